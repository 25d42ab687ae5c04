"""Copies and masters: how many, where, and in which steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from backstay.consensus.records import (
    ClusterConfig,
    MemberStatus,
    RoutingTable,
    SlotReplicas,
)
from backstay.pserver.controller import (
    ClusterRecords,
    StepSizes,
    decide,
)
from backstay.pserver.controller.balance import (
    EARLY_PART,
    HANDOVERS_MAX,
    balance_masters,
)
from backstay.pserver.controller.routing_builder import CATCHING_UP_MAX, RoutingBuilder
from tests.unit.controller_cluster import (
    SLOTS,
    after,
    catching_up,
    cluster,
    kinds,
    member,
    members,
    settled,
    table,
    true_reports,
    with_slots,
    without,
)


def test_more_copies_than_nodes_run_and_say_so() -> None:
    few = cluster(nodes=2, replicas=3)
    decision = decide(few)
    assert decision.routing is None
    assert {len(held.holders) for held in table(few).sets} == {2}
    assert decision.health.cluster_status == "UNHEALTHY"
    assert "2 nodes for 3 copies" in decision.health.reason
    assert "16 slots with fewer than 3 copies in sync" in decision.health.reason
    more = settled(replace(few, members=members(*map(member, range(3)))))
    assert decide(more).health.cluster_status == "OK"


def test_a_node_that_joins_gets_copies_and_masters() -> None:
    before = cluster(slots=64)
    joined = replace(before, members=members(*map(member, range(4))))
    first = after(joined)
    assert [node.node_id for node in table(first).nodes][-1] == "ps-3"
    assert ("node_joined", "ps-3") in kinds(joined)
    # A copy moves by being one more for a while: nowhere are there fewer than wanted in sync.
    records = joined
    for _ in range(100):
        records = true_reports(records)
        if decide(records).routing is None:
            break
        records = after(records)
        assert all(len(held.synced) >= 2 for held in table(records).sets)
        assert all(len(held.holders) <= 3 for held in table(records).sets)
    routing = table(records)
    assert set(routing.slots_per_node().values()) == {16}
    copies = np.bincount(
        [n for held in routing.replicas_of_slot for n in held.holders], minlength=4
    )
    assert copies.tolist() == [32, 32, 32, 32]


def test_a_process_takes_in_a_bounded_number_of_slots_at_a_time() -> None:
    before = cluster(nodes=2, slots=256)
    alone = after(without(before, 1))
    back = after(replace(alone, members=members(member(0), member(1, 999))))
    assert catching_up(back) == CATCHING_UP_MAX
    assert decide(back).routing is None
    assert catching_up(after(true_reports(back))) == CATCHING_UP_MAX
    assert catching_up(settled(back)) == 0


def test_masters_are_evened_out_by_chains_of_hand_overs() -> None:
    # ps-0 has no slot in common with ps-2: only through ps-1 can it give one away.
    held = [SlotReplicas(0, (1,))] * 5 + [SlotReplicas(1, (2,))] * 2 + [SlotReplicas(2, (1,))]
    before = cluster(nodes=3, slots=8)
    uneven = with_slots(before, held)
    # Copies lie unevenly as well here; look at masters alone.
    builder = RoutingBuilder(uneven, table(uneven))
    balance_masters(builder)
    assert sorted(builder.masters.tolist()) == [2, 3, 3]
    new, events = builder.finish()
    assert new is not None
    assert {event.kind for event in events} == {"handed_over"}
    for slot, old in enumerate(held):
        assert new.replicas_of_slot[slot].master in old.synced
        assert set(new.replicas_of_slot[slot].synced) == set(old.synced)
        changed = new.replicas_of_slot[slot] != old
        assert new.term_of_slot[slot] == 1 + changed


def test_few_slots_are_handed_over_at_a_time() -> None:
    before = cluster(nodes=2, slots=1024)
    uneven = with_slots(before, [SlotReplicas(0, (1,))] * 1024)
    step = table(after(uneven))
    assert step.slots_per_node() == {"ps-0": 1024 - HANDOVERS_MAX, "ps-1": HANDOVERS_MAX}
    assert table(settled(uneven)).slots_per_node() == {"ps-0": 512, "ps-1": 512}


def test_masters_are_shared_while_copies_come_but_only_many_at_a_time() -> None:
    least = 256 // EARLY_PART

    def with_copies(count: int) -> RoutingTable | None:
        held = [SlotReplicas(0, (1,))] * count + [SlotReplicas(0, (), (1,))] * (256 - count)
        return decide(with_slots(cluster(nodes=2, slots=256), held)).routing

    assert with_copies(least - 1) is None
    step = with_copies(least)
    assert step is not None
    assert step.slots_per_node() == {"ps-0": 256 - least, "ps-1": least}
    # No more than make them even, and none that is still to come.
    step = with_copies(250)
    assert step is not None
    assert step.slots_per_node() == {"ps-0": 128, "ps-1": 128}
    assert all(not held.catching_up for held in step.replicas_of_slot if held.master == 1)


def test_a_cluster_grows_by_copies_of_backups_before_masters_are_shared() -> None:
    records = replace(cluster(nodes=2, slots=256), members=members(*map(member, range(3))))
    interrupted = 0
    for _ in range(100):
        records = true_reports(records)
        before = table(records).master_of_slot
        if decide(records).routing is None:
            break
        records = after(records)
        interrupted += not np.array_equal(before, table(records).master_of_slot)
    assert sorted(table(records).slots_per_node().values()) == [85, 85, 86]
    # 170 copies came, 64 at a time; each decision that moves masters makes pushes wait.
    assert interrupted <= 3


def test_a_node_that_stops_hands_its_slots_over_and_gets_no_copies() -> None:
    before = cluster()
    stopping = replace(before, members={**before.members, "ps-1": member(1, status="stopping")})
    new = table(after(stopping))
    assert new.slots_per_node()["ps-1"] == 0
    assert new.generation == 0
    for slot, held in enumerate(table(before).replicas_of_slot):
        assert set(new.replicas_of_slot[slot].synced) == set(held.synced)
    rest = settled(stopping)
    assert table(rest).slots_per_node()["ps-1"] == 0
    # A slot that only the stopping node has stays there.
    single = cluster(nodes=2, replicas=1)
    stopping = replace(single, members={**single.members, "ps-1": member(1, status="stopping")})
    assert 1 in table(after(stopping)).master_of_slot


def test_copies_are_spread_over_hosts() -> None:
    one_host = members(*[member(number, host="a") for number in range(2)])
    config = ClusterConfig("demo", SLOTS, 2, 2, "0")
    before = after(ClusterRecords(config, one_host))
    joined = replace(before, members={**one_host, "ps-2": member(2, host="b")})
    routing = table(settled(joined))
    for held in routing.sets:
        assert len({routing.nodes[number].host for number in held.holders}) == 2


def test_a_copy_is_not_moved_to_who_has_one() -> None:
    # On one host, where no rule about hosts stands in the way of it.
    nodes = members(*[member(number, host="a") for number in range(3)])
    before = after(ClusterRecords(ClusterConfig("demo", 8, 2, 3, "0"), nodes))
    held = [SlotReplicas(0, (2,))] * 2 + [SlotReplicas(0, (1,))] * 6
    step = table(after(with_slots(before, held)))
    assert step.replicas_of_slot[:2] == tuple(held[:2])
    assert (2,) in [one.catching_up for one in step.replicas_of_slot[2:]]


def test_surplus_copies_are_dropped() -> None:
    before = cluster(nodes=3, replicas=3)
    fewer = replace(before, config=replace(before.config, replicas=2))
    routing = table(settled(fewer))
    assert routing.replicas == 2
    assert {len(held.holders) for held in routing.sets} == {2}


def test_copies_that_end_one_at_a_time_are_not_dropped_as_they_come() -> None:
    # Seed 60030503 of the simulator: ps-1 took in copies, dropped each as it came in sync, for
    # it held most with those that were still to come, and was given another one at once.
    before = cluster(nodes=5, replicas=2, slots=16)
    first, moving, fixed = SlotReplicas(1, (3,)), SlotReplicas(0, (2,), (1,)), SlotReplicas(0, (4,))
    other = SlotReplicas(2, (4,), (1,))
    held = [first, first, first, moving, SlotReplicas(0, (2,)), moving, fixed]
    held += [SlotReplicas(1, (2, 3, 4)), other, SlotReplicas(2, (4,)), other, first, fixed]
    held += [SlotReplicas(2, (3,), (1,)), SlotReplicas(0, (1,), (4,)), SlotReplicas(0, (1,), (3,))]
    records = with_slots(before, held)
    taken_in = 0
    while any(one.catching_up for one in table(records).replicas_of_slot):
        reports = sorted(true_reports(records).reports.items())
        master, report = reports[taken_in % len(reports)]
        one = replace(report, caught_up=report.caught_up[:1])
        records = after(replace(records, reports={master: one}))
        while decide(quiet := replace(records, reports={})).routing is not None:
            records = after(quiet)
        taken_in += 1
        assert taken_in < 32, "copies come and go without an end"
    copies = np.bincount([n for one in table(records).replicas_of_slot for n in one.holders])
    assert copies.max() - copies.min() <= 1


def test_a_copy_taken_in_does_not_become_master_in_the_same_decision() -> None:
    # One copy wanted, and one on its way to ps-1: first it is in sync, then it takes over.
    before = cluster(nodes=2, replicas=1, slots=4)
    moving = with_slots(before, [SlotReplicas(0, (), (1,)), *[SlotReplicas(0)] * 3])
    first = after(true_reports(moving))
    assert table(first).replicas_of_slot[0] == SlotReplicas(0, (1,))
    second = after(first)
    assert table(second).replicas_of_slot[0] == SlotReplicas(1)


def test_a_backup_goes_in_the_decision_that_takes_its_successor_in() -> None:
    before = cluster(nodes=3, replicas=2, slots=4)
    held = [SlotReplicas(0, (1,), (2,)), *[SlotReplicas(1, (0,))] * 2, SlotReplicas(0, (1,))]
    step = table(after(true_reports(with_slots(before, held))))
    # ps-1 is as full as ps-0, and ps-0 is the master.
    assert step.replicas_of_slot[0] == SlotReplicas(0, (2,))
    assert step.term_of_slot.tolist() == [2, 1, 1, 1]


def test_a_few_masters_keep_a_copy_too_many_while_others_are_copied() -> None:
    # ps-0 holds most, and is master of what there is a copy too many of.
    before = cluster(nodes=3, replicas=2, slots=16)
    many, one, other = SlotReplicas(0, (1, 2)), SlotReplicas(0, (1,)), SlotReplicas(0, (2,))

    def kept(count: int, *, copied: bool) -> int:
        moving = [SlotReplicas(0, (1,), (2,)) if copied else one] * 2
        held = [many] * count + moving + ([one, other] * 7)[: 14 - count]
        step = table(after(with_slots(before, held)))
        return sum(len(held.synced) > 2 for held in step.replicas_of_slot)

    assert kept(1, copied=True) == 1
    # Many are not kept, and none when nothing is copied any more.
    assert kept(StepSizes().spared_max + 1, copied=True) <= StepSizes().spared_max
    assert kept(1, copied=False) == 0


def test_a_slot_that_keeps_two_copies_too_many_for_now_has_none_to_give_up_on_its_way() -> None:
    before = cluster(nodes=3, replicas=1, slots=4)
    held = [SlotReplicas(0, (1, 2)), SlotReplicas(0, (), (1,)), SlotReplicas(0), SlotReplicas(0)]
    moving = with_slots(before, held)
    assert table(after(moving)).replicas_of_slot[0] == held[0]
    assert {len(one.holders) for one in table(settled(moving)).sets} == {1}


def test_a_copy_taken_in_does_not_follow_a_stopping_master_in_the_same_decision() -> None:
    before = with_slots(cluster(nodes=2, slots=2), [SlotReplicas(0, (), (1,))] * 2)
    stopping = {**before.members, "ps-0": member(0, status="stopping")}
    first = after(true_reports(replace(before, members=stopping)))
    assert table(first).sets == (SlotReplicas(0, (1,)),)
    assert table(after(first)).sets == (SlotReplicas(1, (0,)),)


@pytest.mark.parametrize("status", ["starting", "stopping"])
def test_only_a_node_that_serves_gets_copies(status: MemberStatus) -> None:
    alone = after(without(cluster(nodes=2), 1))
    more = {**alone.members, "ps-1": member(1, 999, status=status)}
    assert catching_up(after(replace(alone, members=more))) == 0


def test_masters_go_to_in_sync_backups_only() -> None:
    uneven = with_slots(cluster(nodes=2, slots=4), [SlotReplicas(0, (), (1,))] * 4)
    builder = RoutingBuilder(uneven, table(uneven))
    balance_masters(builder)
    assert builder.finish() == (None, ())


def test_nothing_is_evened_out_while_copies_are_missing() -> None:
    held = [SlotReplicas(0, (1,))] * 7 + [SlotReplicas(0, (), (1,))]
    waits = with_slots(cluster(nodes=2, slots=8), held)
    assert decide(waits).routing is None
    three = replace(waits, members=members(*map(member, range(3))))
    assert catching_up(after(three)) == 1


def test_slots_on_the_move_count_among_those_that_may_move_at_once() -> None:
    records = replace(settled(cluster(3)), members=members(*map(member, range(4))), moves_at_once=2)
    for _ in range(3):
        # No report says that a copy is there.
        records = after(records)
        assert catching_up(records) == 2
