"""The readable view in the store: bounded writes, only what differs, times that stay."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from backstay.consensus.records import RoutingTable, ShardRecord
from backstay.consensus.store import Operation, Txn
from backstay.errors import StoreUnavailable
from backstay.pserver.leadership.shard_view import SHARDS_PER_WRITE, ShardView
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.controller_cluster import after, cluster, table, without
from tests.unit.memory_nodes import KEYS, run

SLOTS = 128


class Writer:
    """Writes as the controller does, and notes how much at a time."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.sizes: list[int] = []
        self.fails_at = 0

    async def write(self, operations: Sequence[Operation]) -> None:
        if len(self.sizes) + 1 == self.fails_at:
            self.fails_at = 0
            raise StoreUnavailable("nobody answers")
        self.sizes.append(len(operations))
        await self.store.transaction(Txn((), tuple(operations)))

    def view(self) -> ShardView:
        return ShardView(self.store, KEYS, self.write)


async def records(store: MemoryStore) -> dict[str, ShardRecord]:
    found = await store.range(KEYS.shards)
    return {item.key: ShardRecord.from_json(item.value) for item in found.items}


def tables() -> tuple[RoutingTable, RoutingTable]:
    """A table, and the one after a node was lost: some replicas go, some masters change."""
    before = cluster(nodes=3, slots=SLOTS)
    return table(before), table(after(without(before, 1)))


def test_each_write_is_bounded_and_holds_only_what_differs() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        first, second = tables()
        writer = Writer(MemoryStore(backend))
        view = writer.view()
        await view.read()
        await view.show(first, lambda: False)
        assert writer.sizes == [SHARDS_PER_WRITE, SHARDS_PER_WRITE, 2 * SLOTS - 200]
        await view.show(first, lambda: False)
        assert len(writer.sizes) == 3
        before = await records(writer.store)
        await view.show(second, lambda: False)
        changed = sum(writer.sizes[3:])
        assert 0 < changed < 2 * SLOTS
        assert max(writer.sizes) <= SHARDS_PER_WRITE
        # Another controller reads it, and has nothing to write: times are those of the first.
        now = await records(writer.store)
        successor = Writer(writer.store)
        other = successor.view()
        await other.read()
        await other.show(second, lambda: False)
        assert successor.sizes == []
        stayed = [key for key in now if key in before and now[key].node == before[key].node]
        assert stayed
        assert all(now[key].created == before[key].created for key in stayed)

    run(scenario)


def test_a_newer_table_ends_the_work_on_an_older_one() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        first, second = tables()
        writer = Writer(MemoryStore(backend))
        view = writer.view()
        await view.read()
        await view.show(first, lambda: bool(writer.sizes))
        assert writer.sizes == [SHARDS_PER_WRITE]
        await view.show(second, lambda: False)
        shown = await records(writer.store)
        holders = sum(len(held.holders) for held in second.replicas_of_slot)
        assert len(shown) == holders

    run(scenario)


def test_a_write_that_fails_is_made_again() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        first, _ = tables()
        writer = Writer(MemoryStore(backend))
        view = writer.view()
        await view.read()
        writer.fails_at = 2
        with pytest.raises(StoreUnavailable):
            await view.show(first, lambda: False)
        await view.show(first, lambda: False)
        assert len(await records(writer.store)) == 2 * SLOTS
        assert sum(writer.sizes) == 2 * SLOTS

    run(scenario)


def test_what_cannot_be_read_or_stands_under_another_key_goes() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        first, _ = tables()
        writer = Writer(MemoryStore(backend))
        await writer.store.put("pshards/0/ps-0", '{"id":"0/ps-0"}')
        stranger = ShardRecord(
            slot=5,
            replica=0,
            node="ps-0",
            instance=100,
            status="master",
            created=1.0,
            modified=1.0,
            routing_version=1,
        )
        await writer.store.put("pshards/999/0", stranger.to_json())
        view = writer.view()
        await view.read()
        await view.show(first, lambda: False)
        shown = await records(writer.store)
        assert len(shown) == 2 * SLOTS
        assert all(KEYS.shard(one.slot, one.replica) == key for key, one in shown.items())

    run(scenario)
