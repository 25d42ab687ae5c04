"""What happens to the slots of processes that are no longer there.

The rules that keep an acknowledged push (invariant I1) are here: only a process that was in
sync may become master, and a slot is given up only when none of those can come back.
"""

from __future__ import annotations

import numpy as np

from backstay.consensus.records import NO_MASTER, NOBODY, SlotReplicas
from backstay.pserver.controller.draft import Draft

__all__ = ["GIVEN_UP_MAX", "fail_over", "note_members"]

# Processes that one decision may give up: the transaction that writes it compares the revision
# of each one's registration, and etcd takes 128 comparisons.
GIVEN_UP_MAX = 32


def note_members(draft: Draft) -> None:
    """Note who has come and who has gone since the routing table that is there."""
    listed = len(draft.before.nodes)
    # Who is waited for has been noted when the wait began.
    awaited = {
        number for held in draft.before.sets if held.master == NO_MASTER for number in held.in_sync
    }
    for number in range(len(draft.processes)):
        name = draft.name(number)
        if number >= listed:
            draft.note("node_joined", number, f"{name} has registered")
        elif not draft.alive[number] and number not in awaited:
            draft.note("node_gone", number, f"{name}: {draft.state(number)}")


def fail_over(draft: Draft, *, holds_rows: bool = True) -> None:
    """Take absent processes out of every set, and find a master for each slot without one.

    Slots that nobody can have the content of any more are lost from then on.

    Args:
        draft: To be changed.
        holds_rows: Whether slots can have had any content: then losing it is a loss.
    """
    absent = {number for number, alive in enumerate(draft.alive) if not alive}
    concerned = set(draft.slots_with(absent)) if absent else set()
    concerned.update(np.flatnonzero(draft.before.master_of_slot == NO_MASTER).tolist())
    concerned -= draft.lost
    # Without these first, so that the choice of masters sees the load that is left.
    orphans = []
    for slot in sorted(concerned):
        held = draft.held[slot]
        present = SlotReplicas(
            held.master if held.master != NO_MASTER and draft.alive[held.master] else NO_MASTER,
            tuple([number for number in held.in_sync if draft.alive[number]]),
            tuple([number for number in held.catching_up if draft.alive[number]]),
        )
        if present.master == NO_MASTER:
            orphans.append((slot, present))
        elif present != held:
            draft.put(slot, present)
    for slot, present in orphans:
        if present.in_sync:
            _promote(draft, slot, present)
        else:
            _wait_or_give_up(draft, slot, present, holds_rows=holds_rows)


def _promote(draft: Draft, slot: int, present: SlotReplicas) -> None:
    """Make one of the in-sync backups master.

    Each of them has staged all that was acknowledged, so any is safe; ``Draft.heir`` chooses.
    """
    old = draft.held[slot].master
    new = draft.heir(present.in_sync)
    rest = tuple([number for number in present.in_sync if number != new])
    draft.put(slot, SlotReplicas(new, rest, present.catching_up))
    was = "it came back with its memory" if old == NO_MASTER else f"{_why(draft, old)}; in sync"
    draft.note("promoted", new, f"{draft.name(new)} becomes master of {{slots}}: {was}", slot)


def _wait_or_give_up(draft: Draft, slot: int, present: SlotReplicas, *, holds_rows: bool) -> None:
    """Keep a slot for those who have its content, or declare it lost."""
    held = draft.held[slot]
    candidates = tuple([number for number in held.synced if not draft.gone[number]])
    # Nobody has been served what is not loaded yet, and others can load it as well.
    waits = slot not in draft.restoring
    if waits and any(draft.waiting[number] for number in candidates):
        kept = SlotReplicas(NO_MASTER, candidates, present.catching_up)
        if kept != held:
            draft.put(slot, kept)
            names = ", ".join(sorted(draft.name(number) for number in candidates))
            draft.note(
                "unavailable",
                -1,
                f"{{slots}} without a master: the lease of {names} is over, and nobody else "
                "has the content",
                slot,
            )
        return
    given_up = draft.given_up.union(candidates)
    if len(given_up) > GIVEN_UP_MAX:
        return  # In a later decision.
    draft.given_up = given_up
    who = ", ".join(_why(draft, number) for number in held.synced) or "no copy was left"
    if slot not in draft.restoring and holds_rows:
        if draft.least_loaded() is None:
            # Told as lost when there is somebody to come back on, for both are one decision: jobs
            # that hear of a loss alone take it for final.
            if held != NOBODY:
                draft.put(slot, NOBODY)
                note = f"{{slots}} without a master: no node serves, and nobody has them: {who}"
                draft.note("unavailable", -1, note, slot)
            return
        draft.put(slot, NOBODY)
        draft.reborn.add(slot)
        draft.lost.add(slot)
        draft.note("lost", -1, f"DATA LOST: {{slots}} lost all copies: {who}", slot)
        return
    new = draft.least_loaded()
    if new is None:
        # Nobody to begin anew on.
        if held != NOBODY:
            draft.put(slot, NOBODY)
            draft.note("unavailable", -1, "{slots} without a master: no node serves", slot)
        return
    draft.put(slot, SlotReplicas(new))
    draft.reborn.add(slot)
    if slot in draft.restoring:
        where = f"wait for checkpoint {draft.source[1]} on {draft.name(new)}"
        draft.note("lost", new, f"DATA LOST: {{slots}} {where}: {who}", slot)
    else:
        why = f"{who}; there was no table yet, so nothing is lost"
        draft.note("promoted", new, f"{{slots}} begin anew on {draft.name(new)}: {why}", slot)


def _why(draft: Draft, process: int) -> str:
    return f"{draft.name(process)}: {draft.state(process)}"
