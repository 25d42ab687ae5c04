"""The readable view of the routing table, ``pshards/``, as the controller keeps it in the store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace

from backstay.consensus.records import NO_MASTER, ReplicaStatus, RoutingTable, ShardRecord
from backstay.consensus.records.keys import Keys
from backstay.consensus.store import CoordinationStore, Delete, Operation, Put
from backstay.errors import InvalidRequest
from backstay.pserver.membership.departures import now_s

__all__ = ["ShardView", "shard_records"]

# A routing table may change every replica of every slot. Each write holds so many records, and
# the next one begins when it is confirmed: other writes come in between.
SHARDS_PER_WRITE = 100


def shard_records(
    before: Iterable[ShardRecord], routing: RoutingTable, *, time: float
) -> list[ShardRecord]:
    """Return the records that a routing table is shown by, ordered by slot.

    The replicas of a slot are numbered from 0 without a gap. One that is there keeps its number;
    only where one with a lower number has gone, the one with the highest takes its place.

    Args:
        before: The records so far; what has not changed is among the result as it is.
        routing: What to show.
        time: Now; seconds since the epoch.
    """
    of_holder = {(one.slot, one.node, one.instance): one for one in before}
    holders_of_set = [_holders(routing, number) for number in range(len(routing.sets))]
    records = []
    for slot, number in enumerate(routing.set_of_slot.tolist()):
        holders = holders_of_set[number]
        held = [of_holder.get((slot, node, instance)) for node, instance, _ in holders]
        kept = {one.replica for one in held if one is not None and one.replica < len(holders)}
        free = (replica for replica in range(len(holders)) if replica not in kept)
        for (node, instance, status), old in zip(holders, held, strict=True):
            replica = old.replica if old is not None and old.replica in kept else next(free)
            if old is not None and (old.replica, old.status) == (replica, status):
                records.append(old)
                continue
            new = ShardRecord(
                slot=slot,
                replica=replica,
                node=node,
                instance=instance,
                status=status,
                created=time,
                modified=time,
                routing_version=routing.version,
            )
            records.append(new if old is None else replace(new, created=old.created))
    return records


def _holders(routing: RoutingTable, number: int) -> list[tuple[str, int, ReplicaStatus]]:
    """Return who holds the slots of one set: node, instance and status, the master first."""
    held = routing.sets[number]
    roles: list[tuple[int, ReplicaStatus]] = [(one, "in_sync") for one in held.in_sync]
    roles += [(one, "catching_up") for one in held.catching_up]
    if held.master != NO_MASTER:
        roles.insert(0, (held.master, "master"))
    nodes = routing.nodes
    return [(nodes[one].node_id, nodes[one].instance, status) for one, status in roles]


class ShardView:
    """Brings the view to what a routing table says, a bounded number of records at a time."""

    def __init__(
        self,
        store: CoordinationStore,
        keys: Keys,
        write: Callable[[Sequence[Operation]], Awaitable[None]],
    ) -> None:
        """Prepare.

        Args:
            store: The coordination store.
            keys: Where the records are.
            write: Writes as long as this node is the controller.
        """
        self._store = store
        self._keys = keys
        self._write = write
        # By key. None: damaged, of another version, or under a key that is not its own.
        self._shown: dict[str, ShardRecord | None] = {}

    async def read(self) -> None:
        """Read what there is: records keep the times that an earlier controller gave them.

        Raises:
            StoreUnavailable: The store does not answer.
        """
        stored = await self._store.range(self._keys.shards)
        self._shown = {item.key: self._record(item.key, item.value) for item in stored.items}

    async def show(self, routing: RoutingTable, is_void: Callable[[], bool]) -> None:
        """Write what differs from a routing table.

        Args:
            routing: What to show.
            is_void: Asked after each write: whether there is a newer table to show, so that the
                rest of this work is void.

        Raises:
            StoreUnavailable: The store does not answer; what was written stays noted.
        """
        changes = await asyncio.to_thread(self._changes, routing, now_s())
        for start in range(0, len(changes), SHARDS_PER_WRITE):
            if is_void():
                return
            some = changes[start : start + SHARDS_PER_WRITE]
            await self._write(
                [Delete(key) if one is None else Put(key, one.to_json()) for key, one in some]
            )
            for key, record in some:
                if record is None:
                    del self._shown[key]
                else:
                    self._shown[key] = record

    def _changes(self, routing: RoutingTable, time: float) -> list[tuple[str, ShardRecord | None]]:
        """Return the records to write by key; None: it is to be deleted."""
        before = [one for one in self._shown.values() if one is not None]
        wanted = {
            self._keys.shard(one.slot, one.replica): one
            for one in shard_records(before, routing, time=time)
        }
        changes: list[tuple[str, ShardRecord | None]] = [
            (key, one) for key, one in wanted.items() if self._shown.get(key) is not one
        ]
        return changes + [(key, None) for key in self._shown if key not in wanted]

    def _record(self, key: str, text: str) -> ShardRecord | None:
        try:
            record = ShardRecord.from_json(text)
        except InvalidRequest:
            return None
        return record if key == self._keys.shard(record.slot, record.replica) else None
