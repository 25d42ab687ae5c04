"""What a plan asks for now: who is to leave, whether nodes are missing, when it is done.

A plan is followed from the records alone, as everything here: who leaves is looked at anew in each
decision, with those preferred that were chosen before, so that a node that dies in the middle
does not leave the cluster too small. Time comes from the caller, in any unit.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from backstay.consensus.records import MemberRecord, RoutingTable
from backstay.consensus.records.plans import LeavingNode, ResizePlan
from backstay.pserver.controller.inputs import ClusterRecords
from backstay.pserver.controller.routing_builder import RoutingBuilder, counted

__all__ = ["PlanWait", "choose_leaving", "followed", "leaving_of", "progressed"]


class PlanWait:
    """How long the plan that is there has been waiting for nodes."""

    def __init__(self, units_per_s: float = 1.0) -> None:
        """Begin with no plan.

        Args:
            units_per_s: How many of the caller's units of time are a second.
        """
        self._units_per_s = units_per_s
        self._plan_id = ""
        self._since = 0.0
        self._end: float | None = None

    def note(self, now: float, plan: ResizePlan | None) -> bool:
        """Take note of the plan, and return whether it has waited for longer than it is to."""
        if plan is None or plan.state != "waiting_for_nodes":
            self._plan_id, self._end = "", None
            return False
        if plan.plan_id != self._plan_id:
            self._plan_id, self._since = plan.plan_id, now
        self._end = self._since + plan.wait_s * self._units_per_s
        return now >= self._end

    def next_end(self, now: float) -> float | None:
        """Return after how long the wait is over; None if there is none."""
        return None if self._end is None else max(0.0, self._end - now)


def followed(records: ClusterRecords) -> ResizePlan | None:
    """Return the plan as this decision is to follow it."""
    plan = records.plan
    if plan is None or not plan.is_under_way or records.routing is None:
        return plan
    dead = records.gone | set(records.routing.gone)
    living = {name: one for name, one in records.members.items() if one.instance not in dead}
    if plan.kind != "resize":
        leaving = tuple(
            LeavingNode(one.node_id, _instance(living, one.node_id, one.instance))
            for one in plan.leaving
        )
        return replace(plan, leaving=leaving, state="moving")
    serving = {name: one for name, one in living.items() if one.status == "serving"}
    chosen = leaving_of(plan, serving, records.routing, bytes_of_slot=records.bytes_of_slot)
    stay = len(serving) - len(chosen)
    leaving = tuple(LeavingNode(name, serving[name].instance) for name in chosen)
    plan = replace(plan, leaving=leaving)
    if stay < plan.nodes:
        what = f"{stay} of {counted(plan.nodes, 'node')} serve"
        if records.plan_overdue:
            why = f"{what} after {plan.wait_s} s; start more nodes and ask again"
            return replace(plan, state="failed", reason=why, leaving=())
        why = f"waits for nodes: {what}"
        return replace(plan, state="waiting_for_nodes", reason=why, leaving=())
    if stay > plan.nodes:
        why = f"{len(serving)} nodes serve, and only {len(leaving)} of them may leave: the others "
        return replace(plan, state="failed", reason=why + "keep the cluster's store", leaving=())
    return replace(plan, state="moving")


def leaving_of(
    plan: ResizePlan,
    serving: Mapping[str, MemberRecord],
    routing: RoutingTable,
    *,
    bytes_of_slot: NDArray[np.uint64] | None = None,
) -> list[str]:
    """Return which nodes are to leave for a resize; never one that keeps the cluster's store.

    Args:
        plan: The resize.
        serving: The nodes that serve, by id.
        routing: Who holds what.
        bytes_of_slot: The size of each slot; None if it is not known.
    """
    if plan.numbered:
        # What ends them takes the highest numbers, so no other node may leave.
        return sorted(
            name
            for name, one in serving.items()
            if _number(name) >= plan.nodes and not one.keeps_store
        )
    return choose_leaving(
        serving,
        routing,
        len(serving) - plan.nodes,
        before={one.node_id for one in plan.leaving},
        bytes_of_slot=bytes_of_slot,
    )


def _number(node_id: str) -> int:
    """Return the number at the end of a node's name; -1: it has none, and stays."""
    digits = re.search(r"[0-9]+$", node_id)
    return -1 if digits is None else int(digits[0])


