"""Copies that are missing, and copies that are too many."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from backstay.consensus.records import NO_MASTER, SlotReplicas
from backstay.pserver.controller.routing_builder import CATCHING_UP_MAX, RoutingBuilder

__all__ = ["add_missing", "distinct_hosts", "drop_surplus", "surplus_of"]

_NEVER = np.iinfo(np.int64).max


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
    spared = True
    while left := [slot for slot in slots if len(builder.held[slot].synced) > builder.wanted]:
        dropped = False
        for slot in left:
            held = builder.held[slot]
            victim = surplus_of(builder, held.synced, builder.copies)
            if victim != held.master or not (spared or slot in fresh):
                _drop(builder, slot, victim)
                dropped = True
        left = [slot for slot in left if slot not in fresh]
        may_wait = builder.copying.any() and len(left) <= builder.sizes.spared_max
        if not dropped and (not spared or may_wait):
            return
        spared = dropped


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
