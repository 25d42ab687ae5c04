"""What a job master sees of real servers of a job's own, and how it follows a real plan of theirs.

The API of Kubernetes is a stand-in: it says how many Pods are wanted, and which of them run.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from backstay.kubernetes import server_scale
from backstay.kubernetes.api import KubernetesApi, ObjectList
from backstay.kubernetes.names import pserver_name
from backstay.kubernetes.owned_job import OwnedJob
from backstay.kubernetes.server_scale import ServerScale
from backstay.pserver.local_cluster import LocalCluster
from backstay.pserver.resizing import ClusterResizing
from backstay.tables import SGD, TableSpec
from backstay.trainer.client import Client
from tests.integration.counting_jobs import CLIENT, JOB, Eventually
from tests.unit.kubernetes.kubernetes_objects import Objects

NAME = pserver_name(JOB)
LIMIT_BYTES = 256 << 20
ROWS = 20_000
DIM = 16


class Servers(Objects):
    """The Pods of a job's servers; the first two run, no other has room."""

    def __init__(self) -> None:
        super().__init__(JOB)
        self.make_job("a")

    def list_objects(self, kind: str, selector: str) -> ObjectList:
        pods = []
        for number in range(self.replicas("statefulsets", NAME)):
            state = [{"name": "pserver", "state": {"running": {}}}] if number < 2 else []
            pods.append(
                {
                    "metadata": {"name": f"{NAME}-{number}", "uid": str(number)},
                    "status": {"containerStatuses": state},
                }
            )
        return ObjectList(tuple(pods), "1")


def scale_of(objects: Objects, endpoints: list[str]) -> ServerScale:
    """As a job master begins with it."""
    api = cast(KubernetesApi, objects)
    owned = OwnedJob.find(api, JOB)
    return ServerScale(api, JOB, endpoints, CLIENT, owned, follows_load=True, cores=1.0)


def test_the_load_of_servers_is_that_of_their_rows_and_processes(
    eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_scale, "LOOK_PAUSE_S", 0.0)
    settings = {"memory_limit_bytes": LIMIT_BYTES, "replicas": 2}
    with LocalCluster(servers=2, settings=settings) as cluster:
        scale = scale_of(Servers(), cluster.endpoints)
        first = scale.look()
        assert (first.wanted, first.serving, first.cpu_share) == (2, 2, None)
        with Client(cluster.endpoints, config=CLIENT) as client:
            table = client.create_table(TableSpec.sparse("rows", DIM, optimizer=SGD(0.1)))
            keys = np.arange(ROWS, dtype=np.uint64)
            client.push(table, keys, np.ones((ROWS, DIM), dtype=np.float32))

            def is_full() -> bool:
                share = scale.look().memory_share
                # Two copies of each row on two servers.
                return share is not None and share > ROWS * DIM * 4 / LIMIT_BYTES

            eventually(is_full)
        seen = scale.look()
        assert seen.memory_share is not None
        assert seen.memory_share < 1.0
        assert seen.cpu_share is not None
        assert 0.0 <= seen.cpu_share < 2.0


def test_pods_for_a_plan_come_and_go_with_it_whichever_job_master_follows() -> None:
    settings = {"replicas": 2, "numbered_nodes": True}
    with LocalCluster(servers=2, settings=settings) as cluster:
        objects = Servers()
        first = scale_of(objects, cluster.endpoints)
        first.resize(4)
        first.follow()
        assert objects.replicas("statefulsets", NAME) == 4
        assert first.look().is_planning
        with ClusterResizing(cluster.endpoints, CLIENT) as resizing:
            assert resizing.cancel().state == "cancelled"
        # The one that has added them is gone.
        second = scale_of(objects, cluster.endpoints)
        second.follow()
        assert objects.replicas("statefulsets", NAME) == 2
        for one in (first, second):
            one._objects.events.write_rest()
        assert [(one["reason"], one["message"]) for one in objects.events.values()] == [
            ("ServersScaled", "4 servers wanted, 2 before: a resize waits for more"),
            ("ServersScaled", "2 servers wanted, 4 before: a resize was given up"),
        ]


def test_a_plan_that_follows_another_one_unseen_keeps_the_pods_that_it_needs() -> None:
    settings = {"replicas": 2, "numbered_nodes": True}
    with LocalCluster(servers=2, settings=settings) as cluster:
        objects = Servers()
        scale = scale_of(objects, cluster.endpoints)
        scale.resize(5)
        scale.follow()
        assert objects.replicas("statefulsets", NAME) == 5
        with ClusterResizing(cluster.endpoints, CLIENT) as resizing:
            for nodes, replicas in ((3, 3), (4, 4)):
                resizing.cancel()
                resizing.resize(nodes)
                scale.follow()
                assert objects.replicas("statefulsets", NAME) == replicas
            resizing.cancel()
        scale_of(objects, cluster.endpoints).follow()
        assert objects.replicas("statefulsets", NAME) == 2
