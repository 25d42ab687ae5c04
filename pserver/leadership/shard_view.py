"""The readable view of the routing table, ``pshards/``, as the controller keeps it in the store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from backstay.consensus.records import RoutingTable, ShardRecord
from backstay.consensus.records.keys import Keys
from backstay.consensus.store import CoordinationStore, Delete, Operation, Put
from backstay.errors import InvalidRequest
from backstay.pserver.controller import ReplicaKey, shard_changes
from backstay.pserver.membership.departures import now_s

__all__ = ["ShardView"]

# A routing table may change every replica of every slot. Each write holds so many records, and
# the next one begins when it is confirmed: other writes come in between.
SHARDS_PER_WRITE = 100


class _Step(NamedTuple):
    key: ReplicaKey
    record: ShardRecord | None


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
        self._view: dict[ReplicaKey, ShardRecord] = {}
        self._unreadable: list[str] = []

    async def read(self) -> None:
        """Read what there is: records keep the times that an earlier controller gave them.

        Raises:
            StoreUnavailable: The store does not answer.
        """
        found = await self._store.range(self._keys.shards)
        self._view.clear()
        self._unreadable.clear()
        for item in found.items:
            try:
                record = ShardRecord.from_json(item.value)
            except InvalidRequest:
                # Damaged, or of another version. It goes, and is written anew where it belongs.
                self._unreadable.append(item.key)
                continue
            key = ReplicaKey(record.slot, record.replica)
            if item.key == self._keys.shard(*key):
                self._view[key] = record
            else:
                self._unreadable.append(item.key)

    async def show(self, routing: RoutingTable, is_void: Callable[[], bool]) -> None:
        """Write what differs from a routing table.

        Args:
            routing: What to show.
            is_void: Asked after each write: whether there is a newer table to show, so that the
                rest of this work is void.

        Raises:
            StoreUnavailable: The store does not answer; what was written stays noted.
        """
        while self._unreadable and not is_void():
            some = self._unreadable[:SHARDS_PER_WRITE]
            await self._write([Delete(key) for key in some])
            del self._unreadable[: len(some)]
        changes = await asyncio.to_thread(shard_changes, self._view, routing, time=now_s())
        steps = [
            *(_Step(ReplicaKey(one.slot, one.replica), one) for one in changes.put),
            *(_Step(key, None) for key in changes.delete),
        ]
        for start in range(0, len(steps), SHARDS_PER_WRITE):
            if is_void():
                return
            batch = steps[start : start + SHARDS_PER_WRITE]
            await self._write([self._operation(step) for step in batch])
            for key, record in batch:
                if record is None:
                    self._view.pop(key, None)
                else:
                    self._view[key] = record

    def _operation(self, step: _Step) -> Operation:
        name = self._keys.shard(*step.key)
        return Delete(name) if step.record is None else Put(name, step.record.to_json())
