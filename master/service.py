"""``JobService``: the calls of workers, commands and launchers on a job's master.

Translates messages to the job's events and back, and answers only when the journal has what the
answer relies on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from grpc import aio

from backstay._proto.v1 import job_pb2, job_pb2_grpc
from backstay.consensus.job_records import MasterRecord
from backstay.errors import InvalidRequest, JobRefused, NotJobMaster
from backstay.job_engine.known_workers import KnownWorker
from backstay.job_engine.open_round import Assignment
from backstay.job_engine.values import ATTEMPTS_PER_MASTER, Failure, LeasedTask
from backstay.master.job import Job
from backstay.master.launch_handler import LaunchHandler
from backstay.master.launcher import report_of, wish_message
from backstay.master.status import (
    KIND_OF_MESSAGE,
    MESSAGE_OF_KIND,
    dead_letters,
    job_status,
    newest_evaluation,
)
from backstay.schedule.evaluation import TaskOutputs
from backstay.schedule.rounds import RoundId, RoundKind

__all__ = ["JobService"]

# How long a call waits for the journal; callers repeat it.
DURABLE_S = 4.0
# How long a call for a task waits for one, and then how long its worker is to wait. A millisecond
# for each worker: a crowd of up to 10,000 that waits makes no more than 1000 calls a second.
TASK_WAIT_S = 0.5
WAIT_MS_PER_WORKER = 1
WAIT_MS_MIN = 50
WAIT_MS_MAX = 10_000
# With so many workers a status is told again for a while: of 10,000 it takes 40 ms, and every
# display asks four times a second.
STATUS_KEPT_WORKERS = 1000
STATUS_KEPT_S = 1.0


class JobService(job_pb2_grpc.JobServiceServicer):
    """The services of one job's master."""

    def __init__(self, own: MasterRecord) -> None:
        """Prepare; ``job`` is None until the job is open here.

        Args:
            own: This process.
        """
        self._own = own
        self.job: Job | None = None
        self._told = job_pb2.JobStatus()
        self._told_until_s = 0.0
        self.launch_handler: LaunchHandler | None = None
        # Takes keep_state when somebody stops the job.
        self.on_stop: Callable[[bool], None] | None = None
        # Tries a last checkpoint at once that could not be written.
        self.try_save_now: Callable[[], bool] = lambda: False

    # Workers.

    async def Join(  # noqa: N802 (the name is the service's)
        self, request: job_pb2.JoinRequest, context: aio.ServicerContext[Any, Any]
    ) -> job_pb2.JoinResponse:
        """Take note of a worker."""
        job = self._open()
        who = request.worker
        if job.is_over:
            raise JobRefused(f"job {job.spec.name!r} is {job.state.state}: {job.state.reason}")
        job.workers.join(who.id, who.instance, who.host, who.pid)
        return job_pb2.JoinResponse(
            spec_json=job.spec.to_json(),
            stream_job=job.stream_job,
            start=job.state.starts,
            task_lease_ttl_ms=job.task_lease_ttl_ms,
        )

    async def DeclareTables(  # noqa: N802
        self, request: job_pb2.DeclareTablesRequest, context: aio.ServicerContext[Any, Any]
    ) -> job_pb2.DeclareTablesResponse:
        """Take or compare the names of the job's tables."""
        job = self._open()
        known = self._heard(job, request.worker)
        job.declare_tables(request.names, request.notes)
        known.has_program = True
        await job.journal.durable(DURABLE_S)
        return job_pb2.DeclareTablesResponse()

    async def GetTask(  # noqa: N802
        self, request: job_pb2.GetTaskRequest, context: aio.ServicerContext[Any, Any]
    ) -> job_pb2.GetTaskResponse:
        """Give a task; waits a little for one."""
        job = self._open()
        known = self._heard(job, request.worker)
        known.has_program = True
        job.closed((one.pass_number, one.task) for one in request.closed_streams)
        answer = job_pb2.GetTaskResponse()
        given = self._given_before(job, known, request.request)
        deadline_s = job.now() + TASK_WAIT_S
        # What is acknowledged in another state incarnation is not in this one, and what is done
        # may have to be done again.
        while given is None and not job.is_over and _are_of_job(request, job):
            changed = job.changed
            # What cannot be recorded is not told, and would expire without anybody's fault.
            given = None if job.journal.trouble else job.assign(known.id)
            left_s = deadline_s - job.now()
            if given is not None or left_s <= 0:
                break
            try:
                await asyncio.wait_for(changed.wait(), left_s)
            except asyncio.TimeoutError:
                continue
        # Whom to follow is news each time.
        known.request, known.answer = request.request, None if given and given.leader else given
        answer.other_incarnation = not _are_of_job(request, job)
        if not answer.other_incarnation:
            answer.streams_to_close.extend(_streams(job.streams_to_close(known.id)))
        await job.journal.durable(DURABLE_S)
        if given is not None:
            answer.task.CopyFrom(_task_message(job, given))
        elif job.is_over:
            known.knows_end = True
            job.notify()
            answer.ended.CopyFrom(_ended(job))
        else:
            wait_ms = len(job.known) * WAIT_MS_PER_WORKER
            answer.wait_ms = min(max(wait_ms, WAIT_MS_MIN), WAIT_MS_MAX)
        return answer

    async def RenewLeases(  # noqa: N802
        self, request: job_pb2.RenewLeasesRequest, context: aio.ServicerContext[Any, Any]
    ) -> job_pb2.RenewLeasesResponse:
        """Renew leases; nothing is written for that."""
        job = self._open()
        known = self._heard(job, request.worker)
        loss = request.loss if request.HasField("loss") else None
        known.measure(request.examples, request.steps, loss, job.now())
        # It may have told its tables to an earlier master.
        known.has_program |= bool(request.leases)
        job.stalls.heard(
            known.id, request.steps, request.waiting_ms / 1000, request.waits_for, job.now()
        )
        revoked = job.renew(known.id, [_known_lease(job, one) for one in request.leases])
        led = job.stalls.led()
        return job_pb2.RenewLeasesResponse(
            revoked=[_lease_message(round_id, leased) for round_id, leased in revoked],
            stop=job.is_over,
            stop_reason=job.state.reason or job.state.state if job.is_over else "",
            task_lease_ttl_ms=job.task_lease_ttl_ms,
            job_steps=job.schedule.steps,
            training=job.stalls.clocks(),
            led=None
            if led is None
            else _lease_message(led[0], LeasedTask(led[1].task.number, led[1].attempt, 0)),
        )

    async def Complete(  # noqa: N802
        self, request: job_pb2.CompleteRequest, context: aio.ServicerContext[Any, Any]
    ) -> job_pb2.CompleteResponse:
        """Take note that a task is done."""
        job = self._open()
        known = self._heard(job, request.worker)
        round_id, lease = _known_lease(job, request.lease)
        outputs = _outputs(request.outputs) if request.HasField("outputs") else None
        if job.note_damaged(round_id, lease.task, request.bad_record_count):
            await job.journal.durable(DURABLE_S)
        counts, is_new = job.complete(
            known.id,
            round_id,
            lease._replace(acknowledged=request.batches),
            request.examples,
        )
        if is_new and outputs is not None and round_id.kind is RoundKind.EVALUATION:
            job.add_outputs(round_id, lease.task, outputs, dict(request.outputs.metrics))
        await job.journal.durable(DURABLE_S)
        return job_pb2.CompleteResponse(first=counts)

    async def GiveBack(  # noqa: N802
        self, request: job_pb2.GiveBackRequest, context: aio.ServicerContext[Any, Any]
    ) -> job_pb2.GiveBackResponse:
        """End a lease for no fault of the task."""
        job = self._open()
        known = self._heard(job, request.worker)
        round_id, lease = _known_lease(job, request.lease)
        job.give_back(known.id, round_id, lease, request.reason)
        await job.journal.durable(DURABLE_S)
        return job_pb2.GiveBackResponse()

    async def Fail(  # noqa: N802
        self, request: job_pb2.FailRequest, context: aio.ServicerContext[Any, Any]
    ) -> job_pb2.FailResponse:
        """End a lease because the task failed."""
        job = self._open()
        known = self._heard(job, request.worker)
        round_id, lease = _known_lease(job, request.lease)
        bad = "".join(
            f"\n{one.file}, {one.offset}: {one.reason}" for one in request.bad_records[:100]
        )
        if request.bad_record_count > job.spec.max_bad_records:
            # Another try would end alike.
            first = bad.lstrip().partition("\n")[0]
            job.note_damaged(round_id, lease.task, request.bad_record_count, first)
        failure = Failure(request.error + bad, known.id, tuple(request.records))
        dead_lettered = job.fail(known.id, round_id, lease, failure)
        await job.journal.durable(DURABLE_S)
        return job_pb2.FailResponse(dead_lettered=dead_lettered)

    async def Leave(  # noqa: N802
        self, request: job_pb2.LeaveRequest, context: aio.ServicerContext[Any, Any]
    ) -> job_pb2.LeaveResponse:
        """Let a worker go."""
        job = self._open()
        known = self._heard(job, request.worker)
        job.drop_worker(known.id, request.reason or "it leaves")
        await job.journal.durable(DURABLE_S)
        return job_pb2.LeaveResponse()

    # Commands.

    async def GetJob(  # noqa: N802
        self, request: job_pb2.GetJobRequest, context: aio.ServicerContext[Any, Any]
    ) -> job_pb2.JobStatus:
        """Tell how the job goes."""
        return self._status(self._open())

    async def Scale(  # noqa: N802
        self, request: job_pb2.ScaleRequest, context: aio.ServicerContext[Any, Any]
    ) -> job_pb2.ScaleResponse:
        """Have another number of workers."""
        job = self._open()
        if job.is_over:
            raise JobRefused(f"job {job.spec.name!r} is {job.state.state}")
        before = job.workers.scale(request.workers)
        job.notify()
        await job.journal.durable(DURABLE_S)
        return job_pb2.ScaleResponse(before=before)

    async def Stop(  # noqa: N802
        self, request: job_pb2.StopRequest, context: aio.ServicerContext[Any, Any]
    ) -> job_pb2.StopResponse:
        """End the job."""
        job = self._open()
        if self.on_stop is not None:
            self.on_stop(request.keep_state)
        if job.unsaved:
            job.end_unsaved(job.unsaved)
        else:
            job.end("stopped", request.reason or "stopped by a command")
        await job.journal.durable(DURABLE_S)
        return job_pb2.StopResponse()

    async def ListDeadLetters(  # noqa: N802
        self, request: job_pb2.ListDeadLettersRequest, context: aio.ServicerContext[Any, Any]
    ) -> job_pb2.ListDeadLettersResponse:
        """Return the tasks that failed for good."""
        return job_pb2.ListDeadLettersResponse(tasks=dead_letters(self._open()))

    async def RetryDeadLetters(  # noqa: N802
        self, request: job_pb2.RetryDeadLettersRequest, context: aio.ServicerContext[Any, Any]
    ) -> job_pb2.RetryDeadLettersResponse:
        """Give dead-lettered tasks their tries again."""
        job = self._open()
        if job.is_over:
            raise JobRefused(
                f"job {job.spec.name!r} is {job.state.state}; start it again: that tries its "
                "dead-lettered tasks once more"
            )
        count = job.retry_dead_letters(request.numbers)
        await job.journal.durable(DURABLE_S)
        return job_pb2.RetryDeadLettersResponse(tasks=count, saves=self.try_save_now())

    async def Launch(  # noqa: N802
        self, request: job_pb2.LaunchRequest, context: aio.ServicerContext[Any, Any]
    ) -> job_pb2.LaunchResponse:
        """Hear what runs, tell what should."""
        if self.launch_handler is None:
            raise NotJobMaster("the job is not open here yet")
        wish = await self.launch_handler.exchange(
            report_of(request), known_version=request.known_version, wait_ms=request.wait_ms
        )
        return wish_message(wish)

    # How it is done.

    def _open(self) -> Job:
        if self.job is None:
            raise NotJobMaster("this process is not the job's master, or not yet; ask again")
        return self.job

    def _heard(self, job: Job, who: job_pb2.Worker) -> KnownWorker:
        known = job.known.hear(who.id, who.instance, who.host, who.pid, job.now())
        known.sync_address = who.sync_address
        return known

    def _status(self, job: Job) -> job_pb2.JobStatus:
        now_s = job.now()
        if now_s >= self._told_until_s or self._told.state != job.state.state:
            self._told = job_status(job, self._own, time.time_ns() // 1_000_000)
            kept_s = STATUS_KEPT_S if len(job.known) >= STATUS_KEPT_WORKERS else 0.0
            self._told_until_s = now_s + kept_s
        return self._told

    def _given_before(self, job: Job, known: KnownWorker, request: int) -> Assignment | None:
        """Return what the same request was given already, if that still holds."""
        given: Assignment | None = known.answer
        if not request or request != known.request or given is None:
            return None
        if job.rounds.get(given.round.id) is not given.round:
            return None
        leased = given.round.ledger.record_of(known.id).leased
        if not any(one[:2] == given.lease[:2] for one in leased):
            return None
        # The worker counts its time from this answer.
        revoked = given.round.ledger.renew(known.id, [given.lease], job.now())
        job.rounds.stage(given.round)
        return None if revoked else given


def _lease_of(message: job_pb2.TaskLease) -> tuple[RoundId, LeasedTask]:
    kind = KIND_OF_MESSAGE.get(message.kind)
    if kind is None or message.round < 1:
        raise InvalidRequest(f"lease: no round of kind {message.kind}, number {message.round}")
    leased = LeasedTask(message.number, message.attempt, message.acknowledged_batches)
    return RoundId(kind, message.round), leased


def _known_lease(job: Job, message: job_pb2.TaskLease) -> tuple[RoundId, LeasedTask]:
    """Return a lease that this master, or one before it, gave.

    Raises:
        NotJobMaster: A later one gave it, so this one is the master no more.
    """
    round_id, leased = _lease_of(message)
    if leased.attempt >= (job.state.starts + 1) * ATTEMPTS_PER_MASTER:
        raise NotJobMaster("another process has become the master, and gave this task; ask it")
    return round_id, leased


def _lease_message(round_id: RoundId, leased: LeasedTask) -> job_pb2.TaskLease:
    return job_pb2.TaskLease(
        kind=MESSAGE_OF_KIND[round_id.kind],
        round=round_id.number,
        number=leased.task,
        attempt=leased.attempt,
        acknowledged_batches=leased.acknowledged,
    )


def _task_message(job: Job, given: Assignment) -> job_pb2.Task:
    records = given.round.table[given.lease.task]
    return job_pb2.Task(
        lease=_lease_message(given.round.id, given.lease),
        shard=records.shard,
        start=records.start,
        count=records.count,
        first_batch=given.lease.acknowledged,
        shuffle_seed=given.round.seed_of(job.spec, given.lease.task),
        leader=given.leader,
        training=job.stalls.clocks(),
        evaluation=newest_evaluation(job),
    )


def _are_of_job(request: job_pb2.GetTaskRequest, job: Job) -> bool:
    """Whether the job's progress is of the state incarnation that a worker pushes to."""
    named = (request.incarnation.restore_version, request.incarnation.generation)
    return not request.HasField("incarnation") or named == (
        job.state.restore_version,
        job.state.generation,
    )


def _streams(streams: Iterable[tuple[int, int]]) -> list[job_pb2.TaskStreamId]:
    return [job_pb2.TaskStreamId(pass_number=number, task=task) for number, task in streams]


def _ended(job: Job) -> job_pb2.JobEnded:
    return job_pb2.JobEnded(state=job.state.state, reason=job.state.reason)


def _outputs(message: job_pb2.EvaluationOutputs) -> TaskOutputs:
    """Return what an evaluation task brought.

    Raises:
        InvalidRequest: Its bytes are not arrays of so many records.
    """
    values = dict(message.values)
    if not message.metrics:
        return TaskOutputs(message.records, values=values)
    width = message.prediction_width or 1
    for name, size, each in (
        ("labels", len(message.labels), 1),
        ("predictions", len(message.predictions), width),
    ):
        if size != 4 * each * message.records:
            raise InvalidRequest(f"{name}: {size} bytes for {message.records} records of {each}")
    predictions = np.frombuffer(message.predictions, "<f4")
    if width > 1:
        predictions = predictions.reshape(-1, width)
    return TaskOutputs(
        message.records,
        labels=np.frombuffer(message.labels, "<f4"),
        predictions=predictions,
        values=values,
    )
