"""Nodes that die or stand still at each step of a checkpoint and of a restore.

After each: what is finished is whole, a later checkpoint tidies up, and no push was refused.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from backstay import rpc
from backstay.checkpoint import remote
from backstay.checkpoint.restore_state import RestoreState
from backstay.checkpoint.storage import CheckpointStorage
from backstay.config import ClientConfig, SecurityConfig
from backstay.consensus.records.jobs import (
    JOBS_PROGRESS,
    JobNameRecord,
    JobSpecRecord,
    JobStateRecord,
)
from backstay.consensus.records.keys import JobKeys
from backstay.consensus.store import Put, Txn
from backstay.consensus.store.remote import RemoteStore
from backstay.errors import BackstayError, CheckpointUnavailable
from backstay.job_engine.progress import kept_job
from backstay.pserver.ctl.cli import main as pserverctl
from backstay.pserver.local_cluster import LocalCluster
from backstay.schedule.rounds import RoundId, RoundKind
from backstay.schedule.schedule import Schedule, SchedulePlan, is_cut_short
from backstay.trainer import Client
from tests.integration.checkpoint_load import (
    KEYS,
    SLOTS,
    Load,
    Saving,
    ask_cluster,
    check_all,
    counted,
    ended_ids,
    fill,
    is_healthy,
    loading,
    pushing,
    save_when_free,
    settings,
    wait_for_file,
)
from tests.waiting import wait_until

# Each of them takes seconds: `make test-slow`.
pytestmark = pytest.mark.slow

# A node writes its part of 160 KB in some seconds.
SLOWLY = "checkpoint_bytes_per_s=30000"
AT_FULL_SPEED = "checkpoint_bytes_per_s=0"


def ctl(endpoint: str, *arguments: str) -> Any:
    """Run a command that must succeed; return its JSON."""
    done = CliRunner().invoke(pserverctl, ["--endpoint", endpoint, *arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def configure(endpoint: str, *changes: str) -> None:
    """Change settings of the cluster, and wait until the node has them."""
    done = CliRunner().invoke(pserverctl, ["--endpoint", endpoint, "config", "set", *changes])
    assert done.exit_code == 0, done.output


def part_of(endpoint: str, node: int) -> str:
    """Return how names of a node's files begin."""
    instances = {one.node_id: one.instance for one in ask_cluster(endpoint).nodes}
    return f"part-{instances[f'ps-{node}'] & 0xFFFFFFFF:08x}"


@contextmanager
def counting(
    folder: Path, servers: int = 3, **more: Any
) -> Iterator[tuple[LocalCluster, Client, Load]]:
    """Start a cluster with a load that counts."""
    with (
        LocalCluster(servers, settings=settings(folder, **more)) as cluster,
        Client(cluster.endpoints) as client,
    ):
        fill(client)
        with pushing(cluster.endpoints) as load:
            yield cluster, client, load
        # Not one was lost, and none was counted twice.
        assert counted(client) == [load.acknowledged]


def check_counts(folder: Path, saved: str, floor: int, ceiling: int) -> None:
    """What a checkpoint restores has each push from before it, and none from after it."""
    with loading(folder, saved) as client:
        counts = counted(client)
        assert counts[0] >= floor
        assert counts[-1] <= ceiling


def test_a_node_that_dies_while_it_writes(tmp_path: Path) -> None:
    with counting(tmp_path, 4) as (cluster, _, load):
        asked = cluster.endpoints[0]
        whole = Saving(asked, load).result()
        configure(asked, SLOWLY)
        saving = Saving(asked, load, kind="full")
        # ps-3 keeps none of the cluster's records.
        wait_for_file(tmp_path, f"ckpt-*/{part_of(asked, 3)}*.tmp")
        cluster.kill(3)
        assert ended_ids(tmp_path) == [whole.id]
        saved = saving.result()
        load.wait_for(5)
        assert ended_ids(tmp_path) == [whole.id, saved.id]
    check_counts(tmp_path, saved.id, saving.floor, saving.ceiling)


