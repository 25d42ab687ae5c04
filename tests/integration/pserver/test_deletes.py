"""Deletes in a cluster whose masters are killed: each counts once, and every copy keeps it."""

from __future__ import annotations

import numpy as np

from backstay import _native, rpc
from backstay._proto.v1 import cluster_pb2, cluster_pb2_grpc
from backstay.config import SecurityConfig
from backstay.consensus import RoutingTable
from backstay.consensus.records.messages import routing_from_message
from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import SGD, TableSpec, Zeros
from backstay.trainer import Client
from tests.waiting import wait_until

SLOTS = 16
KEYS = np.arange(600)
GONE = KEYS[::3]
# Rows that nobody ever pushed.
ABSENT = np.arange(10_000, 10_100)
ONES = np.full((len(KEYS), 2), -1.0, dtype=np.float32)


def routing_at(address: str) -> RoutingTable:
    with rpc.open_channel(address, SecurityConfig()) as channel:
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        return routing_from_message(stub.GetCluster(cluster_pb2.GetClusterRequest(), timeout=30))


def is_whole(address: str, nodes: int) -> bool:
    """Whether every slot has two copies in sync again, and this many nodes hold them."""
    routing = routing_at(address)
    synced = [held.synced for held in routing.replicas_of_slot]
    return all(len(one) == 2 for one in synced) and len(set().union(*synced)) == nodes


def test_deletes_count_once_though_masters_are_killed() -> None:
    with (
        LocalCluster(servers=3, settings={"slot_count": SLOTS}) as cluster,
        Client(cluster.endpoints) as client,
    ):
        spec = TableSpec.sparse("t", 2, optimizer=SGD(1.0), initializer=Zeros())
        table = client.create_table(spec)
        expected = np.zeros(len(KEYS), dtype=np.float32)
        told = rounds = 0
        for victim in (0, 1):
            for step in range(20):
                if step == 8:
                    cluster.kill(victim)
                client.push(table, KEYS, ONES)
                told += client.delete(table, np.concatenate([GONE, ABSENT]))
                rounds += 1
                expected += 1
                expected[GONE] = 0
                assert np.array_equal(client.pull(table, KEYS)[:, 0], expected)
            # The next victim's slots are on copies that were made of rows with gaps.
            cluster.restart(victim)
            wait_until(lambda: is_whole(cluster.endpoints[2], 3), "two copies of each slot")
        # Each row that went was told of once, but for those whose answer was lost with a master.
        assert (rounds - 2) * len(GONE) <= told <= rounds * len(GONE)
        assert client.stats().failovers > 0
        slots = np.unique(_native.slots_of(GONE.astype(np.uint64), SLOTS))
        assert len(slots) == SLOTS
