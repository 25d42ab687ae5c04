"""What nodes tell each other about the sizes of their slots."""

from __future__ import annotations

import grpc
import numpy as np

from backstay._proto.v1 import node_pb2, node_pb2_grpc
from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import Adagrad, TableSpec
from backstay.trainer import Client


def test_the_sizes_of_slots_are_those_of_their_rows() -> None:
    with LocalCluster(2, settings={"slot_count": 64, "replicas": 1}) as cluster:
        with Client(cluster.endpoints) as client:
            table = client.create_table(TableSpec.sparse("t", dim=4, optimizer=Adagrad(0.1)))
            client.push(table, np.arange(1000), np.ones((1000, 4)))
            masters = client.cluster().routing.master_of_slot
        sizes = []
        for endpoint in cluster.endpoints:
            with grpc.insecure_channel(endpoint) as channel:
                stub = node_pb2_grpc.NodeServiceStub(channel)
                answer = stub.GetSlotBytes(node_pb2.GetSlotBytesRequest(), timeout=10)
                sizes.append(np.array(answer.bytes_of_slot))
        # Each slot is held by its master alone; a row is a key, four weights and four of state.
        assert np.sum(sizes) == 1000 * (8 + 16 + 16)
        for number, held in enumerate(sizes):
            assert not held[masters != number].any()
            assert len(held) == 64
