"""Copies that are missing, and copies that are too many."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from backstay.consensus.records import NO_MASTER, SlotReplicas
from backstay.pserver.controller.draft import CATCHING_UP_MAX, Draft

__all__ = ["add_missing", "distinct_hosts", "drop_surplus", "surplus_of"]

_NEVER = np.iinfo(np.int64).max


def add_missing(draft: Draft) -> bool:
    """Give each slot that has fewer copies than wanted another one, which has to catch up.

    Those with the fewest copies in sync come first. A process takes in a bounded number of
    slots at a time; what finds no place now does so in a later decision.

    Returns:
        Whether a slot is short of a copy that some process could take, now or later.
    """
    short = [
        (len(held.in_sync), slot)
        for slot, held in enumerate(draft.held)
        if held.master != NO_MASTER and len(held.in_sync) + len(held.catching_up) + 1 < draft.wanted
    ]
    pending = False
    for _, slot in sorted(short):
        while len(draft.held[slot].holders) < draft.wanted:
            target = _target(draft, draft.held[slot])
            if target is None:
                break
            pending = True
            if draft.copying[target] >= CATCHING_UP_MAX:
                break
            held = draft.held[slot]
            draft.put(slot, held._replace(catching_up=(*held.catching_up, target)))
            draft.note(
                "copy_added",
                target,
                f"{draft.name(target)} gets a copy of {{slots}} that have fewer than "
                f"{draft.wanted}",
                slot,
            )
    return pending


def drop_surplus(draft: Draft) -> None:
    """Take copies away where more than wanted are in sync.

    A slot may have one copy more than wanted as long as that one is catching up: so a copy is
    moved without ever having fewer.
    """
    many = [
        slot
        for slot, held in enumerate(draft.held)
        if held.master != NO_MASTER and len(held.in_sync) + len(held.catching_up) >= draft.wanted
    ]
    fresh = set(draft.changed)
    for slot in many:
        held = draft.held[slot]
        for number in held.catching_up:
            # It was to get the copy before it was to leave.
            if draft.leaves[number] and len(held.synced) >= draft.wanted:
                _drop(draft, slot, number)
    _drop_synced(draft, many, fresh)
    for slot in many:
        if len(draft.held[slot].synced) > draft.wanted:
            continue  # One of those goes in a later decision.
        while len(draft.held[slot].holders) > draft.wanted + 1:
            _drop(draft, slot, draft.held[slot].catching_up[-1])


def _drop_synced(draft: Draft, slots: list[int], fresh: set[int]) -> None:
    """Take in-sync copies away until each slot has as many as wanted.

    Backups first, for pushes wait for a moment where a master goes. Each step changes who holds
    most, and so who is to go from the others: those are looked at again. A few masters may stay
    for as long as other copies come, and then there may be a backup to go in their place.

    Args:
        draft: The decision.
        slots: Where to look.
        fresh: Slots that this decision has changed. They keep their masters: a copy that was
            taken in just now must not become master in the same step.
    """
    spared = True
    while left := [slot for slot in slots if len(draft.held[slot].synced) > draft.wanted]:
        dropped = False
        for slot in left:
            held = draft.held[slot]
            victim = surplus_of(draft, held.synced, draft.copies)
            if victim != held.master or not (spared or slot in fresh):
                _drop(draft, slot, victim)
                dropped = True
        left = [slot for slot in left if slot not in fresh]
        may_wait = draft.copying.any() and len(left) <= draft.sizes.spared_max
        if not dropped and (not spared or may_wait):
            return
        spared = dropped


def surplus_of(draft: Draft, holders: tuple[int, ...], load: NDArray[np.int64]) -> int:
    """Return which of the holders of a slot is to go if one of them is.

    One that does not hear another one of them; else one that is to leave; else one on a host that
    has another one of them; else one that does not serve; else the one that holds most slots; the
    master, which comes first, only if it holds more than others.
    """
    hosts = [int(draft.hosts[number]) for number in holders]

    def weight(at: int) -> tuple[bool, bool, bool, bool, int, int]:
        number = holders[at]
        apart = not draft.reaches(number, holders)
        return (
            apart,
            draft.leaves[number],
            hosts.count(hosts[at]) > 1,
            not draft.serving[number],
            int(load[number]),
            at > 0,
        )

    # max() takes the first of equals, that is, the one that has been there longer.
    return holders[max(range(len(holders)), key=weight)]


def distinct_hosts(draft: Draft, holders: Iterable[int]) -> int:
    """Return the number of hosts that some processes run on."""
    return len({int(draft.hosts[number]) for number in holders})


def _drop(draft: Draft, slot: int, number: int) -> None:
    held = draft.held[slot]
    master = held.master
    in_sync = tuple([one for one in held.in_sync if one != number])
    if number == master:
        # The backup has everything that was acknowledged: it may take over at once.
        master = draft.heir(in_sync)
        in_sync = tuple([one for one in in_sync if one != master])
        draft.note(
            "handed_over",
            master,
            f"{draft.name(master)} becomes master of {{slots}}: {draft.name(number)} gives "
            "its copy away",
            slot,
        )
    catching_up = tuple([one for one in held.catching_up if one != number])
    draft.put(slot, SlotReplicas(master, in_sync, catching_up))
    why = f"there are more copies than {draft.wanted}"
    if draft.leaves[number]:
        why += ", and it is to leave"
    draft.note("copy_dropped", number, f"{draft.name(number)} drops {{slots}}: {why}", slot)


def _target(draft: Draft, held: SlotReplicas) -> int | None:
    """Return the process to take a copy, even if it takes as many as it may already.

    Only one on another host, if such a one serves; of those one that has room, of those the
    one that holds least.
    """
    free = np.array(draft.serving)
    free[list(held.holders)] = False
    free[list(draft.full)] = False
    # A master that gets no answer from a process cannot copy anything to it.
    free[list(draft.apart_from(held.master))] = False
    if not free.any():
        return None
    elsewhere = free & ~np.isin(draft.hosts, draft.hosts[list(held.holders)])
    candidates = elsewhere if elsewhere.any() else free
    together = candidates.copy()
    for holder in held.holders:
        together[list(draft.apart_from(holder))] = False
    candidates = together if together.any() else candidates
    load = np.where(candidates, draft.copies, _NEVER)
    load[candidates & (draft.copying >= CATCHING_UP_MAX)] = _NEVER - 1
    return int(np.argmin(load))
