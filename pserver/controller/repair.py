"""Copies that are missing, copies that are too many, and how far a repair is.

A repair's record follows from the routing tables before and after a decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from backstay.consensus.records import NO_MASTER, Event, RoutingTable, SlotReplicas
from backstay.consensus.records.repairs import LOST_MAX, LostNode, RepairRecord
from backstay.pserver.controller.routing_builder import CATCHING_UP_MAX, RoutingBuilder

__all__ = [
    "add_missing",
    "distinct_hosts",
    "drop_surplus",
    "follow_repair",
    "load_after_moves",
    "missing_copies",
    "surplus_of",
]

_NEVER = np.iinfo(np.int64).max
# Rounds over the slots with a copy too many, in which each may choose another one to drop it.
_PASSES_MAX = 8

LOSSES = ("node_gone", "backup_silent")


def add_missing(builder: RoutingBuilder) -> bool:
    """Give each slot that has fewer copies than wanted another one, which has to catch up.

    Those with the fewest copies in sync come first. A process takes in a bounded number of
    slots at a time; what finds no place now does so in a later decision.

    Returns:
        Whether a slot is short of a copy that some process could take, now or later.
    """
    short = [
        (len(held.in_sync), slot)
        for slot, held in enumerate(builder.held)
        if held.master != NO_MASTER
        and len(held.in_sync) + len(held.catching_up) + 1 < builder.wanted
    ]
    pending = False
    for _, slot in sorted(short):
        while len(builder.held[slot].holders) < builder.wanted:
            target = _target(builder, builder.held[slot])
            if target is None:
                break
            pending = True
            if builder.copying[target] >= CATCHING_UP_MAX:
                break
            held = builder.held[slot]
            builder.put(slot, held._replace(catching_up=(*held.catching_up, target)))
            builder.note(
                "copy_added",
                target,
                f"{builder.name(target)} gets a copy of {{slots}} that have fewer than "
                f"{builder.wanted}",
                slot,
            )
    return pending


def drop_surplus(builder: RoutingBuilder) -> None:
    """Take copies away where more than wanted are in sync.

    A slot may have one copy more than wanted as long as that one is catching up: so a copy is
    moved without ever having fewer.
    """
    many = [
        slot
        for slot, held in enumerate(builder.held)
        if held.master != NO_MASTER and len(held.in_sync) + len(held.catching_up) >= builder.wanted
    ]
    fresh = set(builder.changed)
    for slot in many:
        held = builder.held[slot]
        for number in held.catching_up:
            # It was to get the copy before it was to leave.
            if builder.leaves[number] and len(held.synced) >= builder.wanted:
                _drop(builder, slot, number)
    _drop_synced(builder, many, fresh)
    for slot in many:
        if len(builder.held[slot].synced) > builder.wanted:
            continue  # One of those goes in a later decision.
        while len(builder.held[slot].holders) > builder.wanted + 1:
            _drop(builder, slot, builder.held[slot].catching_up[-1])


def _drop_synced(builder: RoutingBuilder, slots: list[int], fresh: set[int]) -> None:
    """Take in-sync copies away until each slot has as many as wanted.

    Backups first, for pushes wait for a moment where a master goes. Each step changes who holds
    most, and so who is to go from the others: those are looked at again. A few masters may stay
    for as long as other copies come, and then there may be a backup to go in their place.

    Args:
        builder: The decision.
        slots: Where to look.
        fresh: Slots that this decision has changed. They keep their masters: a copy that was
            taken in just now must not become master in the same step.
    """
    slots = [slot for slot in slots if len(builder.held[slot].synced) > builder.wanted]
    if not slots:
        return
    spared = True
    load, victims = load_after_moves(builder)
    while left := [slot for slot in slots if len(builder.held[slot].synced) > builder.wanted]:
        dropped = False
        for slot in left:
            held = builder.held[slot]
            load[victims.pop(slot)] += 1
            victim = surplus_of(builder, held.synced, load)
            if victim != held.master or not (spared or slot in fresh):
                _drop(builder, slot, victim)
                load[victim] -= 1
                dropped = True
            victims[slot] = _take_surplus(builder, builder.held[slot].synced, load)
        left = [slot for slot in left if slot not in fresh]
        may_wait = builder.copying.any() and len(left) <= builder.sizes.spared_max
        if not dropped and (not spared or may_wait):
            return
        spared = dropped


def load_after_moves(builder: RoutingBuilder) -> tuple[NDArray[np.int64], dict[int, list[int]]]:
    """Return what each process holds when the moves under way have ended, and who drops what.

    A decision that begins a move and a later one that ends it must agree on who drops the slot.
    Otherwise a process that takes in many copies, and so holds most for a while, drops each copy
    as it comes in sync, and is given it again, without an end. They agree because no slot alone
    would choose another process: each choice is looked at again until none changes.

    Returns:
        By number the slots that a process will hold, and by slot the processes that will drop it.
    """
    many = [slot for slot, held in enumerate(builder.held) if len(held.holders) > builder.wanted]
    load = builder.copies.copy()
    victims: dict[int, list[int]] = {}
    for slot in many:
        held = builder.held[slot]
        # The first choice spares masters. Later a master drops its slot only where that makes the
        # load more even.
        victims[slot] = _take_surplus(builder, held.in_sync + held.catching_up, load, 1)
    for _ in range(_PASSES_MAX):
        same = True
        for slot in many:
            held, before = builder.held[slot], victims[slot]
            load[before] += 1
            victims[slot] = _take_surplus(builder, held.synced + held.catching_up, load)
            same = same and victims[slot] == before
        if same:
            break
    return load, victims


def _take_surplus(
    builder: RoutingBuilder, holders: tuple[int, ...], load: NDArray[np.int64], others: int = 0
) -> list[int]:
    """Return which holders are to drop a slot that has too many, and take them from the load."""
    victims: list[int] = []
    while len(holders) + others > builder.wanted:
        victim = surplus_of(builder, holders, load)
        load[victim] -= 1
        victims.append(victim)
        holders = tuple([number for number in holders if number != victim])
    return victims


def surplus_of(builder: RoutingBuilder, holders: tuple[int, ...], load: NDArray[np.int64]) -> int:
    """Return which of the holders of a slot is to go if one of them is.

    One that does not hear another one of them; else one that is to leave; else one on a host that
    has another one of them; else one that does not serve; else the one that holds most slots; the
    master, which comes first, only if it holds more than others.
    """
    hosts = [int(builder.hosts[number]) for number in holders]

    def weight(at: int) -> tuple[bool, bool, bool, bool, int, int]:
        number = holders[at]
        apart = not builder.reaches(number, holders)
        return (
            apart,
            builder.leaves[number],
            hosts.count(hosts[at]) > 1,
            not builder.serving[number],
            int(load[number]),
            at > 0,
        )

    # max() takes the first of equals, that is, the one that has been there longer.
    return holders[max(range(len(holders)), key=weight)]


def distinct_hosts(builder: RoutingBuilder, holders: Iterable[int]) -> int:
    """Return the number of hosts that some processes run on."""
    return len({int(builder.hosts[number]) for number in holders})


def _drop(builder: RoutingBuilder, slot: int, number: int) -> None:
    held = builder.held[slot]
    master = held.master
    in_sync = tuple([one for one in held.in_sync if one != number])
    if number == master:
        # The backup has everything that was acknowledged: it may take over at once.
        master = builder.heir(in_sync)
        in_sync = tuple([one for one in in_sync if one != master])
        builder.note(
            "handed_over",
            master,
            f"{builder.name(master)} becomes master of {{slots}}: {builder.name(number)} gives "
            "its copy away",
            slot,
        )
    catching_up = tuple([one for one in held.catching_up if one != number])
    builder.put(slot, SlotReplicas(master, in_sync, catching_up))
    why = f"there are more copies than {builder.wanted}"
    if builder.leaves[number]:
        why += ", and it is to leave"
    builder.note("copy_dropped", number, f"{builder.name(number)} drops {{slots}}: {why}", slot)


def _target(builder: RoutingBuilder, held: SlotReplicas) -> int | None:
    """Return the process to take a copy, even if it takes as many as it may already.

    Only one on another host, if such a one serves; of those one that has room, of those the
    one that holds least.
    """
    free = np.array(builder.serving)
    free[list(held.holders)] = False
    free[list(builder.full)] = False
    # A master that gets no answer from a process cannot copy anything to it.
    free[list(builder.apart_from(held.master))] = False
    if not free.any():
        return None
    elsewhere = free & ~np.isin(builder.hosts, builder.hosts[list(held.holders)])
    candidates = elsewhere if elsewhere.any() else free
    together = candidates.copy()
    for holder in held.holders:
        together[list(builder.apart_from(holder))] = False
    candidates = together if together.any() else candidates
    load = np.where(candidates, builder.copies, _NEVER)
    load[candidates & (builder.copying >= CATCHING_UP_MAX)] = _NEVER - 1
    return int(np.argmin(load))


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
