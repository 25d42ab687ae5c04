"""The readable view of the routing table: one record for each replica of each slot."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from backstay.consensus.records import NO_MASTER, ReplicaStatus, RoutingTable, ShardRecord

__all__ = ["ReplicaKey", "ShardChanges", "shard_changes"]


class ReplicaKey(NamedTuple):
    """A slot, and the number of one of its replicas."""

    slot: int
    replica: int


class _Holder(NamedTuple):
    node: str
    instance: int
    status: ReplicaStatus


@dataclass(frozen=True)
class ShardChanges:
    """What to write so that the view says what the routing table says.

    Attributes:
        put: Records to write, ordered by slot and number.
        delete: Which records to delete, in order.
    """

    put: tuple[ShardRecord, ...]
    delete: tuple[ReplicaKey, ...]


def shard_changes(
    existing: Mapping[ReplicaKey, ShardRecord], routing: RoutingTable, *, time: float
) -> ShardChanges:
    """Return what has to change in the view.

    The replicas of a slot are numbered from 0 without a gap. One that is there keeps its number;
    only where one with a lower number has gone, the one with the highest takes its place.

    Args:
        existing: The view as it is.
        routing: What it is to show.
        time: Now; seconds since the epoch.
    """
    of_slot: dict[int, list[ShardRecord]] = {}
    for record in existing.values():
        of_slot.setdefault(record.slot, []).append(record)
    holders_of_set = [_holders(routing, number) for number in range(len(routing.sets))]
    put: list[ShardRecord] = []
    delete = [key for key in existing if key.slot >= routing.slot_count]
    for slot, number in enumerate(routing.set_of_slot.tolist()):
        holders = holders_of_set[number]
        old = of_slot.get(slot, ())
        put += _changed(slot, old, holders, routing.version, time)
        delete += [ReplicaKey(slot, one.replica) for one in old if one.replica >= len(holders)]
    return ShardChanges(tuple(put), tuple(sorted(delete)))


def _holders(routing: RoutingTable, number: int) -> list[_Holder]:
    """Return who holds the slots of one set, the master first."""
    held = routing.sets[number]
    roles: list[tuple[int, ReplicaStatus]] = [(one, "in_sync") for one in held.in_sync]
    roles += [(one, "catching_up") for one in held.catching_up]
    if held.master != NO_MASTER:
        roles.insert(0, (held.master, "master"))
    nodes = routing.nodes
    return [_Holder(nodes[one].node_id, nodes[one].instance, status) for one, status in roles]


def _changed(
    slot: int,
    old: Collection[ShardRecord],
    holders: Sequence[_Holder],
    version: int,
    time: float,
) -> list[ShardRecord]:
    """Return the records of one slot that differ from the old ones, ordered by number."""
    record_of = {(one.node, one.instance): one for one in old}
    known = [record_of.get((one.node, one.instance)) for one in holders]
    if len(old) == len(holders) and all(
        record is not None and record.replica < len(holders) and record.status == holder.status
        for record, holder in zip(known, holders, strict=True)
    ):
        return []
    kept = {one.replica for one in known if one is not None and one.replica < len(holders)}
    free = (number for number in range(len(holders)) if number not in kept)
    changed = []
    for holder, record in zip(holders, known, strict=True):
        if record is None:
            number = next(free)
            record = ShardRecord(
                slot=slot,
                replica=number,
                node=holder.node,
                instance=holder.instance,
                status=holder.status,
                created=time,
                modified=time,
                routing_version=version,
            )
            changed.append(record)
            continue
        number = record.replica if record.replica in kept else next(free)
        if (number, holder.status) != (record.replica, record.status):
            changed.append(
                replace(
                    record,
                    replica=number,
                    status=holder.status,
                    modified=time,
                    routing_version=version,
                )
            )
    return sorted(changed, key=lambda one: one.replica)
