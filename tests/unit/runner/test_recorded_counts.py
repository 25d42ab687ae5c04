"""What an audit expects of each record follows from the job's records, however it ended."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from backstay.consensus.records.jobs import stream_job_of
from backstay.errors import JobRefused
from backstay.job_engine.values import Failure
from backstay.job_spec import DataSpec, EarlyStop, JobSpec
from backstay.master.job import Job
from backstay.runner.recorded_counts import RecordedCounts, recorded_counts
from backstay.schedule.rounds import RoundKind
from backstay.trainer.worker.audit import records_table
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.job_records_of import KEYS, counting_spec, master_of
from tests.unit.memory_nodes import run

DURABLE_S = 5.0
TASKS = 5
PER_TASK = 4


def job_of(folder: Path, **fields: object) -> JobSpec:
    values = {"epochs": 3, "audit": True, "max_task_retries": 0, "batch_size": 1, **fields}
    return counting_spec(folder, records=TASKS * PER_TASK, max_bad_records=1, **values)


async def counts_of(backend: MemoryBackend) -> RecordedCounts:
    found = (await MemoryStore(backend).range(KEYS.root)).values()
    return recorded_counts(KEYS, {key: item.value for key, item in found.items()})


class Worker:
    """Does tasks, and keeps how often each was done and begun."""

    def __init__(self, fails: set[tuple[int, int]] | None = None) -> None:
        self.fails = fails or set()
        self.done: Counter[int] = Counter()
        self.begun: set[tuple[int, int]] = set()

    async def work(self, job: Job, tasks: int = 10**6) -> None:
        while not job.is_over and tasks:
            given = job.assign("w1")
            if given is None:
                job.closed(job.streams_to_close("w1"))
                for opened in job.advance():
                    # It never gets better.
                    job.evaluated(opened, {"auc": 0.5})
                continue
            round_id, lease = given.round.id, given.lease
            if round_id.kind is not RoundKind.TRAINING:
                job.complete("w1", round_id, lease, batches=PER_TASK, examples=PER_TASK)
                continue
            tasks -= 1
            self.begun.add((round_id.number, lease.task))
            if (round_id.number, lease.task) in self.fails:
                job.fail("w1", round_id, lease, Failure("bad", "w1"))
                continue
            damaged = 1 if lease.task == 2 else 0
            counts, is_new = job.complete(
                "w1",
                round_id,
                lease,
                batches=PER_TASK,
                examples=PER_TASK,
                damaged=damaged,
            )
            assert counts
            self.done[lease.task] += is_new
            job.closed([(round_id.number, lease.task)])
            for opened in job.advance():
                job.evaluated(opened, {"auc": 0.5})
        job.closed(job.streams_to_close("w1"))
        job.advance()
        await job.journal.durable(DURABLE_S)


def check(recorded: RecordedCounts, worker: Worker) -> int:
    """Compare what is expected with what was done; return in how many passes tasks may count."""
    tasks = list(recorded.tasks)
    assert len(tasks) == TASKS
    assert [one.least for one in tasks] == [worker.done[task] for task in range(TASKS)]
    for number, one in enumerate(tasks):
        assert one.most >= len({begun for begun, task in worker.begun if task == number})
        assert one.damaged == (1 if number == 2 and worker.done[2] else 0)
    (most,) = {one.most for one in tasks}
    return most


@pytest.mark.parametrize(
    ("max_steps", "fails", "passes", "most"),
    [
        (0, set(), 3, 3),
        # Cut short in the middle of a pass.
        (7 * PER_TASK, set(), 1, 2),
        (1, set(), 0, 1),
        # Tasks that failed for good.
        (0, {(1, 0), (3, 4)}, 3, 3),
        # Dead-lettered in the pass that is cut short, and in one before.
        (7 * PER_TASK, {(1, 3), (2, 1)}, 1, 2),
    ],
)
def test_what_is_done_counts_and_nothing_else(
    tmp_path: Path, max_steps: int, fails: set[tuple[int, int]], passes: int, most: int
) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        worker = Worker(fails)
        spec = job_of(tmp_path, max_steps=max_steps)
        async with master_of(MemoryStore(backend), spec, 1) as (_, job):
            await worker.work(job)
            assert job.is_over
        recorded = await counts_of(backend)
        assert (recorded.passes, recorded.stream_job) == (passes, stream_job_of("ab12"))
        assert check(recorded, worker) == most
        if not fails:
            # Another job master, which finds nothing to do, changes nothing.
            async with master_of(MemoryStore(backend), spec, 2, replaces=1) as (_, job):
                await worker.work(job)
            assert check(await counts_of(backend), worker) == most

    run(scenario)


@pytest.mark.parametrize("every", [0, 3 * PER_TASK])
def test_an_early_stop_between_or_within_passes(tmp_path: Path, every: int) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        worker = Worker()
        data = DataSpec(paths=(str(tmp_path / "data.csv"),))
        stop = EarlyStop(metric="auc", patience=1)
        spec = job_of(tmp_path, validation=data, early_stop=stop, evaluation_every_steps=every)
        async with master_of(MemoryStore(backend), spec, 1) as (_, job):
            await worker.work(job)
            assert job.schedule.reason.startswith("early_stop")
        recorded = await counts_of(backend)
        # Between two passes, nothing is in part: the next one was never begun.
        assert check(recorded, worker) == recorded.passes + (1 if every else 0)

    run(scenario)


def test_a_job_that_was_stopped_and_one_that_begins_anew_after_a_restore(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        worker = Worker()
        async with master_of(MemoryStore(backend), job_of(tmp_path), 1) as (_, job):
            await worker.work(job, TASKS + 2)
            assert check(await counts_of(backend), worker) == 2
            # The model and its counters go back; some of the first pass may be in them.
            job.go_back(None)
            await job.journal.durable(DURABLE_S)
            assert {(one.least, one.most) for one in (await counts_of(backend)).tasks} == {(0, 1)}

    run(scenario)


def test_a_job_without_counters_is_refused(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        with pytest.raises(JobRefused, match="has not begun"):
            await counts_of(backend)
        async with master_of(MemoryStore(backend), job_of(tmp_path, audit=False), 1):
            with pytest.raises(JobRefused, match="it needs `audit: true`"):
                await counts_of(backend)

    run(scenario)


def test_a_job_that_is_begun_anew_has_other_counters() -> None:
    assert records_table("a", stream_job_of("1")) != records_table("a", stream_job_of("2"))