def test_the_node_that_was_asked_dies_while_others_write(tmp_path: Path) -> None:
    with counting(tmp_path, 4) as (cluster, _, load):
        other = cluster.endpoints[0]
        whole = Saving(other, load).result()
        configure(other, SLOWLY)
        saving = Saving(cluster.endpoints[3], load, kind="full")
        wait_for_file(tmp_path, f"ckpt-*/{part_of(other, 1)}*.tmp")
        cluster.kill(3)
        assert isinstance(saving.failure(), BackstayError)
        assert ended_ids(tmp_path) == [whole.id]
        assert len(CheckpointStorage(tmp_path).unfinished()) == 1
        configure(other, AT_FULL_SPEED)
        again = save_when_free(other, load)
        # What is not there counts for nothing: this one adds to the one that is whole.
        assert again.base == whole.id
        check_all(tmp_path)


def test_the_node_that_was_asked_dies_when_all_is_there_but_the_manifest(tmp_path: Path) -> None:
    with counting(tmp_path) as (cluster, client, load):
        asked = cluster.endpoints[0]
        saved = Saving(asked, load).result()
        # As a death right before, and in the midst of, the last step leaves it.
        for number, name in ((2, None), (3, "manifest.json.tmp")):
            half = tmp_path / f"ckpt-{number:06d}-abcdef"
            half.mkdir()
            for part in (tmp_path / saved.id).glob("part-*"):
                (half / part.name).write_bytes(part.read_bytes())
            if name is not None:
                (half / name).write_bytes((tmp_path / saved.id / "manifest.json").read_bytes())
        assert [one.id for one in client.checkpoints.list()] == [saved.id]
        assert ctl(asked, "checkpoint", "verify")["id"] == saved.id
        check_counts(tmp_path, "latest", 1, load.acknowledged)
        assert Saving(asked, load).result().base == saved.id
        check_all(tmp_path)


def test_a_writer_that_stands_still_does_not_hold_up_the_others(tmp_path: Path) -> None:
    with counting(tmp_path, 4) as (cluster, _, load):
        asked = cluster.endpoints[0]
        configure(asked, SLOWLY)
        saving = Saving(asked, load)
        wait_for_file(tmp_path, f"ckpt-*/{part_of(asked, 3)}*.tmp")
        cluster.pause(3)
        # Long before its connection is given up.
        saved = saving.result()
        load.wait_for(5)
        cluster.resume(3)
        wait_until(lambda: is_healthy(asked), "all is whole again")
        assert ended_ids(tmp_path) == [saved.id]
    check_counts(tmp_path, saved.id, saving.floor, saving.ceiling)


def test_a_late_writer_puts_nothing_before_a_newer_checkpoint(tmp_path: Path) -> None:
    with counting(tmp_path, 4) as (cluster, _, load):
        other = cluster.endpoints[0]
        configure(other, SLOWLY)
        late = Saving(cluster.endpoints[3], load)
        wait_for_file(tmp_path, f"ckpt-*/{part_of(other, 1)}*.tmp")
        cluster.pause(3)
        configure(other, AT_FULL_SPEED)
        newer = save_when_free(other, load)
        cluster.resume(3)
        assert isinstance(late.failure(), BackstayError)
        assert ended_ids(tmp_path) == [newer.id]
        # It is asked again: its turn is over, and its folder is gone.
        after = save_when_free(cluster.endpoints[3], load)
        assert after.base == newer.id
        check_all(tmp_path)


def test_slots_that_are_lost_while_a_checkpoint_is_written_are_in_none(tmp_path: Path) -> None:
    with LocalCluster(2, settings=settings(tmp_path, replicas=1)) as cluster:
        asked = cluster.endpoints[0]
        with Client(cluster.endpoints) as client:
            fill(client)
            client.push("count", KEYS, -client.pull("count", KEYS) - 1)
            whole = Saving(asked).result()
            configure(asked, SLOWLY)
            saving = Saving(asked, kind="full")
            wait_for_file(tmp_path, f"ckpt-*/{part_of(asked, 1)}*.tmp")
            cluster.kill(1)
            # Its slots come back from the one before: as part of this they would hide the loss.
            failure = saving.failure()
        assert isinstance(failure, CheckpointUnavailable)
        assert "were lost or restored while it was written" in str(failure)
        assert ended_ids(tmp_path) == [whole.id]
    check_counts(tmp_path, "latest", 1, 1)


