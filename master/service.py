"""``JobService``: the calls of workers, commands and launchers on a job master.

Translates messages to the job's events and back, and answers only when the journal has what the
answer relies on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import numpy as np
from grpc import aio

from backstay._proto.v1 import job_pb2, job_pb2_grpc
from backstay.consensus.records.jobs import MasterRecord
from backstay.errors import BackstayError, InvalidRequest, NotJobMaster
from backstay.job.score_counts import Scores
from backstay.job_engine.known_workers import KnownWorker, WorkerSigns
from backstay.job_engine.open_round import Assignment
from backstay.job_engine.opening import StateIncarnation
from backstay.job_engine.round_scores import Scored
from backstay.job_engine.values import Failure, LeasedTask
from backstay.master.call_stream import CallStream
from backstay.master.hosted_launcher import LaunchHandler
from backstay.master.job import Job
from backstay.master.launcher import report_of, wish_message
from backstay.master.status import (
    KIND_OF_MESSAGE,
    MESSAGE_OF_KIND,
    dead_letters,
    job_status,
    newest_evaluation,
)
from backstay.schedule.evaluation import TaskOutputs
from backstay.schedule.orders import record_order_seed
from backstay.schedule.rounds import RoundId

__all__ = ["JobService"]

# How long a call waits for the journal; callers repeat it.
DURABLE_S = 4.0
# How long a call for a task waits for one.
TASK_WAIT_S = 0.5
# With so many workers a status is told again for a while: of 10,000 it takes 40 ms, and every
# display asks four times a second.
STATUS_KEPT_WORKERS = 1000
STATUS_KEPT_S = 1.0
# Progressive metrics: what was predicted of a task, packed.
SCORES_BYTES_MAX = 512 * 1024
# Of the histogram of a worker: a sign of life with more is cut.
STALENESS_BUCKETS_MAX = 32


class JobService(job_pb2_grpc.JobServiceServicer):
    """The services of one job master."""

    def __init__(
        self,
        own: MasterRecord,
        job: Job,
        launches: LaunchHandler,
        *,
        on_stop: Callable[[bool], None],
        try_save_now: Callable[[], bool],
    ) -> None:
        """Prepare; call it while the event loop runs.

        Args:
            own: This process.
            job: The job, which is open.
            launches: Answers its launcher.
            on_stop: Takes ``keep_state`` when an operator stops the job.
            try_save_now: Tries a last checkpoint at once that could not be written; says whether
                there is one.
        """
        self._own = own
        self._job = job
        self._launches = launches
        self._on_stop = on_stop
        self._try_save_now = try_save_now
        self._told = job_pb2.JobStatus()
        self._told_until_s = 0.0
        # Done when this process stops to serve.
        self._stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end_streams(self) -> None:
        """Have call streams answer what they have read, and end."""
        if not self._stopping.done():
            self._stopping.set_result(None)

    # Workers.

    async def CallStream(  # type: ignore[override]  # noqa: N802 (the name is the service's)
        self, _requests: object, context: aio.ServicerContext[Any, Any]
    ) -> None:
        """Answer the calls of one process."""
        handlers = {
            "get_task": lambda request: self.GetTask(request, context),
            "complete": lambda request: self.Complete(request, context),
        }
        stream = CallStream(self._renew, handlers, context)
        await stream.serve(self._stopping)

    async def Join(  # noqa: N802
        self, request: job_pb2.JoinRequest, context: aio.ServicerContext[Any, Any]
    ) -> job_pb2.JoinResponse:
        """Take note of a worker."""
        job = self._job
        who = request.worker
        job.join(who.id, who.instance, who.host, who.pid)
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
        job = self._job
        known = self._heard(job, request.worker)
        job.declare_tables(request.names, request.notes, worker=known.id)
        await job.journal.durable(DURABLE_S)
        return job_pb2.DeclareTablesResponse()

    async def GetTask(  # noqa: N802
        self, request: job_pb2.GetTaskRequest, context: aio.ServicerContext[Any, Any]
    ) -> job_pb2.GetTaskResponse:
        """Give a task; waits a little for one."""
        job = self._job
        known = self._heard(job, request.worker)
        job.closed((one.pass_number, one.task) for one in request.closed_streams)
        answer = job_pb2.GetTaskResponse()
        rows = _incarnation(request)
        deadline_s = job.now() + TASK_WAIT_S
        while True:
            changed = job.changed
            given = job.give(known.id, request.request, rows, can_record=not job.journal.trouble)
            left_s = deadline_s - job.now()
            if given is not None or job.is_over or not job.goes_with(rows) or left_s <= 0:
                break
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(changed.wait(), left_s)
        answer.other_incarnation = not job.goes_with(rows)
        if not answer.other_incarnation:
            answer.streams_to_close.extend(_streams(job.streams_to_close(known.id)))
        await job.journal.durable(DURABLE_S)
        if given is not None:
            answer.task.CopyFrom(_task_message(job, given))
        elif job.is_over:
            job.told_end(known.id)
            answer.ended.CopyFrom(_ended(job))
        else:
            answer.wait_ms = job.ask_again_ms()
        return answer

    async def RenewLeases(  # noqa: N802
        self, request: job_pb2.RenewLeasesRequest, context: aio.ServicerContext[Any, Any]
    ) -> job_pb2.RenewLeasesResponse:
        """Renew leases; nothing is written for that."""
        return self._renew(request)

    async def Complete(  # noqa: N802
        self, request: job_pb2.CompleteRequest, context: aio.ServicerContext[Any, Any]
    ) -> job_pb2.CompleteResponse:
        """Take note that a task is done."""
        job = self._job
        known = self._heard(job, request.worker)
        round_id, lease = _known_lease(job, known.id, request.lease)
        counts, _ = job.complete(
            known.id,
            round_id,
            lease,
            batches=request.batches,
            examples=request.examples,
            damaged=request.bad_record_count,
            outputs=_outputs(request.outputs) if request.HasField("outputs") else None,
            metrics=dict(request.outputs.metrics),
            scores=_scores(request.lease),
            scored_from=request.lease.scored_from,
        )
        await job.journal.durable(DURABLE_S)
        return job_pb2.CompleteResponse(first=counts)

    async def GiveBack(  # noqa: N802
        self, request: job_pb2.GiveBackRequest, context: aio.ServicerContext[Any, Any]
    ) -> job_pb2.GiveBackResponse:
        """End a lease for no fault of the task."""
        job = self._job
        known = self._heard(job, request.worker)
        round_id, lease = _known_lease(job, known.id, request.lease)
        job.give_back(known.id, round_id, lease, request.reason, scored=_scored(request.lease))
        await job.journal.durable(DURABLE_S)
        return job_pb2.GiveBackResponse()

    async def Fail(  # noqa: N802
        self, request: job_pb2.FailRequest, context: aio.ServicerContext[Any, Any]
    ) -> job_pb2.FailResponse:
        """End a lease because the task failed."""
        job = self._job
        known = self._heard(job, request.worker)
        round_id, lease = _known_lease(job, known.id, request.lease)
        bad = "".join(
            f"\n{one.file}, {one.offset}: {one.reason}" for one in request.bad_records[:100]
        )
        dead_lettered = job.fail(
            known.id,
            round_id,
            lease,
            Failure(request.error + bad, known.id, tuple(request.records)),
            damaged=request.bad_record_count,
            first_damaged=bad.lstrip().partition("\n")[0],
            scored=_scored(request.lease),
        )
        await job.journal.durable(DURABLE_S)
        return job_pb2.FailResponse(dead_lettered=dead_lettered)

    async def Leave(  # noqa: N802
        self, request: job_pb2.LeaveRequest, context: aio.ServicerContext[Any, Any]
    ) -> job_pb2.LeaveResponse:
        """Let a worker go."""
        job = self._job
        known = self._heard(job, request.worker)
        job.drop_worker(known.id, request.reason or "it leaves")
        await job.journal.durable(DURABLE_S)
        return job_pb2.LeaveResponse()

    # Commands.

    async def GetJob(  # noqa: N802
        self, request: job_pb2.GetJobRequest, context: aio.ServicerContext[Any, Any]
    ) -> job_pb2.JobStatus:
        """Tell how the job goes."""
        return self.status()

    async def Scale(  # noqa: N802
        self, request: job_pb2.ScaleRequest, context: aio.ServicerContext[Any, Any]
    ) -> job_pb2.ScaleResponse:
        """Have another number of workers."""
        job = self._job
        before = job.scale(request.workers)
        await job.journal.durable(DURABLE_S)
        return job_pb2.ScaleResponse(before=before)

    async def Stop(  # noqa: N802
        self, request: job_pb2.StopRequest, context: aio.ServicerContext[Any, Any]
    ) -> job_pb2.StopResponse:
        """End the job."""
        job = self._job
        self._on_stop(request.keep_state)
        reason, left = request.reason or "stopped by a command", 0
        if request.when_done and job.spec.is_stream:
            left = job.stop_taking(reason)
        else:
            job.stop(reason)
        await job.journal.durable(DURABLE_S)
        return job_pb2.StopResponse(records_left=left)

    async def ListDeadLetters(  # noqa: N802
        self, request: job_pb2.ListDeadLettersRequest, context: aio.ServicerContext[Any, Any]
    ) -> job_pb2.ListDeadLettersResponse:
        """Return the tasks that failed for good."""
        return job_pb2.ListDeadLettersResponse(tasks=dead_letters(self._job))

    async def RetryDeadLetters(  # noqa: N802
        self, request: job_pb2.RetryDeadLettersRequest, context: aio.ServicerContext[Any, Any]
    ) -> job_pb2.RetryDeadLettersResponse:
        """Give dead-lettered tasks their tries again."""
        job = self._job
        count = job.retry_dead_letters(request.numbers)
        await job.journal.durable(DURABLE_S)
        return job_pb2.RetryDeadLettersResponse(tasks=count, saves=self._try_save_now())

    async def Launch(  # noqa: N802
        self, request: job_pb2.LaunchRequest, context: aio.ServicerContext[Any, Any]
    ) -> job_pb2.LaunchResponse:
        """Hear what runs, tell what should."""
        wish = await self._launches.exchange(
            report_of(request), known_version=request.known_version, wait_ms=request.wait_ms
        )
        return wish_message(wish)

    def status(self) -> job_pb2.JobStatus:
        """Return how the job goes; with many workers the same for a while."""
        job = self._job
        now_s = job.now()
        if now_s >= self._told_until_s or self._told.state != job.state.state:
            self._told = job_status(job, self._own, time.time_ns() // 1_000_000)
            kept_s = STATUS_KEPT_S if len(job.known) >= STATUS_KEPT_WORKERS else 0.0
            self._told_until_s = now_s + kept_s
        return self._told

    # How it is done.

    def _renew(self, request: job_pb2.RenewLeasesRequest) -> job_pb2.RenewLeasesResponse:
        job = self._job
        known = self._heard(job, request.worker)
        signs = WorkerSigns(
            request.examples,
            request.steps,
            request.loss if request.HasField("loss") else None,
            request.waiting_ms / 1000,
            tuple(request.waits_for),
            request.resident_bytes,
            request.stale_slots,
            request.staleness_sum,
            tuple(request.staleness_buckets[:STALENESS_BUCKETS_MAX]),
        )
        leases = [_known_lease(job, known.id, one) for one in request.leases]
        told = zip(leases, map(_scored, request.leases), strict=True)
        scored = {lease: one for lease, one in told if one is not None}
        revoked = job.renew(known.id, leases, signs, scored)
        led = job.stalls.leading_lease()
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

    def _heard(self, job: Job, who: job_pb2.Worker) -> KnownWorker:
        return job.hear(who.id, who.instance, who.host, who.pid, sync_address=who.sync_address)


def _lease_of(message: job_pb2.TaskLease) -> tuple[RoundId, LeasedTask]:
    kind = KIND_OF_MESSAGE.get(message.kind)
    if kind is None or message.round < 1:
        raise InvalidRequest(f"lease: no round of kind {message.kind}, number {message.round}")
    leased = LeasedTask(message.number, message.attempt, message.acknowledged_batches)
    return RoundId(kind, message.round), leased


def _known_lease(job: Job, worker: str, message: job_pb2.TaskLease) -> tuple[RoundId, LeasedTask]:
    """Return a lease that this job master, or one before it, gave a worker.

    Raises:
        NotJobMaster: A later job master gave it, so this process no longer is one.
        InvalidRequest: There is no such kind of round.
    """
    try:
        round_id, leased = _lease_of(message)
        if job.is_of_later_master(leased):
            raise NotJobMaster(
                "another process has become the job master, and gave this task; ask it"
            )
    except BackstayError as error:
        job.refusals.log_error(worker, error, job.now())
        raise
    return round_id, leased


def _lease_message(round_id: RoundId, leased: LeasedTask) -> job_pb2.TaskLease:
    return job_pb2.TaskLease(
        kind=MESSAGE_OF_KIND[round_id.kind],
        round=round_id.number,
        number=leased.task,
        attempt=leased.attempt,
        acknowledged_batches=leased.acknowledged,
    )


def _scored(message: job_pb2.TaskLease) -> Scored | None:
    """Return what was predicted of the batches that a worker tells as acknowledged.

    Raises:
        InvalidRequest: It is too much.
    """
    if not message.scores:
        return None
    if len(message.scores) > SCORES_BYTES_MAX:
        raise InvalidRequest(
            f"scores: {len(message.scores)} bytes are more than {SCORES_BYTES_MAX}"
        )
    return Scored(message.scored_from, message.scores)


def _scores(message: job_pb2.TaskLease) -> Scores | None:
    """Return the same, unpacked.

    Raises:
        InvalidRequest: It is too much, or cannot be read.
    """
    scored = _scored(message)
    return None if scored is None else Scores.from_bytes(scored.packed)


def _task_message(job: Job, given: Assignment) -> job_pb2.Task:
    records = given.round.table[given.lease.task]
    return job_pb2.Task(
        lease=_lease_message(given.round.id, given.lease),
        shard=records.shard,
        start=records.start,
        count=records.count,
        first_batch=given.lease.acknowledged,
        shuffle_seed=record_order_seed(job.spec, given.round.id, given.lease.task),
        leader=given.leader,
        training=job.stalls.clocks(),
        evaluation=newest_evaluation(job),
        scored_values=job.scored_values,
    )


def _incarnation(request: job_pb2.GetTaskRequest) -> StateIncarnation | None:
    """Return the rows that a worker pushes to; None: it does not say."""
    if not request.HasField("incarnation"):
        return None
    named = request.incarnation
    return StateIncarnation(named.restore_version, named.generation)


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
