"""Trainers register with the cluster, whatever they are, and are gone when they are gone."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backstay.pserver.client.inspection import ClusterInspection
from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import TableSpec
from backstay.trainer import Client
from backstay.trainer.adapter.session import init
from tests.etcd import EtcdCluster
from tests.integration.job_processes import JobProcesses
from tests.integration.trainer.test_worker import SIGNAL_AT_BATCH, job

Eventually = Callable[[Callable[[], bool]], None]
Command = Callable[..., "subprocess.CompletedProcess[str]"]
TTL_MS = 3000
EMBEDDING = TableSpec.sparse("emb", dim=4)
KEYS = np.arange(64)
ONES = np.ones((64, 4), np.float32)
# A loop of one's own, until it is killed.
LOOP = """
import sys, time
import numpy as np
from backstay.tables import TableSpec
from backstay.trainer import Client

client = Client(sys.argv[1:])
table = client.create_table(TableSpec.sparse("emb", dim=4))
while True:
    client.push(table, np.arange(64), np.ones((64, 4), np.float32))
    print("pushed", flush=True)
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture(scope="module")
def cluster(etcd: EtcdCluster) -> Iterator[LocalCluster]:
    settings: dict[str, object] = {
        "store": "etcd",
        "store_endpoints": list(etcd.endpoints),
        "slot_count": 16,
        "trainer_ttl_ms": TTL_MS,
    }
    with LocalCluster(servers=3, settings=settings) as running:
        yield running


def listed(cluster: LocalCluster) -> list[dict[str, Any]]:
    with ClusterInspection(",".join(cluster.endpoints), cluster.client_config()) as inspection:
        trainers: list[dict[str, Any]] = inspection.trainers()["trainers"]
        return trainers


def registered(cluster: LocalCluster, pid: int) -> dict[str, Any] | None:
    return next((one for one in listed(cluster) if one["pid"] == pid), None)


def test_a_client_is_listed_and_leaves_at_once(
    cluster: LocalCluster, etcd: EtcdCluster, eventually: Eventually, command: Command
) -> None:
    with init(cluster.endpoints, job="ads") as session:
        client = session.client
        eventually(lambda: len(listed(cluster)) == 1)
        (found,) = listed(cluster)
        assert (found["job"], found["worker"], found["pushes"]) == ("ads", None, 0)
        assert found["last_push_age_s"] is None
        record = json.loads(
            etcd.etcdctl("get", "--print-value-only", f"/local/trainers/{found['id']}")
        )
        assert (record["id"], record["status"], record["pid"]) == (found["id"], "up", found["pid"])
        assert record["start_time"] == pytest.approx(time.time(), abs=60)
        client.push(client.create_table(EMBEDDING), KEYS, ONES)
        eventually(lambda: listed(cluster)[0]["last_push_age_s"] is not None)
        shown = command("pserverctl", "--endpoint", cluster.endpoints[0], "trainers")
        assert found["address"] in shown.stdout
        assert "s ago" in shown.stdout
        closed_s = time.monotonic()
    eventually(lambda: listed(cluster) == [])
    assert time.monotonic() - closed_s < TTL_MS / 1000
    told = command("pserverctl", "--endpoint", cluster.endpoints[0], "trainers")
    assert (told.returncode, told.stdout) == (0, "no trainers\n")


def test_a_loop_that_is_killed_is_gone_after_its_time_to_live(
    cluster: LocalCluster, eventually: Eventually
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LOOP, *cluster.endpoints], stdout=subprocess.PIPE
    ) as loop:
        eventually(lambda: registered(cluster, loop.pid) is not None)
        assert loop.stdout is not None
        assert loop.stdout.readline() == b"pushed\n"
        loop.kill()
    killed_s = time.monotonic()
    assert registered(cluster, loop.pid) is not None
    eventually(lambda: registered(cluster, loop.pid) is None)
    assert time.monotonic() - killed_s > TTL_MS / 3000


def test_a_worker_of_a_job_is_listed_and_gone_when_it_hangs(
    cluster: LocalCluster, tmp_path: Path, eventually: Eventually
) -> None:
    spec = job(tmp_path, "clicks", "torch", SIGNAL_AT_BATCH)
    with JobProcesses(cluster, spec, tmp_path) as processes:
        processes.start_worker("w-0", SIGNAL="SIGSTOP", AT_BATCH="15")

        def workers() -> list[tuple[str, str]]:
            return [(one["job"], one["worker"]) for one in listed(cluster)]

        eventually(lambda: ("clicks", "w-0") in workers())
        eventually(lambda: ("clicks", "w-0") not in workers())
        processes.start_worker("w-1")
        eventually(lambda: ("clicks", "w-1") in workers())
        assert processes.over().state == "done"


def test_trainers_of_a_node_that_dies_register_with_another_one(
    cluster: LocalCluster, eventually: Eventually
) -> None:
    with Client(cluster.endpoints) as client:
        table = client.create_table(EMBEDDING)
        eventually(lambda: len(listed(cluster)) == 1)
        keeper = listed(cluster)[0]["node"]
        index = int(keeper.removeprefix("ps-"))
        cluster.kill(index)

        def is_elsewhere() -> bool:
            client.push(table, KEYS, ONES)
            found = listed(cluster)
            return len(found) == 1 and found[0]["node"] != keeper

        eventually(is_elsewhere)
        cluster.restart(index)


def test_training_goes_on_while_the_store_is_away(
    cluster: LocalCluster, etcd: EtcdCluster, eventually: Eventually
) -> None:
    with Client(cluster.endpoints) as client:
        table = client.create_table(EMBEDDING)
        eventually(lambda: len(listed(cluster)) == 1)
        etcd.pause()
        try:
            away_s = time.monotonic()
            slowest_s = 0.0
            while time.monotonic() < away_s + 2 * TTL_MS / 1000:
                begun_s = time.monotonic()
                client.push(table, KEYS, ONES)
                slowest_s = max(slowest_s, time.monotonic() - begun_s)
            # Calls to the store take 2 s until they are given up: no push waited for one.
            assert slowest_s < 2.0
        finally:
            etcd.resume()
        eventually(lambda: len(listed(cluster)) == 1)
