"""A job master tells workers nothing of rows that are not those which its progress is of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from backstay._proto.v1 import job_pb2
from backstay.consensus.store import Txn, TxnResult
from backstay.errors import NotJobMaster, StoreUnavailable
from backstay.job_engine.opening import StateIncarnation
from backstay.job_engine.values import ATTEMPTS_PER_MASTER
from backstay.master import service as service_module
from backstay.master.job import Job
from backstay.master.service import JobService
from backstay.schedule.rounds import RoundId
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.job_records_of import counting_spec, master_of, service_of
from tests.unit.memory_nodes import run

ROWS = StateIncarnation(restore_version=7, generation=2)
NO_CONTEXT = cast(Any, None)


def scenario(folder: Path, play: Callable[[JobService, Job], Awaitable[None]]) -> None:
    async def inside(backend: MemoryBackend) -> None:
        spec = counting_spec(folder)
        async with master_of(MemoryStore(backend), spec, 1) as (_, job):
            service = service_of(job)
            job.note_incarnation(ROWS)
            await play(service, job)

    run(inside)


def asked(worker: str, number: int, rows: StateIncarnation | None) -> job_pb2.GetTaskRequest:
    request = job_pb2.GetTaskRequest(
        worker=job_pb2.Worker(id=worker, instance=ord(worker[0])), request=number
    )
    if rows is not None:
        request.incarnation.restore_version, request.incarnation.generation = rows
    return request


@pytest.mark.parametrize(
    "other", [StateIncarnation(6, 2), StateIncarnation(7, 1), StateIncarnation(9, 3)]
)
def test_a_worker_of_another_incarnation_gets_neither_tasks_nor_streams(
    tmp_path: Path, other: StateIncarnation
) -> None:
    async def play(service: JobService, job: Job) -> None:
        first = await service.GetTask(asked("a", 1, ROWS), NO_CONTEXT)
        assert first.HasField("task")
        lease = first.task.lease
        done = job_pb2.CompleteRequest(worker=asked("a", 1, None).worker, lease=lease, batches=1)
        assert (await service.Complete(done, NO_CONTEXT)).first
        job.drop_worker("a", "it dies before it has closed the stream")
        answer = await service.GetTask(asked("b", 1, other), NO_CONTEXT)
        assert answer.other_incarnation
        assert not answer.HasField("task")
        assert not answer.streams_to_close
        # The same worker, connected anew.
        answer = await service.GetTask(asked("b", 2, ROWS), NO_CONTEXT)
        assert not answer.other_incarnation
        assert answer.HasField("task")
        assert [one.task for one in answer.streams_to_close] == [lease.number]

    scenario(tmp_path, play)


def test_what_a_later_master_gave_is_for_that_one(tmp_path: Path) -> None:
    async def play(service: JobService, job: Job) -> None:
        lease = (await service.GetTask(asked("a", 1, ROWS), NO_CONTEXT)).task.lease
        lease.attempt = (job.state.starts + 1) * ATTEMPTS_PER_MASTER
        worker = asked("a", 1, None).worker
        for call in (
            service.Complete(job_pb2.CompleteRequest(worker=worker, lease=lease), NO_CONTEXT),
            service.RenewLeases(
                job_pb2.RenewLeasesRequest(worker=worker, leases=[lease]), NO_CONTEXT
            ),
            service.GiveBack(job_pb2.GiveBackRequest(worker=worker, lease=lease), NO_CONTEXT),
            service.Fail(job_pb2.FailRequest(worker=worker, lease=lease), NO_CONTEXT),
        ):
            with pytest.raises(NotJobMaster, match="ask it"):
                await call

    scenario(tmp_path, play)


def test_a_request_that_is_repeated_late_gets_its_task_with_new_time(tmp_path: Path) -> None:
    async def inside(backend: MemoryBackend) -> None:
        async with master_of(MemoryStore(backend), counting_spec(tmp_path), 1) as (master, job):
            service = service_of(job)
            first = (await service.GetTask(asked("a", 1, None), NO_CONTEXT)).task.lease
            # The answer was lost, and the lease is over before the worker knows of it.
            master.now_s += 3.0
            job.expire()
            again = (await service.GetTask(asked("a", 1, None), NO_CONTEXT)).task.lease
            assert again == first
            other = (await service.GetTask(asked("b", 1, None), NO_CONTEXT)).task.lease
            assert other.number != first.number

    run(inside)


class Away(MemoryStore):
    """A store that does not answer while it is away."""

    is_away = False

    async def transaction(self, txn: Txn) -> TxnResult:
        if self.is_away:
            raise StoreUnavailable("away")
        return await super().transaction(txn)


def test_no_task_is_given_while_nothing_can_be_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "DURABLE_S", 0.02)
    monkeypatch.setattr(service_module, "TASK_WAIT_S", 0.0)

    async def inside(backend: MemoryBackend) -> None:
        store = Away(backend)
        async with master_of(store, counting_spec(tmp_path), 1) as (_, job):
            service = service_of(job)
            store.is_away = True
            with pytest.raises(StoreUnavailable):
                await service.GetTask(asked("a", 1, None), NO_CONTEXT)
            for number in range(1, 4):
                with pytest.raises(StoreUnavailable):
                    await service.GetTask(asked("b", number, None), NO_CONTEXT)
            opened = job.rounds[RoundId.parse("training-1")]
            assert [lease.worker for lease in opened.ledger.leases] == ["a"]
            store.is_away = False
            answer = job_pb2.GetTaskResponse()
            while not answer.HasField("task"):
                with suppress(StoreUnavailable):
                    answer = await service.GetTask(asked("b", 9, None), NO_CONTEXT)

    run(inside)
