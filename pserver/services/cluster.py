"""``ClusterService``: who is in the cluster, which node is master of a slot, how this node does."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from grpc import aio

from backstay._native import DataServer
from backstay._proto.v1 import cluster_pb2, cluster_pb2_grpc
from backstay.consensus import ClusterSnapshot, ClusterView, RoutingTable
from backstay.consensus.clock import clock_s
from backstay.consensus.cluster_mirror import seen_routing
from backstay.consensus.records import NO_MASTER, Event
from backstay.consensus.records.messages import node_to_message, routing_to_message
from backstay.errors import ConfigError, ServerUnavailable, Stopping
from backstay.pserver.membership.own_node import OwnNode
from backstay.pserver.metrics.figures import ControlFigures
from backstay.pserver.tables.registry import TableRegistry

__all__ = ["ClusterService", "answered_alike"]

# Changes come in bursts; a stream gets at most one answer in this time.
ANSWER_PAUSE_S = 0.01


class ClusterService(cluster_pb2_grpc.ClusterServiceServicer):
    """Answers from the view and from the data plane; changes nothing."""

    def __init__(
        self,
        *,
        own: OwnNode,
        view: ClusterView,
        registry: TableRegistry,
        data_server: DataServer,
        figures: ControlFigures,
        read_events: Callable[[], Awaitable[Sequence[Event]]],
        accept_loss: Callable[[int], Awaitable[int]],
    ) -> None:
        """Prepare.

        Args:
            own: This node.
            view: The cluster as this node sees it.
            registry: The tables.
            data_server: The data plane.
            figures: Of the control plane.
            read_events: Reads what the controllers decided, oldest first.
            accept_loss: Accepts what was lost up to a routing version; see ``requests.losses``.
        """
        self._own = own
        self._view = view
        self._registry = registry
        self._data_server = data_server
        self._figures = figures
        self._read_events = read_events
        self._accept_loss = accept_loss
        self._started_s = time.monotonic()
        self._stopping = asyncio.Event()
        self._answer: tuple[ClusterSnapshot, cluster_pb2.GetClusterResponse] | None = None

    def end_streams(self) -> None:
        """Let every stream end: this node stops."""
        self._stopping.set()

    async def GetCluster(  # noqa: N802 (the name is the service's)
        self,
        request: cluster_pb2.GetClusterRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> cluster_pb2.GetClusterResponse:
        """Return nodes, routing and health, once there is a routing."""
        self._routing()
        return self._answer_of(self._view.snapshot())

    def _routing(self) -> RoutingTable:
        snapshot = self._view.snapshot()
        if snapshot.routing is None:
            raise ServerUnavailable(
                f"{self._own.record.node_id} knows no routing yet: {snapshot.health.reason}"
            )
        return snapshot.routing

    async def WatchCluster(  # noqa: N802
        self,
        request: cluster_pb2.WatchClusterRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[cluster_pb2.GetClusterResponse]:
        """Send the answer of GetCluster, and again after each change of it."""
        revision, last = -1, None
        while True:
            snapshot = await self._newer_than(revision)
            revision = snapshot.revision
            if snapshot.routing is None:
                continue
            answer = self._answer_of(snapshot)
            if (
                last is None
                and answer.routing_version <= request.known_routing_version
                and answer.paused == request.known_paused
            ):
                # Known already: the next change is of interest.
                last = answer
                continue
            if answer != last:
                last = answer
                yield answer
                await asyncio.sleep(ANSWER_PAUSE_S)

    async def GetSlot(  # noqa: N802
        self,
        request: cluster_pb2.GetSlotRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> cluster_pb2.GetSlotResponse:
        """Return who holds one slot, and since when."""
        routing = self._routing()
        if request.slot >= routing.slot_count:
            raise ConfigError(
                f"slot: {request.slot} is out of range; the cluster has 0 to "
                f"{routing.slot_count - 1}"
            )
        held = routing.replicas_of_slot[request.slot]
        ids = [node.node_id for node in routing.nodes]
        return cluster_pb2.GetSlotResponse(
            routing_version=routing.version,
            term=int(routing.term_of_slot[request.slot]),
            epoch=int(routing.epoch_of_slot[request.slot]),
            master="" if held.master == NO_MASTER else ids[held.master],
            in_sync=[ids[index] for index in held.in_sync],
            catching_up=[ids[index] for index in held.catching_up],
            replicas=routing.replicas,
        )

    async def GetNodeStats(  # noqa: N802
        self,
        request: cluster_pb2.GetNodeStatsRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> cluster_pb2.GetNodeStatsResponse:
        """Return this node's figures."""
        own = self._own.node()
        snapshot = self._view.snapshot()
        routing = snapshot.routing
        slots = 0
        if routing is not None and any(node.instance == own.instance for node in routing.nodes):
            slots = routing.slots_per_node()[own.node_id]
        return cluster_pb2.GetNodeStatsResponse(
            node=node_to_message(own),
            master_slots=slots,
            tables=len(self._registry),
            uptime_ms=int((time.monotonic() - self._started_s) * 1000),
            data_plane_json=self._data_server.stats_json(),
            control_plane_json=json.dumps(
                self._figures.to_object(snapshot, clock_s(), time.process_time())
            ),
        )

    async def ListEvents(  # noqa: N802
        self,
        request: cluster_pb2.ListEventsRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> cluster_pb2.ListEventsResponse:
        """Return what the controllers decided, oldest first."""
        events = await self._read_events()
        return cluster_pb2.ListEventsResponse(
            events=[
                cluster_pb2.Event(
                    routing_version=event.routing_version,
                    kind=event.kind,
                    node_id=event.node,
                    slot_count=event.slot_count,
                    slots=event.slots,
                    reason=event.reason,
                )
                for event in events[-request.newest :]
            ]
        )

    async def GetSlotDigests(  # noqa: N802
        self,
        request: cluster_pb2.GetSlotDigestsRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> cluster_pb2.GetSlotDigestsResponse:
        """Return what this node holds of each slot."""
        return cluster_pb2.GetSlotDigestsResponse(
            node=node_to_message(self._own.node()),
            # Every row is read: not in the event loop.
            slots=await asyncio.to_thread(self._slot_digests),
        )

    async def AcceptLoss(  # noqa: N802
        self,
        request: cluster_pb2.AcceptLossRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> cluster_pb2.AcceptLossResponse:
        """Let slots that lost all their copies begin anew."""
        slots = await self._accept_loss(request.routing_version)
        return cluster_pb2.AcceptLossResponse(slots=slots)

    def _slot_digests(self) -> list[cluster_pb2.SlotDigest]:
        digests = []
        for state in json.loads(self._data_server.slot_states_json()):
            if state["role"] == "outside":
                continue
            position, digest = self._data_server.slot_digest(state["slot"])
            digests.append(
                cluster_pb2.SlotDigest(
                    slot=state["slot"],
                    term=state["term"],
                    role=state["role"],
                    position=position,
                    digest=digest,
                )
            )
        return digests

    async def _newer_than(self, revision: int) -> ClusterSnapshot:
        """Wait for a newer snapshot.

        Raises:
            Stopping: The node stops first.
        """
        newer = asyncio.ensure_future(self._view.newer_than(revision))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({newer, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if self._stopping.is_set():
                raise Stopping(f"{self._own.record.node_id} stops; ask another node")
            return newer.result()
        finally:
            newer.cancel()
            stopping.cancel()

    def _answer_of(self, snapshot: ClusterSnapshot) -> cluster_pb2.GetClusterResponse:
        """Return the answer for a snapshot; many callers share it.

        While copies move, most changes are reports of masters, which are not in it.
        """
        if self._answer is None or not answered_alike(self._answer[0], snapshot):
            routing = seen_routing(snapshot)
            assert routing is not None
            answer = routing_to_message(
                self._view.cluster_id,
                routing,
                cluster_uid=self._own.cluster_uid,
                health=snapshot.health,
                controller=snapshot.controller.node_id if snapshot.controller else "",
                paused=snapshot.plan.pause_reason if snapshot.plan is not None else "",
            )
            self._answer = (snapshot, answer)
        return self._answer[1]


def answered_alike(one: ClusterSnapshot, other: ClusterSnapshot) -> bool:
    """Whether two snapshots differ in nothing that clients are told."""
    return (
        one.routing is other.routing
        and one.config is other.config
        and one.members == other.members
        and one.health == other.health
        and one.controller == other.controller
        and one.plan == other.plan
    )
