"""Brings a node to what the cluster's records say: its tables, its routing table, its exports.

Level-triggered: a node that missed some states goes by the newest. It imports the records, what
keeps tables, slots and figures of this node, and no service.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from backstay._native import DataServer
from backstay.consensus import ClusterMirror, ClusterSnapshot
from backstay.consensus.records import RoutingTable
from backstay.consensus.records.exports import tables_of_exports
from backstay.errors import BackstayError
from backstay.logs import fields
from backstay.pserver.checkpoints.loading import SlotLoader
from backstay.pserver.checkpoints.restoring import unused_restore
from backstay.pserver.membership.handover import all_in_sync, is_dismissed
from backstay.pserver.membership.own_node import OwnNode
from backstay.pserver.membership.record_watch import RecordWatch
from backstay.pserver.membership.registration import Registration
from backstay.pserver.metrics.figures import ControlFigures
from backstay.pserver.metrics.readiness import Readiness
from backstay.pserver.tables.creation import TableKeeper

__all__ = ["RecordApplier"]

log = logging.getLogger(__name__)


class RecordApplier:
    """Applies the records to the data plane of one process."""

    def __init__(
        self,
        own: OwnNode,
        *,
        mirror: ClusterMirror,
        watch: RecordWatch,
        server: DataServer,
        keeper: TableKeeper,
        loader: SlotLoader,
        figures: ControlFigures,
        readiness: Readiness,
        restore_wanted: str,
        on_dismissed: Callable[[], None],
    ) -> None:
        """Prepare.

        Args:
            own: This node.
            mirror: The records as this node sees them.
            watch: What feeds the mirror.
            server: The data plane.
            keeper: Takes tables over.
            loader: Loads slots that are to be restored.
            figures: Where changes of the routing are counted.
            readiness: Remembers that this node was ready.
            restore_wanted: What the settings ask a new cluster to begin with.
            on_dismissed: Called when a plan is done by which this process is to end.
        """
        self._node_id, self._instance = own.record.node_id, own.record.instance
        self._mirror = mirror
        self._watch = watch
        self._server = server
        self._keeper = keeper
        self._loader = loader
        self._figures = figures
        self._readiness = readiness
        self._restore_wanted = restore_wanted
        self._on_dismissed = on_dismissed
        # What was applied last.
        self._routing: RoutingTable | None = None
        self._tracked: list[str] = []

    async def take_over_tables(self) -> None:
        """Read the records, and take the tables of the cluster over.

        Raises:
            BackstayError: This node cannot hold one of them.
        """
        await self._watch.read_until_answered()
        if failures := self._keeper.apply_records(dict(self._mirror.snapshot().tables)):
            raise BackstayError("this node cannot hold the cluster's tables: " + failures[0])

    async def catch_up(self) -> None:
        """Go by the newest records before a new lease allows to serve by old ones."""
        if self._routing is None:
            return  # Nothing is served yet.
        await self._watch.read_until_answered()
        snapshot = self._mirror.snapshot()
        self._keeper.apply_records(dict(snapshot.tables))
        if snapshot.routing is not None:
            self._server.set_routing_json(snapshot.routing_json)

    async def run(
        self, registration: Registration, on_ready: Callable[[], Awaitable[None]]
    ) -> None:
        """Apply one change after the other; never returns.

        Args:
            registration: Says whether all replicas here are in sync.
            on_ready: Called once, when this node has its first routing table.
        """
        loop = asyncio.get_running_loop()
        revision, is_ready = -1, False
        while True:
            snapshot = await self._mirror.newer_than(revision)
            revision = snapshot.revision
            self._figures.notice(snapshot, loop.time())
            self._readiness.notice(snapshot)
            self._keeper.apply_records(dict(snapshot.tables))
            self._track_exports(snapshot)
            if is_ready:
                self._end_if_dismissed(snapshot)
            before, routing = self._routing, snapshot.routing
            if routing is None or (before is not None and routing.version <= before.version):
                continue
            self._apply_routing(routing, snapshot)
            registration.set_sync(all_in_sync(routing, self._instance))
            if not is_ready:
                # A client that waits for this node may ask it for the cluster next: the others'
                # registrations, older than the routing, must have arrived by then.
                await self._watch.read_until_answered()
                is_ready = True
                await on_ready()

    def _track_exports(self, snapshot: ClusterSnapshot) -> None:
        exported = tables_of_exports(snapshot.exports, snapshot.tables)
        wanted = sorted(table for tables in exported.values() for table in tables)
        if wanted != self._tracked:
            self._server.track_exports(wanted)
            self._tracked = wanted

    def _end_if_dismissed(self, snapshot: ClusterSnapshot) -> None:
        if is_dismissed(snapshot.plan, snapshot.routing, self._node_id, self._instance):
            assert snapshot.plan is not None
            log.info("%s is done and this node holds nothing: ending", snapshot.plan.kind)
            self._on_dismissed()

    def _apply_routing(self, routing: RoutingTable, snapshot: ClusterSnapshot) -> None:
        self._server.set_routing_json(snapshot.routing_json)
        self._loader.follow(routing)
        self._figures.take_routing(self._routing, routing, self._instance)
        is_first = self._routing is None
        if is_first and (unused := unused_restore(self._restore_wanted, snapshot.restore)):
            log.warning("%s", unused)
        self._routing = routing
        own_id = {node.instance: node.node_id for node in routing.nodes}.get(self._instance)
        log.info(
            "routing %d: master of %d of %d slots",
            routing.version,
            routing.slots_per_node()[own_id] if own_id is not None else 0,
            routing.slot_count,
            extra=fields(version=routing.version),
        )
