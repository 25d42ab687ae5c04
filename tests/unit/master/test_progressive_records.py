"""Progressive metrics over deaths: whatever dies, each record that was trained counts once.

A real journal writes to a store in memory. Each batch has one record, whose predictions are in
buckets of its own, so that the counts tell how often each record was counted.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from backstay.consensus.records.jobs import MasterRecord
from backstay.consensus.store import Txn, TxnResult
from backstay.job.score_counts import BUCKETS, Scores
from backstay.job_engine import progressive
from backstay.job_engine.round_scores import Scored
from backstay.job_engine.values import Failure, LeasedTask
from backstay.job_spec import AlertSpec, JobSpec, ProgressiveSpec
from backstay.master.job import Job
from backstay.schedule.rounds import RoundId, RoundKind
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.job_records_of import (
    DURABLE_S,
    KEYS,
    Master,
    counting_spec,
    master_of,
    saved_progress,
)
from tests.unit.memory_nodes import run

RECORDS = 40
BATCHES = 4
TASKS = RECORDS // BATCHES
PASS = RoundId(RoundKind.TRAINING, 1)
WORKERS = ("w1", "w2", "w3")
WINDOW = 10


def spec_of(folder: Path, **fields: object) -> JobSpec:
    given: dict[str, object] = {
        "batch_size": 1,
        "progressive": ProgressiveSpec(window_examples=WINDOW, half_life_examples=0),
        **fields,
    }
    return counting_spec(folder, records=RECORDS, **given)


def logit(task: int, batch: int, attempt: int) -> float:
    """What an attempt predicts for a record; another one predicts something else."""
    return (task * BATCHES + batch - RECORDS / 2) / 8 + (attempt % 97) / 1000


def counted(job: Job) -> Counter[int]:
    """How often each record was counted, by the buckets of the predictions."""
    assert job.progressive is not None
    weights = job.progressive._all.decayed._weights.sum(axis=0)
    found: Counter[int] = Counter()
    for bucket in np.flatnonzero(weights):
        score = bucket / BUCKETS * 32 - 16
        found[math.floor(score * 8 + RECORDS / 2)] += int(weights[bucket])
    return found


def scores(task: int, first: int, end: int, attempt: int) -> Scores:
    found = Scores()
    logits = np.array([logit(task, batch, attempt) for batch in range(first, end)])
    found.all.add(logits, np.arange(first, end) % 2, logits=True)
    return found


@dataclass
class Work:
    """A lease as its worker knows it."""

    worker: str
    round: RoundId
    lease: LeasedTask
    acknowledged: int

    @property
    def first(self) -> int:
        return self.lease.acknowledged

    def told(self) -> tuple[RoundId, LeasedTask]:
        return self.round, self.lease._replace(acknowledged=self.acknowledged)

    def scored(self) -> Scored | None:
        if self.acknowledged == self.first:
            return None
        found = scores(self.lease.task, self.first, self.acknowledged, self.lease.attempt)
        return Scored(self.first, found.to_bytes())


class Limited(MemoryStore):
    """Takes so many transactions, and then none any more."""

    def __init__(self, backend: MemoryBackend, left: int) -> None:
        super().__init__(backend)
        self._left = left
        self.is_full = asyncio.Event()

    async def transaction(self, txn: Txn) -> TxnResult:
        if not self._left:
            self.is_full.set()
            await asyncio.Event().wait()
        self._left -= 1
        return await super().transaction(txn)


class Play:
    """Workers that do, lose and give back tasks, in an order that is drawn."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.works: dict[tuple[int, int], Work] = {}

    async def events(self, job: Job, master: Master, store: Limited) -> bool:
        """Let things happen until all is done (True) or the store takes no more."""
        is_full = asyncio.create_task(store.is_full.wait())
        try:
            ledger = job.rounds[PASS].ledger
            while ledger.counts.done < TASKS:
                # Calls of several workers wait for the same transactions.
                for _ in range(self.random.randint(1, 4)):
                    event = self.random.choice(
                        (self.assign, self.assign, self.work, self.work, self.renew, self.retry,
                         self.complete, self.complete, self.give_back, self.fail, self.die,
                         self.expire)
                    )  # fmt: skip
                    event(job, master)
                durable = asyncio.create_task(job.journal.durable(DURABLE_S))
                await asyncio.wait({durable, is_full}, return_when=asyncio.FIRST_COMPLETED)
                if not durable.done():
                    durable.cancel()
                    return False
                self.told(job)
            return True
        finally:
            is_full.cancel()
            with suppress(asyncio.CancelledError):
                await is_full

    def told(self, job: Job) -> None:
        """What is recorded is answered: who has leases hears of them with the next event."""
        for key, work in list(self.works.items()):
            if work.acknowledged < 0:
                self.works[key] = replace(work, acknowledged=work.first)

    def pick(self) -> Work | None:
        known = [work for work in self.works.values() if work.acknowledged >= 0]
        return self.random.choice(known) if known else None

    def assign(self, job: Job, master: Master) -> None:
        given = job.assign(self.random.choice(WORKERS))
        if given is not None:
            worker = next(
                one.worker
                for one in given.round.ledger.leases
                if (one.task.number, one.attempt) == given.lease[:2]
            )
            # Until it is recorded, its worker does not hear of it.
            self.works[given.lease[:2]] = Work(worker, given.round.id, given.lease, -1)

    def work(self, job: Job, master: Master) -> None:
        work = self.pick()
        if work is not None:
            work.acknowledged = min(BATCHES, work.acknowledged + self.random.randint(1, 3))

    def renew(self, job: Job, master: Master) -> None:
        work = self.pick()
        if work is None:
            return
        told, scored = work.told(), work.scored()
        if job.renew(work.worker, [told], scored={told: scored} if scored else {}):
            self.works.pop(work.lease[:2])

    def complete(self, job: Job, master: Master) -> None:
        work = self.pick()
        if work is None or work.acknowledged < BATCHES:
            return
        found = scores(work.lease.task, work.first, BATCHES, work.lease.attempt)
        job.complete(
            work.worker,
            work.round,
            work.told()[1],
            batches=BATCHES,
            examples=BATCHES,
            scores=found,
            scored_from=work.first,
        )
        # Now and then the answer is lost, and the call is repeated, perhaps to the next job master.
        if self.random.random() < 0.5:
            self.works.pop(work.lease[:2], None)

    def give_back(self, job: Job, master: Master) -> None:
        work = self.pick()
        if work is not None:
            job.give_back(work.worker, *work.told(), "a test", scored=work.scored())
            self.works.pop(work.lease[:2])

    def fail(self, job: Job, master: Master) -> None:
        work = self.pick()
        if work is not None:
            why = Failure("a test", work.worker)
            job.fail(work.worker, *work.told(), why, scored=work.scored())
            self.works.pop(work.lease[:2])

    def die(self, job: Job, master: Master) -> None:
        worker = self.random.choice(WORKERS)
        job.drop_worker(worker, "a test")
        self.works = {key: work for key, work in self.works.items() if work.worker != worker}

    def retry(self, job: Job, master: Master) -> None:
        job.retry_dead_letters([])

    def expire(self, job: Job, master: Master) -> None:
        master.now_s += job.task_lease_ttl_ms / 1000
        job.expire()