def choose_leaving(
    serving: Mapping[str, MemberRecord],
    routing: RoutingTable,
    count: int,
    *,
    before: Collection[str] = (),
    bytes_of_slot: NDArray[np.uint64] | None = None,
) -> list[str]:
    """Return which nodes are to leave, at most ``count``.

    Never one that keeps the cluster's store. The nodes that were chosen before come first; then one
    without which there are still enough hosts for the copies; then the one that holds least, so
    that little has to be moved; of equals the one that came last.

    Args:
        serving: The nodes that serve, by id.
        routing: Who holds what.
        count: How many.
        before: Ids of the nodes that were chosen before.
        bytes_of_slot: The size of each slot; None if it is not known.
    """
    place = {node.node_id: at for at, node in enumerate(routing.nodes)}
    copies = np.zeros(len(routing.nodes), dtype=np.int64)
    sizes = np.zeros(len(routing.nodes), dtype=np.float64)
    slots_of_set = np.bincount(routing.set_of_slot, minlength=len(routing.sets))
    bytes_of_set = np.bincount(
        routing.set_of_slot, weights=bytes_of_slot, minlength=len(routing.sets)
    )
    for number, held in enumerate(routing.sets):
        copies[list(held.holders)] += slots_of_set[number]
        sizes[list(held.holders)] += bytes_of_set[number]
    hosts = Counter(one.host or f"/{name}" for name, one in serving.items())
    left = {name: one for name, one in serving.items() if not one.keeps_store}
    chosen: list[str] = []

    def weight(name: str) -> tuple[bool, bool, int, float, int]:
        at = place.get(name)
        needed = hosts[left[name].host or f"/{name}"] == 1 and len(hosts) <= routing.replicas
        held = (0, 0.0) if at is None else (int(copies[at]), float(sizes[at]))
        return (name not in before, needed, *held, -len(place) if at is None else -at)

    while len(chosen) < count and left:
        name = min(sorted(left), key=weight)
        host = left.pop(name).host or f"/{name}"
        hosts[host] -= 1
        if not hosts[host]:
            del hosts[host]
        chosen.append(name)
    return sorted(chosen)


def progressed(plan: ResizePlan, builder: RoutingBuilder, *, at_rest: bool) -> ResizePlan:
    """Return a plan that is under way as it stands after a decision.

    Args:
        plan: The plan as the decision followed it.
        builder: The decision.
        at_rest: Whether there is nothing left that could be moved, or is on its way.
    """
    if plan.state != "moving":
        return plan
    held = [
        number for number, leaves in enumerate(builder.leaves) if leaves and builder.copies[number]
    ]
    left = _moves_left(builder)
    if at_rest and not held:
        reason = f"{plan.moves_total} copies moved" if plan.moves_total else "nothing had to move"
        return replace(plan, state="done", reason=reason, moves_left=0)
    total = max(plan.moves_total, left)
    reason = f"{left} of {total} copies are still to move"
    if at_rest:
        slots = counted(int(builder.copies[held].sum()), "slot")
        reason = (
            f"{_names(builder, held)} cannot give {slots} away: the others have no room, do not "
            f"reach each other, or are fewer than the {builder.wanted} copies; "
            "add a node, or cancel"
        )
        # It may last for ever: trainers that were to wait for it go on.
        plan = replace(plan, pause=False)
    return replace(plan, reason=reason, moves_total=total, moves_left=left)


def _moves_left(builder: RoutingBuilder) -> int:
    """Return how many copies are still to be in sync on nodes that stay."""
    staying = np.flatnonzero(builder.serving)
    if not staying.size:
        return 0
    synced = builder.copies - builder.copying
    share = len(builder.held) * min(builder.wanted, staying.size) // staying.size
    lacking = np.maximum(0, share - synced[staying]).sum()
    return int(max(lacking, synced[np.flatnonzero(builder.leaves)].sum()))


def _names(builder: RoutingBuilder, numbers: Sequence[int]) -> str:
    return ", ".join(sorted(builder.name(number) for number in numbers))


def _instance(living: Mapping[str, MemberRecord], node_id: str, known: int) -> int:
    member = living.get(node_id)
    return known if member is None else member.instance
