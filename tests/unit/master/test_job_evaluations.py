"""A job master tells with each task how the newest evaluation of the job went."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

from backstay._proto.v1 import job_pb2
from backstay.consensus.records.jobs import MasterRecord
from backstay.job_spec import DataSpec
from backstay.master.job import Job
from backstay.master.service import JobService
from backstay.master.status import job_status
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.job_records_of import counting_spec, master_of, service_of
from tests.unit.memory_nodes import run

NO_CONTEXT = cast(Any, None)
WHO = job_pb2.Worker(id="a", instance=1)


def scenario(folder: Path, play: Callable[[JobService, Job], Awaitable[None]]) -> None:
    async def inside(backend: MemoryBackend) -> None:
        spec = counting_spec(folder, records=8, epochs=2)
        validation = DataSpec(paths=spec.training.paths if spec.training else ())
        spec = counting_spec(folder, records=8, epochs=2, validation=validation)
        async with master_of(MemoryStore(backend), spec, 1) as (_, job):
            service = service_of(job)
            await play(service, job)

    run(inside)


def told(job: Job) -> job_pb2.JobStatus:
    return job_status(job, MasterRecord("127.0.0.1:1", 1, "here", 1), 0)


def rounds_told(job: Job) -> list[int]:
    return [one.round for one in told(job).evaluations]


async def next_task(service: JobService) -> job_pb2.Task:
    answer = await service.GetTask(job_pb2.GetTaskRequest(worker=WHO), NO_CONTEXT)
    assert answer.HasField("task")
    return answer.task


async def done(service: JobService, job: Job, task: job_pb2.Task) -> None:
    """Complete a task; of an evaluation, with predictions that are all right."""
    request = job_pb2.CompleteRequest(worker=WHO, lease=task.lease, batches=1, examples=task.count)
    if task.lease.kind == job_pb2.TASK_KIND_EVALUATION:
        request.outputs.records = task.count
        request.outputs.predictions = np.ones(task.count, np.float32).tobytes()
        request.outputs.labels = np.ones(task.count, np.float32).tobytes()
        request.outputs.metrics["mse"] = "mse"
    assert (await service.Complete(request, NO_CONTEXT)).first
    for opened in job.advance():
        job.evaluated(opened, opened.compute())
        job.advance()


def test_a_task_comes_with_the_newest_evaluation(tmp_path: Path) -> None:
    async def play(service: JobService, job: Job) -> None:
        seen = []
        for _ in range(9):  # two tasks each: pass, evaluation, pass, evaluation; the end
            task = await next_task(service)
            seen.append((task.lease.kind, task.evaluation.round))
            await done(service, job, task)
        training, evaluation = job_pb2.TASK_KIND_TRAINING, job_pb2.TASK_KIND_EVALUATION
        assert seen == [
            *[(training, 0)] * 2,
            *[(evaluation, 0)] * 2,
            *[(training, 1)] * 2,
            *[(evaluation, 1)] * 2,
            (job_pb2.TASK_KIND_TRAIN_END, 2),
        ]
        assert dict(task.evaluation.metrics) == {"mse": 0.0}
        assert job.is_over

    scenario(tmp_path, play)


def test_a_restore_takes_back_the_evaluations_of_the_model_that_is_gone(tmp_path: Path) -> None:
    async def play(service: JobService, job: Job) -> None:
        assert told(job).went_back == 0
        for _ in range(4):
            await done(service, job, await next_task(service))
        assert (await next_task(service)).evaluation.round == 1
        assert rounds_told(job) == [1]
        job.go_back(None, 5)
        job.advance()
        assert rounds_told(job) == []
        assert told(job).went_back == 1
        for _ in range(4):
            await done(service, job, await next_task(service))
        assert rounds_told(job) == [1]

    scenario(tmp_path, play)


def test_an_evaluation_that_a_restore_has_undone_is_not_told(tmp_path: Path) -> None:
    async def play(service: JobService, job: Job) -> None:
        for _ in range(4):
            await done(service, job, await next_task(service))
        assert (await next_task(service)).evaluation.round == 1
        job.go_back(None)
        job.advance()
        assert not (await next_task(service)).HasField("evaluation")

    scenario(tmp_path, play)
