"""All copies of slots die: the cluster comes back from its checkpoint, or waits and says so."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from backstay.config import ClientConfig
from backstay.errors import ServerUnavailable, StateLost
from backstay.pserver.ctl.cli import main as pserverctl
from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import SGD, TableSpec, Zeros
from backstay.trainer import Client
from tests.etcd import EtcdCluster

Eventually = Callable[[Callable[[], bool]], None]
KEYS = np.arange(2000, dtype=np.uint64)
SLOTS = 32
COUNT = TableSpec.sparse("count", dim=1, optimizer=SGD(1.0), initializer=Zeros())
BRIEF = ClientConfig(deadline_ms=1500)


@pytest.fixture(params=["etcd", "embedded"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A store that remembers the cluster when all of its processes are dead."""
    if request.param == "embedded":
        yield {}
        return
    with EtcdCluster(tmp_path) as etcd:
        yield {"store": "etcd", "store_endpoints": list(etcd.endpoints)}


def settings(store: dict[str, Any], folder: Path | None, **more: Any) -> dict[str, Any]:
    given = {"slot_count": SLOTS, "lease_ttl_ms": 2000, "return_grace_ms": 500, **store, **more}
    if folder is not None:
        given |= {"checkpoint_url": str(folder), "restore": "latest"}
    return given


def ctl(cluster: LocalCluster, *arguments: str, **more: Any) -> Result:
    return CliRunner().invoke(
        pserverctl, ["--endpoint", ",".join(cluster.endpoints), *arguments], **more
    )


def status(cluster: LocalCluster) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(ctl(cluster, "status", "--json").output)
    return report


def all_know(cluster: LocalCluster) -> bool:
    """Whether each node, asked alone, says that all slots are lost."""
    asked = [["--endpoint", at, "status", "--json"] for at in cluster.endpoints]
    answers = [CliRunner().invoke(pserverctl, one).output for one in asked]
    return all(json.loads(answer)["slots_lost"] == SLOTS for answer in answers)


def push_once(client: Client) -> None:
    """Count each key once more."""
    client.push("count", KEYS, np.full((len(KEYS), 1), -1.0, dtype=np.float32))


def counts(client: Client) -> list[int]:
    """How often keys were counted: the distinct answers."""
    return sorted({round(float(value)) for value in client.pull("count", KEYS).ravel()})


def end_all(cluster: LocalCluster, how: signal.Signals) -> None:
    """End all servers, without giving any of them time to give its slots away."""
    for server in cluster.servers:
        server.process.send_signal(how)
    for index, server in enumerate(cluster.servers):
        server.process.wait(30)
        cluster.kill(index)


def cut_power(cluster: LocalCluster, how: signal.Signals = signal.SIGKILL) -> None:
    """End all servers and start them again with the same commands."""
    end_all(cluster, how)
    cluster.restart(*range(len(cluster.servers)))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_cluster_that_died_comes_back_from_its_newest_checkpoint(
    store: dict[str, Any], tmp_path: Path, eventually: Eventually, how: signal.Signals
) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    with LocalCluster(2, settings=settings(store, folder)) as cluster:
        with Client(cluster.endpoints) as client:
            client.create_table(COUNT)
            push_once(client)
            client.checkpoints.save()
            push_once(client)
            saved = client.checkpoints.save()
            push_once(client)
            cut_power(cluster, how)
            with pytest.raises(StateLost, match="lost its rows of some slots"):
                counts(client)
        with Client(cluster.endpoints) as client:
            assert counts(client) == [2]
            restored = client.checkpoints.restored()
            assert restored is not None
            assert restored.checkpoint.id == saved.id
        eventually(lambda: bool(status(cluster)["healthy"]))
        report = status(cluster)
        assert report["slots_lost"] == 0
        assert report["loss"]["slots"] == SLOTS
        assert report["loss"]["checkpoint"] == saved.id
        assert report["loss"]["created"] == saved.created
        said = ctl(cluster, "status")
        assert said.exit_code == 0
        assert f"{SLOTS} slots lost all copies" in said.output
        assert f"all slots go on from {saved.id} of {saved.created}" in said.output


