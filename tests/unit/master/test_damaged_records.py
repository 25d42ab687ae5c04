"""Damaged records count once each, whichever passes, tries, masters and restores there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from backstay._proto.v1 import job_pb2
from backstay.consensus.store import Txn, TxnResult
from backstay.errors import InvalidRequest
from backstay.job_engine.progress import kept_job
from backstay.job_engine.values import ATTEMPTS_PER_MASTER, LeasedTask
from backstay.job_spec import DataSpec, JobSpec
from backstay.master.job import Job
from backstay.pserver.checkpoints.jobs import JOBS_PROGRESS, progress_of_jobs
from backstay.schedule.damaged import PART_TASKS, DamagedRecords
from backstay.schedule.rounds import RoundId, RoundKind
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.job_records_of import KEYS, Master, counting_spec, master_of, service_of
from tests.unit.memory_nodes import run

NO_CONTEXT = cast(Any, None)
# Of the tasks of the training data; the others have none.
DAMAGED = {2: 3, 5: 1}


def spec_of(folder: Path, limit: int) -> JobSpec:
    data = DataSpec(paths=(str(folder / "data.csv"),))
    return counting_spec(folder, max_bad_records=limit, validation=data, epochs=3)


async def work(job: Job, tasks: int = 10**6) -> None:
    """Do tasks as a worker does that meets the same damaged records each time."""
    service = service_of(job)
    who = job_pb2.Worker(id="w1", instance=7)
    while tasks and not job.is_over:
        given = job.assign("w1")
        if given is None:
            for opened in job.advance():
                job.evaluated(opened, {})
            continue
        tasks -= 1
        message = job_pb2.TaskLease(
            kind=job_pb2.TaskKind.Value(f"TASK_KIND_{given.round.id.kind.name}"),
            round=given.round.id.number,
            number=given.lease.task,
            attempt=given.lease.attempt,
        )
        bad = 0 if given.round.id.kind is RoundKind.TRAIN_END else DAMAGED.get(given.lease.task, 0)
        done = job_pb2.CompleteRequest(worker=who, lease=message, batches=1, bad_record_count=bad)
        await service.Complete(done, NO_CONTEXT)
        job.closed([(given.round.id.number, given.lease.task)])


def test_passes_and_validation_data_do_not_add_up(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        # One pass over the training data meets as many as are allowed, and so does an evaluation.
        async with master_of(MemoryStore(backend), spec_of(tmp_path, 4), 1) as (_, job):
            await work(job)
            assert (job.state.state, job.schedule.passes_over) == ("done", 3)
            assert job.damaged.of_data("training") == job.damaged.of_data("validation") == 4
            assert job.figures["bad_records"] == 8

    run(scenario)


def test_one_more_than_the_limit_ends_the_job(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        async with master_of(MemoryStore(backend), spec_of(tmp_path, 3), 1) as (_, job):
            await work(job)
            assert job.state.state == "failed"
            assert job.state.reason == (
                "4 damaged records in the training data; max_bad_records allows 3 in one pass "
                "over them"
            )

    run(scenario)


def test_one_task_with_too_many_ends_the_job_at_once(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        async with master_of(MemoryStore(backend), spec_of(tmp_path, 2), 1) as (_, job):
            service = service_of(job)
            given = job.assign("w1")
            assert given is not None
            lease = job_pb2.TaskLease(
                kind=job_pb2.TASK_KIND_TRAINING,
                round=1,
                number=given.lease.task,
                attempt=given.lease.attempt,
            )
            where = job_pb2.BadRecord(file="a.csv", offset=17, reason="2 values, not 3")
            failed = job_pb2.FailRequest(
                worker=job_pb2.Worker(id="w1", instance=7),
                lease=lease,
                error="TooManyBadRecords: ...",
                bad_records=[where],
                bad_record_count=2,
            )
            # As many as are allowed: something else is wrong with the task.
            await service.Fail(failed, NO_CONTEXT)
            assert not job.is_over
            given = job.assign("w1")
            assert given is not None
            failed.lease.number, failed.lease.attempt = given.lease.task, given.lease.attempt
            failed.bad_record_count = 3
            await service.Fail(failed, NO_CONTEXT)
            assert job.state.state == "failed"
            assert job.state.reason == (
                "3 damaged records in the training data (a.csv, 17: 2 values, not 3); "
                "max_bad_records allows 2 in one pass over them"
            )

    run(scenario)


@pytest.mark.parametrize("tasks", range(1, 10))
def test_a_master_that_dies_and_tasks_that_are_done_again_change_nothing(
    tmp_path: Path, tasks: int
) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store = MemoryStore(backend)
        async with master_of(store, spec_of(tmp_path, 4), 1) as (_, job):
            await work(job, tasks)
            # Reported, and not done: another worker does the task again.
            training = RoundId(RoundKind.TRAINING, 1)
            lease = LeasedTask(2, ATTEMPTS_PER_MASTER, 0)
            job.give_back("w1", training, lease, "it ends", damaged=3)
            job.drop_worker("w1", "it dies")
            await job.journal.durable(5.0)
        async with master_of(store, spec_of(tmp_path, 4), 2, replaces=1) as (_, job):
            assert job.damaged.of_task("training", 2) == 3
            await work(job)
            assert job.state.state == "done"
            assert job.damaged.of_data("training") == 4

    run(scenario)


def test_what_is_damaged_is_known_after_a_restore(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        async with master_of(MemoryStore(backend), spec_of(tmp_path, 4), 1) as (_, job):
            await work(job, 9)
            kept = await progress_of_jobs(MemoryStore(backend), 0, 0)
            found = job.damaged.of_data("training")
            assert found >= 1
        records = kept_job(kept[JOBS_PROGRESS], KEYS.job)
        assert records is not None
        other = MemoryBackend()
        async with master_of(MemoryStore(other), spec_of(tmp_path, 4), 1) as (_, job):
            job.go_back(records.progress(job.tables))
            assert job.damaged.of_data("training") == job.figures["bad_records"] == found
            await job.journal.durable(5.0)
        async with master_of(MemoryStore(other), spec_of(tmp_path, 4), 2, replaces=1) as (_, job):
            assert job.damaged.of_data("training") == found

    run(scenario)


class Watched(MemoryStore):
    """Keeps the keys that were written, in order."""

    def __init__(self, backend: MemoryBackend) -> None:
        super().__init__(backend)
        self.written: list[str] = []

    async def transaction(self, txn: Txn) -> TxnResult:
        self.written += [operation.key for operation in txn.success]
        return await super().transaction(txn)


def test_what_is_damaged_is_recorded_before_that_the_task_is_done(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store = Watched(backend)
        master = Master(store, spec_of(tmp_path, 9), 1, changes_max=1)
        job = await master.open()
        first, second = job.assign("w1"), job.assign("w1")
        assert first is not None
        assert second is not None
        # The bitmap of both waits already when the second one is reported.
        job.complete("w1", first.round.id, first.lease, batches=1, examples=4)
        job.complete(
            "w1",
            second.round.id,
            second.lease,
            batches=1,
            examples=4,
            damaged=3,
        )
        await job.journal.durable(5.0)
        damaged = KEYS.damaged("training", 0)
        assert store.written.index(damaged) < store.written.index(KEYS.done("training-1", 0))
        await master.kill()

    run(scenario)


def test_a_file_that_was_mended_has_no_damaged_records_any_more() -> None:
    damaged = DamagedRecords()
    assert damaged.note("training", 3, 2)
    assert not damaged.note("training", 3, 2)
    assert damaged.note("training", 3, 0)
    assert (damaged.total, damaged.part("training", 0)) == (0, "")


def test_parts_are_read_as_they_were_written() -> None:
    damaged = DamagedRecords()
    for data, task, count in (
        ("training", 0, 1),
        ("training", PART_TASKS, 2),
        ("validation", PART_TASKS - 1, 5),
    ):
        damaged.note(data, task, count)
    parts = {f"{data}/{number:06d}": text for (data, number), text in damaged.parts().items()}
    assert len(parts) == 3
    again = DamagedRecords()
    again.learn(parts)
    assert again.parts() == damaged.parts()
    for text in ("{}", '{"tasks":{"x":1}}', '{"tasks":{"1":0}}', '{"tasks":{"1":"2"}}'):
        with pytest.raises(InvalidRequest, match="damaged records"):
            DamagedRecords().learn({"training/000000": text})
