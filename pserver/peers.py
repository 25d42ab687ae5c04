"""Calls from one node to another, each with a deadline.

Failures are errors of ``backstay.errors``. It opens a channel for each call: they are rare.
"""

from __future__ import annotations

from backstay import rpc
from backstay._proto.v1 import node_pb2, node_pb2_grpc
from backstay.config import SecurityConfig

__all__ = ["PeerCalls"]


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

    async def apply_table(self, address: str, spec_json: str) -> None:
        """Let the node at a control address take over a table."""
        async with rpc.open_aio_channel(address, self._security) as channel:
            stub: node_pb2_grpc.NodeServiceAsyncStub = node_pb2_grpc.NodeServiceStub(channel)
            request = node_pb2.ApplyTableRequest(spec_json=spec_json)
            with rpc.mapped_errors(address):
                await stub.ApplyTable(request, timeout=self._deadline_s)