def test_slots_without_a_checkpoint_are_nobodys_until_the_loss_is_accepted(
    store: dict[str, Any], eventually: Eventually
) -> None:
    said: list[str] = []
    with LocalCluster(2, settings=settings(store, None)) as cluster:
        with Client(cluster.endpoints) as client:
            client.create_table(COUNT)
            push_once(client)
        cut_power(cluster)
        eventually(lambda: all_know(cluster))
        report = ctl(cluster, "status")
        assert report.exit_code == 1
        assert f"{SLOTS} slots lost all copies and wait for a decision" in report.output
        assert "pserverctl slots accept-loss" in report.output
        assert status(cluster)["loss"]["state"] == "waits"
        # New trainers do not begin from initial values.
        with Client(cluster.endpoints, config=BRIEF, progress=said.append) as client:
            for call in (counts, push_once):
                with pytest.raises(ServerUnavailable, match="accept the loss"):
                    call(client)
        assert any("wait for a decision" in line for line in said)
        not_sure = ctl(cluster, "slots", "accept-loss", input="n\n")
        assert not_sure.exit_code == 1
        assert status(cluster)["slots_lost"] == SLOTS
        accepted = ctl(cluster, "slots", "accept-loss", "--yes", "--json")
        assert accepted.exit_code == 0, accepted.output
        assert json.loads(accepted.output)["accepted"] == SLOTS
        assert json.loads(accepted.output)["slots_lost"] == 0
        with Client(cluster.endpoints) as client:
            assert counts(client) == [0]
            push_once(client)
            assert counts(client) == [1]
        eventually(lambda: bool(status(cluster)["healthy"]))
        assert "accepted" in ctl(cluster, "status").output
        # It is accepted once: what is lost later waits again.
        cut_power(cluster)
        eventually(lambda: all_know(cluster))


def test_whoever_chose_not_to_restore_is_asked(
    store: dict[str, Any], tmp_path: Path, eventually: Eventually
) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    with LocalCluster(2, settings=settings(store, folder)) as cluster:
        assert ctl(cluster, "config", "set", "on_slot_loss=wait").exit_code == 0
        with Client(cluster.endpoints) as client:
            client.create_table(COUNT)
            push_once(client)
            saved = client.checkpoints.save()
        cut_power(cluster)
        eventually(lambda: all_know(cluster))
        said = ctl(cluster, "status")
        assert said.exit_code == 1, said.output
        refused = ctl(cluster, "checkpoint", "save")
        assert refused.exit_code == 3
        assert "wait for a decision" in refused.output
        done = ctl(cluster, "checkpoint", "restore", "--yes", "--json")
        assert done.exit_code == 0, done.output
        assert json.loads(done.output)["id"] == saved.id
        with Client(cluster.endpoints) as client:
            assert counts(client) == [1]
        eventually(lambda: bool(status(cluster)["healthy"]))


def test_a_cluster_without_tables_has_nothing_to_lose(
    store: dict[str, Any], eventually: Eventually
) -> None:
    with LocalCluster(2, settings=settings(store, None)) as cluster:
        cut_power(cluster)
        eventually(lambda: bool(status(cluster)["healthy"]))
        assert status(cluster)["loss"] is None
        nothing = ctl(cluster, "slots", "accept-loss", "--yes")
        assert nothing.exit_code == 0
        assert "no slot waits for a decision" in nothing.output


def test_slots_that_still_live_go_back_with_those_that_were_lost(
    tmp_path: Path, eventually: Eventually
) -> None:
    with LocalCluster(3, settings=settings({}, tmp_path, replicas=1)) as cluster:
        with Client(cluster.endpoints) as client:
            client.create_table(COUNT)
            push_once(client)
            saved = client.checkpoints.save()
            push_once(client)
            cluster.kill(2)
            eventually(lambda: status(cluster)["loss"] is not None)
            with pytest.raises(StateLost):
                counts(client)
        with Client(cluster.endpoints) as client:
            # Of one time: two of three slots had the second push still.
            assert counts(client) == [1]
        loss = status(cluster)["loss"]
        assert 0 < loss["slots"] < SLOTS
        assert loss["checkpoint"] == saved.id


def test_the_figures_tell_of_slots_that_are_lost(eventually: Eventually) -> None:
    with LocalCluster(1, settings={"slot_count": SLOTS}) as cluster:
        with Client(cluster.endpoints) as client:
            client.create_table(COUNT)
            push_once(client)
        cut_power(cluster)
        eventually(lambda: all_know(cluster))
        page = urllib.request.urlopen(f"http://{cluster.servers[0].metrics_address}/metrics")
        text = page.read().decode()
        assert f"backstay_cluster_slots_lost {SLOTS}.0" in text
        assert "backstay_cluster_slots_restoring 0.0" in text
