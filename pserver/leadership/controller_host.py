"""The controller's shell: campaigns for leadership, and carries decisions out while it leads.

What to decide is the pure core's business (``pserver.controller``). Here the records are handed
to it on every change, and what it decides is written in transactions that succeed only while
this node leads and no other has written the routing table. Whatever is interrupted is done
again by the next controller, from the records alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import numpy as np

from backstay.consensus import ClusterMirror, ClusterSnapshot
from backstay.consensus.records import (
    ClusterConfig,
    ClusterHealthRecord,
    ControllerRecord,
    Event,
    RoutingTable,
)
from backstay.consensus.records.keys import Keys
from backstay.consensus.records.packing import pack
from backstay.consensus.records.plans import ResizePlan
from backstay.consensus.store import (
    CoordinationStore,
    Delete,
    Get,
    Operation,
    Put,
    Txn,
    mod_revision_is,
)
from backstay.consensus.store.follow import Election, FencingToken
from backstay.errors import CheckpointError, StoreUnavailable
from backstay.logs import fields
from backstay.pserver.checkpoints.restoring import FirstRestore
from backstay.pserver.controller import (
    Absences,
    ClusterRecords,
    Decision,
    PlanWait,
    follow_repair,
    living,
)
from backstay.pserver.leadership.shard_view import ShardView
from backstay.pserver.leadership.slot_sizes import SlotSizes
from backstay.pserver.membership.departures import now_s
from backstay.pserver.membership.record_watch import RecordWatch
from backstay.pserver.metrics.figures import ControlFigures
from backstay.tasks import end_tasks, spawn

__all__ = ["ControllerHost", "copies_under_way", "is_urgent", "read_events"]

# Records of one cause (a node's death is up to three) come together; one decision for all.
DEBOUNCE_S = 0.003
# What is not urgent waits for more of its kind: each new routing table costs every node and
# every trainer a look at it.
CALM_S = 0.05
# A copy that has caught up waits so long for the others that are under way.
COPIES_CALM_S = 0.5
RETRY_PAUSE_S = 0.1
EVENTS_MAX = 1000
# Written with the routing; further ones of the same decision follow in transactions of their own.
EVENTS_PER_WRITE = 40
DEATHS_MAX = 64
REPAIRS_MAX = 20
# Until a checkpoint that a cluster is to begin with is looked for again.
CHECKPOINT_PAUSE_S = 2.0
# The least pause between two looks at processes whose time to come back is over.
LOOK_AGAIN_S = 0.05

log = logging.getLogger(__name__)


class _Deposed(Exception):
    """Another one is the controller now."""


class ControllerHost:
    """One node's candidacy and leadership."""

    def __init__(
        self,
        store: CoordinationStore,
        keys: Keys,
        mirror: ClusterMirror,
        watch: RecordWatch,
        config: ClusterConfig,
        own: ControllerRecord,
        *,
        return_grace_ms: int,
        first_restore: FirstRestore,
        sizes: SlotSizes,
        decide: Callable[[ClusterRecords], Decision],
        figures: ControlFigures,
    ) -> None:
        """Prepare.

        Args:
            store: The coordination store.
            keys: Where the records are.
            mirror: The records as this node sees them.
            watch: What feeds the mirror.
            config: The cluster's config record.
            own: This process, as the election key names it.
            return_grace_ms: How long a process whose lease is over may come back before slots
                without another copy are given up.
            first_restore: What a cluster without a routing table begins with.
            sizes: How large the slots are.
            decide: The pure core.
            figures: Where failovers are counted.
        """
        self._store = store
        self._keys = keys
        self._mirror = mirror
        self._watch = watch
        self._config = config
        self._own = own
        self._absences = Absences(return_grace_ms / 1000)
        self._first_restore = first_restore
        self._sizes = sizes
        self._plan_wait = PlanWait()
        self._decide = decide
        self._figures = figures
        self._loop = asyncio.get_running_loop()
        self._written = 0
        self._routing_to_show: RoutingTable | None = None
        self._show = asyncio.Event()
        self._events: deque[str] = deque()

    async def run(self, lease: int) -> None:
        """Be a candidate, and rule when elected; never returns."""
        election = Election(self._store, self._keys.controller)
        while True:
            token = await election.campaign(self._own.to_json(), lease)
            detail = fields(fencing_token=token.create_revision)
            log.info("this node is the controller now", extra=detail)
            self._figures.is_controller = True
            view = spawn(self._keep_view(token), "the readable view of the routing")
            try:
                await self._rule(token)
            except _Deposed:
                log.info("this node is no longer the controller")
            finally:
                self._figures.is_controller = False
                await end_tasks(view)

    async def _rule(self, token: FencingToken) -> None:
        await self._repeat(self._take_over)
        revision = -1
        decided: ClusterSnapshot | None = None
        while True:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._mirror.newer_than(revision), self._patience_s())
            snapshot = await self._after_pause(decided)
            revision = snapshot.revision
            if snapshot.routing_revision < self._written:
                # What this one wrote has not come back yet; a decision now would be of yesterday.
                continue
            try:
                await self._decide_once(snapshot, token)
                decided = snapshot
            except StoreUnavailable as error:
                log.warning("a decision could not be written: %s", error)
                await asyncio.sleep(RETRY_PAUSE_S)
                # Whether it was written is not known: look again at once.
                revision = -1

    async def _after_pause(self, decided: ClusterSnapshot | None) -> ClusterSnapshot:
        """Return the records after a short pause, in which those of one cause come together.

        Args:
            decided: The records of the last decision; None if there was none.
        """
        began_s = self._loop.time()
        while True:
            await asyncio.sleep(DEBOUNCE_S)
            snapshot = self._mirror.snapshot()
            if decided is None or is_urgent(decided, snapshot):
                return snapshot
            calm_s = COPIES_CALM_S if copies_under_way(snapshot) > 0 else CALM_S
            left_s = began_s + calm_s - self._loop.time()
            if left_s <= 0:
                return snapshot
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._mirror.newer_than(snapshot.revision), left_s)

    async def _take_over(self) -> None:
        """Read everything, so that the first decision is not one of yesterday's records."""
        self._absences.forget()
        await self._watch.read_all()
        events = await self._store.range(self._keys.events)
        self._events = deque(item.key for item in events.items)
        self._written = 0

    def _patience_s(self) -> float | None:
        """Return how long to wait for a change before looking again at who is missing."""
        now_s = self._loop.time()
        ends = [self._absences.next_end(now_s), self._plan_wait.next_end(now_s)]
        known = [end for end in ends if end is not None]
        # Where nothing can be decided now, the end stays in the past: no busy loop then.
        return max(min(known), LOOK_AGAIN_S) if known else None

    async def _decide_once(self, snapshot: ClusterSnapshot, token: FencingToken) -> None:
        routing, routing_revision = snapshot.routing, snapshot.routing_revision
        # The rest is read after the routing table: older members could make a process
        # look as if it had been replaced by the one that it replaced.
        await self._watch.read_all()
        snapshot = self._mirror.snapshot()
        self._figures.notice(snapshot, self._loop.time())
        if snapshot.unreadable:
            key, reason = next(iter(snapshot.unreadable.items()))
            log.error("nothing is decided while %s cannot be read: %s", key, reason)
            return
        if routing is None and await self._begins_with_checkpoint(snapshot, token):
            # The plan for it comes back as a record.
            return
        self._sizes.look(snapshot)
        records = self._records(snapshot, routing)
        if not records.members:
            return
        # The records of the snapshot: the mirror goes on while the thread decides.
        revision_of = self._revisions_of(records)
        # In a thread: with many slots it takes longer than this loop may stand still.
        decision, routing_value = await asyncio.to_thread(self._decide_and_pack, records)
        operations: list[Operation] = []
        conditions = [token.still_mine()]
        if decision.routing is not None:
            operations.append(Put(self._keys.routing, routing_value))
            conditions.append(mod_revision_is(self._keys.routing, routing_revision))
            relied_on = [self._keys.report(instance) for instance in decision.relies_on]
            relied_on += [self._keys.member(node_id) for node_id in decision.given_up]
            if records.on_loss and decision.routing.restoring != (routing and routing.restoring):
                # A node that has noted a newer one may remove it.
                relied_on.append(self._keys.checkpoint)
            conditions += [mod_revision_is(key, revision_of[key]) for key in relied_on]
        if decision.restore is not None:
            operations.append(Put(self._keys.restore, decision.restore.to_json()))
            conditions.append(mod_revision_is(self._keys.restore, snapshot.restore_revision))
        if decision.plan is not None:
            operations.append(Put(self._keys.plan, decision.plan.to_json()))
            # The caller may have cancelled it meanwhile.
            conditions.append(mod_revision_is(self._keys.plan, snapshot.plan_revision))
        if decision.health != snapshot.status:
            operations.append(Put(self._keys.status, decision.health.to_json()))
        operations += self._event_writes(decision.events[:EVENTS_PER_WRITE], 0)
        newest = decision.routing or routing
        operations += self._repair_writes(snapshot, routing, decision)
        operations += self._forget_deaths(snapshot, newest)
        lost = self._figures.lost()
        if operations:
            result = await self._store.transaction(
                Txn(tuple(conditions), tuple(operations), (Get(self._keys.controller),))
            )
            if not result.succeeded:
                held = result.results[0]
                if held is None or held.create_revision != token.create_revision:
                    raise _Deposed
                # Another controller before this one wrote last: the mirror will bring it.
                return
            if decision.routing is not None:
                self._written = result.revision
                self._figures.routing_written(lost, routing, decision.routing, self._loop.time())
            self._tell(decision, snapshot.plan)
        for start in range(EVENTS_PER_WRITE, len(decision.events), EVENTS_PER_WRITE):
            await self._write(
                self._event_writes(decision.events[start : start + EVENTS_PER_WRITE], start), token
            )
        if newest is not None and newest is not self._routing_to_show:
            self._routing_to_show = newest
            self._show.set()

    def _records(self, snapshot: ClusterSnapshot, routing: RoutingTable | None) -> ClusterRecords:
        """Return what there is to decide from, and note who is missing for how long."""
        gone = frozenset(snapshot.deaths)
        return ClusterRecords(
            config=self._config,
            members=living(snapshot.members, gone),
            routing=routing,
            reports=snapshot.reports,
            gone=gone,
            waiting=self._absences.note(self._loop.time(), routing, snapshot.members, gone),
            restore=snapshot.restore,
            on_loss=None if snapshot.settings.on_slot_loss == "wait" else snapshot.checkpoint,
            lost_only=snapshot.settings.on_slot_loss == "restore-lost",
            accepted=snapshot.loss.version if snapshot.loss is not None else 0,
            has_tables=bool(snapshot.tables),
            plan=snapshot.plan,
            plan_overdue=self._plan_wait.note(self._loop.time(), snapshot.plan),
            bytes_of_slot=self._sizes.known(snapshot),
            moves_at_once=snapshot.settings.moves_at_once,
        )

    def _revisions_of(self, records: ClusterRecords) -> dict[str, int]:
        """Return the store's revision of each record that a decision may rely on."""
        nodes = records.routing.nodes if records.routing is not None else ()
        keys = [self._keys.report(instance) for instance in records.reports]
        keys += [self._keys.member(node.node_id) for node in nodes]
        keys.append(self._keys.checkpoint)
        return {key: self._mirror.revision_of(key) for key in keys}

    async def _begins_with_checkpoint(self, snapshot: ClusterSnapshot, token: FencingToken) -> bool:
        """Let a new cluster begin with a checkpoint, or say in its status why it cannot yet."""
        if snapshot.restore is not None or self._first_restore.is_decided:
            return False
        try:
            return await self._first_restore.request(token.still_mine())
        except CheckpointError as error:
            reason = f"it is to begin with a checkpoint: {error}"
            status = ClusterHealthRecord("UNKNOWN", reason, tuple(sorted(snapshot.members)))
            if status != snapshot.status:
                log.error("the cluster cannot begin: %s", error)
                await self._write([Put(self._keys.status, status.to_json())], token)
            await asyncio.sleep(CHECKPOINT_PAUSE_S)
            raise StoreUnavailable(reason) from error

    def _tell(self, decision: Decision, before: ResizePlan | None) -> None:
        plan = decision.plan
        if plan is not None and (before is None or before.state != plan.state):
            log.info("%s %s: %s", plan.kind, plan.state.replace("_", " "), plan.reason)
        for event in decision.events:
            level = logging.ERROR if event.kind in ("lost", "unavailable") else logging.INFO
            log.log(
                level,
                "routing %d: %s",
                event.routing_version,
                event.reason,
                extra=fields(kind=event.kind, node=event.node, slots=event.slot_count),
            )
        if decision.routing is None and plan is None:
            log.info(
                "cluster status %s: %s", decision.health.cluster_status, decision.health.reason
            )

    def _decide_and_pack(self, records: ClusterRecords) -> tuple[Decision, str]:
        """Decide; returns the new routing as it is stored, too, or an empty string."""
        decision = self._decide(records)
        return decision, pack(decision.routing.to_json()) if decision.routing else ""

    def _event_writes(self, events: Sequence[Event], first: int) -> list[Operation]:
        operations: list[Operation] = []
        for number, event in enumerate(events, start=first):
            key = self._keys.event(event.routing_version, number)
            operations.append(Put(key, event.to_json()))
            if key not in self._events:
                self._events.append(key)
        written = {operation.key for operation in operations}
        while len(self._events) > EVENTS_MAX and self._events[0] not in written:
            operations.append(Delete(self._events.popleft()))
            if len(operations) > 2 * EVENTS_PER_WRITE:
                break
        return operations

    def _repair_writes(
        self, snapshot: ClusterSnapshot, before: RoutingTable | None, decision: Decision
    ) -> list[Operation]:
        """Return what brings the record of the repair up to date; the oldest ones go."""
        after = decision.routing
        if before is None or after is None:
            return []
        known = snapshot.repairs[max(snapshot.repairs)] if snapshot.repairs else None
        # Sizes that were asked for an earlier repair say nothing of one that begins.
        name = known.repair_id if known is not None and known.state == "copying" else 0
        repair = follow_repair(
            known,
            before,
            after,
            decision.events,
            time=now_s(),
            controller=self._own.node_id,
            bytes_of_slot=self._sizes.of_repair(name),
            bytes_total=self._sizes.missing_bytes(name),
        )
        if repair is None or repair == known:
            return []
        if repair.state == "copying":
            self._sizes.look_for_repair(repair.repair_id, after)
        operations: list[Operation] = [Put(self._keys.repair(repair.repair_id), repair.to_json())]
        kept = sorted({*snapshot.repairs, repair.repair_id})
        operations += [Delete(self._keys.repair(one)) for one in kept[:-REPAIRS_MAX]]
        return operations

    def _forget_deaths(
        self, snapshot: ClusterSnapshot, routing: RoutingTable | None
    ) -> list[Operation]:
        """Return what removes the oldest death records that the routing no longer needs."""
        if len(snapshot.deaths) <= DEATHS_MAX or routing is None:
            return []
        needed = {node.instance for node in routing.nodes}
        oldest = sorted(snapshot.deaths.values(), key=lambda death: death.time)
        surplus = len(snapshot.deaths) - DEATHS_MAX
        return [
            Delete(self._keys.death(death.instance))
            for death in oldest[: min(surplus, EVENTS_PER_WRITE)]
            if death.instance not in needed
        ]

    async def _write(self, operations: Sequence[Operation], token: FencingToken) -> None:
        result = await self._store.transaction(
            Txn((token.still_mine(),), tuple(operations), (Get(self._keys.controller),))
        )
        if not result.succeeded:
            raise _Deposed

    async def _keep_view(self, token: FencingToken) -> None:
        """Bring the readable view up to date after each change of the routing table."""
        view = ShardView(self._store, self._keys, lambda some: self._write(some, token))
        await self._repeat(view.read)
        while True:
            await self._show.wait()
            self._show.clear()
            if self._routing_to_show is None:
                continue
            try:
                # A newer table waits as soon as the event is set again.
                await view.show(self._routing_to_show, self._show.is_set)
            except StoreUnavailable:
                await asyncio.sleep(RETRY_PAUSE_S)
                self._show.set()
            except _Deposed:
                return

    async def _repeat(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
                return
            except StoreUnavailable as error:
                log.warning("the controller waits for the store: %s", error)
                await asyncio.sleep(RETRY_PAUSE_S)


def _processes(snapshot: ClusterSnapshot) -> dict[str, tuple[int, str]]:
    """Return instance and status by node; whether one is in sync changes with every copy."""
    return {name: (one.instance, one.status) for name, one in snapshot.members.items()}


def copies_under_way(snapshot: ClusterSnapshot) -> int:
    """Return how many copies catch up whose masters have not said yet that they have."""
    routing = snapshot.routing
    if routing is None:
        return 0
    copying = np.array([len(held.catching_up) for held in routing.sets])
    # Only reports about this table count.
    said = [one for one in snapshot.reports.values() if one.routing_version == routing.version]
    return int(copying[routing.set_of_slot].sum()) - sum(len(one.caught_up) for one in said)


def is_urgent(before: ClusterSnapshot, now: ClusterSnapshot) -> bool:
    """Whether a process came, went or changed its status, or a master waits for a silent backup."""
    return (
        _processes(before) != _processes(now)
        or before.deaths.keys() != now.deaths.keys()
        or any(
            report.silent and report != before.reports.get(instance)
            for instance, report in now.reports.items()
        )
    )


async def read_events(store: CoordinationStore, keys: Keys) -> list[Event]:
    """Return the events that are kept, oldest first.

    Raises:
        StoreUnavailable: The store does not answer.
        InvalidRequest: A record is of another version.
    """
    found = await store.range(keys.events)
    items = sorted(found.items, key=lambda item: item.key)
    return [Event.from_json(item.value) for item in items]
