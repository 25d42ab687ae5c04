"""The real controller's decisions on whichever process leads, with the shell modelled.

Between reading the records and writing a decision there is time for everything to change; the
write holds only if the leadership and the records that were relied on are as they were read.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from backstay.consensus.records import ClusterConfig, NodeReport, RoutingTable
from backstay.consensus.records.checkpoints import CheckpointRecord, LossAcceptance, RestorePlan
from backstay.consensus.records.nodes import MemberRecord
from backstay.consensus.records.plans import ResizePlan
from backstay.consensus.store import (
    Compare,
    Operation,
    Put,
    Txn,
    TxnResult,
    absent,
    create_revision_is,
    mod_revision_is,
)
from backstay.consensus.store.state import StoreState
from backstay.pserver.controller import (
    Absences,
    ClusterRecords,
    Decision,
    PlanWait,
    StepSizes,
    decide,
    living,
)
from tests.sim.checkpoints import NEWEST, RESTORE
from tests.sim.events import MS, S
from tests.sim.losses import LOSS
from tests.sim.plans import PLAN

if TYPE_CHECKING:
    from tests.sim.agent import Agent

__all__ = ["Candidate"]


# What is for many slots only, in clusters of few.
FEW_SLOTS = StepSizes(early_handovers_min=1, spared_max=2)
LEADERSHIP = "controller"
ROUTING = "routing"
STATUS = "pserver_cluster_status"


class _Read:
    """The records at one revision, with the revisions of what a decision may rely on."""

    def __init__(self, state: StoreState) -> None:
        registered = state.range("pservers/").items
        members = [MemberRecord.from_json(one.value) for one in registered]
        reports = state.range("reports/").items
        routing = state.get(ROUTING)
        status = state.get(STATUS)
        leadership = state.get(LEADERSHIP)
        self.members = {member.node_id: member for member in members}
        self.reports = {
            report.instance: report
            for report in (NodeReport.from_json(one.value) for one in reports)
        }
        self.revisions = {one.key: one.mod_revision for one in (*registered, *reports)}
        self.deaths = frozenset(
            int(one.key.partition("/")[2]) for one in state.range("deaths/").items
        )
        self.routing = RoutingTable.from_json(routing.value) if routing else None
        self.routing_revision = routing.mod_revision if routing else 0
        plan = state.get(PLAN)
        self.plan = ResizePlan.from_json(plan.value) if plan else None
        self.plan_revision = plan.mod_revision if plan else 0
        self.status = status.value if status else ""
        self.leadership = leadership
        restore, newest = state.get(RESTORE), state.get(NEWEST)
        self.restore = RestorePlan.from_json(restore.value) if restore else None
        self.restore_revision = restore.mod_revision if restore else 0
        self.newest = CheckpointRecord.from_json(newest.value) if newest else None
        loss = state.get(LOSS)
        self.accepted = LossAcceptance.from_json(loss.value).version if loss else 0


class Candidate:
    """One process's candidacy and leadership."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._process = agent.process
        self._token = 0
        self._busy = False
        self._again = False
        self._absences = Absences(self._process.cluster.options.return_grace)
        self._plan_wait = PlanWait(S)

    def lease_gained(self) -> None:
        """Stand for election."""
        self.look()

    def lease_lost(self) -> None:
        """Lose the leadership, at the store at least."""
        self._token = 0

    def look(self) -> None:
        """Read the records and do what follows; one such step at a time."""
        if not self._agent.lease:
            return
        leadership = self._agent.store.state.get(LEADERSHIP)
        if leadership is not None and leadership.lease != self._agent.lease:
            return  # Another one rules; that it does no more will be heard of.
        if self._busy:
            self._again = True
            return
        self._busy = True
        self._agent.queue.after(
            self._process.cluster.think_delay(), partial(self._process.handle, self._read)
        )

    def _done(self) -> None:
        self._busy = False
        if self._again:
            self._again = False
            self.look()

    def _retry(self) -> None:
        self._busy = False
        self._agent.queue.after(60 * MS, partial(self._process.handle, self.look))

    def _read(self) -> None:
        # Only who is, or may become, the controller needs to read anything.
        self._agent.store.request(self._process, self._read_all, self._decide)

    def _read_all(self, state: StoreState) -> _Read | None:
        leadership = state.get(LEADERSHIP)
        mine = leadership is not None and leadership.lease == self._agent.lease
        return _Read(state) if mine or leadership is None else None

    def _decide(self, read: _Read | None, known: bool) -> None:
        if not known:
            self._retry()
            return
        if read is None:
            self._token = 0
            self._done()
            return
        if read.leadership is None:
            self._campaign()
            return
        if read.leadership.create_revision != self._token:
            # Its own campaign, whose answer got lost.
            self._elected(read.leadership.create_revision)
        self._act(read)

    def _elected(self, token: int) -> None:
        self._token = token
        self._absences.forget()
        self._process.queue.counts["elections"] += 1
        self._process.queue.log(self._process.node_id, lambda: "is the controller")

    def _campaign(self) -> None:
        lease = self._agent.lease
        put = Put(LEADERSHIP, self._process.node_id, lease)

        def elected(result: TxnResult | None, known: bool) -> None:
            if known and result is not None and result.succeeded:
                self._elected(result.revision)
                self._again = True
                self._done()
            elif known:
                self._done()
            else:
                self._retry()

        if not lease:
            self._done()
            return
        self._agent.store.transact(self._process, Txn((absent(LEADERSHIP),), (put,)), elected)

    def _act(self, read: _Read) -> None:
        decision = self._decision(read)
        if decision is None:
            self._done()
            return
        operations: list[Operation] = []
        conditions: list[Compare] = [create_revision_is(LEADERSHIP, self._token)]
        if decision.routing is not None:
            operations.append(Put(ROUTING, decision.routing.to_json()))
            conditions.append(mod_revision_is(ROUTING, read.routing_revision))
            for instance in decision.relies_on:
                key = f"reports/{instance}"
                conditions.append(mod_revision_is(key, read.revisions[key]))
            for node_id in decision.given_up:
                key = f"pservers/{node_id}"
                conditions.append(mod_revision_is(key, read.revisions.get(key, 0)))
        if decision.plan is not None:
            operations.append(Put(PLAN, decision.plan.to_json()))
            conditions.append(mod_revision_is(PLAN, read.plan_revision))
        if decision.restore is not None:
            operations.append(Put(RESTORE, decision.restore.to_json()))
            conditions.append(mod_revision_is(RESTORE, read.restore_revision))
        if decision.health.to_json() != read.status:
            operations.append(Put(STATUS, decision.health.to_json()))
        if operations:
            self._write(decision, Txn(tuple(conditions), tuple(operations)))
        else:
            self._done()

    def _decision(self, read: _Read) -> Decision | None:
        """Decide, and come back when somebody who is waited for is to be given up."""
        options = self._process.cluster.options
        now = self._process.clock.now()
        waiting = self._absences.note(now, read.routing, read.members, read.deaths)
        if waiting:
            self._agent.queue.after(options.return_grace, partial(self._process.handle, self.look))
        overdue = self._plan_wait.note(now, read.plan)
        if (left := self._plan_wait.next_end(now)) is not None and not overdue:
            self._agent.queue.after(int(left) + 1, partial(self._process.handle, self.look))
        members = living(read.members, read.deaths)
        if not members:
            return None
        config = ClusterConfig("sim", options.slots, options.replicas, options.nodes, "0")
        checkpoints = self._process.cluster.checkpoints
        restores_lost = checkpoints is not None and checkpoints.restores_lost
        return decide(
            ClusterRecords(
                config=config,
                members=members,
                routing=read.routing,
                reports=read.reports,
                gone=read.deaths,
                waiting=waiting,
                plan=read.plan,
                plan_overdue=overdue,
                restore=read.restore,
                on_loss=read.newest if restores_lost else None,
                lost_only=checkpoints is not None and checkpoints.lost_only,
                accepted=read.accepted,
            ),
            FEW_SLOTS,
        )

    def _write(self, decision: Decision, txn: Txn) -> None:
        cluster, routing = self._process.cluster, decision.routing

        def ask(state: StoreState) -> TxnResult:
            result = state.transact(txn)
            if result.succeeded and routing is not None:
                cluster.routing_written(routing, [event.reason for event in decision.events])
            return result

        def written(_result: TxnResult | None, known: bool) -> None:
            if known:
                self._again = True
                self._done()
            else:
                self._retry()

        self._agent.queue.after(
            cluster.think_delay(),
            partial(
                self._process.handle,
                lambda: self._agent.store.request(self._process, ask, written),
            ),
        )
