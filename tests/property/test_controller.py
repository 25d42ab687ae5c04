"""The controller over random histories: nodes come, go, pause and restart; reports may be old.

A model beside the controller knows what each process really holds: the number of acknowledged
pushes of each slot, and how many of them each process has. The controller never sees it. Slots
are restored from checkpoints at any moment: then it knows, too, what each process has loaded.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backstay.consensus.records import (
    NO_MASTER,
    CaughtUp,
    ClusterConfig,
    MemberRecord,
    NodeReport,
    RoutingTable,
)
from backstay.consensus.records.checkpoints import CheckpointRecord, RestorePlan
from backstay.consensus.records.plans import LeavingNode, ResizePlan
from backstay.pserver.controller import ClusterRecords, StepSizes, decide
from tests.examples import examples

NODES = 5
# What is for many slots only, in clusters of few.
FEW_SLOTS = StepSizes(early_handovers_min=1, spared_max=2)


def instances(routing: RoutingTable, numbers: tuple[int, ...]) -> set[int]:
    return {routing.nodes[number].instance for number in numbers}


def master(routing: RoutingTable, slot: int) -> int | None:
    number = routing.replicas_of_slot[slot].master
    return None if number == NO_MASTER else routing.nodes[number].instance


class World:
    """Processes, the records they write, and what they really hold."""

    def __init__(self, slots: int, replicas: int, initial: int, hosts: int) -> None:
        self.config = ClusterConfig("demo", slots, replicas, initial, "0")
        self.hosts = hosts
        self.members: dict[str, MemberRecord] = {}
        self.paused: dict[str, MemberRecord] = {}
        self.routing: RoutingTable | None = None
        self.reports: dict[int, NodeReport] = {}
        self.gone: set[int] = set()
        self.waiting: set[int] = set()
        self.next_instance = 1
        self.acknowledged = [0] * slots
        self.has: dict[tuple[int, int], int] = {}
        self.streaming: set[tuple[int, int]] = set()
        self.plan: ResizePlan | None = None
        self.overdue = False
        self.restore: RestorePlan | None = None
        self.on_loss: CheckpointRecord | None = None
        self.lost_only = False
        self.has_tables = True
        self.accepted = 0
        # What processes have loaded: by instance, slot and epoch, the checkpoint that it is from.
        self.loaded: dict[tuple[int, int, int], str] = {}
        self.checkpoints = 0
        for number in range(initial):
            self.start(number)

    def start(self, number: int) -> None:
        """Start a process, or a new one in place of one that runs or is paused."""
        name = f"ps-{number}"
        self.paused.pop(name, None)
        self.members[name] = MemberRecord(
            node_id=name,
            instance=self.next_instance,
            incarnation=1,
            status="serving",
            start_time=0.0,
            sync=False,
            data_address=f"h:{self.next_instance}",
            control_address=f"h:{number}",
            host=f"host-{number % self.hosts}",
            lease=1,
            version="0",
        )
        self.next_instance += 1

    def kill(self, number: int, *, sure: bool) -> None:
        name = f"ps-{number}"
        member = self.members.pop(name, None) or self.paused.pop(name, None)
        if member and sure:
            self.gone.add(member.instance)

    def pause(self, number: int, *, wait: bool) -> None:
        """Take a process's lease away; it keeps its memory."""
        member = self.members.pop(f"ps-{number}", None)
        if member:
            self.paused[member.node_id] = member
            if wait:
                self.waiting.add(member.instance)

    def resume(self, number: int) -> None:
        member = self.paused.pop(f"ps-{number}", None)
        if member:
            self.members[member.node_id] = member
            self.waiting.discard(member.instance)

    def give_up_waiting(self) -> None:
        self.waiting.clear()

    def plan_for(self, kind: str, number: int) -> None:
        """Ask for something, as an operator does; a plan under way is in the way."""
        if self.plan is not None and self.plan.is_under_way:
            return
        self.overdue = False
        if kind in ("resize", "resize by number"):
            nodes, numbered = max(self.config.replicas, number), kind != "resize"
            wanted = ResizePlan("p", "resize", nodes, stop=not numbered, numbered=numbered)
            self.plan = replace(wanted, state="waiting_for_nodes")
        else:
            leaving = (LeavingNode(f"ps-{number}", 0),)
            self.plan = ResizePlan("p", "drain", max(1, len(self.members) - 1), leaving)

    def cancel(self) -> None:
        if self.plan is not None and self.plan.is_under_way:
            self.plan = replace(self.plan, state="cancelled", leaving=())

    def leaving(self) -> set[int]:
        """The living processes that are to hold nothing."""
        return {
            one.instance
            for one in self.members.values()
            if self.plan is not None and self.plan.lets_go(one.node_id, one.instance)
        }

    def push(self) -> None:
        """Acknowledge one push of each slot whose master and in-sync set can."""
        if self.routing is None:
            return
        waiting = set(self.routing.restoring.slots)
        for slot, held in enumerate(self.routing.replicas_of_slot):
            if held.master != NO_MASTER and slot not in waiting:
                self.acknowledged[slot] += 1
                for one in sorted(instances(self.routing, held.synced)):
                    self.has[slot, one] = self.acknowledged[slot]
                for one in sorted(instances(self.routing, held.catching_up)):
                    if (slot, one) in self.streaming:
                        self.has[slot, one] = self.acknowledged[slot]

    def report(self, number: int, silent: frozenset[int]) -> None:
        """Let a master copy its slots to backups and say so, by the table that is there.

        From then on such a backup gets every push, as from a master that keeps its word.
        """
        member = self.members.get(f"ps-{number}")
        if member is None or self.routing is None:
            return
        reporter = member.instance
        alive = {one.instance for one in self.members.values()}
        caught_up = []
        waiting = set(self.routing.restoring.slots)
        for slot, held in enumerate(self.routing.replicas_of_slot):
            if master(self.routing, slot) != reporter:
                continue
            if slot in waiting:
                # A copy of what the slot was before; its master may not have forgotten it yet.
                caught_up += [
                    CaughtUp(slot, int(self.routing.term_of_slot[slot]), one)
                    for one in sorted(instances(self.routing, held.catching_up) & alive - silent)
                ]
            else:
                for one in sorted(instances(self.routing, held.catching_up) & alive - silent):
                    self.has[slot, one] = self.acknowledged[slot]
                    self.streaming.add((slot, one))
                    caught_up.append(CaughtUp(slot, int(self.routing.term_of_slot[slot]), one))
        self.reports[reporter] = NodeReport(
            reporter,
            self.routing.version,
            tuple(sorted(silent - {reporter})),
            caught_up=tuple(caught_up),
            # Told for ever: also of slots that have begun anew, or are others', since.
            loaded=tuple(
                sorted((slot, epoch) for own, slot, epoch in self.loaded if own == reporter)
            ),
        )

    def ask_for_restore(self, some: bool) -> None:
        """Let slots take their content from a checkpoint, in place of whatever is under way."""
        self.checkpoints += 1
        count = self.config.slot_count
        slots = tuple(range(0, count, 2)) if some else ()
        self.restore = RestorePlan("/ckpt", f"ckpt-{self.checkpoints:06d}-abcdef", slots)

    def accept_loss(self) -> None:
        """Accept what is lost by now, as an operator does who has seen the table."""
        if self.routing is not None and self.routing.lost:
            self.accepted = self.routing.version

    def load(self, number: int) -> None:
        """Let a process load every other slot that the table wants of it."""
        member = self.members.get(f"ps-{number}") or self.paused.get(f"ps-{number}")
        if member is None or self.routing is None:
            return
        own = [
            slot
            for slot in self.routing.restoring.slots
            if master(self.routing, slot) == member.instance
        ]
        for slot in own[::2]:
            key = member.instance, slot, int(self.routing.epoch_of_slot[slot])
            # Once loaded, a slot of this epoch is not loaded again.
            self.loaded.setdefault(key, self.routing.restoring.checkpoint)

    def records(self) -> ClusterRecords:
        return ClusterRecords(
            self.config,
            dict(self.members),
            self.routing,
            dict(self.reports),
            frozenset(self.gone),
            frozenset(self.waiting),
            plan=self.plan,
            plan_overdue=self.overdue,
            restore=self.restore,
            on_loss=self.on_loss,
            lost_only=self.lost_only,
            accepted=self.accepted,
            has_tables=self.has_tables,
        )

    def decide(self) -> bool:
        """Take one decision and check it; return whether something changed."""
        records = self.records()
        decision = decide(records, FEW_SLOTS)
        backwards = replace(records, members=dict(reversed(list(records.members.items()))))
        assert decide(backwards, FEW_SLOTS) == decision
        after = decision.routing
        if decision.plan is not None:
            assert decision.plan != self.plan
            assert ResizePlan.from_json(decision.plan.to_json()) == decision.plan
            self.plan = decision.plan
        if after is None:
            assert decision.restore is None or decision.restore.state == "done"
            self.restore = decision.restore or self.restore
            return decision.restore is not None or decision.plan is not None
        assert decision.events
        assert RoutingTable.from_json(after.to_json()) == after
        if self.routing is None:
            assert after.version == 1
        else:
            self.check(self.routing, after, decision.restore)
            self.check_restoring(self.routing, after)
            self.check_lost(self.routing, after)
        self.routing = after
        self.restore = decision.restore or self.restore
        if self.restore is not None and self.restore.state == "done":
            assert not after.restoring.slots or self.on_loss is not None
        self.follow(after)
        return True

    def check(self, before: RoutingTable, after: RoutingTable, restore: RestorePlan | None) -> None:
        assert after.version == before.version + 1
        new_epoch = after.epoch_of_slot != before.epoch_of_slot
        assert set(after.epoch_of_slot[new_epoch].tolist()) <= {after.version}
        assert after.generation == before.generation + bool(new_epoch.any())
        living = {one.instance for one in self.members.values()} - set(after.gone)
        dead = self.gone | set(after.gone)
        # Their node ids are others' now: the cluster does not wait for their memory.
        owner = {member.node_id: member.instance for member in self.members.values()}
        dead |= {n.instance for n in before.nodes if owner.get(n.node_id, n.instance) != n.instance}
        if restore is not None and restore.lost and restore.state == "loading":
            self.check_lost_some(before, living, dead)
        for slot in range(after.slot_count):
            old, new = before.replicas_of_slot[slot], after.replicas_of_slot[slot]
            old_synced = instances(before, old.synced)
            new_synced = instances(after, new.synced)
            unserved = slot in before.restoring.slots or self.restore is not None
            # All slots go back when some have lost their copies.
            unserved = unserved or (restore is not None and restore.lost > 0)
            if new_epoch[slot] and slot in after.restoring.slots and unserved:
                # On purpose, or no client was served what it had: no content counts.
                assert not new.in_sync
            elif new_epoch[slot]:
                assert not old_synced & living
                assert not (old_synced - dead) & self.waiting
            elif master(after, slot) is not None and slot not in before.lost:
                assert master(after, slot) in old_synced
            assert not instances(after, new.holders) & dead
            names = [after.nodes[number].node_id for number in new.holders]
            assert len(set(names)) == len(names)
            changed = (master(before, slot), instances(before, old.in_sync)) != (
                master(after, slot),
                instances(after, new.in_sync),
            )
            assert after.term_of_slot[slot] == before.term_of_slot[slot] + changed
            if new_epoch[slot]:
                self.acknowledged[slot] = 0
                for key in [key for key in self.has if key[0] == slot]:
                    del self.has[key]
            # I1: a node that may become master has everything that was acknowledged.
            for one in new_synced:
                assert self.has.get((slot, one), 0) == self.acknowledged[slot]

    def check_lost_some(self, before: RoutingTable, living: set[int], dead: set[int]) -> None:
        """Nothing goes back by itself but when slots are lost that no node may come back with."""
        held = [instances(before, held.synced) for held in before.replicas_of_slot]
        assert any(not one & living and not (one - dead) & self.waiting for one in held)

    def check_restoring(self, before: RoutingTable, after: RoutingTable) -> None:
        """A node that serves a restored slot has loaded it, from the checkpoint that was wanted."""
        source = before.restoring[:2]
        for slot in range(after.slot_count):
            epoch = int(after.epoch_of_slot[slot])
            new_epoch = epoch != int(before.epoch_of_slot[slot])
            if slot in after.restoring.slots:
                assert not after.replicas_of_slot[slot].in_sync
                # One checkpoint for one epoch: what came from another one is told from it.
                assert new_epoch or (slot in before.restoring.slots)
                assert new_epoch or after.restoring[:2] == source
            elif slot in before.restoring.slots and not new_epoch:
                loader = master(before, slot)
                assert loader is not None
                assert loader == master(after, slot)
                assert self.loaded[loader, slot, epoch] == before.restoring.checkpoint
                # What it loaded counts like a push that no other node has.
                self.acknowledged[slot] = self.has[slot, loader] = 1
                assert not after.replicas_of_slot[slot].in_sync

    def check_lost(self, before: RoutingTable, after: RoutingTable) -> None:
        """What is lost has no node until an operator says what is to become of it."""
        for slot in range(after.slot_count):
            new_epoch = after.epoch_of_slot[slot] != before.epoch_of_slot[slot]
            served = master(after, slot) is not None and slot not in after.restoring.slots
            if new_epoch and served:
                # Nothing begins anew by itself, but where there can have been nothing.
                assert not self.has_tables
            elif slot in before.lost and served:
                assert not new_epoch
                assert not self.has_tables or int(before.epoch_of_slot[slot]) <= self.accepted
            if slot in after.lost:
                assert not after.replicas_of_slot[slot].holders
        if self.on_loss is not None and set(after.lost) - set(before.lost):
            # Only while no node could take them, or something else had been asked for.
            serving = [one for one in self.members.values() if one.instance not in after.gone]
            assert not serving or self.restore is not None

    def follow(self, after: RoutingTable) -> None:
        """Let each process drop what the table does not give it."""
        for slot, held in enumerate(after.replicas_of_slot):
            holders = instances(after, held.holders)
            catching_up = instances(after, held.catching_up)
            for key in [key for key in self.has if key[0] == slot and key[1] not in holders]:
                del self.has[key]
            self.streaming = {
                key for key in self.streaming if key[0] != slot or key[1] in catching_up
            }

    def settle(self) -> None:
        """Let every master report the truth until nothing changes any more."""
        for _ in range(60 + 6 * self.config.slot_count):
            for number in range(NODES):
                self.load(number)
                self.report(number, frozenset())
            if not self.decide():
                return
        pytest.fail("decisions do not come to an end")


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.integers(0, NODES - 1)),
        st.tuples(st.just("kill"), st.integers(0, NODES - 1)),
        st.tuples(st.just("kill surely"), st.integers(0, NODES - 1)),
        st.tuples(st.just("pause"), st.integers(0, NODES - 1)),
        st.tuples(st.just("pause, wait"), st.integers(0, NODES - 1)),
        st.tuples(st.just("resume"), st.integers(0, NODES - 1)),
        st.tuples(st.just("report"), st.integers(0, NODES - 1)),
        st.tuples(st.just("silent"), st.integers(0, NODES - 1)),
        st.tuples(st.just("decide"), st.just(0)),
        st.tuples(st.just("decide"), st.just(0)),
        st.tuples(st.just("push"), st.just(0)),
        st.tuples(st.just("resize"), st.integers(1, NODES)),
        st.tuples(st.just("resize by number"), st.integers(1, NODES)),
        st.tuples(st.just("drain"), st.integers(0, NODES - 1)),
        st.tuples(st.just("cancel"), st.just(0)),
        st.tuples(st.just("restore"), st.integers(0, 1)),
        st.tuples(st.just("load"), st.integers(0, NODES - 1)),
        st.tuples(st.just("on loss"), st.integers(0, 2)),
        st.tuples(st.just("accept"), st.just(0)),
        st.tuples(st.just("tables"), st.integers(0, 1)),
    ),
    max_size=30,
)