def test_changes_are_whole_after_another_node_has_become_master(tmp_path: Path) -> None:
    with LocalCluster(4, settings=settings(tmp_path)) as cluster:
        with Client(cluster.endpoints) as client:
            fill(client)
            ones = -client.pull("count", KEYS) - 1
            client.push("count", KEYS, ones)
            full = client.checkpoints.save()
            client.push("count", KEYS[:100], ones[:100])
            cluster.kill(3)
            client.push("count", KEYS[100:200], ones[100:200])
            changes = save_when_free(cluster.endpoints[0])
            assert (changes.kind, changes.base) == ("incremental", full.id)
            before = client.pull("count", KEYS).tobytes(), client.pull("wide", KEYS).tobytes()
        check_all(tmp_path)
    with loading(tmp_path, "latest", 2) as client:
        after = client.pull("count", KEYS).tobytes(), client.pull("wide", KEYS).tobytes()
        assert after == before


# -- restores -----------------------------------------------------------------------------------


def restore_state(endpoint: str) -> RestoreState:
    """Return how the restore goes; ``state`` is empty if the node does not answer."""
    try:
        with (
            rpc.open_channel(endpoint, SecurityConfig()) as channel,
            rpc.mapped_errors(endpoint),
        ):
            return remote.restore_state(channel, timeout_s=5)
    except BackstayError:
        return RestoreState("", "", "", 0, "")


def write_one(folder: Path) -> str:
    """Write a checkpoint of two files, in which each key has the count 1."""
    with LocalCluster(2, settings=settings(folder)) as cluster, Client(cluster.endpoints) as client:
        fill(client)
        client.push("count", KEYS, -client.pull("count", KEYS) - 1)
        return client.checkpoints.save().id


@contextmanager
def waiting(
    folder: Path, servers: int = 4, **more: Any
) -> Iterator[tuple[LocalCluster, Callable[[], None]]]:
    """Begin a cluster with a checkpoint of which one file is not there yet.

    What is given lets the file come. Until then about half of the slots wait for it.
    """
    away = next((folder / write_one(folder)).glob("part-*"))
    aside = away.rename(folder / "aside")
    given = settings(folder, restore="latest", **more)
    with LocalCluster(servers, settings=given) as cluster:
        wait_until(
            lambda: 0 < restore_state(cluster.endpoints[0]).slots_left <= SLOTS // 2,
            "half of the slots are loaded",
        )
        assert away.name in restore_state(cluster.endpoints[0]).trouble
        yield cluster, lambda: os.rename(aside, away)


def check_restored(cluster: LocalCluster, running: list[int], replicas: int = 2) -> None:
    """Each key has the count of the checkpoint, on every copy; and it goes on."""
    endpoints = [cluster.endpoints[number] for number in running]
    wait_until(lambda: restore_state(endpoints[0]).state == "done", "every slot is loaded")
    with Client(endpoints) as client:
        assert counted(client) == [1]
        client.push("count", KEYS, np.full((len(KEYS), 1), -1.0))
        assert counted(client) == [2]
        assert save_when_free(endpoints[0]).kind == "full"
    wait_until(lambda: is_healthy(endpoints[0]) or replicas == 1, "copies are made")
    wait_until(lambda: replicas_equal(endpoints[0]), "copies are equal")


def replicas_equal(endpoint: str) -> bool:
    """Return whether all copies could be compared, and are equal."""
    done = CliRunner().invoke(pserverctl, ["--endpoint", endpoint, "verify", "--json"])
    found = json.loads(done.output)
    assert not found["different"]
    return bool(found["good"])


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_node_that_dies_while_it_loads(tmp_path: Path, replicas: int) -> None:
    with waiting(tmp_path, replicas=replicas) as (cluster, let_come):
        # Also what it has loaded already must come again, if there is one copy.
        cluster.kill(3)
        wait_until(
            lambda: len(ask_cluster(cluster.endpoints[0]).nodes) == 3, "others have its slots"
        )
        let_come()
        check_restored(cluster, [0, 1, 2], replicas)
        ended_ids(tmp_path)


def test_the_controller_dies_while_slots_are_loaded(tmp_path: Path) -> None:
    with waiting(tmp_path) as (cluster, let_come):
        controller = int(ask_cluster(cluster.endpoints[0]).controller.removeprefix("ps-"))
        running = [number for number in range(4) if number != controller]
        cluster.kill(controller)
        wait_until(
            lambda: len(ask_cluster(cluster.endpoints[running[0]]).nodes) == 3,
            "another controller gives its slots to others",
        )
        let_come()
        check_restored(cluster, running)


