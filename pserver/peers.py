"""Calls from one node to another, each with a deadline.

Failures are errors of ``backstay.errors``. It opens a channel for each call: they are rare.
Pushes and copies go between nodes in Rust (``crates/backstay-net/src/peer_link.rs``).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from backstay import rpc
from backstay._proto.v1 import (
    checkpoint_pb2,
    checkpoint_pb2_grpc,
    cluster_pb2,
    cluster_pb2_grpc,
    node_pb2,
    node_pb2_grpc,
)
from backstay.config import SecurityConfig

__all__ = ["PeerCalls"]

# A few files to a slow disk or a far-away bucket.
WRITE_SLOTS_S = 600.0
# What one request writes, unless single slots are larger.
WRITE_SLOTS_BYTES = 256 * 2**20


class PeerCalls:
    """Asks other nodes, with this node's credentials."""

    def __init__(self, security: SecurityConfig, deadline_ms: int) -> None:
        """Prepare; nothing is sent yet."""
        self._security = security
        self._deadline_s = deadline_ms / 1000

    async def describe(self, address: str) -> node_pb2.DescribeResponse:
        """Ask who is at a control address."""
        async with rpc.open_aio_channel(address, self._security) as channel:
            stub: node_pb2_grpc.NodeServiceAsyncStub = node_pb2_grpc.NodeServiceStub(channel)
            with rpc.mapped_errors(address):
                return await stub.Describe(node_pb2.DescribeRequest(), timeout=self._deadline_s)

    async def apply_table(self, address: str, spec_json: str, revision: int) -> None:
        """Let the node at a control address take over a table."""
        async with rpc.open_aio_channel(address, self._security) as channel:
            stub: node_pb2_grpc.NodeServiceAsyncStub = node_pb2_grpc.NodeServiceStub(channel)
            request = node_pb2.ApplyTableRequest(spec_json=spec_json, revision=revision)
            with rpc.mapped_errors(address):
                await stub.ApplyTable(request, timeout=self._deadline_s)

    async def slot_bytes(self, address: str) -> NDArray[np.uint64]:
        """Ask the node at a control address how many bytes each slot takes there."""
        async with rpc.open_aio_channel(address, self._security) as channel:
            stub: node_pb2_grpc.NodeServiceAsyncStub = node_pb2_grpc.NodeServiceStub(channel)
            with rpc.mapped_errors(address):
                request = node_pb2.GetSlotBytesRequest()
                answer = await stub.GetSlotBytes(request, timeout=self._deadline_s)
        return np.array(answer.bytes_of_slot, dtype=np.uint64)

    async def write_slots(
        self, address: str, request: checkpoint_pb2.WriteSlotsRequest
    ) -> checkpoint_pb2.WriteSlotsResponse:
        """Let the node at a control address write slots to a checkpoint.

        With a rate it has as much time as its files take, and the usual limit on top.
        """
        limit_s = WRITE_SLOTS_S
        if request.bytes_per_s:
            limit_s += WRITE_SLOTS_BYTES / request.bytes_per_s
        async with rpc.open_aio_channel(address, self._security) as channel:
            stub: checkpoint_pb2_grpc.CheckpointServiceAsyncStub = (
                checkpoint_pb2_grpc.CheckpointServiceStub(channel)
            )
            with rpc.mapped_errors(address):
                return await stub.WriteSlots(request, timeout=limit_s)

    async def node_stats(self, address: str) -> cluster_pb2.GetNodeStatsResponse:
        """Ask the node at a control address for its figures."""
        async with rpc.open_aio_channel(address, self._security) as channel:
            stub: cluster_pb2_grpc.ClusterServiceAsyncStub = cluster_pb2_grpc.ClusterServiceStub(
                channel
            )
            with rpc.mapped_errors(address):
                request = cluster_pb2.GetNodeStatsRequest()
                return await stub.GetNodeStats(request, timeout=self._deadline_s)
