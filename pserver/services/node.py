"""``NodeService``: what the nodes of a cluster say to each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpc import aio

from backstay._proto.v1 import node_pb2, node_pb2_grpc
from backstay.config import ServerConfig
from backstay.consensus import ClusterView
from backstay.consensus.messages import node_to_message
from backstay.pserver.table_registry import KnownTable

__all__ = ["NodeService"]


class NodeService(node_pb2_grpc.NodeServiceServicer):
    """Describes this node and takes over tables."""

    def __init__(
        self,
        *,
        config: ServerConfig,
        view: ClusterView,
        apply_here: Callable[[str], KnownTable],
    ) -> None:
        """Prepare; ``apply_here`` takes a table in on this node."""
        self._config = config
        self._view = view
        self._apply_here = apply_here

    async def Describe(  # noqa: N802 (the name is the service's)
        self,
        request: node_pb2.DescribeRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> node_pb2.DescribeResponse:
        """Say who this node is and with which settings it was started."""
        nodes = self._view.snapshot().nodes
        own = next(node for node in nodes if node.node_id == self._config.node_id)
        return node_pb2.DescribeResponse(
            node=node_to_message(own),
            cluster_id=self._config.cluster,
            slot_count=self._config.slot_count,
            peers=[str(peer) for peer in self._config.peers],
        )

    async def ApplyTable(  # noqa: N802
        self,
        request: node_pb2.ApplyTableRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> node_pb2.ApplyTableResponse:
        """Take over a table that the first node has accepted."""
        self._apply_here(request.spec_json)
        return node_pb2.ApplyTableResponse()
