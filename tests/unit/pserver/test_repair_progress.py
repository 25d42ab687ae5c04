"""The record of a repair: one from the loss until every slot has its copies again."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from backstay.consensus.records import RoutingTable
from backstay.consensus.records.repairs import LOST_MAX, LostNode, RepairRecord
from backstay.errors import InvalidRequest
from backstay.pserver.controller import ClusterRecords, decide, follow_repair, missing_copies
from tests.unit.controller_cluster import (
    SLOTS,
    after,
    cluster,
    member,
    members,
    table,
    true_reports,
    without,
)

DONE = RepairRecord(
    7, "done", (LostNode("ps-1", "because"),), 0, 12, 0, 4096, 0, 10.5, 12.0, "ps-0", "ps-2"
)


def step(
    records: ClusterRecords, known: RepairRecord | None, *, time: float, controller: str = "ps-0"
) -> tuple[ClusterRecords, RepairRecord | None]:
    """Decide once, and return the records and the repair as they stand then."""
    decision = decide(records)
    if decision.routing is None:
        return records, known
    repair = follow_repair(
        known,
        table(records),
        decision.routing,
        decision.events,
        time=time,
        controller=controller,
        bytes_of_slot=np.full(SLOTS, 10, dtype=np.uint64),
    )
    return after(records), repair or known


def followed(
    records: ClusterRecords, known: RepairRecord | None, *, controller: str = "ps-0"
) -> tuple[ClusterRecords, list[RepairRecord]]:
    """Let every copy arrive; return the records and the repair after each decision."""
    seen: list[RepairRecord] = []
    for time in range(1, 100):
        before = records
        records, known = step(true_reports(records), known, time=float(time), controller=controller)
        if known is not None and (not seen or seen[-1] != known):
            seen.append(known)
        if table(before) is table(records):
            return records, seen
    raise AssertionError("it does not settle")


def test_the_record_leads_back_and_is_strict() -> None:
    assert RepairRecord.from_json(DONE.to_json()) == DONE
    good = json.loads(DONE.to_json())
    for broken in ({**good, "kind": "resize"}, {**good, "lost": [1]}, {**good, "copies_left": -1}):
        with pytest.raises(InvalidRequest, match=r"^repair: "):
            RepairRecord.from_json(json.dumps(broken))


def test_one_record_from_the_loss_until_all_copies_are_back() -> None:
    before = cluster(nodes=3)
    lost = int((missing_copies(table(after(without(before, 1))))).sum())
    assert lost > 0
    records, seen = followed(without(before, 1), None)
    assert {one.repair_id for one in seen} == {table(before).version + 1}
    assert {one.copies_total for one in seen} == {lost}
    assert (seen[0].state, seen[0].copies_left, seen[0].ended) == ("copying", lost, 0.0)
    assert [one.node_id for one in seen[0].lost] == ["ps-1"]
    last = seen[-1]
    assert (last.state, last.copies_left, last.bytes_left) == ("done", 0, 0)
    assert last.bytes_total == 10 * lost
    assert last.ended >= last.begun > 0
    assert (last.begun_by, last.ended_by) == ("ps-0", "ps-0")
    assert not missing_copies(table(records)).any()


def test_a_second_loss_belongs_to_the_same_repair_and_another_controller_goes_on() -> None:
    records, known = step(without(cluster(nodes=5, replicas=3), 1), None, time=1.0)
    assert known is not None
    before = known.copies_total
    records, seen = followed(without(records, 1, 2), known, controller="ps-3")
    last = seen[-1]
    assert last.repair_id == known.repair_id
    assert [one.node_id for one in last.lost] == ["ps-1", "ps-2"]
    assert last.copies_total > before
    assert (last.state, last.begun, last.begun_by, last.ended_by) == ("done", 1.0, "ps-0", "ps-3")


def test_a_repair_waits_for_a_node_and_the_next_loss_after_its_end_is_another() -> None:
    whole = cluster(nodes=2)
    records, seen = followed(without(whole, 1), None)
    assert [one.state for one in seen] == ["copying"]
    back = {**records.members, "ps-1": member(1, 999)}
    records, more = followed(replace(records, members=back), seen[-1])
    assert more[-1].state == "done"
    assert more[-1].repair_id == seen[0].repair_id
    records, again = followed(without(records, 0), more[-1])
    assert again[-1].repair_id > more[-1].repair_id
    assert [one.node_id for one in again[-1].lost] == ["ps-0"]


def test_slots_that_had_no_other_copy_are_told_and_keep_the_repair_open() -> None:
    """They wait for somebody to decide; with nothing to lose they begin anew at once."""
    alone = without(cluster(nodes=2, replicas=1), 1)
    _, seen = followed(alone, None)
    assert (seen[-1].state, seen[-1].slots_lost, seen[-1].copies_left) == (
        "copying",
        SLOTS // 2,
        SLOTS // 2,
    )
    records, _ = followed(replace(alone, has_tables=False), None)
    assert not missing_copies(table(records)).any()


def test_moving_and_growing_are_no_repairs() -> None:
    before = cluster(nodes=2)
    more = members(*map(member, range(4)))
    _, seen = followed(replace(before, members=more), None)
    assert seen == []


def test_a_record_names_a_bounded_number_of_nodes() -> None:
    before = cluster(nodes=LOST_MAX + 8, slots=64)
    alone: RoutingTable = table(before)
    decision = decide(without(before, *range(LOST_MAX + 4)))
    assert decision.routing is not None
    repair = follow_repair(
        None, alone, decision.routing, decision.events, time=1.0, controller="ps-39"
    )
    assert repair is not None
    assert len(repair.lost) == LOST_MAX
