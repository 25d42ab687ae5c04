"""What happens to the slots of processes that are no longer there.

The rules that keep an acknowledged push (invariant I1) are here: only a process that was in
sync may become master, and a slot is given up only when none of those can come back.
"""

from __future__ import annotations

import numpy as np

from backstay.consensus.records import NO_MASTER, NOBODY, SlotReplicas
from backstay.pserver.controller.routing_builder import RoutingBuilder

__all__ = ["GIVEN_UP_MAX", "fail_over", "note_members"]

# Processes that one decision may give up: the transaction that writes it compares the revision
# of each one's registration, and etcd takes 128 comparisons.
GIVEN_UP_MAX = 32


def note_members(builder: RoutingBuilder) -> None:
    """Note who has come and who has gone since the routing table that is there."""
    listed = len(builder.before.nodes)
    # Who is waited for has been noted when the wait began.
    awaited = {
        number
        for held in builder.before.sets
        if held.master == NO_MASTER
        for number in held.in_sync
    }
    for number in range(len(builder.processes)):
        name = builder.name(number)
        if number >= listed:
            builder.note("node_joined", number, f"{name} has registered")
        elif not builder.alive[number] and number not in awaited:
            builder.note("node_gone", number, f"{name}: {builder.state(number)}")


def fail_over(builder: RoutingBuilder, *, holds_rows: bool = True) -> None:
    """Take absent processes out of every set, and find a master for each slot without one.

    A slot is lost from now on if no process can have its content any more.

    Args:
        builder: To be changed.
        holds_rows: Whether slots can have had any content: then losing it is a loss.
    """
    absent = {number for number, alive in enumerate(builder.alive) if not alive}
    concerned = set(builder.slots_with(absent)) if absent else set()
    concerned.update(np.flatnonzero(builder.before.master_of_slot == NO_MASTER).tolist())
    concerned -= builder.lost
    # Absent processes leave first, so that the choice of masters sees the remaining load.
    orphans = []
    for slot in sorted(concerned):
        held = builder.held[slot]
        present = SlotReplicas(
            held.master if held.master != NO_MASTER and builder.alive[held.master] else NO_MASTER,
            tuple([number for number in held.in_sync if builder.alive[number]]),
            tuple([number for number in held.catching_up if builder.alive[number]]),
        )
        if present.master == NO_MASTER:
            orphans.append((slot, present))
        elif present != held:
            builder.put(slot, present)
    for slot, present in orphans:
        if present.in_sync:
            _promote(builder, slot, present)
        else:
            _wait_or_give_up(builder, slot, present, holds_rows=holds_rows)


def _promote(builder: RoutingBuilder, slot: int, present: SlotReplicas) -> None:
    """Make one of the in-sync backups master.

    Each of them has staged all that was acknowledged, so any is safe;
    ``RoutingBuilder.heir`` chooses.
    """
    old = builder.held[slot].master
    new = builder.heir(present.in_sync)
    rest = tuple([number for number in present.in_sync if number != new])
    builder.put(slot, SlotReplicas(new, rest, present.catching_up))
    was = "it came back with its memory" if old == NO_MASTER else f"{_why(builder, old)}; in sync"
    builder.note("promoted", new, f"{builder.name(new)} becomes master of {{slots}}: {was}", slot)


def _wait_or_give_up(
    builder: RoutingBuilder, slot: int, present: SlotReplicas, *, holds_rows: bool
) -> None:
    """Keep a slot for those who have its content, or declare it lost."""
    held = builder.held[slot]
    candidates = tuple([number for number in held.synced if not builder.gone[number]])
    # No client was served what is not loaded yet, and other nodes can load it as well.
    waits = slot not in builder.restoring
    if waits and any(builder.waiting[number] for number in candidates):
        kept = SlotReplicas(NO_MASTER, candidates, present.catching_up)
        if kept != held:
            builder.put(slot, kept)
            names = ", ".join(sorted(builder.name(number) for number in candidates))
            builder.note(
                "unavailable",
                -1,
                f"{{slots}} without a master: the lease of {names} is over, and no other "
                "has the content",
                slot,
            )
        return
    given_up = builder.given_up.union(candidates)
    if len(given_up) > GIVEN_UP_MAX:
        return  # In a later decision.
    builder.given_up = given_up
    who = ", ".join(_why(builder, number) for number in held.synced) or "no copy was left"
    if slot not in builder.restoring and holds_rows:
        if builder.least_loaded() is None:
            # Told as lost when there is a node to come back on, for both are one decision: jobs
            # that hear of a loss alone take it for final.
            if held != NOBODY:
                builder.put(slot, NOBODY)
                note = f"{{slots}} without a master: no node serves, and none has them: {who}"
                builder.note("unavailable", -1, note, slot)
            return
        builder.put(slot, NOBODY)
        builder.new_epoch.add(slot)
        builder.lost.add(slot)
        builder.note("lost", -1, f"DATA LOST: {{slots}} lost all copies: {who}", slot)
        return
    new = builder.least_loaded()
    if new is None:
        # There is no node to begin anew on.
        if held != NOBODY:
            builder.put(slot, NOBODY)
            builder.note("unavailable", -1, "{slots} without a master: no node serves", slot)
        return
    builder.put(slot, SlotReplicas(new))
    builder.new_epoch.add(slot)
    if slot in builder.restoring:
        where = f"wait for checkpoint {builder.source[1]} on {builder.name(new)}"
        builder.note("lost", new, f"DATA LOST: {{slots}} {where}: {who}", slot)
    else:
        why = f"{who}; there was no table yet, so nothing is lost"
        builder.note("promoted", new, f"{{slots}} begin anew on {builder.name(new)}: {why}", slot)


def _why(builder: RoutingBuilder, process: int) -> str:
    return f"{builder.name(process)}: {builder.state(process)}"
