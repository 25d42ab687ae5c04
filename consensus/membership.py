"""The cluster as one process sees it, and the fixed list that fills the view for now.

``ClusterView`` is the interface that the node's services and its data plane use. Behind it
stands ``StaticCluster`` (a list of nodes given at start) and later the coordination store; the
users of the view need not know which. Everything here runs in one asyncio event loop, makes no
network call and reads no clock: others tell ``StaticCluster`` what they have learned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from backstay.consensus.node_records import NodeRecord
from backstay.consensus.routing import RoutingTable
from backstay.errors import InvalidRequest

__all__ = ["ClusterSnapshot", "ClusterView", "StaticCluster"]

STATIC_ROUTING_VERSION = 1


@dataclass(frozen=True)
class ClusterSnapshot:
    """What a view held at one moment.

    Attributes:
        revision: Grows with each change of anything below, in this process only; use it to
            wait for the next change. It is not the routing version.
        nodes: The nodes, known or not.
        routing: The routing table, None as long as some node was never met.
    """

    revision: int
    nodes: tuple[NodeRecord, ...]
    routing: RoutingTable | None

    @property
    def missing(self) -> tuple[NodeRecord, ...]:
        """The nodes that were never met."""
        return tuple(node for node in self.nodes if not node.is_known)


class ClusterView(Protocol):
    """Read access to membership and routing."""

    @property
    def cluster_id(self) -> str:
        """Name of the cluster."""

    def snapshot(self) -> ClusterSnapshot:
        """Return what is known now."""

    async def newer_than(self, revision: int) -> ClusterSnapshot:
        """Wait until the revision is above ``revision`` and return what is known then."""


class StaticCluster:
    """A ``ClusterView`` of a list of nodes that never changes.

    The nodes' data addresses and instances are not in the list; whoever meets a node calls
    ``meet``. Masters are fixed, so the routing version is 1 for ever: a node that restarts
    shows as another instance in an unchanged routing.
    """

    def __init__(
        self,
        cluster_id: str,
        nodes: Sequence[NodeRecord],
        master_of_slot: NDArray[np.uint16],
    ) -> None:
        """Begin with what the list says.

        Args:
            cluster_id: Name of the cluster.
            nodes: All nodes in the order of the list.
            master_of_slot: uint16 [slot_count]: index into ``nodes``.
        """
        self._cluster_id = cluster_id
        self._nodes = {node.node_id: node for node in nodes}
        self._master_of_slot = master_of_slot
        self._changed = asyncio.Event()
        self._snapshot = self._take_snapshot(revision=0)

    @property
    def cluster_id(self) -> str:
        """Name of the cluster."""
        return self._cluster_id

    def snapshot(self) -> ClusterSnapshot:
        """Return what is known now."""
        return self._snapshot

    async def newer_than(self, revision: int) -> ClusterSnapshot:
        """Wait until the revision is above ``revision`` and return what is known then."""
        while self._snapshot.revision <= revision:
            await self._changed.wait()
        return self._snapshot

    def meet(self, record: NodeRecord) -> None:
        """Take over what a node said about itself.

        Raises:
            InvalidRequest: The record is of no node in the list, or says nothing new about it.
        """
        listed = self._nodes.get(record.node_id)
        if listed is None:
            raise InvalidRequest(f"node {record.node_id!r} is not in the list of this cluster")
        if not record.is_known:
            raise InvalidRequest(f"node {record.node_id!r} says nothing about itself")
        # The list's address stands: it is the one that worked from here.
        self._put(replace(record, control_address=listed.control_address))

    def lose(self, node_id: str) -> None:
        """Note that a node does not answer; one that was never met stays unknown."""
        listed = self._nodes[node_id]
        if listed.is_known:
            self._put(replace(listed, status="unreachable"))

    def _put(self, record: NodeRecord) -> None:
        if self._nodes[record.node_id] == record:
            return
        self._nodes[record.node_id] = record
        self._snapshot = self._take_snapshot(revision=self._snapshot.revision + 1)
        # Wake those who wait now; those who come later wait for the next change.
        self._changed.set()
        self._changed = asyncio.Event()

    def _take_snapshot(self, revision: int) -> ClusterSnapshot:
        nodes = tuple(self._nodes.values())
        routing = None
        if all(node.is_known for node in nodes):
            routing = RoutingTable.of_masters(STATIC_ROUTING_VERSION, nodes, self._master_of_slot)
        return ClusterSnapshot(revision, nodes, routing)
