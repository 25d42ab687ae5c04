"""A job master dies between two groups of what it writes: the schedule is never behind."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from backstay.consensus.store import Txn, TxnResult
from backstay.errors import StoreUnavailable
from backstay.job_engine.values import Failure
from backstay.job_spec import DataSpec, JobSpec
from backstay.master.job import Job
from backstay.schedule.rounds import RoundId
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.job_records_of import KEYS, Master, counting_spec, master_of
from tests.unit.memory_nodes import run

DURABLE_S = 5.0
TASKS = 4
# Each of these jobs takes more transactions than that.
DEATHS_MIN = 12
KEPT = {"journal", "master", "shard_counts", "shards", "spec", "state"}


class Mortal(MemoryStore):
    """Dies after so many transactions; before each, the job master does its due work."""

    def __init__(self, backend: MemoryBackend, transactions: int) -> None:
        super().__init__(backend)
        self._left = transactions
        self.died = asyncio.Event()
        self.meanwhile: Callable[[], object] = lambda: None

    async def transaction(self, txn: Txn) -> TxnResult:
        if self._left <= 0:
            self.died.set()
            await asyncio.Event().wait()
        self._left -= 1
        self.meanwhile()
        return await super().transaction(txn)


class Worker:
    """Does tasks; those of ``fails`` go wrong. Keeps what it was told is recorded."""

    def __init__(self, fails: set[tuple[str, int]]) -> None:
        self.fails = fails
        self.told: Counter[tuple[str, int]] = Counter()
        self.worked: set[tuple[str, int]] = set()

    async def work(self, job: Job) -> None:
        # What a process of that name held before is lost.
        job.drop_worker("w1", "it begins anew")
        while not job.is_over:
            given = job.assign("w1")
            await job.journal.durable(DURABLE_S)
            if given is None:
                job.closed(job.streams_to_close("w1"))
                job.advance()
                continue
            which = str(given.round.id), given.lease.task
            if which in self.fails:
                job.fail("w1", given.round.id, given.lease, Failure("bad", "w1"))
                await job.journal.durable(DURABLE_S)
                continue
            self.worked.add(which)
            _, is_new = job.complete("w1", given.round.id, given.lease, batches=2, examples=4)
            await job.journal.durable(DURABLE_S)
            self.told[which] += is_new
            if which[0].startswith("training"):
                job.closed([(given.round.id.number, given.lease.task)])
        job.closed(job.streams_to_close("w1"))
        job.advance()
        await job.journal.durable(DURABLE_S)


async def live(master: Master, store: Mortal, worker: Worker, instance: int) -> Job:
    job = await master.open(replaces=instance - 1)
    store.meanwhile = job.advance
    await worker.work(job)
    return job


async def live_and_die(backend: MemoryBackend, spec: JobSpec, worker: Worker, *ways: int) -> bool:
    """Be the first job master for so many transactions; return whether it died before the end."""
    lifetime, changes_max = ways
    store = Mortal(backend, lifetime)
    master = Master(store, spec, 1, changes_max=changes_max)
    living = asyncio.create_task(live(master, store, worker, 1))
    dying = asyncio.create_task(store.died.wait())
    await asyncio.wait({living, dying}, return_when=asyncio.FIRST_COMPLETED)
    has_died = not living.done()
    for task in (living, dying):
        task.cancel()
        with suppress(asyncio.CancelledError, StoreUnavailable):
            await task
    await master.kill()
    return has_died


def job_of(kind: str, folder: Path) -> JobSpec:
    spec = counting_spec(folder, records=4 * TASKS, epochs=2, max_task_retries=0)
    if kind == "prediction":
        data = DataSpec(paths=(str(folder / "data.csv"),))
        return counting_spec(folder, training=None, prediction=data)
    return spec


@pytest.mark.parametrize("changes_max", [1, 2, 3])
@pytest.mark.parametrize("kind", ["training", "prediction"])
def test_what_was_told_is_never_done_again(tmp_path: Path, kind: str, changes_max: int) -> None:
    spec = job_of(kind, tmp_path)
    has_died = True
    lifetime = 3
    while has_died:
        lifetime += 1
        worker = Worker(set())

        async def scenario(
            backend: MemoryBackend, lifetime: int = lifetime, worker: Worker = worker
        ) -> None:
            nonlocal has_died
            has_died = await live_and_die(backend, spec, worker, lifetime, changes_max)
            async with master_of(MemoryStore(backend), spec, 2, replaces=1) as (_, job):
                await worker.work(job)
                assert job.state.state == "done"
                left = (await MemoryStore(backend).range(KEYS.root)).values()
                assert {key.split("/")[2] for key in left} == KEPT, lifetime

        run(scenario)
        assert set(worker.told.values()) == {1}, lifetime
    assert lifetime > DEATHS_MIN


@pytest.mark.parametrize("changes_max", [1, 2, 3])
def test_a_task_that_failed_is_dead_lettered_or_tried_again_and_never_forgotten(
    tmp_path: Path, changes_max: int
) -> None:
    spec = job_of("training", tmp_path)
    failing = {("training-1", 2), ("training-2", 0)}
    has_died = True
    lifetime = 3
    while has_died:
        lifetime += 1
        done: set[tuple[str, int]] = set()

        async def scenario(
            backend: MemoryBackend,
            lifetime: int = lifetime,
            done: set[tuple[str, int]] = done,
        ) -> None:
            nonlocal has_died
            worker = Worker(failing)
            has_died = await live_and_die(backend, spec, worker, lifetime, changes_max)
            async with master_of(MemoryStore(backend), spec, 2, replaces=1) as (_, job):
                await worker.work(job)
                assert job.state.state == "failed"
                dead_letters = {
                    (str(name), task)
                    for name in job.rounds
                    for task in job.rounds[name].ledger.dead_letters
                }
                assert dead_letters == failing, lifetime
            worker.fails = set()
            async with master_of(MemoryStore(backend), spec, 3, replaces=2) as (_, job):
                await worker.work(job)
                assert job.state.state == "done"
            done.update(worker.worked)

        run(scenario)
        assert {(f"training-{number}", task) for number in (1, 2) for task in range(TASKS)} <= done
    assert lifetime > DEATHS_MIN


def test_dead_lettered_tasks_that_are_put_back_are_tried_again_whenever_the_master_dies(
    tmp_path: Path,
) -> None:
    spec = job_of("training", tmp_path)
    for lifetime in range(12):

        async def scenario(backend: MemoryBackend, lifetime: int = lifetime) -> None:
            worker = Worker({("training-1", 2)})
            async with master_of(MemoryStore(backend), spec, 1) as (_, job):
                while job.schedule.passes_over == 0:
                    given = job.assign("w1")
                    assert given is not None
                    which = str(given.round.id), given.lease.task
                    if which in worker.fails:
                        job.fail("w1", given.round.id, given.lease, Failure("bad", "w1"))
                    else:
                        job.complete(
                            "w1",
                            given.round.id,
                            given.lease,
                            batches=1,
                            examples=4,
                        )
                        job.closed([(1, given.lease.task)])
                    job.advance()
                await job.journal.durable(DURABLE_S)
            store = Mortal(backend, 10_000)
            second = Master(store, spec, 2, changes_max=1)
            job = await second.open(replaces=1)
            store._left = lifetime
            assert job.retry_dead_letters([]) == 1
            with suppress(asyncio.TimeoutError, StoreUnavailable):
                await job.journal.durable(0.02)
            await second.kill()
            worker.fails = set()
            async with master_of(MemoryStore(backend), spec, 3, replaces=2) as (_, job):
                await worker.work(job)
                if job.state.state == "failed":
                    assert 2 in job.rounds[RoundId.parse("training-1")].ledger.dead_letters
                else:
                    assert worker.told["training-1", 2] == 1

        run(scenario)
