"""The journal of a job master: groups, fences, and transactions whose outcome is unknown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from backstay.consensus.records.keys import JobKeys
from backstay.consensus.store import OPERATIONS_MAX, Txn, TxnResult
from backstay.consensus.store.follow import Election
from backstay.errors import LeaseLost, NotJobMaster, StoreUnavailable
from backstay.master.journal import CHANGES_MAX, Journal
from backstay.tasks import end_tasks
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.memory_nodes import run

KEYS = JobKeys("counting")
LIMIT_S = 5.0


class Watched(MemoryStore):
    """Keeps what was written, and lets a transaction go wrong in a given way."""

    def __init__(self, backend: MemoryBackend) -> None:
        super().__init__(backend)
        self.written: list[Txn] = []
        self.faults: list[str] = []
        self.gone_wrong = asyncio.Event()
        self._late: list[Txn] = []

    async def transaction(self, txn: Txn) -> TxnResult:
        fault = self.faults.pop(0) if self.faults else ""
        if fault:
            self.gone_wrong.set()
        if fault == "lost":
            raise StoreUnavailable("the request was lost")
        if fault == "late":
            self._late.append(txn)
            raise StoreUnavailable("the request is on its way")
        result = await super().transaction(txn)
        if result.succeeded:
            self.written.append(txn)
        if fault == "unseen":
            raise StoreUnavailable("the answer was lost")
        for late in self._late:
            assert not (await super().transaction(late)).succeeded, "it came behind a later one"
        self._late.clear()
        return result


async def elect(store: MemoryStore, journal: Journal) -> None:
    lease = await store.lease_grant(60_000)
    await journal.open(await Election(store, KEYS.master).campaign("me", lease.id))


@asynccontextmanager
async def writing(journal: Journal) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(journal.run())
    try:
        yield task
    finally:
        await end_tasks(task)


def scenario(
    play: Callable[[Watched, Journal], Awaitable[None]], *, changes_max: int = CHANGES_MAX
) -> None:
    async def inside(backend: MemoryBackend) -> None:
        store = Watched(backend)
        journal = Journal(store, KEYS, instance=7, changes_max=changes_max)
        await elect(store, journal)
        store.written.clear()
        await play(store, journal)

    run(inside)


def test_what_many_callers_stage_at_once_goes_out_in_full_groups() -> None:
    async def play(store: Watched, journal: Journal) -> None:
        async def caller(number: int) -> None:
            journal.outbox.stage_text(f"jobs/counting/leased/a/{number}", str(number))
            await journal.durable(LIMIT_S)

        async with writing(journal):
            await asyncio.gather(*map(caller, range(300)))
        assert [len(txn.success) for txn in store.written] == [OPERATIONS_MAX] * 2 + [300 - 254 + 1]
        assert len((await store.range("jobs/counting/leased/")).items) == 300

    scenario(play)


def test_a_group_is_bounded_in_bytes_too() -> None:
    async def play(store: Watched, journal: Journal) -> None:
        for number in range(5):
            journal.outbox.stage_text(f"jobs/counting/shards/training/{number}", "x" * 600_000)
        async with writing(journal):
            await journal.durable(LIMIT_S)
        assert len(store.written) == 5

    scenario(play)


@pytest.mark.parametrize("fault", ["", "lost", "unseen"])
def test_what_is_to_go_first_is_written_before_all_that_waits_or_is_under_way(fault: str) -> None:
    async def play(store: Watched, journal: Journal) -> None:
        journal.outbox.stage_text("jobs/counting/a", "1")
        journal.outbox.stage_first("jobs/counting/z", lambda: "1")
        journal.outbox.stage_text("jobs/counting/b", "1")
        store.faults = [fault]
        async with writing(journal):
            if fault:
                await store.gone_wrong.wait()
            # ``a`` is sent again after a fault, with what it says by now.
            journal.outbox.stage_text("jobs/counting/a", "2")
            journal.outbox.stage_first("jobs/counting/y", lambda: "2")
            await journal.durable(LIMIT_S)
        places = [
            operation.key
            for txn in store.written
            for operation in txn.success
            if operation.key != KEYS.journal
        ]
        # A group has one record here; what an unseen transaction wrote is written again.
        assert places.index("jobs/counting/z") < places.index("jobs/counting/a")
        assert places.index("jobs/counting/y") < _last(places, "jobs/counting/a")
        assert set(places) == {f"jobs/counting/{name}" for name in "abyz"}

    scenario(play, changes_max=1)


def _last(places: list[str], key: str) -> int:
    return max(number for number, place in enumerate(places) if place == key)


def test_a_record_staged_many_times_is_written_once_as_it_is_then() -> None:
    async def play(store: Watched, journal: Journal) -> None:
        values: list[str] = []
        for value in range(1, 11):
            values.append(str(value))
            journal.outbox.stage("jobs/counting/state", lambda: values[-1])
        async with writing(journal):
            await journal.durable(LIMIT_S)
        assert len(store.written) == 1
        found = await store.get("jobs/counting/state")
        assert found is not None
        assert found.value == "10"

    scenario(play)


@pytest.mark.parametrize("fault", ["lost", "unseen", "late"])
def test_an_unknown_outcome_is_neither_lost_nor_does_it_undo_what_came_later(fault: str) -> None:
    async def play(store: Watched, journal: Journal) -> None:
        state = "before"
        journal.outbox.stage("jobs/counting/state", lambda: state)
        store.faults = [fault]
        async with writing(journal):
            waiting = asyncio.create_task(journal.durable(LIMIT_S))
            await store.gone_wrong.wait()
            state = "after"
            journal.outbox.stage("jobs/counting/state", lambda: state)
            await waiting
            await journal.durable(LIMIT_S)
            journal.outbox.stage_text("jobs/counting/leased/a/w", "{}")
            await journal.durable(LIMIT_S)
        found = await store.get("jobs/counting/state")
        assert found is not None
        assert found.value == "after"
        assert await store.get("jobs/counting/leased/a/w") is not None

    scenario(play)


def test_a_caller_is_told_when_the_store_does_not_answer_and_nothing_is_lost() -> None:
    async def play(store: Watched, journal: Journal) -> None:
        store.faults = ["lost"] * 3
        journal.outbox.stage_text("jobs/counting/state", "kept")
        async with writing(journal):
            with pytest.raises(StoreUnavailable, match="repeat the call"):
                await journal.durable(0.0)
            await journal.durable(LIMIT_S)
        found = await store.get("jobs/counting/state")
        assert found is not None
        assert found.value == "kept"

    scenario(play)


def test_a_deposed_master_writes_nothing_and_hears_why() -> None:
    async def play(store: Watched, journal: Journal) -> None:
        await store.delete(KEYS.master)
        other = Journal(store, KEYS, instance=8)
        await elect(store, other)
        before = await store.range("jobs/")
        journal.outbox.stage_text("jobs/counting/state", "of the deposed one")
        with pytest.raises(NotJobMaster):
            await asyncio.wait_for(journal.run(), LIMIT_S)
        assert await store.range("jobs/") == before
        journal.fail(NotJobMaster("deposed"))
        with pytest.raises(NotJobMaster):
            await journal.durable(LIMIT_S)

    scenario(play)


def test_a_key_that_was_lost_to_nobody_is_created_anew_and_nothing_staged_is_lost() -> None:
    async def play(store: Watched, journal: Journal) -> None:
        async with writing(journal):
            journal.outbox.stage_text("jobs/counting/state", "first")
            await journal.durable(LIMIT_S)
        await store.delete(KEYS.master)
        journal.outbox.stage_text("jobs/counting/state", "second")
        with pytest.raises(LeaseLost):
            await asyncio.wait_for(journal.run(), LIMIT_S)
        await elect(store, journal)
        async with writing(journal):
            await journal.durable(LIMIT_S)
        found = await store.get("jobs/counting/state")
        assert found is not None
        assert found.value == "second"

    scenario(play)


def test_who_lost_the_key_before_it_wrote_anything_goes_on() -> None:
    async def play(store: Watched, journal: Journal) -> None:
        async with writing(journal):
            journal.outbox.stage_text("jobs/counting/state", "of the one before")
            await journal.durable(LIMIT_S)
        await store.delete(KEYS.master)
        after = Journal(store, KEYS, instance=8)
        await elect(store, after)
        await store.delete(KEYS.master)
        await elect(store, after)
        async with writing(after):
            after.outbox.stage_text("jobs/counting/state", "of the one after")
            await after.durable(LIMIT_S)
        await store.delete(KEYS.master)
        with pytest.raises(NotJobMaster):
            await elect(store, journal)

    scenario(play)


def test_who_was_replaced_in_the_meantime_does_not_go_on_with_what_it_remembers() -> None:
    async def play(store: Watched, journal: Journal) -> None:
        async with writing(journal):
            journal.outbox.stage_text("jobs/counting/state", "mine")
            await journal.durable(LIMIT_S)
        await store.delete(KEYS.master)
        other = Journal(store, KEYS, instance=8)
        await elect(store, other)
        async with writing(other):
            other.outbox.stage_text("jobs/counting/state", "theirs")
            await other.durable(LIMIT_S)
        await store.delete(KEYS.master)
        with pytest.raises(NotJobMaster):
            await elect(store, journal)

    scenario(play)
