"""The steps of a job: each acknowledged batch once, through deaths of job masters and restores."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from backstay.job_engine.open_round import Assignment
from backstay.job_engine.progress import kept_job
from backstay.job_engine.values import LeasedTask
from backstay.job_spec import JobSpec
from backstay.master.job import Job
from backstay.pserver.checkpoints.jobs import JOBS_PROGRESS, progress_of_jobs
from backstay.schedule.rounds import RoundId
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.job_records_of import KEYS, counting_spec, master_of
from tests.unit.memory_nodes import run

DURABLE_S = 5.0
# Of a task: 4 records, one a batch.
BATCHES = 4
PASS = RoundId.parse("training-1")


def spec_of(folder: Path, **fields: object) -> JobSpec:
    return counting_spec(folder, batch_size=1, **fields)  # type: ignore[arg-type]


async def take(job: Job, worker: str) -> LeasedTask:
    given = job.assign(worker)
    assert isinstance(given, Assignment)
    await job.journal.durable(DURABLE_S)
    return given.lease


async def finish(job: Job, worker: str, lease: LeasedTask, batches: int = BATCHES) -> None:
    counts, _ = job.complete(worker, PASS, lease, batches=batches, examples=batches)
    assert counts
    await job.journal.durable(DURABLE_S)


def told(job: Job, worker: str, lease: LeasedTask, batches: int) -> None:
    assert job.renew(worker, [(PASS, lease._replace(acknowledged=batches))]) == []


def test_what_is_under_way_when_a_master_dies_is_not_counted_again(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store, spec = MemoryStore(backend), spec_of(tmp_path, max_steps=9)
        async with master_of(store, spec, 1) as (_, job):
            slow, fast = await take(job, "slow"), await take(job, "fast")
            told(job, "slow", slow, 3)
            # The state is written with these three in it, the lease without them.
            await finish(job, "fast", fast)
            assert job.schedule.steps == 3 + BATCHES
        for instance in (2, 3):
            async with master_of(store, spec, instance, replaces=instance - 1) as (_, job):
                told(job, "slow", slow, 3)
                assert job.schedule.steps == 3 + BATCHES
                assert job.schedule.open_rounds == (PASS,), "training ended before its most steps"
        async with master_of(store, spec, 4, replaces=3) as (_, job):
            told(job, "slow", slow, 3)
            last = await take(job, "fast")
            told(job, "fast", last, 1)
            assert job.schedule.open_rounds == (PASS,)
            told(job, "fast", last, 2)
            assert "max_steps: 9" in job.schedule.reason
            assert job.schedule.steps == 9

    run(scenario)


def test_batches_that_were_given_back_stay_counted(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store, spec = MemoryStore(backend), spec_of(tmp_path)
        async with master_of(store, spec, 1) as (_, job):
            lease = await take(job, "w1")
            job.give_back("w1", PASS, lease._replace(acknowledged=3), "it is told to end")
            await job.journal.durable(DURABLE_S)
        async with master_of(store, spec, 2, replaces=1) as (_, job):
            assert job.schedule.steps == 3
            again = await take(job, "w2")
            assert (again.task, again.acknowledged) == (lease.task, 3)
            told(job, "w2", again, 3)
            assert job.schedule.steps == 3
        async with master_of(store, spec, 3, replaces=2) as (_, job):
            await finish(job, "w2", again)
            assert job.schedule.steps == BATCHES

    run(scenario)


def test_a_speculative_attempt_counts_nothing_of_its_own(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store = MemoryStore(backend)
        spec = spec_of(
            tmp_path, records_per_task=40, straggler_min_s=0.0, task_lease_ttl_ms=600_000
        )
        async with master_of(store, spec, 1) as (master, job):
            first = await take(job, "w1")
            told(job, "w1", first, 5)
            master.now_s += 1.0
            speculative = await take(job, "w2")
            assert (speculative.task, speculative.acknowledged) == (first.task, 5)
            told(job, "w2", speculative, 7)
            told(job, "w1", first, 6)
            assert job.schedule.steps == 7
            await finish(job, "w1", first, 40)
            assert job.renew("w2", [(PASS, speculative._replace(acknowledged=9))]) != []
            assert job.schedule.steps == 40

    run(scenario)


def test_damaged_records_are_no_steps(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store, spec = MemoryStore(backend), spec_of(tmp_path, max_bad_records=9)
        async with master_of(store, spec, 1) as (_, job):
            await finish(job, "w1", await take(job, "w1"), BATCHES - 3)
            await finish(job, "w1", await take(job, "w1"))
        async with master_of(store, spec, 2, replaces=1) as (_, job):
            assert job.schedule.steps == 2 * BATCHES - 3

    run(scenario)


@pytest.mark.parametrize("passes_before", [0, 1])
def test_steps_go_back_with_a_restore(tmp_path: Path, passes_before: int) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store, spec = MemoryStore(backend), spec_of(tmp_path, epochs=2, records_per_task=20)
        async with master_of(store, spec, 1) as (_, job):
            for _ in range(2 * passes_before):
                given = job.assign("w1")
                assert given is not None
                job.complete("w1", given.round.id, given.lease, batches=20, examples=20)
                job.closed([(given.round.id.number, given.lease.task)])
                job.advance()
            current = RoundId(PASS.kind, 1 + passes_before)
            leased = job.assign("w1")
            assert leased is not None
            assert leased.round.id == current
            job.renew("w1", [(current, leased.lease._replace(acknowledged=11))])
            await job.journal.durable(DURABLE_S)
            assert job.schedule.steps == 40 * passes_before + 11
            kept = json.loads(json.dumps(await progress_of_jobs(store, 0, 0)))
            records = kept_job(kept[JOBS_PROGRESS], KEYS.job)
            assert records is not None
            progress = records.progress(job.tables)
            job.complete("w1", current, leased.lease, batches=20, examples=20)
            assert job.schedule.steps == 40 * passes_before + 20
            job.go_back(progress)
            job.advance()
            # What was under way is done again, and counts when it is told.
            assert job.schedule.steps == 40 * passes_before
            again = job.assign("w2")
            assert again is not None
            await job.journal.durable(DURABLE_S)
            job.renew("w2", [(current, again.lease._replace(acknowledged=11))])
            assert job.schedule.steps == 40 * passes_before + 11
        async with master_of(store, spec, 2, replaces=1) as (_, job):
            assert job.schedule.steps == 40 * passes_before

    run(scenario)


def test_an_evaluation_that_was_due_is_not_due_again_after_a_death(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store = MemoryStore(backend)
        data = spec_of(tmp_path).training
        spec = replace(spec_of(tmp_path), validation=data, evaluation_every_steps=5)
        async with master_of(store, spec, 1) as (_, job):
            slow, fast = await take(job, "slow"), await take(job, "fast")
            told(job, "slow", slow, 2)
            await finish(job, "fast", fast)
            assert str(job.schedule.open_rounds[0]) == "evaluation-1"
            job.schedule.round_over(job.schedule.open_rounds[0])
            job.stage_state()
            await job.journal.durable(DURABLE_S)
        async with master_of(store, spec, 2, replaces=1) as (_, job):
            told(job, "slow", slow, 2)
            assert job.schedule.steps == 6
            assert job.schedule.open_rounds == (PASS,)

    run(scenario)
