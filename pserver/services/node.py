"""``NodeService``: what the nodes of a cluster say to each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
from grpc import aio
from numpy.typing import NDArray

from backstay._proto.v1 import node_pb2, node_pb2_grpc
from backstay.config import ServerConfig
from backstay.consensus.records.messages import node_to_message
from backstay.pserver.membership.own_node import OwnNode
from backstay.pserver.tables.registry import KnownTable

__all__ = ["NodeService"]


class NodeService(node_pb2_grpc.NodeServiceServicer):
    """Describes this node, takes over tables, tells sizes."""

    def __init__(
        self,
        *,
        config: ServerConfig,
        own: OwnNode,
        apply_here: Callable[[str, int], KnownTable],
        slot_bytes: Callable[[], NDArray[np.uint64]],
    ) -> None:
        """Prepare.

        Args:
            config: This node's settings.
            own: This node.
            apply_here: Takes a table in on this node: its description, and of which revision.
            slot_bytes: Says how many bytes each slot takes here.
        """
        self._config = config
        self._own = own
        self._apply_here = apply_here
        self._slot_bytes = slot_bytes

    async def Describe(  # noqa: N802 (the name is the service's)
        self,
        request: node_pb2.DescribeRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> node_pb2.DescribeResponse:
        """Say who this node is and with which settings it runs."""
        return node_pb2.DescribeResponse(
            node=node_to_message(self._own.node()),
            cluster_id=self._config.cluster,
            slot_count=self._config.slot_count,
            cluster_uid=self._own.cluster_uid,
        )

    async def ApplyTable(  # noqa: N802
        self,
        request: node_pb2.ApplyTableRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> node_pb2.ApplyTableResponse:
        """Take over a table of the cluster's records."""
        self._apply_here(request.spec_json, request.revision)
        return node_pb2.ApplyTableResponse()

    async def GetSlotBytes(  # noqa: N802
        self,
        request: node_pb2.GetSlotBytesRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> node_pb2.GetSlotBytesResponse:
        """Say how large the slots are here."""
        sizes = await asyncio.to_thread(self._slot_bytes)
        return node_pb2.GetSlotBytesResponse(bytes_of_slot=sizes.tolist())
