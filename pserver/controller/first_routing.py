"""The first routing table: masters and copies dealt evenly, on distinct hosts where possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from backstay.consensus.records import NodeRecord, Restoring, RoutingTable, SlotReplicas
from backstay.consensus.records.checkpoints import RestorePlan

__all__ = ["FIRST_VERSION", "first_routing", "place_replicas", "restored_routing", "shuffled_slots"]

FIRST_VERSION = 1
# The finaliser of splitmix64. Any fixed bijection on 64 bits would do; this one is well mixed.
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)


def first_routing(nodes: Sequence[NodeRecord], slot_count: int, replicas: int) -> RoutingTable:
    """Return the first routing table: every copy is empty, so every copy is in sync."""
    ones = np.full(slot_count, FIRST_VERSION, dtype=np.uint64)
    hosts = [node.host or f"/{node.node_id}" for node in nodes]
    return RoutingTable(
        version=FIRST_VERSION,
        nodes=tuple(nodes),
        replicas=replicas,
        replicas_of_slot=tuple(place_replicas(slot_count, hosts, replicas)),
        term_of_slot=ones,
        epoch_of_slot=ones,
    )


def restored_routing(routing: RoutingTable, plan: RestorePlan) -> RoutingTable:
    """Return a first routing table whose slots come from a checkpoint: with their masters only.

    A backup that begins empty would not have what its master loads.
    """
    sets = [SlotReplicas(replicas.master) for replicas in routing.replicas_of_slot]
    slots = plan.slots or tuple(range(routing.slot_count))
    restoring = Restoring(plan.url, plan.checkpoint, slots)
    return replace(routing, replicas_of_slot=tuple(sets), restoring=restoring)


def place_replicas(slot_count: int, hosts: Sequence[str], replicas: int) -> list[SlotReplicas]:
    """Deal masters and copies to nodes.

    The shuffled slots are dealt to the nodes as masters in turn. In each round the backups are
    the nodes that follow the master at some distance in a circle of the nodes, another distance in
    each round: so each round gives each node as many copies, and what one node is master of
    has its backups on all the others, which then share its load if it fails. In the circle,
    nodes of one host are apart. In a last round that is not whole, and where a backup would
    share a host with another copy all the same, the node that holds least is taken, on another
    host if there is one.

    Args:
        slot_count: The number of slots.
        hosts: The host of each node.
        replicas: Copies wanted; fewer if there are fewer nodes.

    Returns:
        For each slot its nodes, by their place in ``hosts``.
    """
    count = len(hosts)
    copies = min(replicas, count)
    circle = _circle(hosts)
    # The masters are counted before any backup is placed, the backups as they are.
    load = np.zeros(count, dtype=np.int64)
    load[circle] = (slot_count + count - 1 - np.arange(count)) // count
    whole_rounds = slot_count // count
    host_count = len(set(hosts))
    host_numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    host_of = np.array([host_numbers[host] for host in hosts])
    placed: list[SlotReplicas] = [SlotReplicas(0)] * slot_count
    for position, slot in enumerate(shuffled_slots(slot_count).tolist()):
        turn, at = divmod(position, count)
        held = [circle[at]]
        for nth in range(1, copies):
            distance = 1 + (turn + nth - 1) % (count - 1)
            number = circle[(at + distance) % count]
            used = {int(host_of[one]) for one in held}
            shared = int(host_of[number]) in used and len(used) < host_count
            if turn == whole_rounds or number in held or shared:
                number = _least_loaded(load, host_of, held, used)
            held.append(number)
            load[number] += 1
        placed[slot] = SlotReplicas(held[0], tuple(held[1:]))
    return placed


def _circle(hosts: Sequence[str]) -> list[int]:
    """Return the nodes in an order in which those of one host are far apart."""
    seen: Counter[str] = Counter()
    keys = []
    totals = Counter(hosts)
    for number, host in enumerate(hosts):
        keys.append(((seen[host] + 0.5) / totals[host], number))
        seen[host] += 1
    return [number for _, number in sorted(keys)]


def _least_loaded(
    load: np.ndarray, host_of: np.ndarray, held: Sequence[int], used: set[int]
) -> int:
    candidates = ~np.isin(host_of, list(used))
    if not candidates.any():
        candidates = np.ones(len(load), dtype=np.bool_)
        candidates[list(held)] = False
    return int(np.argmin(np.where(candidates, load, np.iinfo(np.int64).max)))


def shuffled_slots(slot_count: int) -> NDArray[np.int64]:
    """Return the slots in the fixed order in which they are dealt to nodes.

    A node spreads its slots over locks or threads by some simple rule on the slot's number. Dealt
    in plain order to two nodes, one node would get the even slots only, and in ranges the lower
    half only, so that for one rule or the other half of its locks or threads had nothing to do.
    """
    return np.argsort(_mixed(np.arange(slot_count, dtype=np.uint64)), kind="stable")


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return well-mixed numbers, all different where ``numbers`` are."""
    mixed = numbers + _INCREMENT
    for shift, multiplier in zip(_SHIFTS[:2], _MULTIPLIERS, strict=True):
        mixed = (mixed ^ (mixed >> shift)) * multiplier
    return mixed ^ (mixed >> _SHIFTS[2])
