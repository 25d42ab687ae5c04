"""A node's part in its cluster, from the moment it knows which cluster that is.

It registers, goes by the records (``applying``), watches its peers, reports, and is a candidate for
controller. A store that is away leaves it with what it has. All its parts are made here, in one
place, and none of them changes later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from backstay._native import DataServer
from backstay.config import ServerConfig
from backstay.consensus import ClusterMirror
from backstay.consensus.records import ClusterConfig, ControllerRecord, MemberRecord
from backstay.consensus.records.exports import ExportRecord
from backstay.consensus.records.keys import Keys
from backstay.consensus.store import CoordinationStore
from backstay.errors import (
    BackstayError,
    InvalidRequest,
    LeaseLost,
    StoreAuthError,
    StoreDataLost,
    StoreError,
)
from backstay.pserver.applying import RecordApplier
from backstay.pserver.checkpoints.loading import SlotLoader
from backstay.pserver.checkpoints.lock import CheckpointLock
from backstay.pserver.checkpoints.records import CheckpointRecords
from backstay.pserver.checkpoints.restoring import FirstRestore
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
)
from backstay.pserver.membership.own_node import OwnNode
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
from backstay.tasks import end_tasks

__all__ = ["ClusterMember", "JoinedParts", "NodeParts", "keep_on"]

REFUSED_PAUSE_S = 1.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeParts:
    """What a node has before it joins a cluster."""

    config: ServerConfig
    keys: Keys
    mirror: ClusterMirror
    own: OwnNode
    server: DataServer
    registry: TableRegistry
    keeper: TableKeeper
    figures: ControlFigures
    readiness: Readiness


@dataclass(frozen=True)
class JoinedParts:
    """What the services of a node that has joined its cluster work with."""

    creation: TableCreation
    checkpoints: CheckpointParts
    exports: ExportParts
    plans: PlanRequests
    trainers: TrainerRegistrations


class ClusterMember:
    """Takes part in a cluster; made when the cluster's config record is known.

    Attributes:
        registration: This node's place in the cluster.
        parts: For the services.
    """

    def __init__(
        self,
        node: NodeParts,
        store: CoordinationStore,
        joined: ClusterConfig,
        *,
        on_dismissed: Callable[[], None],
    ) -> None:
        """Put the parts together; nothing runs before ``run``.

        ``on_dismissed`` is called when a plan is done by which this process is to end.
        """
        config, keys, mirror, figures = node.config, node.keys, node.mirror, node.figures
        own = node.own.record
        calls = PeerCalls(config, config.control_deadline_ms)
        self._watch = RecordWatch(store, keys, mirror)
        self._departures = Departures(store, keys, mirror, own.node_id, own.host)
        suspect = self._departures.suspect
        self._probe = PeerProbe(mirror, own.node_id, config, suspect)
        self._reporter = Reporter(store, keys, own.instance, node.server, suspect, figures)
        self._loader = SlotLoader(node.server, node.keeper.have, self._reporter.set_load_trouble)
        self._applier = RecordApplier(
            node.own,
            mirror=mirror,
            watch=self._watch,
            server=node.server,
            keeper=node.keeper,
            loader=self._loader,
            figures=figures,
            readiness=node.readiness,
            restore_wanted=config.restore_wanted,
            on_dismissed=on_dismissed,
        )
        self.registration = Registration(
            store,
            keys,
            joined,
            node.own,
            ttl_ms=config.lease_ttl_ms,
            judge=partial(_judge, own, self._departures, calls),
            on_alive=partial(_hold_lease, node.server, figures),
            on_trouble=partial(_note_trouble, mirror),
            catch_up=self._applier.catch_up,
        )
        self._controller = ControllerHost(
            store,
            keys,
            mirror,
            self._watch,
            joined,
            ControllerRecord(own.node_id, own.instance),
            return_grace_ms=config.return_grace_ms,
            first_restore=FirstRestore(config, store, keys),
            sizes=SlotSizes(calls),
            decide=decide,
            figures=figures,
        )
        self.parts = _joined_parts(node, store, joined, calls)
        self._checkpoints = _checkpoint_schedule(node, self.parts.checkpoints.saver, calls)
        self._exports = _export_schedule(node, self.parts.exports.records, joined, calls)

    async def run(self, on_ready: Callable[[], Awaitable[None]]) -> None:
        """Take part until cancelled.

        Raises:
            BackstayError: The node cannot be in this cluster (any more).
        """
        async with AsyncExitStack() as stack:
            stack.callback(self.registration.close)
            stack.callback(self.parts.checkpoints.writer.close)
            stack.callback(self.parts.checkpoints.increments.close)
            await self.registration.register()
            stack.push_async_callback(self._departures.close)
            await stack.enter_async_context(self._watch)
            await self._applier.take_over_tables()
            await stack.enter_async_context(self._probe)
            self._reporter.start()
            stack.push_async_callback(self._reporter.stop)
            await _first_failure(
                self.registration.hold(self._work),
                self._serve(on_ready),
                self._loader.run(),
                self._checkpoints.run(),
                self._exports.run(),
            )

    async def _serve(self, on_ready: Callable[[], Awaitable[None]]) -> None:
        await self.registration.set_status("serving")
        await self._applier.run(self.registration, on_ready)

    async def _work(self, lease: int) -> None:
        """Do what goes with a lease: reports, the controller's leadership, trainers' records."""
        await _first_failure(
            keep_on(lambda: self._reporter.run(lease), "reporting"),
            keep_on(lambda: self._controller.run(lease), "the controller"),
            keep_on(lambda: self.parts.trainers.run(lease), "the trainers"),
        )


def _joined_parts(
    node: NodeParts, store: CoordinationStore, joined: ClusterConfig, calls: PeerCalls
) -> JoinedParts:
    """Put together what handles requests: tables, checkpoints, exports, plans, trainers."""
    config, keys, mirror, figures = node.config, node.keys, node.mirror, node.figures
    node_id, instance = node.own.record.node_id, node.own.record.instance
    creation = TableCreation(
        store=store,
        keys=keys,
        view=mirror,
        node_id=node_id,
        registry=node.registry,
        keeper=node.keeper,
        calls=calls,
        deadline_ms=config.control_deadline_ms,
    )
    saver = Saver(
        lock=CheckpointLock(store, keys, mirror, node.own.node),
        records=CheckpointRecords(store, keys, mirror),
        view=mirror,
        cluster_uid=joined.cluster_uid,
        calls=calls,
        specs=node.registry.specs,
        figures=figures,
    )
    return JoinedParts(
        creation=creation,
        checkpoints=CheckpointParts(
            store=store,
            keys=keys,
            view=mirror,
            saver=saver,
            writer=SlotWriter(node.server, instance),
            increments=SlotWriter(node.server, instance, name="increment", nice=0),
            create_table=creation.have,
        ),
        exports=ExportParts(ExportRecords(store, keys), mirror, calls, figures.exports, node_id),
        plans=PlanRequests(store, keys, mirror, calls, numbered=config.numbered_nodes),
        trainers=TrainerRegistrations(
            store, keys, ttl_ms=config.trainer_ttl_ms, on_count=figures.hears_from
        ),
    )


def _checkpoint_schedule(node: NodeParts, saver: Saver, calls: PeerCalls) -> CheckpointSchedule:
    figures = node.figures
    return CheckpointSchedule(
        node.mirror,
        saver,
        Due(PushCounts(node.mirror, calls)),
        is_controller=lambda: figures.is_controller,
        tell_error=figures.scheduled_checkpoints_fail,
    )


def _export_schedule(
    node: NodeParts, records: ExportRecords, joined: ClusterConfig, calls: PeerCalls
) -> ExportSchedule:
    mirror, figures = node.mirror, node.figures

    def open_exporter(record: ExportRecord, counter: ExportCounter) -> Exporter:
        return Exporter(
            record,
            view=mirror,
            gatherer=SlotGatherer(mirror, calls),
            specs=node.registry.specs,
            cluster_uid=joined.cluster_uid,
            counter=counter,
        )

    return ExportSchedule(
        mirror,
        records,
        open_exporter,
        TopicPublisher,
        lambda: Due(PushCounts(mirror, calls)),
        lambda: figures.is_controller,
        figures.exports,
    )


async def _first_failure(*works: Coroutine[Any, Any, None]) -> None:
    """Do several things that never return, until one fails or the caller is cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        await end_tasks(*tasks)


