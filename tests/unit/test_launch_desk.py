"""What becomes of a job whose workers end with "the model file or a setting is wrong"."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

from backstay._proto.v1 import job_pb2
from backstay.consensus.job_records import MasterRecord
from backstay.consensus.memory_store import MemoryBackend, MemoryStore
from backstay.exits import EXIT_WRONG_SETTING
from backstay.master.job import Job
from backstay.master.launch_desk import LaunchDesk
from backstay.master.service import JobService
from tests.unit.job_records_of import counting_spec, master_of
from tests.unit.memory_nodes import run

NO_CONTEXT = cast(Any, None)
CONFLICT = "ERROR table 'counting/users' exists with other settings: dim is 4, not 8"


def scenario(folder: Path, play: Callable[[Job, LaunchDesk], Awaitable[None]]) -> None:
    async def inside(backend: MemoryBackend) -> None:
        store, spec = MemoryStore(backend), counting_spec(folder)
        async with master_of(store, spec, 1) as (_, job):
            # The tables of an earlier run of the same job.
            job.declare_tables(["counting/users"])
            await play(job, LaunchDesk(job))

    run(inside)


def ended(worker: str, code: int, words: str = "") -> job_pb2.LaunchRequest:
    told = job_pb2.WorkerExit(worker_id=worker, code=code, last_words=words)
    return job_pb2.LaunchRequest(launcher="here", exits=[told])


def test_a_model_that_does_not_fit_the_tables_fails_the_job_at_once(tmp_path: Path) -> None:
    async def play(job: Job, desk: LaunchDesk) -> None:
        wanted = (await desk.hear(job_pb2.LaunchRequest(launcher="here"))).wanted
        await desk.hear(ended(wanted[0], EXIT_WRONG_SETTING, f"Traceback\n{CONFLICT}\n"))
        assert job.state.state == "failed"
        assert job.state.reason == f"the model file or a setting is wrong: {CONFLICT}"

    scenario(tmp_path, play)


def test_one_wrong_worker_beside_others_that_work_is_only_replaced(tmp_path: Path) -> None:
    async def play(job: Job, desk: LaunchDesk) -> None:
        service = JobService(MasterRecord("127.0.0.1:1", 1, "here", 1))
        service.job = job
        wanted = (await desk.hear(job_pb2.LaunchRequest(launcher="here"))).wanted
        other = job_pb2.Worker(id=wanted[1], instance=5)
        given = await service.GetTask(job_pb2.GetTaskRequest(worker=other, request=1), NO_CONTEXT)
        assert given.HasField("task")
        await desk.hear(ended(wanted[0], EXIT_WRONG_SETTING, CONFLICT))
        assert not job.is_over
        # It ends, too: nobody works any more.
        await desk.hear(ended(wanted[1], -9))
        await desk.hear(ended("w-2", EXIT_WRONG_SETTING, CONFLICT))
        assert job.is_over

    scenario(tmp_path, play)


def test_a_worker_that_joined_an_earlier_master_counts_as_one_that_works(tmp_path: Path) -> None:
    async def play(job: Job, desk: LaunchDesk) -> None:
        service = JobService(MasterRecord("127.0.0.1:1", 1, "here", 1))
        service.job = job
        given = job.assign("w-1")
        assert given is not None
        lease = job_pb2.TaskLease(
            kind=job_pb2.TASK_KIND_TRAINING, round=1, number=given.lease.task,
            attempt=given.lease.attempt,
        )  # fmt: skip
        sign = job_pb2.RenewLeasesRequest(
            worker=job_pb2.Worker(id="w-1", instance=5), leases=[lease]
        )
        await service.RenewLeases(sign, NO_CONTEXT)
        await desk.hear(ended("w-0", EXIT_WRONG_SETTING, CONFLICT))
        assert not job.is_over

    scenario(tmp_path, play)
