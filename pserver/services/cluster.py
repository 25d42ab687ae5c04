"""``ClusterService``: who is in the cluster, which node is master of a slot, how this node does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from grpc import aio

from backstay._native import DataServer
from backstay._proto.v1 import cluster_pb2, cluster_pb2_grpc
from backstay.consensus import ClusterView
from backstay.consensus.messages import node_to_message, routing_to_message
from backstay.errors import ServerUnavailable
from backstay.pserver.table_registry import TableRegistry

__all__ = ["ClusterService"]


class ClusterService(cluster_pb2_grpc.ClusterServiceServicer):
    """Answers from the view and from the data plane; changes nothing."""

    def __init__(
        self,
        *,
        node_id: str,
        view: ClusterView,
        missing: Callable[[], str],
        registry: TableRegistry,
        data_server: DataServer,
    ) -> None:
        """Prepare; ``missing`` says which nodes were never met, and why."""
        self._node_id = node_id
        self._view = view
        self._missing = missing
        self._registry = registry
        self._data_server = data_server
        self._started_s = time.monotonic()

    async def GetCluster(  # noqa: N802 (the name is the service's)
        self,
        request: cluster_pb2.GetClusterRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> cluster_pb2.GetClusterResponse:
        """Return nodes and routing, once all nodes were met."""
        routing = self._view.snapshot().routing
        if routing is None:
            raise ServerUnavailable(f"{self._node_id} has not met all nodes yet: {self._missing()}")
        return routing_to_message(self._view.cluster_id, routing)

    async def GetNodeStats(  # noqa: N802
        self,
        request: cluster_pb2.GetNodeStatsRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> cluster_pb2.GetNodeStatsResponse:
        """Return this node's figures."""
        snapshot = self._view.snapshot()
        own = next(node for node in snapshot.nodes if node.node_id == self._node_id)
        slots = snapshot.routing.slots_per_node()[self._node_id] if snapshot.routing else 0
        return cluster_pb2.GetNodeStatsResponse(
            node=node_to_message(own),
            master_slots=slots,
            tables=len(self._registry),
            uptime_ms=int((time.monotonic() - self._started_s) * 1000),
            data_plane_json=self._data_server.stats_json(),
        )