async def leader(backend: MemoryBackend) -> int:
    """The instance of the newest job master that had the leadership; 0: none."""
    found = await MemoryStore(backend).get(KEYS.master)
    return 0 if found is None else MasterRecord.from_json(found.value).instance


# The rare orders of writes need many of them.
SEEDS = [*range(20), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20, 200))]


@pytest.mark.parametrize("seed", SEEDS)
def test_each_record_counts_once_whoever_dies(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progressive, "TASKS_MAX", 1 + seed % 5)
    play = Play(seed)

    async def scenario(backend: MemoryBackend) -> None:
        spec = spec_of(tmp_path, max_task_retries=(1000, 1)[seed % 2])
        instance, over = 0, False
        while not over:
            instance += 1
            # The first ones die soon, in the middle of what an event has changed.
            limit = play.random.randint(6, 30) if instance < 12 else 10**9
            store = Limited(backend, limit)
            small = 1 + seed % 4
            master = Master(store, spec, instance, changes_max=small)
            opening = asyncio.create_task(master.open(replaces=await leader(backend)))
            is_full = asyncio.create_task(store.is_full.wait())
            await asyncio.wait({opening, is_full}, return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                over = await play.events(opening.result(), master, store)
            opening.cancel()
            is_full.cancel()
            with suppress(asyncio.CancelledError):
                await opening
            await master.kill()
            # What no worker was told, none has.
            play.works = {key: work for key, work in play.works.items() if work.acknowledged >= 0}
        last = await leader(backend)
        async with master_of(MemoryStore(backend), spec, instance + 1, replaces=last) as (_, job):
            assert job.progressive is not None
            shown = job.progressive.shown()
            assert shown["examples"] == RECORDS
            assert shown["decayed"]["examples"] == RECORDS
            assert counted(job) == dict.fromkeys(range(RECORDS), 1)
            await job.journal.durable(DURABLE_S)
            found = await MemoryStore(backend).range(KEYS.all_progressive)
            left = [item.key for item in found.items]
            assert sum("/counts/" in key for key in left) <= 1
            assert not any("/begun/" in key for key in left), "of tasks that are done"

    run(scenario)


async def train(job: Job, tasks: int) -> None:
    """Do so many tasks."""
    for _ in range(tasks):
        given = job.assign("w1")
        assert given is not None
        task, attempt, first = given.lease
        found = scores(task, first, BATCHES, attempt)
        job.complete(
            "w1", given.round.id, given.lease, batches=BATCHES, examples=BATCHES, scores=found,
            scored_from=first,
        )  # fmt: skip
        job.closed([(given.round.id.number, task)])
    await job.journal.durable(DURABLE_S)


def shown(job: Job) -> dict[str, object]:
    assert job.progressive is not None
    return job.progressive.shown()


def test_the_metrics_go_back_with_the_model(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store, spec = MemoryStore(backend), spec_of(tmp_path)
        async with master_of(store, spec, 1) as (_, job):
            await train(job, 4)
            saved, before = await saved_progress(store, job), shown(job)
            await train(job, 4)
            assert shown(job)["examples"] == 32
            assert len(shown(job)["windows"]) == 2  # type: ignore[arg-type]
            job.go_back(saved)
            job.advance()
            await job.journal.durable(DURABLE_S)
            after = shown(job)
            assert after["examples"] == 16
            assert after["windows"] == before["windows"]
            assert after["decayed"] == before["decayed"]
        # So it is for the next job master, and what is done again counts once.
        async with master_of(store, spec, 2, replaces=1) as (_, job):
            assert shown(job)["examples"] == 16
            await train(job, 6)
            assert shown(job)["examples"] == RECORDS
        async with master_of(store, spec, 3, replaces=2) as (_, job):
            assert shown(job)["examples"] == RECORDS
            job.go_back(None)
            assert shown(job)["examples"] == 0

    run(scenario)


def test_a_dead_letter_goes_back_with_the_scores_of_its_batches(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store = MemoryStore(backend)
        async with master_of(store, spec_of(tmp_path, max_task_retries=0), 1) as (_, job):
            given = job.assign("w1")
            assert given is not None
            work = Work("w1", given.round.id, given.lease, 3)
            why = Failure("a test", "w1")
            assert job.fail("w1", *work.told(), why, scored=work.scored())
            await job.journal.durable(DURABLE_S)
            saved = await saved_progress(store, job)
            job.go_back(saved)
            job.advance()
            await job.journal.durable(DURABLE_S)
        async with master_of(store, spec_of(tmp_path), 2, replaces=1) as (_, job):
            job.retry_dead_letters([])
            firsts = []
            for _ in range(TASKS):
                again = job.assign("w1")
                assert again is not None
                firsts.append(again.lease.acknowledged)
                task, attempt, first = again.lease
                found = scores(task, first, BATCHES, attempt)
                job.complete(
                    "w1", PASS, again.lease, batches=BATCHES, examples=BATCHES, scores=found,
                    scored_from=first,
                )  # fmt: skip
            assert sorted(firsts) == [0] * (TASKS - 1) + [3]
            assert counted(job) == dict.fromkeys(range(RECORDS), 1)

    run(scenario)


def test_a_checkpoint_without_metrics_is_one_of_a_job_that_had_none(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store = MemoryStore(backend)
        plain = spec_of(tmp_path, progressive=None)
        async with master_of(store, plain, 1) as (_, job):
            await train(job, 2)
            assert (await saved_progress(store, job)).progressive == {}
        # They may be asked for when the job goes on, and then begin there.
        async with master_of(store, spec_of(tmp_path), 2, replaces=1) as (_, job):
            await train(job, 2)
            assert shown(job)["examples"] == 8

    run(scenario)


def test_an_alert_stops_the_job_and_says_why(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store = MemoryStore(backend)
        rule = AlertSpec(metric="auc", above=0.1, action="stop")
        async with master_of(store, spec_of(tmp_path, alerts=(rule,)), 1) as (_, job):
            await train(job, 3)
            assert job.ended is not None
            state, reason = job.ended
            assert state == "stopped"
            assert reason.startswith("alert: auc above 0.1 for 1 window (")
        # As after `jobs stop`, the same command goes on.
        async with master_of(store, spec_of(tmp_path), 2, replaces=1) as (_, job):
            assert not job.is_over
            await train(job, 7)
            assert shown(job)["examples"] == RECORDS

    run(scenario)


def test_a_window_ends_by_its_time_while_nothing_is_done(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store = MemoryStore(backend)
        timed = ProgressiveSpec(window_examples=0, window_s=60.0)
        rule = AlertSpec(metric="examples", below=1, for_windows=2, action="stop")
        spec = spec_of(tmp_path, progressive=timed, alerts=(rule,))
        async with master_of(store, spec, 1) as (master, job):
            await train(job, 2)
            for _ in range(2):
                master.now_s += 60.0
                job.expire()
                assert not job.is_over
            master.now_s += 60.0
            job.expire()
            assert job.ended == (
                "stopped", "alert: examples below 1 for 2 windows (0 in the last)"
            )  # fmt: skip

    run(scenario)
