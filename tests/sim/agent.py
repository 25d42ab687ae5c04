"""The control plane of one process, as a small model: lease, registration, routing, reports.

The candidate for controller that every process is stands in ``tests.sim.controller``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from backstay.consensus.records import NodeReport
from backstay.consensus.records.nodes import MemberRecord
from backstay.consensus.store import Delete, Get, Lease, Put, Txn, TxnResult, mod_revision_is
from backstay.consensus.store.state import StoreState
from backstay.pserver.membership.handover import is_dismissed
from backstay.pserver.membership.reporting import NativeReport
from tests.sim.controller import Candidate
from tests.sim.events import MS
from tests.sim.plans import plan_of

if TYPE_CHECKING:
    from tests.sim.pserver import Pserver

__all__ = ["Agent"]

RETRY = 60 * MS
# Taken off the lease, for clocks that run at different speeds.
LEASE_MARGIN_DIVISOR = 10


class Agent:
    """What a process tells the store, and learns from it."""

    def __init__(self, process: Pserver) -> None:
        self.process = process
        self.queue = process.queue
        self.store = process.cluster.store
        self.lease = 0
        self.candidate = Candidate(self)
        self._routing_version = 0
        self._reporting = False
        self._written: NodeReport | None = NodeReport(process.instance, 0)
        self._report_revision = 0
        self._report_again = False
        self._suspected: set[int] = set()
        self._looking = False
        self.store.watch(self._notice)
        self.queue.after(self.queue.random.randrange(20 * MS), self._register)

    def _later(self, delay: int, what: Callable[[], None]) -> None:
        self.queue.after(delay, partial(self.process.handle, what))

    # Lease and registration

    def _register(self) -> None:
        ttl_ms = self.process.cluster.options.ttl // MS
        self._request(lambda state: state.grant(ttl_ms), self._granted, self._register)

    def _request(
        self,
        ask: Callable[[StoreState], Lease | TxnResult | int | None],
        done: Callable[[Lease | TxnResult | int | None], None],
        again: Callable[[], None],
    ) -> None:
        def answered(answer: Lease | TxnResult | int | None, known: bool) -> None:
            if known:
                done(answer)
            else:
                self._later(RETRY, again)

        self.store.request(self.process, ask, answered)

    def _granted(self, answer: Lease | TxnResult | int | None) -> None:
        if isinstance(answer, Lease):
            self._put_member(answer.id)

    def _put_member(self, lease: int) -> None:
        process, key = self.process, f"pservers/{self.process.node_id}"

        def ask(state: StoreState) -> int:
            old = state.get(key)
            incarnation = MemberRecord.from_json(old.value).incarnation + 1 if old else 1
            record = MemberRecord(
                node_id=process.node_id,
                instance=process.instance,
                incarnation=incarnation,
                status="serving",
                start_time=0.0,
                sync=True,
                data_address=f"{process.node_id}:1",
                control_address=f"{process.node_id}:2",
                host=process.node_id,
                lease=lease,
                version="0",
            )
            state.transact(Txn((), (Put(key, record.to_json(), lease),)))
            return 1

        def done(answer: Lease | TxnResult | int | None) -> None:
            if answer is None:
                self._register()
                return
            self._catch_up(lease)

        self._request(ask, done, partial(self._put_member, lease))

    def _catch_up(self, lease: int) -> None:
        """Read the routing before the lease allows anything: its slots may be another's."""
        process, cluster = self.process, self.process.cluster

        def done(newest: Lease | TxnResult | int | None) -> None:
            if isinstance(newest, int) and newest > self._routing_version:
                self._go_by(newest)
            self.lease = lease
            self._written = NodeReport(process.instance, 0)
            self._report_revision = 0
            self.report_changed()
            self.candidate.lease_gained()
            self._keep_alive(lease)

        self._request(lambda _: len(cluster.routings), done, partial(self._catch_up, lease))

    def _keep_alive(self, lease: int) -> None:
        if lease != self.lease:
            return
        sent = self.process.clock.now()
        ttl = self.process.cluster.options.ttl

        def done(answer: Lease | TxnResult | int | None) -> None:
            if lease != self.lease:
                return
            if answer is None:
                self.queue.log(self.process.node_id, lambda: "has lost its lease")
                self.lease = 0
                self.candidate.lease_lost()
                self.process.native.set_lease(0)
                self._register()
                return
            self.process.native.set_lease(sent + ttl - ttl // LEASE_MARGIN_DIVISOR)
            self._later(ttl // 4, partial(self._keep_alive, lease))

        self._request(lambda state: state.keepalive(lease), done, partial(self._keep_alive, lease))

    # Watching

    def _notice(self) -> None:
        """Something has changed in the store; it is heard of some time later."""
        if self.process.is_alive and not self._looking:
            self._looking = True
            self._later(self.process.cluster.watch_delay(), self._look)

    def _look(self) -> None:
        cluster = self.process.cluster
        if not (self.store.is_up and cluster.network.is_open("store", self.process.place)):
            self._later(RETRY, self._look)
            return
        self._looking = False
        newest = len(cluster.routings)
        if newest > self._routing_version:
            # Mostly one by one; a mirror that lags behind sees only the newest.
            step = newest if self.queue.random.random() < 0.3 else self._routing_version + 1
            self._go_by(step)
            if step < newest:
                self._notice()
        self._leave_if_dismissed()
        if self.process.is_alive:
            self.candidate.look()

    def _leave_if_dismissed(self) -> None:
        """End if a plan that is done wants it, as the real node does."""
        process, routings = self.process, self.process.cluster.routings
        routing = routings[self._routing_version - 1] if self._routing_version else None
        plan = plan_of(process.cluster)
        if is_dismissed(plan, routing, process.node_id, process.instance):
            self.queue.counts["dismissed"] += 1
            self.queue.log(process.node_id, lambda: "ends: the plan is done")
            process.die()

    def _go_by(self, version: int) -> None:
        self._routing_version = version
        self.queue.log(self.process.node_id, lambda: f"goes by routing {version}")
        self.process.native.set_routing_json(
            self.process.clock.now(), self.process.cluster.routings[version - 1].to_json()
        )
        if self.process.cluster.checkpoints is not None:
            self.process.cluster.checkpoints.look(self.process, version)

    # Reports

    def report_changed(self) -> None:
        """Write the report, one write at a time; and look at those who refuse connections."""
        report, refused = NativeReport.from_json(
            self.process.instance, self.process.native.report_json()
        )
        for instance in refused:
            self._suspect(instance)
        self.process.cluster.check_silent(self.process, report.silent)
        if self._reporting:
            self._report_again = True
            return
        if not self.lease:
            return
        if not report.is_news_after(self._written):
            return
        self._reporting = True
        lease = self.lease

        # Only over what is known to be there, as the real one does: a write may come late.
        key = f"reports/{self.process.instance}"
        compare = mod_revision_is(key, self._report_revision)
        txn = Txn((compare,), (Put(key, report.to_json(), lease),), (Get(key),))

        def done(result: TxnResult | None, known: bool) -> None:
            self._reporting = False
            if result is not None and result.succeeded:
                self._written, self._report_revision = report, result.revision
            elif result is not None:
                held = result.results[0]
                self._report_revision = held.mod_revision if held else 0
                self._written, self._report_again = None, True
            elif not known:
                self._written = None
            if self._report_again or not known:
                self._report_again = False
                self._later(RETRY if not known else 0, self.report_changed)

        self.queue.log(self.process.node_id, lambda: f"reports {report.to_json()}")
        self.store.transact(self.process, txn, done)

    def _suspect(self, instance: int) -> None:
        """Look at a process that refuses connections; if it is gone, say so."""
        other = self.process.cluster.processes.get(instance)
        if other is None or instance in self._suspected:
            return
        reached = self.process.cluster.network.is_open(self.process.place, other.place)
        if other.is_alive or not reached:
            return
        self._suspected.add(instance)
        key = f"pservers/{other.node_id}"

        def ask(state: StoreState) -> int:
            item = state.get(key)
            if item is None or MemberRecord.from_json(item.value).instance != instance:
                return 1
            death = Put(f"deaths/{instance}", other.node_id)
            state.transact(Txn((mod_revision_is(key, item.mod_revision),), (Delete(key), death)))
            state.revoke(item.lease)
            return 1

        def done(_answer: int | None, known: bool) -> None:
            if not known:
                self._suspected.discard(instance)
                self._later(RETRY, partial(self._suspect, instance))

        self.store.request(self.process, ask, done)
