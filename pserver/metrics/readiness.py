"""When a node counts as ready: it serves, and once since its start no slot lacked a copy.

A rolling restart goes on to the next node when this one is ready. So ready means more than
serving: the copies that the restart took away are there again. Once ready, a node stays so while
it serves. Otherwise the loss of one node would take every other one out of service. It knows no
socket and no clock; it imports the records and counts.
"""

from __future__ import annotations

import numpy as np

from backstay.consensus import ClusterSnapshot
from backstay.consensus.records import NO_MASTER, MemberRecord, NodeStatus, RoutingTable
from backstay.consensus.records.plans import ResizePlan

__all__ = ["Readiness", "slots_to_wait_for"]


def slots_to_wait_for(
    routing: RoutingTable, members: list[MemberRecord], plan: ResizePlan | None = None
) -> int:
    """Return how many slots have fewer copies in sync than the nodes that are there could hold.

    A node that is starting counts: it is about to take its copies. A copy counts only on the very
    process that the routing table names: after a restart the table may still be the one before.

    Args:
        routing: The routing table.
        members: The nodes with a living lease.
        plan: The last plan: a node that it lets go, as a drain does, is to hold no copy.
    """
    holders = sum(
        member.status != "stopping"
        and not (plan is not None and plan.lets_go(member.node_id, member.instance))
        for member in members
    )
    wanted = min(routing.replicas, max(1, holders))
    instances = {member.instance for member in members}
    living = {n for n, node in enumerate(routing.nodes) if node.instance in instances}
    slots_of_set = np.bincount(routing.set_of_slot, minlength=len(routing.sets)).tolist()
    return sum(
        slots
        for replicas, slots in zip(routing.sets, slots_of_set, strict=True)
        if replicas.master == NO_MASTER or len(living.intersection(replicas.synced)) < wanted
    )


class Readiness:
    """Remembers that the node was ready."""

    def __init__(self) -> None:
        self._had_all_copies = False

    def notice(self, snapshot: ClusterSnapshot) -> None:
        """Take note of the records as they are now; called after each change."""
        if not self._had_all_copies and snapshot.routing is not None:
            self._had_all_copies = not _short(snapshot.routing, snapshot)

    def why_not(self, status: NodeStatus, snapshot: ClusterSnapshot) -> str:
        """Return why the node is not ready; empty if it is. Called on any thread.

        Args:
            status: What the node says about itself.
            snapshot: The records as the node sees them.
        """
        if status == "starting" and snapshot.trouble:
            return snapshot.trouble
        if status != "serving":
            return f"the node is {status}"
        if self._had_all_copies:
            return ""
        if snapshot.routing is None:
            return f"there is no routing table yet: {snapshot.health.reason or 'no controller'}"
        short = _short(snapshot.routing, snapshot)
        return f"slots with fewer copies in sync than wanted: {short}"


def _short(routing: RoutingTable, snapshot: ClusterSnapshot) -> int:
    return slots_to_wait_for(routing, list(snapshot.members.values()), snapshot.plan)
