"""The readable view of the routing table: one record for each replica of each slot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from backstay.consensus.records import NO_MASTER, ReplicaStatus, RoutingTable, ShardRecord

__all__ = ["ShardChanges", "shard_changes"]

Key = tuple[int, str]


@dataclass(frozen=True)
class ShardChanges:
    """What to write so that the view says what the routing table says.

    Attributes:
        put: Records to write, ordered by slot and node.
        delete: (slot, node id) of the records to delete, in order.
    """

    put: tuple[ShardRecord, ...]
    delete: tuple[Key, ...]


def shard_changes(
    existing: Mapping[Key, ShardRecord], routing: RoutingTable, *, time: str
) -> ShardChanges:
    """Return what has to change in the view.

    Args:
        existing: The view as it is, by slot and node id.
        routing: What it is to show.
        time: Now, as ISO 8601 text for people.
    """
    wanted: dict[Key, ReplicaStatus] = {}
    for slot, held in enumerate(routing.replicas_of_slot):
        if held.master != NO_MASTER:
            wanted[slot, routing.nodes[held.master].node_id] = "master"
        for number in held.in_sync:
            wanted[slot, routing.nodes[number].node_id] = "in_sync"
        for number in held.catching_up:
            wanted[slot, routing.nodes[number].node_id] = "catching_up"
    put = []
    for (slot, node), status in wanted.items():
        old = existing.get((slot, node))
        if old is None:
            put.append(
                ShardRecord(slot, node, status, routing.version, time, routing.version, time)
            )
        elif old.status != status:
            put.append(
                replace(old, status=status, modified_version=routing.version, modified_time=time)
            )
    delete = sorted(key for key in existing if key not in wanted)
    return ShardChanges(tuple(sorted(put, key=lambda one: (one.slot, one.node))), tuple(delete))
