"""A node's part in its cluster, from the moment it knows which cluster that is.

It registers, takes over the tables, goes by the routing table, watches its peers, reports, and
is a candidate for controller. Everything it does follows from the records; a store that is away
leaves it with what it has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from backstay._native import DataServer
from backstay._version import __version__
from backstay.config import ServerConfig
from backstay.consensus import ClusterMirror
from backstay.consensus.records import ClusterConfig, ControllerRecord, MemberRecord, RoutingTable
from backstay.consensus.records.exports import ExportRecord, tables_of_exports
from backstay.consensus.records.keys import Keys
from backstay.consensus.records.nodes import MemberStatus
from backstay.consensus.store import CoordinationStore
from backstay.errors import (
    BackstayError,
    InvalidRequest,
    LeaseLost,
    StoreAuthError,
    StoreDataLost,
    StoreError,
    StoreUnavailable,
)
from backstay.logs import fields
from backstay.pserver.checkpoints.loading import SlotLoader
from backstay.pserver.checkpoints.lock import CheckpointLock
from backstay.pserver.checkpoints.records import CheckpointRecords
from backstay.pserver.checkpoints.restoring import FirstRestore, unused_restore
from backstay.pserver.checkpoints.saving import Saver
from backstay.pserver.checkpoints.schedule import CheckpointSchedule
from backstay.pserver.controller import decide
from backstay.pserver.exports.exporter import Exporter
from backstay.pserver.exports.records import ExportRecords
from backstay.pserver.exports.schedule import ExportSchedule
from backstay.pserver.exports.topic.publisher import TopicPublisher
from backstay.pserver.leadership.controller_host import ControllerHost
from backstay.pserver.leadership.slot_sizes import SlotSizes
from backstay.pserver.membership.departures import (
    Departures,
    PeerProbe,
    all_refuse,
    can_judge,
    now_s,
)
from backstay.pserver.membership.handover import all_in_sync, is_dismissed
from backstay.pserver.membership.record_watch import RecordWatch
from backstay.pserver.membership.registration import Predecessor, Registration
from backstay.pserver.membership.reporting import Reporter
from backstay.pserver.membership.trainer_registrations import TrainerRegistrations
from backstay.pserver.metrics.export_figures import ExportCounter
from backstay.pserver.metrics.figures import ControlFigures
from backstay.pserver.metrics.readiness import Readiness
from backstay.pserver.peers import PeerCalls
from backstay.pserver.requests.plans import PlanRequests
from backstay.pserver.services.checkpoint import CheckpointParts
from backstay.pserver.services.export import ExportParts
from backstay.pserver.snapshots.due import Due
from backstay.pserver.snapshots.gathering import SlotGatherer
from backstay.pserver.snapshots.pushes import PushCounts
from backstay.pserver.snapshots.writing import SlotWriter
from backstay.pserver.tables.creation import TableCreation, TableKeeper
from backstay.pserver.tables.registry import TableRegistry
from backstay.tables import TableSpec
from backstay.tasks import end_tasks

__all__ = ["ClusterMember", "Identity", "keep_on"]

RETRY_PAUSE_S = 0.1
REFUSED_PAUSE_S = 1.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Identity:
    """Who this process is: its node's id, its own number, and where it is reached."""

    node_id: str
    instance: int
    control_address: str
    data_address: str
    host: str


