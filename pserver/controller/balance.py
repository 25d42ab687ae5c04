"""Masters and copies spread evenly, in small steps, once there is nothing more urgent.

Each step makes a sum of squares smaller (of the masters, of the copies by process) or brings a
slot to more hosts, so the steps come to an end.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from backstay.consensus.records import NO_MASTER, SlotReplicas
from backstay.pserver.controller.repair import (
    distinct_hosts,
    load_after_moves,
    surplus_of,
)
from backstay.pserver.controller.routing_builder import CATCHING_UP_MAX, RoutingBuilder

__all__ = [
    "HANDOVERS_MAX",
    "MOVES_MAX",
    "balance_masters",
    "move_copies",
    "relieve_leaving",
    "relieve_stopping",
    "share_masters_early",
]

# Slots handed over in one decision. A push that touches one of them waits for a moment; most
# touch many slots, so many at once hold up less than as many one after the other.
HANDOVERS_MAX = 256
# While copies still come, a hand-over is at least one in so many of the master's slots.
EARLY_PART = 4
# Moves of copies begun in one decision.
MOVES_MAX = 256


def relieve_stopping(builder: RoutingBuilder) -> None:
    """Hand every slot of a process that is stopping to an in-sync backup that serves.

    Not slots that this decision has changed: a copy that was taken in just now must not be made
    master in the same step.
    """
    leaving = {
        number
        for number, alive in enumerate(builder.alive)
        if alive and not builder.able[number] and builder.masters[number]
    }
    if not leaving:
        return
    for slot, held in enumerate(builder.held):
        if held.master in leaving and slot not in builder.changed:
            # One that is to leave is better than none; ``heir`` prefers the others.
            heirs = [number for number in held.in_sync if builder.able[number]]
            if heirs:
                heir = builder.heir(heirs)
                hand_over(
                    builder, slot, heir, f"{builder.name(held.master)} does not serve any more"
                )


def relieve_leaving(builder: RoutingBuilder) -> None:
    """Hand slots of processes that are to leave to in-sync backups that stay, before copies move.

    Their copies are given away in many small steps; so pushes are held up once, not each time.
    A slot without such a backup goes with its copy.
    """
    leaving = {n for n, leaves in enumerate(builder.leaves) if leaves and builder.masters[n]}
    left = HANDOVERS_MAX if leaving else 0
    for slot in builder.slots_with(leaving) if leaving else []:
        held = builder.held[slot]
        if left and held.master in leaving and not held.catching_up:
            heirs = [one for one in held.in_sync if builder.serving[one]]
            heirs = [one for one in heirs if builder.reaches(one, held.holders)]
            if heirs:
                hand_over(
                    builder, slot, builder.heir(heirs), f"{builder.name(held.master)} is to leave"
                )
                left -= 1


def share_masters_early(builder: RoutingBuilder) -> None:
    """Hand over slots to the process that is master of fewest while copies are still coming.

    One that has come back, or anew, otherwise does nothing but take copies in until the last one
    is there, and the others do its work. Only many slots at a time, so that it happens seldom.
    """
    serving = np.flatnonzero(builder.serving)
    if serving.size < 2:
        return
    masters = builder.masters[serving]
    rich, poor = int(serving[np.argmax(masters)]), int(serving[np.argmin(masters)])
    most = int(masters.max() - masters.min()) // 2
    least = max(builder.sizes.early_handovers_min, int(masters.max()) // EARLY_PART)
    if most < least:
        return
    slots = [
        slot
        for slot, held in enumerate(builder.held)
        if held.master == rich
        and poor in held.in_sync
        and not held.catching_up
        and slot not in builder.changed
        and builder.reaches(poor, held.holders)
    ]
    if len(slots) >= least:
        for slot in slots[: min(most, HANDOVERS_MAX)]:
            hand_over(builder, slot, poor, "masters are spread evenly")


def hand_over(builder: RoutingBuilder, slot: int, heir: int, why: str) -> None:
    """Make an in-sync backup master; the master becomes an in-sync backup."""
    held = builder.held[slot]
    in_sync = tuple([held.master if number == heir else number for number in held.in_sync])
    builder.put(slot, SlotReplicas(heir, in_sync, held.catching_up))
    builder.note(
        "handed_over", heir, f"{builder.name(heir)} becomes master of {{slots}}: {why}", slot
    )


def move_copies(builder: RoutingBuilder) -> bool:
    """Begin to move copies away from who leaves, to other hosts, and to emptier processes.

    One after the other: what is moved from who leaves evens out the others already. A move is an
    additional copy; ``drop_surplus`` ends it once that one is in sync.

    Returns:
        Whether a move is under way.
    """
    serving = np.flatnonzero(builder.serving)
    load, _ = load_after_moves(builder)
    moving = bool(builder.copying.any())
    if any(leaves and builder.copies[number] for number, leaves in enumerate(builder.leaves)):
        return _empty_leaving(builder, load) or moving
    crowded = _crowded(builder)
    if not crowded and (serving.size < 2 or load[serving].max() - load[serving].min() < 2):
        return moving
    # For each process: the slots of which it is backup, and of which it is master.
    slots_of: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for slot, held in enumerate(builder.held):
        if not held.catching_up and held.master != NO_MASTER:
            slots_of[held.master][1].append(slot)
            for number in held.in_sync:
                slots_of[number][0].append(slot)
    size = _sizes_held(builder)
    most = _moves_left(builder)
    begun = 0
    for slot in crowded:
        for target in serving[np.argsort(load[serving], kind="stable")].tolist():
            if begun < most and _begin(builder, slot, target, load):
                begun += 1
                break
    failed: set[int] = set()
    while begun < most:
        targets = [n for n in serving.tolist() if n not in failed]
        if not targets:
            break
        target = min(targets, key=lambda number: (load[number], number))
        if _fill(builder, target, slots_of, load, size):
            begun += 1
        else:
            failed.add(target)
    return moving or begun > 0


def balance_masters(builder: RoutingBuilder) -> None:
    """Hand slots over until no chain of hand-overs can even out the masters any more.

    From the process with most slots as master, the shortest chain "master here, in-sync backup
    there" is looked for that ends at one with at least two fewer; each link hands one slot
    over. Where no such chain exists the distribution is as even as the in-sync sets allow.
    """
    serving = [number for number, serves in enumerate(builder.serving) if serves]
    counts = {number: int(builder.masters[number]) for number in serving}
    if not counts or max(counts.values()) - min(counts.values()) < 2:
        return
    links: dict[int, dict[int, list[int]]] = {number: {} for number in serving}
    for slot, held in enumerate(builder.held):
        if held.master in links:
            for backup in held.in_sync:
                if backup in links and builder.reaches(backup, held.holders):
                    links[held.master].setdefault(backup, []).append(slot)
    left = HANDOVERS_MAX
    # What is reached from a process without finding an end has no end for those with fewer.
    exhausted: set[int] = set()
    while left > 0:
        starts = [number for number in serving if number not in exhausted]
        if not starts:
            return
        start = max(starts, key=lambda number: (counts[number], -number))
        chain = _chain(links, counts, start, exhausted)
        for giver, taker in pairwise(chain):
            slot = links[giver][taker][0]
            _relink(builder, links, slot, taker)
            hand_over(builder, slot, taker, "masters are spread evenly")
            left -= 1
        if chain:
            counts[chain[0]] -= 1
            counts[chain[-1]] += 1


def _chain(
    links: dict[int, dict[int, list[int]]],
    counts: dict[int, int],
    start: int,
    exhausted: set[int],
) -> list[int]:
    """Return a shortest chain from ``start``; if there is none, note what was searched."""
    came_from: dict[int, int] = {start: start}
    queue = deque([start])
    while queue:
        giver = queue.popleft()
        for taker, slots in links[giver].items():
            if not slots or taker in came_from or taker in exhausted:
                continue
            came_from[taker] = giver
            if counts[taker] <= counts[start] - 2:
                chain = [taker]
                while chain[-1] != start:
                    chain.append(came_from[chain[-1]])
                return chain[::-1]
            queue.append(taker)
    exhausted.update(came_from)
    return []


def _relink(
    builder: RoutingBuilder, links: dict[int, dict[int, list[int]]], slot: int, heir: int
) -> None:
    """Keep the links true when a slot gets another master."""
    held = builder.held[slot]
    able = [n for n in held.synced if n in links and builder.reaches(n, held.holders)]
    for backup in able:
        if backup != held.master:
            links[held.master][backup].remove(slot)
    for backup in able:
        if backup != heir:
            links[heir].setdefault(backup, []).append(slot)


def _crowded(builder: RoutingBuilder) -> list[int]:
    """Return the slots that could be on more hosts than they are."""
    hosts = distinct_hosts(builder, np.flatnonzero(builder.serving).tolist())
    if len(set(builder.hosts.tolist())) == len(builder.processes):
        return []
    few = [
        len(held.holders) <= builder.wanted
        and distinct_hosts(builder, held.holders) < min(hosts, len(held.holders))
        for held in builder.before.sets
    ]
    slots = np.flatnonzero(np.array(few)[builder.before.set_of_slot]).tolist()
    return [
        slot
        for slot in slots
        if builder.held[slot].master != NO_MASTER and not builder.held[slot].catching_up
    ]


def _empty_leaving(builder: RoutingBuilder, load: np.ndarray) -> bool:
    """Begin to move what processes hold that are to leave; return whether any move began.

    Each copy moves once, to the process that holds least. Large ones are dealt first: so each
    round of dealing makes up for the differences of the one before.
    """
    leaving = {number for number, leaves in enumerate(builder.leaves) if leaves}
    slots = builder.slots_with(leaving)
    sizes = builder.bytes_of_slot
    if sizes is not None:
        slots.sort(key=lambda slot: (-sizes[slot], slot))
    size = _sizes_held(builder)
    serving = np.flatnonzero(builder.serving)
    free = serving[~np.isin(serving, list(builder.full))]
    most = _moves_left(builder)
    begun = 0
    for slot in slots:
        if begun >= most:
            break
        held = builder.held[slot]
        stay = [number for number in held.synced if number not in leaving]
        shares_host = np.isin(builder.hosts[free], builder.hosts[stay])
        # On another host, then who holds least; ties in the order of the processes.
        for target in free[np.lexsort((size[free], load[free], shares_host))].tolist():
            if _begin(builder, slot, target, load):
                begun += 1
                size[target] += sizes[slot] if sizes is not None else 0
                break
            if target not in held.holders and builder.copying[target] >= CATCHING_UP_MAX:
                break  # Its turn will come; what another one took now would go on to it later.
    return begun > 0


def _moves_left(builder: RoutingBuilder) -> int:
    """Return how many moves may begin in this decision."""
    under_way = sum(1 for held in builder.held if held.catching_up)
    return max(0, min(MOVES_MAX, builder.moves_at_once - under_way))


def _sizes_held(builder: RoutingBuilder) -> np.ndarray:
    """Return by number the bytes of the slots that a process holds; zeros if not known."""
    size = np.zeros(len(builder.processes), dtype=np.float64)
    if builder.bytes_of_slot is not None:
        for slot, held in enumerate(builder.held):
            for number in held.holders:
                size[number] += builder.bytes_of_slot[slot]
    return size


def _fill(
    builder: RoutingBuilder,
    target: int,
    slots_of: dict[int, tuple[list[int], list[int]]],
    load: np.ndarray,
    size: np.ndarray,
) -> bool:
    """Begin to move one copy to a process, from one of the fullest that allows it.

    Of its slots those come first of which it is not the master: no push has to wait for another
    one then. Of those one is taken whose size evens out the bytes as the number evens out the
    copies: what one has more in bytes, over what it has more in copies.
    """
    if builder.copying[target] >= CATCHING_UP_MAX:
        return False
    for source in sorted(slots_of, key=lambda number: (-load[number], -size[number], number)):
        if load[source] - load[target] < 2:
            return False
        ideal = (size[source] - size[target]) / (load[source] - load[target])
        for slots in slots_of[source]:
            if _begin_one(builder, slots, source, target, load, size, ideal):
                return True
    return False


def _begin_one(
    builder: RoutingBuilder,
    slots: list[int],
    source: int,
    target: int,
    load: np.ndarray,
    size: np.ndarray,
    ideal: float,
) -> bool:
    """Begin to move the slot nearest to the ideal size that can be moved, and take it out."""
    order: Iterable[int] = range(len(slots))
    sizes = builder.bytes_of_slot
    if sizes is not None:
        order = np.argsort(np.abs(np.array([sizes[slot] for slot in slots]) - ideal)).tolist()
    for at in order:
        slot = slots[at]
        if _begin(builder, slot, target, load):
            del slots[at]
            if sizes is not None:
                size[source] -= sizes[slot]
                size[target] += sizes[slot]
            return True
    return False


def _begin(builder: RoutingBuilder, slot: int, target: int, load: np.ndarray) -> bool:
    """Begin to move a copy of a slot to a process, if that makes things better."""
    held = builder.held[slot]
    if held.catching_up or target in held.holders or builder.copying[target] >= CATCHING_UP_MAX:
        return False
    if target in builder.full or not builder.reaches(target, [held.master]):
        return False
    if len(held.synced) > builder.wanted:
        return False  # One of its copies is to go already.
    more = (*held.synced, target)
    victim = surplus_of(builder, more, load)
    if victim == target:
        return False
    after = [number for number in more if number != victim]
    if not builder.reaches(target, after):
        return False
    gain = distinct_hosts(builder, after) - distinct_hosts(builder, held.synced)
    leaves = builder.leaves[victim]
    if not leaves and (gain < 0 or (gain == 0 and load[victim] - load[target] < 2)):
        return False
    builder.put(slot, held._replace(catching_up=(target,)))
    load[target] += 1
    load[victim] -= 1
    why = "copies are on distinct hosts" if gain else "copies are spread evenly"
    if leaves:
        why = f"{builder.name(victim)} is to leave"
    builder.note(
        "copy_added", target, f"{builder.name(target)} gets a copy of {{slots}}: {why}", slot
    )
    return True