async def _judge(
    own: MemberRecord, departures: Departures, calls: PeerCalls, other: MemberRecord
) -> Predecessor:
    """Say whether the process that holds this node's id is dead or alive."""
    addresses = (other.control_address, other.data_address)
    taken: set[str] = set()
    if other.host == own.host:
        # This process listens there, so the other one cannot.
        taken = {own.control_address, own.data_address}
    foreign = [address for address in addresses if address not in taken]
    if can_judge(own.host, other.host, addresses) and (not foreign or await all_refuse(foreign)):
        gone = await departures.declare(other, "another process took over its id")
        return Predecessor(is_gone=gone, answers=False)
    if other.control_address in taken:
        return Predecessor(is_gone=False, answers=False)
    try:
        described = await calls.describe(other.control_address)
    except BackstayError:
        return Predecessor(is_gone=False, answers=False)
    return Predecessor(is_gone=False, answers=described.node.instance == other.instance)


def _hold_lease(server: DataServer, figures: ControlFigures, until_s: float) -> None:
    server.hold_lease_until(until_s)
    figures.lease_until_s = until_s


def _note_trouble(mirror: ClusterMirror, reason: str) -> None:
    before = mirror.snapshot().trouble
    if reason and not before:
        log.error("%s; serving on with what is known", reason)
    elif before and not reason:
        log.info("the coordination store answers again")
    mirror.set_trouble(reason)


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
