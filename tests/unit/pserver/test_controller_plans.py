"""Plans: who leaves, what moves, when a plan is done."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backstay.consensus.records import ClusterConfig, SlotReplicas
from backstay.consensus.records.plans import LeavingNode, ResizePlan
from backstay.pserver.controller import ClusterRecords, PlanWait, choose_leaving, decide
from tests.examples import examples
from tests.unit.controller_cluster import (
    after,
    catching_up,
    cluster,
    member,
    members,
    table,
    true_reports,
    with_slots,
    without,
)


def plan(kind: Any, nodes: int, *leaving: str, **changes: Any) -> ResizePlan:
    return ResizePlan("p", kind, nodes, tuple(LeavingNode(one, 0) for one in leaving), **changes)


def of(records: ClusterRecords) -> ResizePlan:
    assert records.plan is not None
    return records.plan


def grown(records: ClusterRecords, nodes: int) -> ClusterRecords:
    return replace(records, members=members(*map(member, range(nodes))))


def copies_by_node(records: ClusterRecords) -> dict[str, int]:
    routing = table(records)
    counts = {node.node_id: 0 for node in routing.nodes}
    for held in routing.replicas_of_slot:
        for number in held.holders:
            counts[routing.nodes[number].node_id] += 1
    return counts


class Steps:
    """What happens until a plan comes to an end."""

    def __init__(self, records: ClusterRecords) -> None:
        self.copies_begun = 0
        self.hand_overs = 0
        self.fewest_in_sync = 99
        for _ in range(400):
            decision = decide(records)
            before = records
            records = true_reports(after(records))
            for old, new in zip(
                table(before).replicas_of_slot, table(records).replicas_of_slot, strict=True
            ):
                # By instance: numbers may change when a node goes.
                was = {table(before).nodes[n].instance for n in old.holders}
                now = {table(records).nodes[n].instance for n in new.holders}
                self.copies_begun += len(now - was)
                self.fewest_in_sync = min(self.fewest_in_sync, len(new.synced))
            self.hand_overs += sum(
                event.slot_count for event in decision.events if event.kind == "handed_over"
            )
            if decision.routing is None and decision.plan is None:
                self.records = records
                return
        pytest.fail("a plan does not come to an end")


def fewest_moves(before: dict[str, int], stay: int, replicas: int, slots: int) -> int:
    """Copies that must move whatever one does, if the result is to be even."""
    total = slots * min(replicas, stay)
    held = sorted([*before.values(), *[0] * stay], reverse=True)[: max(stay, len(before))]
    goals = [total // stay + (at < total % stay) for at in range(stay)] + [0] * len(held)
    # What is missing somewhere is as much as is too much elsewhere, but for copies that are new.
    return sum(max(0, goals[at] - count) for at, count in enumerate(held))


def test_a_cluster_that_grows_moves_no_more_than_it_must() -> None:
    before = cluster(nodes=3, replicas=2, slots=256)
    asked = replace(grown(before, 5), plan=plan("resize", 5))
    steps = Steps(asked)
    assert of(steps.records).state == "done"
    assert of(steps.records).leaving == ()
    counts = copies_by_node(steps.records)
    assert max(counts.values()) - min(counts.values()) <= 1
    minimum = counts["ps-3"] + counts["ps-4"]
    assert steps.copies_begun == minimum
    assert of(steps.records).moves_total in (minimum, minimum - 1)
    assert steps.fewest_in_sync == 2
    masters = table(steps.records).slots_per_node().values()
    assert max(masters) - min(masters) <= 1


def test_nothing_moves_before_all_nodes_have_come() -> None:
    before = replace(cluster(nodes=3, slots=256), plan=plan("resize", 5))
    waiting = after(grown(before, 4))
    assert of(waiting).state == "waiting_for_nodes"
    assert of(waiting).reason == "waits for nodes: 4 of 5 nodes serve"
    assert copies_by_node(waiting)["ps-3"] == 0
    assert decide(waiting).plan is None
    # A node that is lost meanwhile is replaced all the same.
    assert catching_up(after(without(waiting, 0))) > 0
    moving = after(grown(waiting, 5))
    assert of(moving).state == "moving"
    assert catching_up(moving) > 0


def test_numbered_nodes_leave_from_the_highest_number_down() -> None:
    before = cluster(nodes=4, replicas=2, slots=256)
    steps = Steps(replace(before, plan=plan("resize", 2, numbered=True)))
    assert of(steps.records).state == "done"
    assert [one.node_id for one in of(steps.records).leaving] == ["ps-2", "ps-3"]
    counts = copies_by_node(steps.records)
    assert (counts["ps-2"], counts["ps-3"]) == (0, 0)
    assert steps.fewest_in_sync == 2


def test_a_numbered_node_that_is_to_stay_is_waited_for() -> None:
    before = replace(cluster(nodes=4, slots=256), plan=plan("resize", 2, numbered=True))
    waiting = after(without(before, 0))
    assert of(waiting).state == "waiting_for_nodes"
    assert of(waiting).reason == "waits for nodes: 1 of 2 nodes serve"
    assert of(waiting).leaving == ()


def test_a_plan_that_waited_long_enough_fails_and_the_cluster_goes_on() -> None:
    before = replace(cluster(nodes=3), plan=plan("resize", 5, wait_s=7))
    late = after(replace(after(grown(before, 4)), plan_overdue=True))
    assert of(late).state == "failed"
    assert of(late).reason == "4 of 5 nodes serve after 7 s; start more nodes and ask again"
    steps = Steps(late)
    assert of(steps.records).state == "failed"
    assert copies_by_node(steps.records)["ps-3"] == 8


def test_a_cluster_that_shrinks_empties_the_newest_node_and_keeps_all_copies() -> None:
    before = cluster(nodes=4, replicas=2, slots=256)
    steps = Steps(replace(before, plan=plan("resize", 3, stop=True)))
    done = of(steps.records)
    assert (done.state, done.leaving) == ("done", (LeavingNode("ps-3", 103),))
    counts = copies_by_node(steps.records)
    assert counts.pop("ps-3") == 0
    assert max(counts.values()) - min(counts.values()) <= 1
    assert steps.copies_begun == 128
    assert steps.fewest_in_sync == 2
    assert table(steps.records).slots_per_node()["ps-3"] == 0
    # It stays empty, and a node that comes under that name afterwards is welcome.
    assert decide(steps.records).routing is None
    again = {**steps.records.members, "ps-3": member(3, 999)}
    back = Steps(replace(steps.records, members=again))
    assert copies_by_node(back.records)["ps-3"] == 128


def test_nodes_that_keep_the_store_do_not_leave() -> None:
    before = cluster(nodes=4)
    keepers = {name: replace(one, keeps_store=True) for name, one in before.members.items()}
    keepers["ps-1"] = before.members["ps-1"]
    asked = replace(before, members=keepers, plan=plan("resize", 3))
    assert of(after(asked)).leaving == (LeavingNode("ps-1", 101),)
    refused = after(replace(asked, plan=plan("resize", 2)))
    assert of(refused).state == "failed"
    assert "only 1 of them may leave" in of(refused).reason


def test_a_node_leaves_whose_host_is_not_needed() -> None:
    nodes = [member(n, host="a") for n in range(3)] + [member(3, host="b")]
    before = after(ClusterRecords(ClusterConfig("demo", 16, 2, 4, "0"), members(*nodes)))
    # It holds least, and is the newest.
    held = [SlotReplicas(0, (1,))] * 8 + [SlotReplicas(1, (2,))] * 6 + [SlotReplicas(0, (3,))] * 2
    uneven = with_slots(before, held)
    assert choose_leaving(before.members, table(uneven), 2) == ["ps-0", "ps-2"]
    assert "ps-3" in choose_leaving(before.members, table(uneven), 3)


def test_an_emptier_node_leaves_first() -> None:
    held = [SlotReplicas(0, (1,))] * 10 + [SlotReplicas(2, (3,))] * 4 + [SlotReplicas(0, (3,))] * 2
    uneven = with_slots(cluster(nodes=4), held)
    assert choose_leaving(uneven.members, table(uneven), 1) == ["ps-2"]
    sizes = np.ones(16, dtype=np.uint64)
    assert choose_leaving(uneven.members, table(uneven), 1, bytes_of_slot=sizes) == ["ps-2"]
    assert choose_leaving(uneven.members, table(uneven), 1, before={"ps-1"}) == ["ps-1"]


def test_a_node_that_dies_meanwhile_lets_another_one_stay() -> None:
    before = cluster(nodes=4, slots=64)
    moving = after(replace(before, plan=plan("resize", 3, stop=True)))
    assert of(moving).leaving == (LeavingNode("ps-3", 103),)
    steps = Steps(without(moving, 1))
    assert of(steps.records).state == "done"
    assert of(steps.records).leaving == ()
    counts = copies_by_node(steps.records)
    assert set(counts) == {"ps-0", "ps-2", "ps-3"}
    assert max(counts.values()) - min(counts.values()) <= 1


def test_a_drained_node_stays_empty_also_as_another_process() -> None:
    before = cluster(nodes=4, slots=64)
    steps = Steps(replace(before, plan=plan("drain", 3, "ps-1")))
    assert of(steps.records).state == "done"
    assert copies_by_node(steps.records)["ps-1"] == 0
    anew = replace(steps.records, members={**steps.records.members, "ps-1": member(1, 999)})
    assert copies_by_node(Steps(anew).records)["ps-1"] == 0
    # Until another plan says otherwise.
    level = Steps(replace(anew, plan=plan("rebalance", 4)))
    assert of(level.records).state == "done"
    assert copies_by_node(level.records)["ps-1"] == 32


def test_a_drained_node_gets_no_copies_when_others_die() -> None:
    before = cluster(nodes=4, slots=64)
    drained = Steps(replace(before, plan=plan("drain", 3, "ps-1"))).records
    lost = Steps(without(drained, 2)).records
    assert copies_by_node(lost) == {"ps-0": 64, "ps-1": 0, "ps-3": 64}
    alone = Steps(without(lost, 3)).records
    assert copies_by_node(alone) == {"ps-0": 64, "ps-1": 0}
    assert "1 node for 2 copies" in decide(alone).health.reason


def test_a_drain_that_cannot_end_keeps_the_copies_and_says_why() -> None:
    before = cluster(nodes=3, slots=16)
    moving = after(replace(before, plan=plan("drain", 2, "ps-2")))
    stuck = Steps(without(moving, 1))
    assert of(stuck.records).state == "moving"
    assert "ps-2 cannot give 10 slots away" in of(stuck.records).reason
    assert copies_by_node(stuck.records) == {"ps-0": 16, "ps-2": 10}
    come = {**stuck.records.members, "ps-1": member(1, 999)}
    assert of(Steps(replace(stuck.records, members=come)).records).state == "done"


def test_the_only_copies_of_a_leaving_node_that_is_alone_are_promoted() -> None:
    # Both that stay are lost: better a master that is to leave than none.
    before = cluster(nodes=3, slots=16)
    moving = after(replace(before, plan=plan("drain", 2, "ps-2")))
    lost = after(without(moving, 0, 1))
    left = after(replace(lost, accepted=table(lost).version))
    shared = [held for held in table(moving).replicas_of_slot if 2 in held.synced]
    assert table(left).slots_per_node()["ps-2"] == 16
    assert table(left).generation == 1
    assert int((table(left).epoch_of_slot == 1).sum()) == len(shared)


def test_a_node_that_takes_the_place_of_another_gets_all_that_it_had() -> None:
    # Also more than may be on its way at a time: nothing is dealt to others meanwhile.
    before = cluster(nodes=4, replicas=2, slots=512)
    asked = replace(grown(before, 5), plan=plan("drain", 4, "ps-1"))
    steps = Steps(asked)
    assert of(steps.records).state == "done"
    assert steps.copies_begun == 256
    assert copies_by_node(steps.records) == {
        name: 0 if name == "ps-1" else 256 for name in copies_by_node(steps.records)
    }


def test_a_host_is_given_up_if_a_drain_wants_it() -> None:
    nodes = [member(0, host="a"), member(1, host="a"), member(2, host="b")]
    config = ClusterConfig("demo", 16, 2, 3, "0")
    before = after(ClusterRecords(config, members(*nodes)))
    steps = Steps(replace(before, plan=plan("drain", 2, "ps-2")))
    assert of(steps.records).state == "done"
    assert copies_by_node(steps.records) == {"ps-0": 16, "ps-1": 16, "ps-2": 0}


def test_a_drain_keeps_copies_on_distinct_hosts_where_it_can() -> None:
    nodes = [member(n, host="aabb"[n]) for n in range(4)]
    config = ClusterConfig("demo", 16, 2, 4, "0")
    before = after(ClusterRecords(config, members(*nodes)))
    steps = Steps(replace(before, plan=plan("drain", 3, "ps-3")))
    routing = table(steps.records)
    for held in routing.sets:
        assert len({routing.nodes[number].host for number in held.holders}) == 2
    assert steps.copies_begun == copies_by_node(before)["ps-3"]


def test_a_node_that_stops_hands_over_to_one_that_is_to_leave_if_there_is_no_other() -> None:
    held = [SlotReplicas(0, (1,))] * 8 + [SlotReplicas(0, (1, 2))] * 8
    before = replace(with_slots(cluster(nodes=3), held), plan=plan("drain", 2, "ps-1"))
    stopping = {**before.members, "ps-0": member(0, status="stopping")}
    new = table(after(replace(before, members=stopping)))
    assert new.slots_per_node() == {"ps-0": 0, "ps-1": 8, "ps-2": 8}


def test_a_plan_that_is_cancelled_gives_everything_back() -> None:
    before = cluster(nodes=4, slots=64)
    half = true_reports(after(replace(before, plan=plan("resize", 3, stop=True))))
    cancelled = replace(half, plan=replace(of(half), state="cancelled"))
    steps = Steps(cancelled)
    assert of(steps.records).state == "cancelled"
    assert set(copies_by_node(steps.records).values()) == {32}
    assert steps.fewest_in_sync == 2


def test_copies_on_their_way_to_who_is_to_leave_are_given_up() -> None:
    before = cluster(nodes=2, slots=16)
    growing = after(replace(grown(before, 3), plan=plan("resize", 3)))
    assert catching_up(growing) == 10
    turned = after(replace(growing, plan=plan("drain", 2, "ps-2")))
    assert catching_up(turned) == 0


def test_a_new_controller_goes_on_from_the_records_alone() -> None:
    records = replace(cluster(nodes=4, slots=64), plan=plan("resize", 3))
    for _ in range(3):
        records = true_reports(after(records))
        text = of(records).to_json()
        assert ResizePlan.from_json(text) == of(records)
        assert decide(replace(records, plan=ResizePlan.from_json(text))) == decide(records)


def test_bytes_are_evened_out_where_slots_can_be_chosen() -> None:
    before = cluster(nodes=3, replicas=2, slots=256)
    sizes = (np.arange(256, dtype=np.uint64) % 16 + 1) ** 3
    asked = replace(grown(before, 4), plan=plan("resize", 4), bytes_of_slot=sizes)
    steps = Steps(asked)
    total = 2 * int(sizes.sum())
    held: dict[str, int] = dict.fromkeys(copies_by_node(steps.records), 0)
    routing = table(steps.records)
    for slot, one in enumerate(routing.replicas_of_slot):
        for number in one.holders:
            held[routing.nodes[number].node_id] += int(sizes[slot])
    assert max(held.values()) < 1.05 * total / 4
    assert steps.copies_begun == 128
    smaller = Steps(replace(steps.records, plan=plan("resize", 3)))
    left: dict[str, int] = dict.fromkeys(held, 0)
    for slot, one in enumerate(table(smaller.records).replicas_of_slot):
        for number in one.holders:
            left[table(smaller.records).nodes[number].node_id] += int(sizes[slot])
    assert sorted(left.values())[0] == 0
    assert max(left.values()) < 1.05 * total / 3


@pytest.mark.parametrize("kind", ["resize", "drain"])
def test_no_more_slots_are_on_the_move_than_the_setting_allows(kind: str) -> None:
    before = cluster(nodes=4, replicas=2, slots=256)
    asked = replace(before, moves_at_once=5)
    if kind == "resize":
        asked = replace(grown(asked, 5), plan=plan("resize", 5))
    else:
        asked = replace(asked, plan=plan("drain", 3, "ps-3"))
    records, most = asked, 0
    for _ in range(400):
        records = true_reports(after(records))
        most = max(most, catching_up(records))
        if decide(records).routing is None:
            break
    assert most == 5
    held = copies_by_node(records)
    assert held.get("ps-3", 0) == 0 if kind == "drain" else min(held.values()) >= 100


def test_a_wait_begins_with_the_plan_and_ends_after_its_time() -> None:
    wait = PlanWait(1000.0)
    waiting = plan("resize", 5, state="waiting_for_nodes", wait_s=10)
    assert wait.next_end(0) is None
    assert not wait.note(500, waiting)
    assert wait.next_end(600) == 9900
    assert not wait.note(10_499, waiting)
    assert wait.note(10_500, waiting)
    assert not wait.note(10_500, replace(waiting, plan_id="q"))
    assert not wait.note(99_000, replace(waiting, plan_id="q", state="moving"))
    assert wait.next_end(99_000) is None


@given(
    st.integers(1, 7),
    st.integers(1, 7),
    st.integers(1, 3),
    st.integers(3, 6).map(lambda exponent: 2**exponent),
    st.integers(1, 7),
)
@settings(max_examples=examples(150))
def test_a_resize_moves_little_and_is_even_in_the_end(
    old: int, new: int, replicas: int, slots: int, hosts: int
) -> None:
    def some(count: int) -> list[Any]:
        return [member(n, host=f"h{n % hosts}") for n in range(count)]

    config = ClusterConfig("demo", slots, replicas, old, "0")
    before = after(ClusterRecords(config, members(*some(old))))
    new = max(new, min(replicas, old))
    asked = replace(before, members=members(*some(max(old, new))), plan=plan("resize", new))
    steps = Steps(asked)
    assert of(steps.records).state == "done"
    staying = {name: n for name, n in copies_by_node(steps.records).items() if n}
    assert len(staying) == new
    assert steps.fewest_in_sync >= min(replicas, old, new)
    if hosts >= max(old, new):
        assert max(staying.values()) - min(staying.values()) <= 1
        minimum = fewest_moves(copies_by_node(before), new, replicas, slots)
        if old > new:
            leaving = {one.node_id for one in of(steps.records).leaving}
            minimum = max(minimum, sum(copies_by_node(before)[name] for name in leaving))
        assert steps.copies_begun <= 1.1 * minimum + 1


def test_a_node_that_leaves_gives_its_masters_away_first_and_all_at_once() -> None:
    before = cluster(nodes=3, replicas=2, slots=256)
    records = replace(before, plan=plan("drain", 3, "ps-2"))
    begun = after(records)
    masters = table(begun).slots_per_node()
    assert masters.pop("ps-2") == 0
    assert max(masters.values()) - min(masters.values()) <= 2
    assert catching_up(begun) == 0
    # From there on a copy that goes is a backup's, and no push has to look for another master;
    # at the end there may be one step that evens masters out.
    interrupted = 0
    while decide(true_reports(begun)).routing is not None:
        was = table(begun).master_of_slot
        begun = after(true_reports(begun))
        interrupted += not np.array_equal(table(begun).master_of_slot, was)
    assert interrupted <= 1
    assert of(after(begun)).state == "done"
    assert copies_by_node(begun) == {"ps-0": 256, "ps-1": 256, "ps-2": 0}
