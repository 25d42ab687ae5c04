"""The records of trainers: written in few transactions, gone in time, and only a node's own."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from backstay.consensus.records.trainers import TrainerRecord
from backstay.consensus.store import Txn, TxnResult
from backstay.errors import InvalidRequest, LimitExceeded, StoreUnavailable
from backstay.pserver.membership import trainer_registrations
from backstay.pserver.membership.trainer_registrations import (
    CHECK_S,
    REFRESH_S,
    TrainerRegistrations,
)
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.memory_nodes import KEYS, run

TTL_MS = 10_000


def trainer(number: int = 0, **changes: Any) -> TrainerRecord:
    record = TrainerRecord(
        trainer_id=f"host-{number}",
        host="host",
        address="10.0.0.1:5000",
        pid=number,
        job="ads",
        worker=f"w-{number}",
        start_time=1490184573.25,
        last_push=0.0,
        pushes=0,
        node="ps-0",
    )
    return replace(record, **changes)


class CountingStore(MemoryStore):
    """Counts transactions, and does not answer while told so."""

    def __init__(self, backend: MemoryBackend) -> None:
        super().__init__(backend)
        self.transactions = 0
        self.is_away = False

    async def transaction(self, txn: Txn) -> TxnResult:
        self.transactions += 1
        if self.is_away:
            raise StoreUnavailable("nobody answers")
        return await super().transaction(txn)


@dataclass
class Node:
    """A node's registrations, with a clock that the test moves."""

    store: CountingStore
    lease: int
    now_s: float = 0.0
    count: int = 0
    registrations: TrainerRegistrations = field(init=False)

    def __post_init__(self) -> None:
        self.registrations = TrainerRegistrations(
            self.store, KEYS, ttl_ms=TTL_MS, on_count=self._take_count, clock=lambda: self.now_s
        )

    def _take_count(self, count: int) -> None:
        self.count = count

    async def write(self) -> None:
        await self.registrations.write(self.lease)


async def node_on(backend: MemoryBackend) -> Node:
    store = CountingStore(backend)
    return Node(store, (await store.lease_grant(60_000)).id)


def with_node(work: Callable[[Node, MemoryBackend], Awaitable[None]]) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        await work(await node_on(backend), backend)

    run(scenario)


async def ids(node: Node) -> list[str]:
    return [one.trainer_id for one in await node.registrations.all()]