def play(world: World, steps: list[tuple[str, int]]) -> None:
    for what, number in steps:
        if what == "start":
            world.start(number)
        elif what.startswith("kill"):
            world.kill(number, sure=what == "kill surely")
        elif what.startswith("pause"):
            world.pause(number, wait=what == "pause, wait")
        elif what == "resume":
            world.resume(number)
        elif what == "report":
            world.report(number, frozenset())
        elif what == "silent":
            # Everybody says so; only those who are master somewhere count.
            member = world.members.get(f"ps-{number}")
            if member:
                for other in range(NODES):
                    world.report(other, frozenset({member.instance}))
        elif what == "push":
            world.push()
        elif what in ("resize", "resize by number", "drain"):
            world.plan_for(what, number)
        elif what == "cancel":
            world.cancel()
        elif what == "restore":
            world.ask_for_restore(bool(number))
        elif what == "load":
            world.load(number)
        elif what == "on loss":
            newest = CheckpointRecord("/ckpt", "ckpt-000999-abcdef", "")
            world.on_loss = newest if number else None
            world.lost_only = number == 2
        elif what == "accept":
            world.accept_loss()
        elif what == "tables":
            world.has_tables = bool(number)
        elif world.members:
            world.decide()


@given(
    STEPS,
    st.integers(0, 3).map(lambda exponent: 4 * 2**exponent),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, NODES),
)
@settings(max_examples=examples(600), suppress_health_check=[HealthCheck.too_slow])
def test_every_decision_is_safe_and_decisions_settle(
    steps: list[tuple[str, int]], slots: int, replicas: int, initial: int, hosts: int
) -> None:
    """I1, and the other rules of a routing change, whatever fails; then no decision is left."""
    world = World(slots, replicas, initial, hosts)
    world.decide()
    play(world, steps)
    if not world.members:
        world.start(0)
    world.has_tables = True
    # Without any report: it comes to rest as well.
    world.reports.clear()
    for _ in range(20 + slots):
        if not world.decide():
            break
    else:
        pytest.fail("decisions without reports do not come to an end")
    world.give_up_waiting()
    world.overdue = True
    world.settle()
    if world.routing is None:
        return
    if world.routing.lost:
        assert world.on_loss is None
        assert decide(world.records()).health.cluster_status == "UNHEALTHY"
        world.accept_loss()
        world.settle()
    check_settled(world, world.routing)


