"""What a node that is about to stop waits for: others taking over what it is master of.

Pure: records in, a number out.
"""

from __future__ import annotations

from collections.abc import Mapping

from backstay.consensus.records import MemberRecord, RoutingTable
from backstay.consensus.records.plans import ResizePlan

__all__ = ["all_in_sync", "is_dismissed", "slots_to_hand_over"]


def slots_to_hand_over(
    routing: RoutingTable | None, members: Mapping[str, MemberRecord], instance: int
) -> int:
    """Return how many slots of a process another one could be master of at once.

    Args:
        routing: The routing table.
        members: The nodes with a living lease.
        instance: The process that is to stop.
    """
    if routing is None:
        return 0
    serving = {member.instance for member in members.values() if member.status == "serving"}
    heirs = {
        index for index, node in enumerate(routing.nodes) if node.instance in serving - {instance}
    }
    own = next(
        (index for index, node in enumerate(routing.nodes) if node.instance == instance), None
    )
    movable = {
        number
        for number, held in enumerate(routing.sets)
        if held.master == own and heirs.intersection(held.in_sync)
    }
    return sum(1 for number in routing.set_of_slot.tolist() if number in movable)


def all_in_sync(routing: RoutingTable | None, instance: int) -> bool:
    """Whether no replica on a process is still catching up."""
    if routing is None:
        return True
    catching_up = {index for held in routing.sets for index in held.catching_up}
    return all(routing.nodes[index].instance != instance for index in catching_up)


def is_dismissed(
    plan: ResizePlan | None, routing: RoutingTable | None, node_id: str, instance: int
) -> bool:
    """Whether a plan that is done wants a process to end, and it holds nothing any more."""
    if plan is None or routing is None or not plan.dismisses(node_id, instance):
        return False
    holders = {index for held in routing.sets for index in held.holders}
    return all(routing.nodes[index].instance != instance for index in holders)
