"""The controller's decisions, one situation at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from backstay.consensus.records import (
    GONE_MAX,
    NO_MASTER,
    CaughtUp,
    ClusterConfig,
    NodeReport,
    RoutingTable,
    SlotReplicas,
)
from backstay.consensus.records.checkpoints import CheckpointRecord
from backstay.errors import InvalidRequest
from backstay.pserver.controller import ClusterRecords, decide
from backstay.pserver.controller.failover import GIVEN_UP_MAX
from tests.unit.controller_cluster import (
    SLOTS,
    after,
    cluster,
    kinds,
    member,
    members,
    names,
    settled,
    table,
    with_slots,
    without,
)


def test_the_first_routing_waits_for_the_first_nodes() -> None:
    config = ClusterConfig("demo", SLOTS, 2, 3, "0")
    two = ClusterRecords(config, members(member(0), member(1), member(2, status="starting")))
    decision = decide(two)
    assert decision.routing is None
    assert decision.health.cluster_status == "UNKNOWN"
    assert "2 of 3 serve (ps-0, ps-1)" in decision.health.reason
    three = replace(two, members=members(*map(member, range(3))))
    decision = decide(three)
    assert decision.routing is not None
    assert decision.routing.version == 1
    assert decision.health.cluster_status == "OK"
    assert decision.health.nodes == ("ps-0", "ps-1", "ps-2")
    assert [event.kind for event in decision.events] == ["created"]
    assert decide(after(three)).routing is None


def test_a_lost_nodes_slots_go_to_their_in_sync_backups() -> None:
    before = cluster()
    lost = without(before, 1)
    decision = decide(lost)
    old, new = table(before), decision.routing
    assert new is not None
    for slot, held in enumerate(old.replicas_of_slot):
        now = names(new, [new.replicas_of_slot[slot].master])
        if names(old, [held.master]) == ["ps-1"]:
            assert now == names(old, held.in_sync)
        else:
            assert now == names(old, [held.master])
        concerned = "ps-1" in names(old, held.holders)
        assert new.term_of_slot[slot] == 1 + concerned
        assert len(new.replicas_of_slot[slot].holders) == 2
    assert [node.node_id for node in new.nodes] == ["ps-0", "ps-2"]
    assert new.generation == 0
    assert new.epoch_of_slot.tolist() == [1] * SLOTS
    assert new.gone == ()
    assert decision.health.cluster_status == "UNHEALTHY"
    assert "with fewer than 2 copies in sync" in decision.health.reason
    promoted = [event for event in decision.events if event.kind == "promoted"]
    assert {event.node for event in promoted} == {"ps-0", "ps-2"}
    assert all("ps-1: the lease is over" in event.reason for event in promoted)
    assert sum(event.slot_count for event in promoted) == old.slots_per_node()["ps-1"]


def test_the_loss_of_a_node_ends_with_all_copies_in_sync_again() -> None:
    rest = settled(without(cluster(nodes=4), 1))
    decision = decide(rest)
    assert decision.health.cluster_status == "OK"
    assert decision.health.reason == ""
    routing = table(rest)
    assert {len(held.synced) for held in routing.sets} == {2}
    per_node = routing.slots_per_node().values()
    assert max(per_node) - min(per_node) <= 1


def test_sure_evidence_is_passed_on() -> None:
    lost = replace(without(cluster(), 1), gone=frozenset({101, 7}))
    assert table(after(lost)).gone == (101,)
    # Its lease may still be there: evidence counts more.
    still = replace(cluster(), gone=frozenset({101}))
    decision = decide(still)
    assert decision.routing is not None
    assert [node.node_id for node in decision.routing.nodes] == ["ps-0", "ps-2"]
    assert "ps-1: taken for dead" in decision.health.reason
    assert decide(after(still)).routing is None


def test_a_restarted_node_is_another_process_and_the_old_one_is_replaced() -> None:
    before = cluster()
    back = replace(before, members={**before.members, "ps-1": member(1, 999)})
    new = table(after(back))
    # It may live on, cut off from the store: what was promised to it still counts.
    assert new.gone == ()
    assert 101 not in [node.instance for node in new.nodes]
    number = [node.instance for node in new.nodes].index(999)
    for held in new.sets:
        assert number not in held.synced
    assert any(number in held.catching_up for held in new.sets)


def test_an_old_member_record_does_not_replace_the_process_that_replaced_it() -> None:
    before = cluster()
    back = after(replace(before, members={**before.members, "ps-1": member(1, 999)}))
    # A reader that lags: it shows the process that is known to be dead.
    stale = replace(back, members=before.members)
    assert 999 not in table(after(stale)).gone


def test_the_list_of_the_dead_is_bounded() -> None:
    before = cluster()
    full = replace(before, routing=replace(table(before), gone=tuple(range(1000, 1000 + GONE_MAX))))
    back = after(replace(full, gone=frozenset({101})))
    assert len(table(back).gone) == GONE_MAX
    assert table(back).gone[-1] == 101


def silent(records: ClusterRecords, reporter: int, backup: int) -> ClusterRecords:
    report = NodeReport(reporter, table(records).version, silent=(backup,))
    return replace(records, reports={reporter: report})


def test_a_silent_backup_has_to_catch_up_in_the_slots_of_the_master_that_says_so() -> None:
    before = cluster()
    hung = silent(before, 100, 101)
    decision = decide(hung)
    new = decision.routing
    assert new is not None
    for slot, held in enumerate(table(before).replicas_of_slot):
        concerned = held == SlotReplicas(0, (1,))
        expected = SlotReplicas(0, (), (1,)) if concerned else held
        assert new.replicas_of_slot[slot] == expected
        assert new.term_of_slot[slot] == 1 + concerned
    assert ("backup_silent", "ps-1") in kinds(hung)
    # The same report again is of an older table.
    assert decide(after(hung)).routing is None


def test_a_silent_node_loses_its_place_among_those_that_catch_up() -> None:
    """Its master may have asked for it, and waits for it until a table says otherwise."""
    hung = after(silent(cluster(), 100, 101))
    places = [held == SlotReplicas(0, (), (1,)) for held in table(hung).replicas_of_slot]
    assert any(places)
    new = table(after(silent(hung, 100, 101)))
    for held, concerned in zip(new.replicas_of_slot, places, strict=True):
        assert not concerned or 1 not in held.catching_up


def test_a_silent_backup_without_a_lease_leaves_the_slot() -> None:
    before = cluster()
    new = table(after(without(silent(before, 100, 101), 1)))
    assert "ps-1" not in [node.node_id for node in new.nodes]


def test_a_backup_becomes_in_sync_on_its_masters_word_only() -> None:
    hung = after(silent(cluster(), 100, 101))
    routing = table(hung)
    slot = routing.replicas_of_slot.index(SlotReplicas(0, (), (1,)))
    good = CaughtUp(slot, 2, 101)

    def decided(reporter: int, version: int, entry: CaughtUp) -> RoutingTable | None:
        report = NodeReport(reporter, version, caught_up=(entry,))
        return decide(replace(hung, reports={reporter: report})).routing

    for refused in (
        decided(102, routing.version, good),
        decided(100, routing.version - 1, good),
        decided(100, routing.version + 1, good),
        decided(100, routing.version, good._replace(term=1)),
        decided(100, routing.version, good._replace(term=3)),
        decided(100, routing.version, good._replace(instance=102)),
        decided(100, routing.version, good._replace(instance=77)),
        decided(100, routing.version, good._replace(slot=SLOTS)),
    ):
        assert refused is None
    new = decided(100, routing.version, good)
    assert new is not None
    assert new.replicas_of_slot[slot] == SlotReplicas(0, (1,))
    assert new.term_of_slot[slot] == 3
    report = NodeReport(100, routing.version, caught_up=(good,))
    assert decide(replace(hung, reports={100: report})).relies_on == (100,)
    # Under another process's key it is no node's report.
    forged = replace(report, instance=102)
    assert decide(replace(hung, reports={100: forged})).routing is None


def test_a_backup_that_is_silent_and_caught_up_stays_out() -> None:
    hung = after(silent(cluster(), 100, 101))
    routing = table(hung)
    slot = routing.replicas_of_slot.index(SlotReplicas(0, (), (1,)))
    report = NodeReport(100, routing.version, silent=(101,), caught_up=(CaughtUp(slot, 2, 101),))
    new = table(after(replace(hung, reports={100: report})))
    assert 1 not in new.replicas_of_slot[slot].holders


def test_a_node_without_room_gets_no_copies_and_others_do() -> None:
    # Two nodes share everything; one comes back empty, and has no room for it.
    hung = after(silent(cluster(nodes=2, replicas=2), 100, 101))
    full = NodeReport(100, table(hung).version, full=(101,))
    spared = after(replace(hung, reports={100: full}))
    assert all(1 not in held.catching_up for held in table(spared).sets if held.master == 0)
    # Nothing goes back and forth while it says so, also by the table before.
    assert decide(spared).routing is None
    more = after(replace(spared, members={**spared.members, "ps-2": member(2)}))
    number = [node.node_id for node in table(more).nodes].index("ps-2")
    short = [held for held in table(more).sets if held.master == 0]
    assert all(held.holders == (0, number) for held in short)


def test_a_backup_that_caught_up_before_it_left_is_not_taken_for_one_that_did_after() -> None:
    # Its lease ended and it came back with its memory, at an unchanged term of the slot.
    hung = after(silent(cluster(nodes=2, replicas=2), 100, 101))
    slot = table(hung).replicas_of_slot.index(SlotReplicas(0, (), (1,)))
    term = int(table(hung).term_of_slot[slot])
    old = NodeReport(100, table(hung).version, caught_up=(CaughtUp(slot, term, 101),))
    left = after(without(replace(hung, reports={}), 1))
    again = after(replace(left, members=hung.members))
    assert table(again).term_of_slot[slot] == term
    assert table(again).replicas_of_slot[slot].catching_up == (1,)
    assert decide(replace(again, reports={100: old})).routing is None


def test_many_who_are_given_up_are_given_up_in_several_decisions() -> None:
    before = cluster(nodes=40, replicas=1, slots=64)
    left = without(before, *range(1, 40))
    given_up: set[str] = set()
    for _ in range(4):
        decision = decide(left)
        if decision.routing is None:
            break
        assert len(decision.given_up) <= GIVEN_UP_MAX
        given_up.update(decision.given_up)
        left = after(left)
    holders = {n for held in table(before).sets for n in held.synced if n != 0}
    assert given_up == {table(before).nodes[number].node_id for number in holders}
    assert len(given_up) > GIVEN_UP_MAX
    assert all(held.synced in ((0,), ()) for held in table(left).replicas_of_slot)


def test_slots_that_lost_all_copies_wait_for_a_decision_and_say_so_loudly() -> None:
    before = cluster()
    both = without(before, 1, 2)
    decision = decide(both)
    new = decision.routing
    assert new is not None
    lost = [
        slot
        for slot, held in enumerate(table(before).replicas_of_slot)
        if set(held.synced) == {1, 2}
    ]
    assert lost
    assert new.generation == 1
    assert np.flatnonzero(new.epoch_of_slot == 2).tolist() == lost
    assert list(new.lost) == lost
    assert np.flatnonzero(new.master_of_slot == NO_MASTER).tolist() == lost
    events = [event for event in decision.events if event.kind == "lost"]
    assert sum(event.slot_count for event in events) == len(lost)
    assert all(event.reason.startswith("DATA LOST") for event in events)
    assert f"{len(lost)} slots lost all copies and wait for a decision" in decision.health.reason
    # Whichever node comes, none takes them, and all else goes on.
    back = settled(replace(both, routing=new, members=members(member(0), member(1, 999))))
    assert list(table(back).lost) == lost
    assert decide(back).health.cluster_status == "UNHEALTHY"
    kept = [held for held in table(back).replicas_of_slot if held.master != NO_MASTER]
    assert len(kept) == SLOTS - len(lost)
    assert all(len(held.synced) == 2 for held in kept)
    # Two losses later it is the second generation.
    gone = after(replace(without(back, 0, 1), members=members(member(2, 888))))
    assert table(gone).generation == 2
    assert len(table(gone).lost) == SLOTS


def test_a_loss_that_is_accepted_lets_its_slots_begin_anew_and_no_later_one() -> None:
    lost = after(without(cluster(), 1, 2))
    first, version = table(lost).lost, table(lost).version
    assert decide(replace(lost, accepted=version - 1)).routing is None
    accepted = replace(lost, accepted=version)
    decision = decide(accepted)
    new = decision.routing
    assert new is not None
    assert new.lost == ()
    assert set(new.master_of_slot.tolist()) == {0}
    # They were lost once: what was served since the loss is not lost now.
    assert new.generation == 1
    assert np.array_equal(new.epoch_of_slot, table(lost).epoch_of_slot)
    (event,) = [event for event in decision.events if event.kind == "loss_accepted"]
    assert event.slot_count == len(first)
    whole = settled(replace(accepted, routing=new, members=members(member(0), member(1, 999))))
    assert decide(whole).health.cluster_status == "OK"
    again = after(replace(whole, members=members(member(2, 888))))
    assert len(table(again).lost) == SLOTS


def test_slots_of_a_cluster_without_tables_are_not_lost() -> None:
    fresh = replace(cluster(replicas=1), has_tables=False)
    decision = decide(without(fresh, 1))
    assert decision.routing is not None
    assert decision.routing.lost == ()
    assert NO_MASTER not in decision.routing.master_of_slot
    assert not [event for event in decision.events if event.kind == "lost"]


def test_a_backup_in_sync_is_promoted_and_nothing_is_lost_while_it_lives() -> None:
    newest = CheckpointRecord("/ckpt", "ckpt-000009-0a0b0c", "2026-01-01T00:00:00Z")
    decision = decide(replace(without(cluster(), 1), on_loss=newest))
    assert decision.routing is not None
    assert decision.routing.lost == ()
    assert decision.routing.restoring.slots == ()
    assert decision.restore is None


def test_a_slot_waits_for_a_process_that_may_come_back_with_its_memory() -> None:
    before = cluster()
    slot = next(
        at for at, held in enumerate(table(before).replicas_of_slot) if set(held.synced) == {1, 2}
    )
    cut_off = replace(without(before, 1, 2), waiting=frozenset({101, 102}))
    waits = after(cut_off)
    held = table(waits).replicas_of_slot[slot]
    assert held.master == NO_MASTER
    assert sorted(names(table(waits), held.in_sync)) == ["ps-1", "ps-2"]
    assert table(waits).term_of_slot[slot] == 2
    assert table(waits).generation == 0
    assert decide(waits).routing is None
    assert "without a master: waits for ps-1, ps-2" in decide(waits).health.reason
    # One of them comes back: it has all that was acknowledged.
    back = after(replace(waits, members=members(member(0), member(2)), waiting=frozenset({101})))
    again = table(back).replicas_of_slot[slot]
    assert names(table(back), [again.master]) == ["ps-2"]
    assert names(table(back), again.in_sync) == []
    assert table(back).epoch_of_slot[slot] == 1
    # No node does: given up.
    given_up = table(after(replace(waits, waiting=frozenset())))
    assert given_up.generation == 1
    assert given_up.epoch_of_slot[slot] == given_up.version
    # One is known to be dead: the other is still waited for.
    known = after(replace(waits, gone=frozenset({101})))
    assert names(table(known), table(known).replicas_of_slot[slot].in_sync) == ["ps-2"]


def test_nobody_to_begin_anew_on() -> None:
    before = cluster(nodes=2, replicas=1)
    nobody = replace(before, members=members(member(0, 900, status="starting")))
    waits = after(nobody)
    assert set(table(waits).master_of_slot.tolist()) == {NO_MASTER}
    # It is not told as a loss before it is settled what comes of it: both are one decision.
    assert table(waits).lost == ()
    assert table(waits).generation == 0
    assert decide(waits).routing is None
    assert "16 slots without a master: no node serves" in decide(waits).health.reason
    serves = after(replace(waits, members=members(member(0, 900))))
    assert len(table(serves).lost) == SLOTS
    assert table(serves).generation == 1
    assert decide(replace(serves, accepted=table(waits).version)).routing is None
    assert "wait for a decision" in decide(serves).health.reason
    accepted = after(replace(serves, accepted=table(serves).version))
    assert set(table(accepted).master_of_slot.tolist()) == {0}
    assert table(accepted).generation == 1
    # Nothing is lost where there was nothing; it takes a node that serves all the same.
    empty = after(replace(nobody, has_tables=False))
    assert table(empty).lost == ()
    assert table(empty).generation == 0
    assert "no node serves" in decide(empty).health.reason


def test_two_faults_in_a_row() -> None:
    one = without(cluster(nodes=4, replicas=3), 1)
    first = after(one)
    second = after(without(first, 2))
    routing = table(second)
    assert routing.generation == 0
    assert NO_MASTER not in routing.master_of_slot
    assert decide(settled(second)).health.cluster_status == "UNHEALTHY"
    for slot, held in enumerate(routing.replicas_of_slot):
        synced = names(table(first), table(first).replicas_of_slot[slot].synced)
        assert set(names(routing, held.synced)) <= set(synced) - {"ps-2"}


def test_a_backup_that_catches_up_never_becomes_master() -> None:
    before = with_slots(cluster(nodes=2, slots=2), [SlotReplicas(0, (), (1,))] * 2)
    new = table(after(without(before, 0)))
    assert new.generation == 1
    assert new.epoch_of_slot.tolist() == [2, 2]


def test_a_master_that_is_gone_asks_for_nothing() -> None:
    before = with_slots(cluster(nodes=3, slots=4), [SlotReplicas(0, (1,), (2,))] * 4)
    entry = CaughtUp(0, 1, 102)
    report = NodeReport(100, 1, silent=(101,), caught_up=(entry,))
    new = table(after(without(replace(before, reports={100: report}), 0)))
    assert new.generation == 0
    assert names(new, new.replicas_of_slot[0].synced) == ["ps-1"]


def test_a_master_of_this_decision_has_nothing_to_say_yet() -> None:
    before = with_slots(cluster(nodes=3, slots=4), [SlotReplicas(0, (1,), (2,))] * 4)
    report = NodeReport(101, 1, caught_up=(CaughtUp(0, 1, 102),))
    new = table(after(without(replace(before, reports={101: report}), 0)))
    assert names(new, new.replicas_of_slot[0].synced) == ["ps-1"]


def test_records_of_two_clusters_are_refused() -> None:
    records = cluster()
    other = replace(records, config=replace(records.config, slot_count=32))
    with pytest.raises(InvalidRequest, match="records of two clusters"):
        decide(other)
    with pytest.raises(InvalidRequest, match="pservers/ps-0 is the record of 'ps-1'"):
        decide(replace(records, members={"ps-0": member(1)}))
    with pytest.raises(InvalidRequest, match="no node is registered"):
        decide(replace(records, members={}))


def test_an_address_that_changes_is_published() -> None:
    before = cluster()
    moved = replace(before, members={**before.members, "ps-1": member(1, control_address="h9:9")})
    decision = decide(moved)
    assert decision.routing is not None
    assert decision.routing.nodes[1].control_address == "h9:9"
    assert decision.routing.term_of_slot.tolist() == [1] * SLOTS
