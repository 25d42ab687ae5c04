"""The readable view in the store: bounded writes, only what differs, times that stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from backstay.consensus.records import NO_MASTER, RoutingTable, ShardRecord, SlotReplicas
from backstay.consensus.store import Operation, Txn
from backstay.errors import StoreUnavailable
from backstay.pserver.controller import ClusterRecords
from backstay.pserver.leadership.shard_view import SHARDS_PER_WRITE, ShardView, shard_records
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.controller_cluster import after, cluster, table, with_slots, without
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


def shown(
    view: Sequence[ShardRecord], records: ClusterRecords | RoutingTable, *, time: float
) -> list[ShardRecord]:
    routing = records if isinstance(records, RoutingTable) else table(records)
    return shard_records(view, routing, time=time)


def test_the_view_of_shards_follows_the_routing() -> None:
    before = cluster(nodes=2, slots=2)
    view = shown([], before, time=10.5)
    assert [(one.slot, one.replica) for one in view] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [one.status for one in view] == ["master", "in_sync", "master", "in_sync"]
    assert shown(view, before, time=20.0) == view
    # In one slot the master stays, in the other its backup takes over and its number, too.
    now = shown(view, after(without(before, 1)), time=20.0)
    assert [(one.slot, one.replica) for one in now] == [(0, 0), (1, 0)]
    (promoted,) = (one for one in now if one not in view)
    assert promoted == ShardRecord(
        slot=promoted.slot,
        replica=0,
        node="ps-0",
        instance=100,
        status="master",
        created=10.5,
        modified=20.0,
        routing_version=2,
    )


def holding_one_slot(nodes: int) -> ClusterRecords:
    """Return a cluster of which one slot is held by the first two nodes and the rest by none."""
    nobody = SlotReplicas(NO_MASTER)
    records = cluster(nodes=nodes, slots=4)
    return with_slots(records, [SlotReplicas(0, (1,)), nobody, nobody, nobody])


def one_slot(records: ClusterRecords, held: SlotReplicas) -> RoutingTable:
    return table(with_slots(records, [held, *table(records).replicas_of_slot[1:]]))


def test_a_replica_keeps_its_number_and_times_while_others_come_and_go() -> None:
    three = holding_one_slot(3)
    held = [SlotReplicas(0, (1,)), SlotReplicas(1, (0,)), SlotReplicas(1, (0,), (2,))]
    # Roles change, a third copy comes, and the first one goes.
    held.append(SlotReplicas(1, (2,)))
    view: list[ShardRecord] = []
    seen = []
    for time, one in enumerate(held):
        view = shown(view, one_slot(three, one), time=float(time))
        seen.append([(r.replica, r.node, r.status, r.created, r.modified) for r in view])
    assert [sorted(one) for one in seen] == [
        [(0, "ps-0", "master", 0.0, 0.0), (1, "ps-1", "in_sync", 0.0, 0.0)],
        [(0, "ps-0", "in_sync", 0.0, 1.0), (1, "ps-1", "master", 0.0, 1.0)],
        [
            (0, "ps-0", "in_sync", 0.0, 1.0),
            (1, "ps-1", "master", 0.0, 1.0),
            (2, "ps-2", "catching_up", 2.0, 2.0),
        ],
        [(0, "ps-2", "in_sync", 2.0, 3.0), (1, "ps-1", "master", 0.0, 1.0)],
    ]


def test_a_process_that_was_started_again_holds_a_new_replica() -> None:
    before = holding_one_slot(2)
    view = shown([], before, time=1.0)
    routing = table(before)
    nodes = tuple(replace(one, instance=one.instance + 900) for one in routing.nodes)
    now = shown(view, replace(routing, nodes=nodes), time=2.0)
    assert [(one.replica, one.instance, one.created) for one in now] == [
        (0, nodes[0].instance, 2.0),
        (1, nodes[1].instance, 2.0),
    ]


def test_a_view_that_was_written_in_part_is_brought_to_the_routing() -> None:
    """The controller may end between two writes; one replica then has two numbers."""
    three = holding_one_slot(3)
    stored: dict[int, ShardRecord] = {}
    for held in (SlotReplicas(1, (0,), (2,)), SlotReplicas(1, (2,))):
        routing = one_slot(three, held)
        # What is no longer there has not been deleted.
        now = shown([*stored.values()], routing, time=3.0)
        stored |= {one.replica: one for one in now}
    assert len(stored) == 3
    now = shown([*stored.values()], routing, time=4.0)
    assert sorted(one.replica for one in now) == [0, 1]
    assert {one.node: one.status for one in now} == {"ps-1": "master", "ps-2": "in_sync"}
    assert shown(now, routing, time=5.0) == now
