"""The controller's part in restoring slots from a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstay.consensus.records import NO_MASTER, ClusterConfig, NodeReport
from backstay.consensus.records.checkpoints import CheckpointRecord, RestorePlan, SaveRecord
from backstay.errors import InvalidRequest
from backstay.pserver.controller import ClusterRecords, decide
from tests.unit.controller_cluster import (
    SLOTS,
    after,
    catching_up,
    cluster,
    member,
    members,
    settled,
    table,
    true_reports,
    without,
)

PLAN = RestorePlan("/ckpt", "ckpt-000007-3fa9c1")
NEWEST = CheckpointRecord("/ckpt", "ckpt-000009-0a0b0c", "2026-01-01T00:00:00Z")


def written(records: ClusterRecords) -> ClusterRecords:
    """Return the records with everything written that was decided."""
    decision = decide(records)
    return replace(after(records), restore=decision.restore or records.restore)


def loaded(records: ClusterRecords, slots: tuple[int, ...]) -> ClusterRecords:
    """Let the masters of some slots say that they have loaded them."""
    routing = table(records)
    reports = {}
    for number, node in enumerate(routing.nodes):
        epochs = tuple(
            (slot, int(routing.epoch_of_slot[slot]))
            for slot in slots
            if routing.replicas_of_slot[slot].master == number
        )
        reports[node.instance] = NodeReport(node.instance, routing.version, loaded=epochs)
    return replace(records, reports=reports)


def test_a_restore_gives_every_slot_a_new_epoch_and_its_master_alone() -> None:
    before = cluster()
    asked = replace(before, restore=PLAN)
    decision = decide(asked)
    routing = decision.routing
    assert routing is not None
    assert routing.restoring == ("/ckpt", PLAN.checkpoint, tuple(range(SLOTS)))
    assert routing.epoch_of_slot.tolist() == [2] * SLOTS
    assert routing.generation == 1
    assert routing.master_of_slot.tolist() == table(before).master_of_slot.tolist()
    assert not any(held.in_sync for held in routing.sets)
    assert decision.restore == replace(PLAN, state="loading", version=2)
    assert "16 slots to be loaded from checkpoint ckpt-000007-3fa9c1" in decision.health.reason
    # No word of lost slots: they were given up on purpose.
    assert "lost" not in decision.health.reason


def test_nothing_is_in_sync_with_a_slot_that_is_not_loaded() -> None:
    records = written(replace(cluster(), restore=PLAN))
    for _ in range(5):
        records = written(true_reports(records))
    assert not any(held.in_sync for held in table(records).sets)
    assert catching_up(records) == SLOTS
    assert len(table(records).restoring.slots) == SLOTS


def test_a_copy_from_before_a_restore_does_not_count_with_the_load_that_ends_it() -> None:
    before = cluster(replicas=1)
    config = replace(before.config, replicas=2)
    before = after(replace(before, config=config))
    assert catching_up(before) == SLOTS
    # Each backup has caught up; before that is taken in, the slots begin anew, in the same term.
    copied = true_reports(before).reports
    records = written(replace(before, restore=PLAN))
    late = loaded(records, tuple(range(SLOTS))).reports
    assert any(report.caught_up for report in copied.values())
    reports = {
        instance: replace(report, caught_up=copied[instance].caught_up)
        for instance, report in late.items()
    }
    records = written(replace(records, reports=reports))
    assert table(records).restoring.slots == ()
    assert not any(held.in_sync for held in table(records).sets)


def test_slots_are_served_as_their_masters_load_them_and_then_copied() -> None:
    records = written(replace(cluster(), restore=PLAN))
    some = (1, 5, 6)
    records = written(loaded(records, some))
    assert set(table(records).restoring.slots) == set(range(SLOTS)) - set(some)
    assert records.restore is not None
    assert records.restore.state == "loading"
    records = written(loaded(records, tuple(range(SLOTS))))
    assert table(records).restoring.slots == ()
    assert records.restore == replace(PLAN, state="done", version=2, generation=1)
    records = settled(records)
    assert all(len(held.synced) == 2 for held in table(records).sets)
    assert decide(records).restore is None


def test_a_load_of_an_earlier_epoch_or_by_another_node_counts_for_nothing() -> None:
    records = written(replace(cluster(), restore=PLAN))
    routing = table(records)
    wrong = {
        node.instance: NodeReport(
            node.instance,
            routing.version,
            # Of the slots of others; and of its own, before they began anew.
            loaded=tuple(
                (slot, 1 if held.master == number else 2)
                for slot, held in enumerate(routing.replicas_of_slot)
            ),
        )
        for number, node in enumerate(routing.nodes)
    }
    assert len(table(written(replace(records, reports=wrong))).restoring.slots) == SLOTS


def test_a_master_that_dies_while_it_loads_hands_the_load_on() -> None:
    records = written(replace(cluster(), restore=PLAN))
    dead = table(records).nodes[0].instance
    gone = replace(without(records, 0), gone=frozenset({dead}))
    records = written(gone)
    routing = table(records)
    assert NO_MASTER not in routing.master_of_slot
    assert len(routing.restoring.slots) == SLOTS
    assert routing.restoring.checkpoint == PLAN.checkpoint
    assert {2, 3} == set(routing.epoch_of_slot.tolist())


def test_single_slots_can_be_restored_while_the_rest_goes_on() -> None:
    records = written(replace(cluster(), restore=replace(PLAN, slots=(3, 4))))
    routing = table(records)
    assert routing.restoring.slots == (3, 4)
    assert [slot for slot in range(SLOTS) if routing.epoch_of_slot[slot] == 2] == [3, 4]


@pytest.mark.parametrize("on_loss", [None, NEWEST])
def test_slots_without_a_copy_come_back_from_the_newest_checkpoint_if_asked(
    on_loss: CheckpointRecord | None,
) -> None:
    before = cluster(replicas=1)
    dead = table(before).nodes[1].instance
    lost = replace(without(before, 1), gone=frozenset({dead}), on_loss=on_loss)
    decision = decide(lost)
    assert decision.routing is not None
    slots = [slot for slot, held in enumerate(table(before).replicas_of_slot) if held.master == 1]
    assert decision.routing.generation == 1
    event = next(event for event in decision.events if event.kind == "lost")
    assert "5 slots lost all copies: ps-1: the process is gone" in event.reason
    if on_loss is None:
        assert decision.routing.restoring.slots == ()
        assert decision.routing.lost == tuple(slots)
        assert decision.restore is None
        return
    # All of them, so that everything is of one time; and the choice is written down.
    assert decision.routing.restoring == ("/ckpt", NEWEST.id, tuple(range(SLOTS)))
    assert decision.restore == RestorePlan(
        "/ckpt", NEWEST.id, (), "loading", 2, created=NEWEST.created, lost=5
    )
    assert (
        f"16 slots to be loaded from checkpoint {NEWEST.id} of {NEWEST.created}, because 5 slots "
        "lost all copies" in decision.health.reason
    )
    # It is made once: another checkpoint that comes meanwhile changes nothing.
    newer = replace(NEWEST, id="ckpt-000010-0a0b0c")
    going = replace(written(lost), on_loss=newer)
    assert decide(going).restore is None
    done = written(loaded(going, tuple(range(SLOTS))))
    assert done.restore == replace(decision.restore, state="done", generation=1)
    assert table(done).restoring.slots == ()


def test_only_the_slots_that_were_lost_come_back_if_that_is_asked_for() -> None:
    before = cluster(replicas=1)
    dead = table(before).nodes[1].instance
    lost = replace(without(before, 1), gone=frozenset({dead}), on_loss=NEWEST, lost_only=True)
    decision = decide(lost)
    assert decision.routing is not None
    slots = [slot for slot, held in enumerate(table(before).replicas_of_slot) if held.master == 1]
    assert decision.routing.restoring == ("/ckpt", NEWEST.id, tuple(slots))
    assert decision.restore is None
    (event, *_) = [event for event in decision.events if event.kind == "restoring"]
    assert f"come back as checkpoint {NEWEST.id} has them" in event.reason


def test_slots_that_wait_for_a_decision_come_back_when_restoring_is_chosen() -> None:
    waits = written(without(cluster(), 1, 2))
    assert table(waits).lost
    records = written(replace(waits, on_loss=NEWEST))
    assert table(records).lost == ()
    assert len(table(records).restoring.slots) == SLOTS
    by_hand = written(replace(waits, restore=PLAN))
    assert table(by_hand).lost == ()
    assert table(by_hand).restoring.checkpoint == PLAN.checkpoint
    some = table(waits).lost[:1]
    records = written(replace(waits, restore=replace(PLAN, slots=some)))
    assert table(records).lost == table(waits).lost[1:]
    assert table(records).restoring.slots == some


def test_another_checkpoint_gives_all_that_still_wait_a_new_epoch() -> None:
    before = cluster(replicas=1)
    dead = table(before).nodes[1].instance
    lost = replace(without(before, 1), gone=frozenset({dead}), on_loss=NEWEST, lost_only=True)
    records = written(lost)
    waiting = table(records).restoring.slots
    late = loaded(records, waiting).reports
    # Slot 0 is not one of them, and is to come from another checkpoint.
    assert 0 not in waiting
    records = written(replace(records, restore=replace(PLAN, slots=(0,))))
    routing = table(records)
    assert routing.restoring == ("/ckpt", PLAN.checkpoint, (0, *waiting))
    assert {int(routing.epoch_of_slot[slot]) for slot in (0, *waiting)} == {routing.version}
    # What was loaded from the other one does not count for this one.
    assert len(table(written(replace(records, reports=late))).restoring.slots) > len(waiting)


def test_a_copy_that_is_lost_before_a_restore_is_over_comes_once_more() -> None:
    records = written(replace(cluster(replicas=1), restore=PLAN))
    first = tuple(
        slot for slot, held in enumerate(table(records).replicas_of_slot) if held.master == 0
    )
    records = written(loaded(records, first))
    assert not set(first) & set(table(records).restoring.slots)
    dead = table(records).nodes[0].instance
    records = written(replace(without(records, 0), gone=frozenset({dead})))
    assert table(records).restoring.slots == tuple(range(SLOTS))
    # Once it is over, it is for the setting to say.
    records = written(loaded(records, tuple(range(SLOTS))))
    records = written(replace(records, members=dict(list(records.members.items())[1:])))
    assert table(records).restoring.slots == ()


def test_a_slot_that_is_not_loaded_does_not_wait_for_who_was_to_load_it() -> None:
    records = written(replace(cluster(), restore=PLAN))
    silent = table(records).nodes[0].instance
    records = written(replace(without(records, 0), waiting=frozenset({silent})))
    assert NO_MASTER not in table(records).master_of_slot
    assert len(table(records).restoring.slots) == SLOTS


def test_a_first_routing_can_come_from_a_checkpoint() -> None:
    config = ClusterConfig("demo", SLOTS, 2, 3, "0")
    fresh = ClusterRecords(config, members(*map(member, range(3))), restore=PLAN)
    records = written(fresh)
    routing = table(records)
    assert routing.version == 1
    assert len(routing.restoring.slots) == SLOTS
    assert not any(held.in_sync for held in routing.sets)
    assert records.restore is not None
    assert records.restore.state == "loading"
    records = settled(written(loaded(records, tuple(range(SLOTS)))))
    assert records.restore is not None
    assert decide(records).health.cluster_status == "OK"


def test_a_restore_that_is_done_is_not_done_again() -> None:
    done = replace(cluster(), restore=replace(PLAN, state="done", version=2))
    assert decide(done).routing is None
    assert decide(done).restore is None


def test_what_masters_cannot_load_is_told() -> None:
    records = written(replace(cluster(), restore=PLAN))
    instance = table(records).nodes[1].instance
    report = NodeReport(instance, 2, load_trouble="ps-1: part-0 is damaged")
    said = decide(replace(records, reports={instance: report})).health.reason
    assert "from checkpoint ckpt-000007-3fa9c1: ps-1: part-0 is damaged" in said


def test_the_records_are_strict() -> None:
    save = SaveRecord("ckpt-000001-abcdef", "ps-0", 7, "now")
    for record in (
        PLAN,
        replace(PLAN, slots=(2,), state="done", version=4, generation=3),
        NEWEST,
        save,
    ):
        kind = type(record)
        assert kind.from_json(record.to_json()) == record
        with pytest.raises(InvalidRequest):
            kind.from_json(record.to_json().replace("{", '{"more":1,', 1))
    with pytest.raises(InvalidRequest, match="unknown state"):
        RestorePlan("u", "c", state="paused")  # type: ignore[arg-type]


def test_slots_are_not_lost_before_a_node_serves_on_which_they_can_come_back() -> None:
    before = cluster(nodes=3, replicas=1)
    dead = table(before).nodes[1].instance
    # All are stopped at once, and one has gone already.
    stopping = members(member(0, status="stopping"), member(2, status="stopping"))
    gone = replace(before, members=stopping, gone=frozenset({dead}), on_loss=NEWEST)
    decision = decide(gone)
    assert decision.routing is not None
    assert decision.restore is None
    assert decision.routing.lost == ()
    assert decision.routing.generation == table(before).generation
    waits = written(gone)
    assert decide(waits).routing is None
    back = replace(waits, members=members(member(0), member(1, 999), member(2)))
    again = decide(back)
    assert again.routing is not None
    assert again.restore is not None
    assert again.restore.lost
    assert len(again.routing.restoring.slots) == again.routing.slot_count