def check_settled(world: World, routing: RoutingTable) -> None:
    assert not routing.restoring.slots
    assert not routing.lost
    assert world.restore is None or world.restore.state == "done"
    living = sorted(
        {one.instance for one in world.members.values()} - world.gone - set(routing.gone)
    )
    assert sorted(node.instance for node in routing.nodes) == living
    if not living:
        return
    leaving = world.leaving() & set(living)
    staying = len(living) - len(leaving)
    if leaving and staying < world.config.replicas:
        # They keep what no other node can take.
        return
    if world.plan is not None:
        assert not world.plan.is_under_way, world.plan
    for held in routing.replicas_of_slot:
        assert not instances(routing, held.holders) & leaving
    keep = [n for n, node in enumerate(routing.nodes) if node.instance not in leaving]
    hosts = np.array([int(routing.nodes[n].host.removeprefix("host-")) for n in keep])
    host_of = dict(zip(keep, hosts.tolist(), strict=True))
    copies = np.zeros(len(routing.nodes), dtype=int)
    for held in routing.replicas_of_slot:
        assert held.master != NO_MASTER
        assert not held.catching_up
        assert len(held.synced) == min(world.config.replicas, staying)
        spread = len({host_of[number] for number in held.holders})
        assert spread == min(len(held.holders), len(set(hosts.tolist())))
        copies[list(held.holders)] += 1
    copies = copies[keep]
    if len(set(hosts.tolist())) == len(hosts):
        assert copies.max() - copies.min() <= 1
    masters = list(routing.slots_per_node().values())
    of_staying = [masters[number] for number in keep]
    if max(of_staying) - min(of_staying) > 1:
        assert not can_be_evened_out(routing, masters)


def can_be_evened_out(routing: RoutingTable, masters: list[int]) -> bool:
    """Whether a chain of hand-overs leads from a node to one with at least two fewer."""
    count = len(masters)
    reach = np.eye(count, dtype=bool)
    for held in routing.replicas_of_slot:
        reach[held.master, list(held.in_sync)] = True
    for through in range(count):
        reach |= reach[:, through : through + 1] & reach[through : through + 1, :]
    return any(
        reach[start, end] and masters[start] - masters[end] > 1
        for start in range(count)
        for end in range(count)
    )
