"""How far a repair is, as its record says: from the routing tables before and after a decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from backstay.consensus.records import NO_MASTER, Event, RoutingTable
from backstay.consensus.repair_records import LOST_MAX, LostNode, RepairRecord

__all__ = ["follow_repair", "missing_copies"]

LOSSES = ("node_gone", "backup_silent")


def missing_copies(routing: RoutingTable) -> NDArray[np.int64]:
    """Return how many copies of each slot are not in sync, [slot_count]."""
    short = [
        # Without a master, the copies that there are cannot be reached.
        routing.replicas
        if held.master == NO_MASTER
        else max(0, routing.replicas - len(held.synced))
        for held in routing.sets
    ]
    return np.array(short, dtype=np.int64)[routing.set_of_slot]


def follow_repair(
    known: RepairRecord | None,
    before: RoutingTable,
    after: RoutingTable,
    events: Sequence[Event],
    *,
    time: float,
    controller: str,
    bytes_of_slot: NDArray[np.uint64] | None = None,
    bytes_total: int = 0,
) -> RepairRecord | None:
    """Return the record of the repair as it stands after a decision; None if there is none.

    A repair begins when a decision takes copies of a lost or silent node out, and takes in what
    is lost until it is done: a second node that dies belongs to the same one.

    Args:
        known: The newest repair; None if there never was one.
        before: The routing table that was there.
        after: The one that was decided.
        events: What was decided.
        time: Now; seconds since the epoch.
        controller: Id of this node.
        bytes_of_slot: The size of each slot, [slot_count]; None if it is not known.
        bytes_total: Size of the copies that were missing when the repair began; 0: not known.
    """
    left, was = missing_copies(after), missing_copies(before)
    more = int(np.maximum(left - was, 0).sum())
    slots_lost = sum(event.slot_count for event in events if event.kind == "lost")
    lost = [LostNode(one.node, one.reason) for one in events if one.kind in LOSSES]
    if known is None or known.state == "done":
        if not lost or not (more or slots_lost):
            return None
        known = RepairRecord(
            repair_id=after.version,
            state="copying",
            lost=(),
            slots_lost=0,
            copies_total=0,
            copies_left=0,
            bytes_total=0,
            bytes_left=0,
            begun=time,
            ended=0.0,
            begun_by=controller,
            ended_by="",
        )
    named = {one.node_id for one in known.lost}
    news = [one for one in lost if one.node_id not in named]
    copies_left = int(left.sum())
    bytes_left = 0 if bytes_of_slot is None else int((bytes_of_slot * left.astype(np.uint64)).sum())
    record = replace(
        known,
        lost=(*known.lost, *news)[:LOST_MAX],
        slots_lost=known.slots_lost + slots_lost,
        copies_total=known.copies_total + more,
        copies_left=copies_left,
        bytes_total=max(known.bytes_total, bytes_total, bytes_left),
        bytes_left=bytes_left,
    )
    if copies_left:
        return record
    return replace(record, state="done", ended=time, ended_by=controller)
