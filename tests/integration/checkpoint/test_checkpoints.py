"""Checkpoints of real clusters: written under pushes, restored into other numbers of servers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from backstay.checkpoint.storage import CheckpointStorage
from backstay.checkpoint.verification import verify
from backstay.config import ClientConfig
from backstay.errors import CheckpointDamaged, CheckpointRefused, StateLost
from backstay.pserver.ctl.cli import main as pserverctl
from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import SGD, Adagrad, TableSpec, Zeros
from backstay.trainer import Client
from tests.waiting import wait_until

KEYS = np.arange(4000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
SLOTS = 64


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {"slot_count": SLOTS, "checkpoint_url": str(folder), **more}


def fill(client: Client) -> None:
    """Make two tables, and rows that are like no others."""
    wide = client.create_table(TableSpec.sparse("wide", dim=4, optimizer=Adagrad(0.1)))
    dense = TableSpec.dense("w", shape=(10, 7), optimizer=SGD(0.5))
    client.create_table(dense)
    for step in range(5):
        client.push(wide, KEYS, np.sin(np.outer(np.arange(len(KEYS)), [1, 2, 3, 4]) + step))


def has_pushed(acknowledged: list[int], wanted: int) -> bool:
    return acknowledged[0] >= wanted


def content(client: Client) -> dict[str, Any]:
    return {
        "wide": client.pull("wide", KEYS).tobytes(),
        "w": client.pull_dense("w").tobytes(),
    }


def ctl(cluster: LocalCluster, *arguments: str) -> Result:
    return CliRunner().invoke(pserverctl, ["--endpoint", cluster.endpoints[0], *arguments])


@contextmanager
def pushing(endpoint: list[str], table: str) -> Iterator[list[int]]:
    """Add 1 to each of 500 keys, again and again; what is given counts the acknowledged pushes."""
    acknowledged = [0]
    stop = threading.Event()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with Client(endpoint) as client:
                keys = np.arange(500, dtype=np.uint64)
                while not stop.is_set():
                    client.push(table, keys, np.full((500, 1), -1.0, dtype=np.float32))
                    acknowledged[0] += 1
        except BaseException as error:  # noqa: BLE001 (raised below, in the test's own thread)
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield acknowledged
    finally:
        stop.set()
        thread.join()
    if failed:
        raise failed[0]


@pytest.mark.parametrize(("servers", "replicas"), [(1, 1), (3, 2)])
def test_a_checkpoint_is_restored_into_another_number_of_servers(
    tmp_path: Path, servers: int, replicas: int
) -> None:
    with (
        LocalCluster(2, settings=settings(tmp_path)) as cluster,
        Client(cluster.endpoints) as client,
    ):
        fill(client)
        full = client.checkpoints.save(tags={"pass": 1}, progress={"done": [1, 2]})
        client.push("wide", KEYS[:50], np.ones((50, 4)))
        second = client.checkpoints.save(tags={"pass": 2}, progress={"done": [1, 2, 3]})
        assert (full.kind, second.kind, second.base) == ("full", "incremental", full.id)
        assert second.rows == 50
        assert [one.id for one in client.checkpoints.list()] == [full.id, second.id]
        before = content(client)
    new = settings(tmp_path, replicas=replicas, restore="latest")
    with LocalCluster(servers, settings=new) as cluster, Client(cluster.endpoints) as client:
        assert content(client) == before
        restored = client.checkpoints.restored()
        assert restored is not None
        assert restored.checkpoint.id == second.id
        assert restored.progress == {"done": [1, 2, 3]}
        # It goes on: rows, optimizer state and all.
        client.push("wide", KEYS[:50], np.ones((50, 4)))
        # Another cluster's checkpoints are nothing to add to.
        assert client.checkpoints.save().kind == "full"


def test_rows_that_were_deleted_stay_gone_after_a_restore(tmp_path: Path) -> None:
    with (
        LocalCluster(2, settings=settings(tmp_path)) as cluster,
        Client(cluster.endpoints) as client,
    ):
        fill(client)
        client.checkpoints.save()
        assert client.delete("wide", KEYS[:300]) == 300
        client.push("wide", KEYS[:100], np.ones((100, 4)))
        second = client.checkpoints.save()
        assert (second.kind, second.rows) == ("incremental", 100)
        before = content(client)
    storage = CheckpointStorage(str(tmp_path))
    verify(storage, second.id)
    # Another number of copies: what is restored is copied, too.
    new = settings(tmp_path, replicas=2, restore="latest")
    with LocalCluster(3, settings=new) as cluster, Client(cluster.endpoints) as client:
        assert content(client) == before
        assert client.delete("wide", KEYS) == len(KEYS) - 200


def test_a_checkpoint_holds_every_push_that_was_acknowledged_before_it(tmp_path: Path) -> None:
    with (
        LocalCluster(3, settings=settings(tmp_path)) as cluster,
        Client(cluster.endpoints) as client,
    ):
        spec = TableSpec.sparse("count", dim=1, optimizer=SGD(1.0), initializer=Zeros())
        client.create_table(spec)
        storage = CheckpointStorage(str(tmp_path))
        floors: list[tuple[str, int]] = []
        with pushing(cluster.endpoints, "count") as acknowledged:
            for _ in range(4):
                wanted = 20 * (len(floors) + 1)
                wait_until(partial(has_pushed, acknowledged, wanted), "pushes")
                floor = acknowledged[0]
                floors.append((client.checkpoints.save().id, floor))
        for checkpoint_id, floor in floors[-3:]:
            assert verify(storage, checkpoint_id).ok
            with (
                LocalCluster(1, settings=settings(tmp_path, restore=checkpoint_id)) as fresh,
                Client(fresh.endpoints) as reader,
            ):
                counts = reader.pull("count", np.arange(500, dtype=np.uint64))
                assert counts.min() >= floor
                assert counts.max() <= acknowledged[0] + 1


def test_a_checkpoint_may_take_longer_than_a_trainers_deadline(tmp_path: Path) -> None:
    config = ClientConfig(deadline_ms=1000)
    with (
        LocalCluster(1, settings=settings(tmp_path)) as cluster,
        Client(cluster.endpoints, config=config) as client,
    ):
        fill(client)
        # 160 KB in two seconds.
        assert ctl(cluster, "config", "set", "checkpoint_bytes_per_s=80000").exit_code == 0
        begun_s = time.monotonic()
        saved = client.checkpoints.save()
        assert time.monotonic() - begun_s > 1.5
        assert client.checkpoints.list() == (saved,)


def test_a_restore_by_hand_gives_up_what_came_since(tmp_path: Path) -> None:
    with LocalCluster(3, settings=settings(tmp_path)) as cluster:
        with Client(cluster.endpoints) as client:
            fill(client)
            before = content(client)
            # Nothing is asked where there is nothing to restore.
            early = ctl(cluster, "checkpoint", "restore")
            assert (early.exit_code, "Give up" in early.output) == (3, False), early.output
            assert f"there is no checkpoint at {tmp_path}" in early.output
            saved = json.loads(
                ctl(cluster, "checkpoint", "save", "--tag", "pass=7", "--json").output
            )
            assert saved["tags"] == {"pass": 7}
            client.push("wide", KEYS, np.ones((len(KEYS), 4)))
            assert content(client) != before
            done = ctl(cluster, "checkpoint", "restore", saved["id"], "--yes", "--json")
            assert done.exit_code == 0, done.output
            assert json.loads(done.output)["state"] == "done"
            with pytest.raises(StateLost):
                client.pull("wide", KEYS)
        with Client(cluster.endpoints) as client:
            assert content(client) == before
            # And so do the backups, once they are there.
            wait_until(
                lambda: json.loads(ctl(cluster, "status", "--json").output)["healthy"], "all copies"
            )
            verdict = json.loads(ctl(cluster, "verify", "--json").output)
            assert (verdict["equal"], verdict["good"]) == (SLOTS, True)


def test_a_damaged_checkpoint_is_named_and_nothing_is_touched(tmp_path: Path) -> None:
    with (
        LocalCluster(1, settings=settings(tmp_path)) as cluster,
        Client(cluster.endpoints) as client,
    ):
        fill(client)
        first = client.checkpoints.save(kind="full")
        client.push("wide", KEYS, np.ones((len(KEYS), 4)))
        second = client.checkpoints.save(kind="full")
        part = next((tmp_path / second.id).glob("part-*"))
        content_bytes = bytearray(part.read_bytes())
        content_bytes[len(content_bytes) // 2] ^= 1
        part.write_bytes(content_bytes)
        before = content(client)
        said = ctl(cluster, "checkpoint", "verify")
        assert said.exit_code == 1
        assert part.name in said.output
        refused = ctl(cluster, "checkpoint", "restore", "--yes")
        assert refused.exit_code == 3
        assert part.name in refused.output
        assert content(client) == before
        fallen_back = ctl(cluster, "checkpoint", "restore", "--fallback", "--yes", "--json")
        assert fallen_back.exit_code == 0, fallen_back.output
        assert json.loads(fallen_back.output)["id"] == first.id


def test_slots_that_lose_their_only_copy_come_back_from_the_newest_checkpoint(
    tmp_path: Path,
) -> None:
    more = {"replicas": 1, "lease_ttl_ms": 1000, "read_lease_ms": 300}
    with LocalCluster(2, settings=settings(tmp_path, **more)) as cluster:
        with Client(cluster.endpoints) as client:
            fill(client)
            before = content(client)
            client.checkpoints.save()
        # ps-0 keeps the coordination store.
        cluster.kill(1)
        cluster.restart(1)
        with Client(cluster.endpoints) as client:
            assert content(client) == before
        kinds = {
            event["kind"] for event in json.loads(ctl(cluster, "events", "--json").output)["events"]
        }
        assert {"lost", "restored"} <= kinds


def test_old_checkpoints_go_and_what_is_needed_stays(tmp_path: Path) -> None:
    with (
        LocalCluster(1, settings=settings(tmp_path)) as cluster,
        Client(cluster.endpoints) as client,
    ):
        fill(client)
        given = ctl(cluster, "config", "set", "checkpoint_keep_last=2", "checkpoint_full_every=3")
        assert given.exit_code == 0
        (tmp_path / "ckpt-000000-abcdef").mkdir()
        made = []
        for step in range(6):
            client.push("wide", KEYS[: step + 1], np.ones((step + 1, 4)))
            made.append(client.checkpoints.save())
        assert [one.kind for one in made] == ["full", "incremental", "incremental"] * 2
        left = [one.id for one in client.checkpoints.list()]
        assert left == [one.id for one in made[3:]]
        assert sorted(path.name for path in tmp_path.iterdir()) == left
        needed = ctl(cluster, "checkpoint", "delete", made[3].id)
        assert needed.exit_code == 3
        assert f"needed by {made[4].id}" in needed.output
        assert ctl(cluster, "checkpoint", "delete", made[5].id).exit_code == 0


def test_a_folder_that_cannot_be_written_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    with (
        LocalCluster(1, settings={"slot_count": SLOTS}) as cluster,
        Client(cluster.endpoints) as client,
    ):
        fill(client)
        with pytest.raises(CheckpointRefused, match="no folder for checkpoints is set"):
            client.checkpoints.save()
        blocked = tmp_path / "file"
        blocked.write_text("no folder")
        assert ctl(cluster, "config", "set", f"checkpoint_url={blocked}").exit_code == 0
        said = ctl(cluster, "checkpoint", "save")
        assert said.exit_code == 3
        assert str(blocked) in said.output
        # The next one is not kept out by the one that failed.
        assert ctl(cluster, "config", "set", f"checkpoint_url={tmp_path / 'new'}").exit_code == 0
        client.checkpoints.save()


def test_checkpoints_are_written_by_time(tmp_path: Path) -> None:
    with (
        LocalCluster(1, settings=settings(tmp_path)) as cluster,
        Client(cluster.endpoints) as client,
    ):
        fill(client)
        assert ctl(cluster, "config", "set", "checkpoint_every_s=1").exit_code == 0
        wait_until(lambda: bool(client.checkpoints.list()), "a checkpoint by time")
        assert client.checkpoints.list()[0].tags == {"by": "schedule"}


def test_a_cluster_that_is_to_begin_with_a_damaged_checkpoint_says_so(tmp_path: Path) -> None:
    with (
        LocalCluster(1, settings=settings(tmp_path)) as cluster,
        Client(cluster.endpoints) as client,
    ):
        fill(client)
        first = client.checkpoints.save(kind="full")
        second = client.checkpoints.save(kind="full")
    manifest = tmp_path / second.id / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"routing_version"', '"routing-version"'))
    with pytest.raises(CheckpointDamaged):
        CheckpointStorage(str(tmp_path)).read_manifest(second.id)
    more = {"restore": "latest", "restore_fallback": True}
    with (
        LocalCluster(1, settings=settings(tmp_path, **more)) as cluster,
        Client(cluster.endpoints) as client,
    ):
        restored = client.checkpoints.restored()
        assert restored is not None
        assert restored.checkpoint.id == first.id