def test_the_record_leads_back_and_has_the_fields_of_the_docs() -> None:
    record = trainer(3, last_push=1490184600.0, pushes=7)
    assert TrainerRecord.from_json(record.to_json()) == record
    assert json.loads(record.to_json()) == {
        "id": "host-3",
        "host": "host",
        "address": "10.0.0.1:5000",
        "pid": 3,
        "job": "ads",
        "worker": "w-3",
        "status": "up",
        "start_time": 1490184573.25,
        "last_push": 1490184600.0,
        "pushes": 7,
        "node": "ps-0",
    }


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"trainer_id": "a/b"}, "id 'a/b' is not"),
        ({"trainer_id": ""}, "id '' is not"),
        ({"trainer_id": "x" * 129}, "is not 1 to 128"),
        ({"job": "j" * 256}, "job has more than 255 characters"),
        ({"pushes": -1}, "is no count"),
        ({"start_time": float("nan")}, "start_time nan is not"),
    ],
)
def test_what_a_trainer_must_not_write_into_the_store(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        trainer(**changes)


def test_many_trainers_are_written_in_few_transactions() -> None:
    async def scenario(node: Node, _backend: MemoryBackend) -> None:
        for number in range(500):
            node.registrations.register(trainer(number))
        await node.write()
        assert (node.store.transactions, node.count) == (5, 500)
        assert len(await ids(node)) == 500
        # Signs of life alone, also of trainers that push all the time, wait for their turn.
        for _ in range(int(REFRESH_S) - 1):
            node.now_s += 1
            for number in range(500):
                pushes = int(node.now_s) if number % 2 else 0
                node.registrations.register(trainer(number, pushes=pushes))
            await node.write()
        assert node.store.transactions == 5
        node.now_s += 1
        await node.write()
        assert node.store.transactions == 5 + 3

    with_node(scenario)


def test_a_first_push_is_told_soon_and_its_time_stays() -> None:
    async def scenario(node: Node, _backend: MemoryBackend) -> None:
        node.registrations.register(trainer())
        await node.write()
        node.registrations.register(trainer(pushes=4, last_push=100.0))
        await node.write()
        (found,) = await node.registrations.all()
        assert (found.pushes, found.last_push) == (4, 100.0)
        written = node.store.transactions
        # The same push, whose time comes out a second later by another beat.
        node.now_s += REFRESH_S
        node.registrations.register(trainer(pushes=4, last_push=101.0))
        await node.write()
        assert node.store.transactions == written
        assert [one.last_push for one in await node.registrations.all()] == [100.0]

    with_node(scenario)


def test_a_trainer_that_is_silent_is_gone_and_one_that_leaves_at_once() -> None:
    async def scenario(node: Node, _backend: MemoryBackend) -> None:
        for number in range(3):
            node.registrations.register(trainer(number))
        await node.write()
        node.registrations.deregister("host-0")
        node.registrations.deregister("nobody")
        await node.write()
        assert await ids(node) == ["host-1", "host-2"]
        node.now_s = TTL_MS / 1000
        node.registrations.register(trainer(2))
        await node.write()
        assert await ids(node) == ["host-1", "host-2"]
        node.now_s += 0.1
        await node.write()
        assert await ids(node) == ["host-2"]
        assert node.count == 1

    with_node(scenario)


def test_a_store_that_is_away_costs_nothing_but_time() -> None:
    async def scenario(node: Node, _backend: MemoryBackend) -> None:
        node.registrations.register(trainer(0))
        await node.write()
        node.store.is_away = True
        node.registrations.deregister("host-0")
        node.registrations.register(trainer(1))
        with pytest.raises(StoreUnavailable):
            await node.write()
        node.registrations.register(trainer(1))
        node.store.is_away = False
        await node.write()
        assert await ids(node) == ["host-1"]

    with_node(scenario)


def test_a_trainer_that_went_to_another_node_is_that_nodes() -> None:
    async def scenario(first: Node, backend: MemoryBackend) -> None:
        second = await node_on(backend)
        for number in range(3):
            first.registrations.register(trainer(number))
        await first.write()
        second.registrations.register(trainer(1, node="ps-1"))
        await second.write()
        # The first node hears no more of it; what it removes must not be the other's record.
        first.now_s = TTL_MS / 1000 + 1
        for number in (0, 2):
            first.registrations.register(trainer(number))
        await first.write()
        assert {one.trainer_id: one.node for one in await first.registrations.all()} == {
            "host-0": "ps-0",
            "host-1": "ps-1",
            "host-2": "ps-0",
        }
        assert first.count == 2
        # With the first node's lease go its records, and only those.
        await first.store.lease_revoke(first.lease)
        assert await ids(second) == ["host-1"]

    with_node(scenario)


def test_a_node_finds_out_that_its_record_was_replaced_by_one_from_before() -> None:
    async def scenario(node: Node, backend: MemoryBackend) -> None:
        late = await node_on(backend)
        node.registrations.register(trainer(0, node="ps-1"))
        node.registrations.register(trainer(1, node="ps-1"))
        await node.write()
        late.registrations.register(trainer(0))
        await late.write()
        node.now_s = CHECK_S
        for number in range(2):
            node.registrations.register(trainer(number, node="ps-1"))
        await node.write()
        await node.write()
        assert [one.node for one in await node.registrations.all()] == ["ps-1", "ps-1"]

    with_node(scenario)


def test_a_new_lease_brings_every_record_back() -> None:
    async def scenario(node: Node, _backend: MemoryBackend) -> None:
        node.registrations.register(trainer())
        await node.write()
        await node.store.lease_revoke(node.lease)
        assert await ids(node) == []
        node.lease = (await node.store.lease_grant(60_000)).id
        node.registrations.forget_written()
        await node.write()
        assert await ids(node) == ["host-0"]

    with_node(scenario)


def test_many_trainers_speak_less_often_and_may_be_silent_for_longer() -> None:
    async def scenario(node: Node, _backend: MemoryBackend) -> None:
        for number in range(1000):
            node.registrations.register(trainer(number))
        assert node.registrations.register(trainer(0)) == 2 * TTL_MS
        await node.write()
        node.now_s = TTL_MS / 1000 + 1
        await node.write()
        assert "host-0" in await ids(node)
        node.now_s = 2 * TTL_MS / 1000 + 1
        await node.write()
        assert await ids(node) == []

    with_node(scenario)


def test_a_node_hears_from_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_registrations, "TRAINERS_MAX", 2)

    async def scenario(node: Node, _backend: MemoryBackend) -> None:
        for number in range(2):
            node.registrations.register(trainer(number))
        node.registrations.register(trainer(0))
        with pytest.raises(LimitExceeded, match="ps-0 keeps the records of 2 trainers"):
            node.registrations.register(trainer(2))

    with_node(scenario)