def test_a_restore_that_cannot_end_gives_way_to_another(tmp_path: Path) -> None:
    sound = write_one(tmp_path)
    with waiting(tmp_path, servers=2) as (cluster, _):
        endpoint = cluster.endpoints[0]
        damaged = restore_state(endpoint).id
        done = ctl(endpoint, "checkpoint", "restore", "--fallback", "--yes")
        assert (done["id"], done["state"]) == (sound, "done")
        assert damaged != sound
        check_restored(cluster, [0, 1])


def test_what_was_restored_is_what_lost_slots_come_back_from(tmp_path: Path) -> None:
    more = {"replicas": 1}
    with LocalCluster(2, settings=settings(tmp_path, **more)) as cluster:
        endpoint = cluster.endpoints[0]
        with Client(cluster.endpoints) as client:
            fill(client)
            ones = np.full((len(KEYS), 1), -1.0)
            client.push("count", KEYS, ones)
            wanted = client.checkpoints.save()
            client.push("count", KEYS, ones)
            client.checkpoints.save()
        ctl(endpoint, "checkpoint", "restore", wanted.id, "--yes")
        cluster.kill(1)
        cluster.restart(1)
        with Client(cluster.endpoints) as client:
            assert counted(client) == [1]


def test_a_checkpoint_is_written_anew_when_a_pass_is_cut_short_meanwhile(tmp_path: Path) -> None:
    with counting(tmp_path) as (cluster, _, load):
        asked = cluster.endpoints[0]
        keys = JobKeys("census")
        write_job(asked, keys, steps=7)
        configure(asked, SLOWLY)
        saving = Saving(asked, load, kind="full")
        wait_for_file(tmp_path, f"ckpt-*/{part_of(asked, 1)}*.tmp")
        # From now on its streams may be closed: slots that are not written yet would keep that.
        write_job(asked, keys, steps=8)
        configure(asked, AT_FULL_SPEED)
        saved = saving.result()
        manifest = CheckpointStorage(tmp_path).read_manifest(saved.id)
        kept = kept_job(manifest.progress[JOBS_PROGRESS], keys.job)
        assert kept is not None
        assert is_cut_short(kept.state.schedule)
        assert kept.state.inexact == ""
        assert ended_ids(tmp_path) == [saved.id]
        check_all(tmp_path)
    check_counts(tmp_path, saved.id, saving.floor, saving.ceiling)


def write_job(endpoint: str, keys: JobKeys, *, steps: int) -> None:
    """Write the records of a job that ends its training after 8 steps."""
    schedule = Schedule(SchedulePlan(passes=2, max_steps=8))
    schedule.count_steps(RoundId(RoundKind.TRAINING, 1), steps)
    records = {
        keys.name: JobNameRecord("ab12").to_json(),
        keys.spec: JobSpecRecord("ab12", 1, "{}").to_json(),
        keys.state: JobStateRecord("running", schedule=schedule.to_json()).to_json(),
    }

    async def write() -> None:
        store = RemoteStore((endpoint,), ClientConfig(), deadline_ms=5000)
        try:
            await store.transaction(Txn((), tuple(Put(*item) for item in records.items())))
        finally:
            await store.close()

    asyncio.run(write())


@contextmanager
def silent_storage(folder: Path, silent: str) -> Iterator[str]:
    """Serve a folder over HTTP; who asks for files of that name waits. Yields the URL."""
    answers = threading.Event()

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if silent in self.path:
                answers.wait()
            super().do_GET()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """The test does not read it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        answers.set()
        server.shutdown()
        server.server_close()


def test_a_restore_whose_storage_hangs_gives_way_to_another(tmp_path: Path) -> None:
    saved = write_one(tmp_path)
    stuck = next((tmp_path / saved).glob("part-*"))
    with (
        silent_storage(tmp_path, stuck.name) as url,
        LocalCluster(
            2, settings={**settings(tmp_path, restore=saved), "checkpoint_url": url}
        ) as cluster,
    ):
        endpoint = cluster.endpoints[0]
        wait_until(
            lambda: f"{url} has brought no file" in restore_state(endpoint).trouble,
            "the restore says that it hangs",
        )
        words = ["checkpoint", "restore", saved, "--url", str(tmp_path), "--yes"]
        done = ctl(endpoint, *words)
        assert (done["id"], done["state"]) == (saved, "done")
        configure(endpoint, f"checkpoint_url={tmp_path}")
        check_restored(cluster, [0, 1])