class ClusterMember:
    """Takes part in a cluster; made when the cluster's config record is known."""

    def __init__(
        self,
        *,
        config: ServerConfig,
        store: CoordinationStore,
        keys: Keys,
        mirror: ClusterMirror,
        joined: ClusterConfig,
        identity: Identity,
        server: DataServer,
        registry: TableRegistry,
        keeper: TableKeeper,
        figures: ControlFigures,
        on_dismissed: Callable[[], None],
    ) -> None:
        """Put the parts together; nothing runs before ``run``.

        ``on_dismissed`` is called when a plan is done by which this process is to end.
        """
        self._mirror = mirror
        self._joined = joined
        self._identity = identity
        self._server = server
        self._keeper = keeper
        self._figures = figures
        self._on_dismissed = on_dismissed
        self._restore = config.restore_wanted
        self._calls = PeerCalls(config, config.control_deadline_ms)
        self._watch = RecordWatch(store, keys, mirror)
        self._departures = Departures(store, keys, mirror, identity.node_id, identity.host)
        self._registration = Registration(
            store,
            keys,
            joined,
            _first_record(identity, keeps_store=config.is_store_member(identity.node_id)),
            ttl_ms=config.lease_ttl_ms,
            judge=self._judge,
            on_alive=self._hold_lease_until,
            on_trouble=self._note_trouble,
            catch_up=self._catch_up,
        )
        self._reporter = Reporter(
            store, keys, identity.instance, server, self._departures.suspect, figures
        )
        self._probe = PeerProbe(mirror, identity.node_id, config, self._departures.suspect)
        self._controller = ControllerHost(
            store,
            keys,
            mirror,
            self._watch,
            joined,
            ControllerRecord(identity.node_id, identity.instance),
            return_grace_ms=config.return_grace_ms,
            first_restore=FirstRestore(config, store, keys),
            sizes=SlotSizes(self._calls),
            decide=decide,
            figures=figures,
        )
        self.trainers = TrainerRegistrations(
            store, keys, ttl_ms=config.trainer_ttl_ms, on_count=self._count_trainers
        )
        self._open_services(config, store, keys, registry)
        self.readiness = Readiness()
        self.is_registered = False

    def _open_services(
        self,
        config: ServerConfig,
        store: CoordinationStore,
        keys: Keys,
        registry: TableRegistry,
    ) -> None:
        """Put together the handlers of requests: tables, checkpoints, exports, plans."""
        mirror, identity = self._mirror, self._identity
        self._specs = lambda: [TableSpec.from_json(table.spec_json) for table in registry]
        self.creation = TableCreation(
            store=store,
            keys=keys,
            view=mirror,
            node_id=identity.node_id,
            registry=registry,
            keeper=self._keeper,
            calls=self._calls,
            deadline_ms=config.control_deadline_ms,
        )
        self.checkpoints = CheckpointParts(
            store=store,
            keys=keys,
            view=mirror,
            saver=Saver(
                lock=CheckpointLock(store, keys, mirror, lambda: self._registration.record.node()),
                records=CheckpointRecords(store, keys, mirror),
                view=mirror,
                cluster_uid=self._joined.cluster_uid,
                calls=self._calls,
                specs=self._specs,
                figures=self._figures,
            ),
            writer=SlotWriter(self._server, identity.instance),
            increments=SlotWriter(self._server, identity.instance, name="increment", nice=0),
            create_table=self.creation.have,
        )
        self.exports = ExportParts(
            records=ExportRecords(store, keys),
            view=mirror,
            calls=self._calls,
            figures=self._figures.exports,
            node_id=identity.node_id,
        )
        self._loader = SlotLoader(
            self._server,
            self._keeper.have,
            self._reporter.set_load_trouble,
        )
        self.plans = PlanRequests(store, keys, mirror, self._calls, numbered=config.numbered_nodes)

    @property
    def status(self) -> MemberStatus:
        """What this node says about itself."""
        return self._registration.record.status

    @property
    def cluster_uid(self) -> str:
        """Which cluster it has joined."""
        return self._joined.cluster_uid

    async def run(self, on_ready: Callable[[], Awaitable[None]]) -> None:
        """Take part until cancelled.

        Raises:
            BackstayError: The node cannot be in this cluster (any more).
        """
        async with AsyncExitStack() as stack:
            stack.callback(self._registration.close)
            stack.callback(self.checkpoints.writer.close)
            stack.callback(self.checkpoints.increments.close)
            await self._registration.register()
            self.is_registered = True
            stack.push_async_callback(self._departures.close)
            await stack.enter_async_context(self._watch)
            await self._read_all()
            failures = self._keeper.apply_records(dict(self._mirror.snapshot().tables))
            if failures:
                raise BackstayError("this node cannot hold the cluster's tables: " + failures[0])
            await stack.enter_async_context(self._probe)
            self._reporter.start()
            stack.push_async_callback(self._reporter.stop)
            schedule = CheckpointSchedule(
                self._mirror,
                self.checkpoints.saver,
                self._open_due(),
                is_controller=lambda: self._figures.is_controller,
                tell_error=self._figures.scheduled_checkpoints_fail,
            )
            tasks = [
                asyncio.ensure_future(self._registration.hold(self._work)),
                asyncio.ensure_future(self._follow(on_ready)),
                asyncio.ensure_future(self._loader.run()),
                asyncio.ensure_future(schedule.run()),
                asyncio.ensure_future(self._export_schedule().run()),
            ]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done():
                        task.result()
            finally:
                await end_tasks(*tasks)

    def _open_due(self) -> Due:
        return Due(PushCounts(self._mirror, self._calls))

    def _export_schedule(self) -> ExportSchedule:
        def open_exporter(record: ExportRecord, counter: ExportCounter) -> Exporter:
            return Exporter(
                record,
                view=self._mirror,
                gatherer=SlotGatherer(self._mirror, self._calls),
                specs=self._specs,
                cluster_uid=self._joined.cluster_uid,
                counter=counter,
            )

        return ExportSchedule(
            self._mirror,
            self.exports.records,
            open_exporter,
            TopicPublisher,
            self._open_due,
            lambda: self._figures.is_controller,
            self._figures.exports,
        )

    async def set_status(self, status: MemberStatus) -> None:
        """Tell the cluster, and wait until the store has it."""
        await self._registration.set_status(status)

    async def leave(self) -> None:
        """Say that this process has stopped serving, so that no node waits for it.

        Raises:
            StoreError: The store does not answer.
        """
        await self._registration.leave("it was stopped")

    async def _work(self, lease: int) -> None:
        """Do what goes with a lease: reports, the controller's leadership, trainers' records."""
        tasks = [
            asyncio.ensure_future(keep_on(lambda: self._reporter.run(lease), "reporting")),
            asyncio.ensure_future(keep_on(lambda: self._controller.run(lease), "the controller")),
            asyncio.ensure_future(keep_on(lambda: self.trainers.run(lease), "the trainers")),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            await end_tasks(*tasks)

    async def _follow(self, on_ready: Callable[[], Awaitable[None]]) -> None:
        """Go by the records, one change after the other."""
        await self._registration.set_status("serving")
        loop = asyncio.get_running_loop()
        revision, version, is_ready = -1, 0, False
        tracked: list[str] = []
        before: RoutingTable | None = None
        while True:
            snapshot = await self._mirror.newer_than(revision)
            revision = snapshot.revision
            self._figures.notice(snapshot, loop.time())
            self.readiness.notice(snapshot)
            self._keeper.apply_records(dict(snapshot.tables))
            exported = tables_of_exports(snapshot.exports, snapshot.tables)
            wanted = sorted(table for tables in exported.values() for table in tables)
            if wanted != tracked:
                self._server.track_exports(wanted)
                tracked = wanted
            routing = snapshot.routing
            own = self._identity
            if is_ready and is_dismissed(snapshot.plan, routing, own.node_id, own.instance):
                assert snapshot.plan is not None
                log.info("%s is done and this node holds nothing: ending", snapshot.plan.kind)
                self._on_dismissed()
            if routing is None or routing.version <= version:
                continue
            version = routing.version
            self._server.set_routing_json(snapshot.routing_json)
            self._loader.follow(routing)
            self._figures.take_routing(before, routing, self._identity.instance)
            if before is None and (unused := unused_restore(self._restore, snapshot.restore)):
                log.warning("%s", unused)
            before = routing
            self._registration.set_sync(all_in_sync(routing, self._identity.instance))
            slots = {node.instance: node.node_id for node in routing.nodes}
            own_id = slots.get(self._identity.instance)
            log.info(
                "routing %d: master of %d of %d slots",
                version,
                routing.slots_per_node()[own_id] if own_id is not None else 0,
                routing.slot_count,
                extra=fields(version=version),
            )
            if not is_ready:
                # A client that waits for this node may ask it for the cluster next: the others'
                # registrations, older than the routing, must have arrived by then.
                await self._read_all()
                is_ready = True
                await on_ready()

    def _count_trainers(self, count: int) -> None:
        self._figures.trainers = count

    def _hold_lease_until(self, until_s: float) -> None:
        self._server.hold_lease_until(until_s)
        self._figures.lease_until_s = until_s

    async def _catch_up(self) -> None:
        """Go by the newest records before a new lease allows to serve by old ones."""
        if not self.is_registered:
            return  # Nothing is served before the first routing table is here.
        await self._read_all()
        snapshot = self._mirror.snapshot()
        self._keeper.apply_records(dict(snapshot.tables))
        if snapshot.routing is not None:
            self._server.set_routing_json(snapshot.routing_json)

    async def _read_all(self) -> None:
        while True:
            try:
                await self._watch.read_all()
                return
            except StoreUnavailable as error:
                log.warning("reading the cluster's records again: %s", error)
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _judge(self, other: MemberRecord) -> Predecessor:
        """Say whether the process that holds this node's id is dead or alive."""
        addresses = (other.control_address, other.data_address)
        own: set[str] = set()
        if other.host == self._identity.host:
            # This process listens there, so the other one cannot.
            own = {self._identity.control_address, self._identity.data_address}
        foreign = [address for address in addresses if address not in own]
        if can_judge(self._identity.host, other.host, addresses) and (
            not foreign or await all_refuse(foreign)
        ):
            gone = await self._departures.declare(other, "another process took over its id")
            return Predecessor(is_gone=gone, answers=False)
        if other.control_address in own:
            return Predecessor(is_gone=False, answers=False)
        try:
            described = await self._calls.describe(other.control_address)
        except BackstayError:
            return Predecessor(is_gone=False, answers=False)
        return Predecessor(is_gone=False, answers=described.node.instance == other.instance)

    def _note_trouble(self, reason: str) -> None:
        before = self._mirror.snapshot().trouble
        if reason and not before:
            log.error("%s; serving on with what is known", reason)
        elif before and not reason:
            log.info("the coordination store answers again")
        self._mirror.set_trouble(reason)


async def keep_on(work: Callable[[], Awaitable[None]], what: str) -> None:
    """Do what writes to the store, again and again if that refuses a write; never returns.

    A store that is full, or a record that is too large for it, must not end a node: the next
    controller would meet the same, and with the last node the rows are gone.

    Raises:
        StoreError: The lease is lost, or nothing that the store says can be relied on.
    """
    while True:
        try:
            await work()
        except (LeaseLost, StoreAuthError, StoreDataLost):
            raise
        except (StoreError, InvalidRequest) as error:
            log.error("%s: the store refuses a write, trying again: %s", what, error)
            await asyncio.sleep(REFUSED_PAUSE_S)


def _first_record(identity: Identity, *, keeps_store: bool) -> MemberRecord:
    return MemberRecord(
        node_id=identity.node_id,
        instance=identity.instance,
        incarnation=1,
        status="starting",
        start_time=now_s(),
        sync=True,
        data_address=identity.data_address,
        control_address=identity.control_address,
        host=identity.host,
        lease=0,
        version=__version__,
        keeps_store=keeps_store,
    )
