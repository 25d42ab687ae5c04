"""A worker's link to its job master: tasks in, progress out, through changes of the job master.

Its calls block. Each is retried with backoff while no job master answers, up to a deadline; every
call may be repeated, so a retry does no harm. A thread renews the leases. The link reads the job
master's address from the job's record at any pserver, and reads it anew when a call fails. This
module imports :mod:`backstay.job.calls` and the generated messages. It never moves rows.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from backstay._proto.v1 import job_pb2
from backstay.config import ClientConfig
from backstay.consensus.clock import clock_s
from backstay.errors import (
    BackstayError,
    ClosedError,
    JobRefused,
    ServerUnavailable,
    UnknownJob,
    WorkerReplaced,
)
from backstay.job.calls import ATTEMPT_S, CallStream, JobCalls, JobIsOver
from backstay.job.messages import (
    TASK_KINDS,
    Acknowledged,
    BadRecordsMet,
    Ended,
    EvaluationOutputs,
    JobTerms,
    LeaseHolder,
    Task,
    Wait,
    bad_record_messages,
    evaluation_of_message,
    key_of,
    key_of_message,
    lease_message,
    outputs_message,
)
from backstay.job_engine.leases import RENEWALS_PER_TTL
from backstay.trainer.worker.peers import Peers

__all__ = ["MasterLink"]

# Taken off the time of a lease, for clocks that run at slightly different speeds.
MARGIN_PART = 0.05
ERROR_CHARACTERS_MAX = 4096
# A longer request goes beside the stream: signs of life must not wait behind it.
STREAM_REQUEST_BYTES_MAX = 64 * 1024
LEAVE_DEADLINE_S = 3.0
NO_BAD_RECORDS = BadRecordsMet()
# Of this process, where the system is Linux: all its pages, and those that are in memory.
STATM = Path("/proc/self/statm")

log = logging.getLogger(__name__)


@dataclass
class _Leased:
    task: Task
    leased: LeaseHolder | None
    told: Callable[[], Acknowledged] | None
    # Its completion is being reported, so the lease no longer matters.
    ending: bool = False


class MasterLink:
    """One worker's link; all methods may be called from any thread."""

    def __init__(
        self,
        endpoints: str | Sequence[str],
        job: str,
        worker_id: str,
        *,
        config: ClientConfig | None = None,
    ) -> None:
        """Prepare; nothing is asked yet.

        Args:
            endpoints: Control addresses of pservers, where the job master's address is read.
            job: Name of the job.
            worker_id: Name of this worker, unique in the job.
            config: Security, and ``deadline_ms``: how long a call is tried while no job master
                answers.
        """
        self._calls = JobCalls(endpoints, job, config)
        self._who = job_pb2.Worker(
            id=worker_id,
            instance=secrets.randbelow(2**63 - 1) + 1,
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        self._lock = threading.Lock()
        # One request for a task at a time: the job master knows the last one only.
        self._asking = threading.Lock()
        self._requests = 0
        self._leases: dict[tuple[str, int, int], _Leased] = {}
        self._closed_streams: list[tuple[int, int]] = []
        # Each with the state incarnation that it belongs to.
        self._to_close: list[tuple[tuple[int, int] | None, tuple[int, int]]] = []
        self._figures = job_pb2.RenewLeasesRequest(worker=self._who)
        self._ttl_s = 0.0
        self._stop_reason: str | None = None
        self._job_steps = 0
        self.peers = Peers()
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def worker_id(self) -> str:
        """Name of this worker."""
        return self._who.id

    def join(self) -> JobTerms:
        """Join the job, and begin to send signs of life.

        Raises:
            JobRefused: The job is over.
            UnknownJob: There is no such job.
            ServerUnavailable: No job master answered within the deadline.
        """
        request = job_pb2.JoinRequest(worker=self._who)
        answer = self._calls.call(lambda stub, timeout: stub.Join(request, timeout=timeout))
        self._learn_nodes()
        with self._lock:
            self._ttl_s = answer.task_lease_ttl_ms / 1000
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(
                    target=self._keep, name="backstay-leases", daemon=True
                )
                self._thread.start()
        return JobTerms(
            spec_json=answer.spec_json,
            stream_job=answer.stream_job,
            start=answer.start,
        )

    def lead_at(self, address: str) -> None:
        """Tell with each call from now on where others can take part in this worker's steps."""
        with self._lock:
            self._who.sync_address = address
            self._figures.worker.sync_address = address

    def declare_tables(self, names: Sequence[str], notes: Sequence[str] = ()) -> None:
        """Tell the names of the job's tables, in the order in which the program made them.

        Args:
            names: The names.
            notes: What became of settings that the tables did not have.

        Raises:
            TableConflict: Another worker's list differs; the message says where.
        """
        request = job_pb2.DeclareTablesRequest(worker=self._who, names=names, notes=notes)
        self._calls.call(lambda stub, timeout: stub.DeclareTables(request, timeout=timeout))

    def get_task(self, incarnation: tuple[int, int] | None = None) -> Task | Wait | Ended:
        """Return a task, or how long to wait, or that there will be none.

        Waits a little for a task itself. Streams that :meth:`stream_closed` told are sent along;
        streams that others have left behind come into :meth:`streams_to_close`.

        Args:
            incarnation: Version of the cluster's last restore and generation of its rows, as of the
                connection that will be pushed on: a job whose progress is of others gives nothing.
                None: whatever it is of.
        """
        with self._asking:
            with self._lock:
                self._requests += 1
                closed = list(self._closed_streams)
            request = job_pb2.GetTaskRequest(
                worker=self._who,
                request=self._requests,
                closed_streams=[
                    job_pb2.TaskStreamId(pass_number=number, task=task) for number, task in closed
                ],
            )
            if incarnation is not None:
                request.incarnation.restore_version, request.incarnation.generation = incarnation
            leased_until = 0.0

            def ask(stream: CallStream, timeout: float) -> job_pb2.GetTaskResponse:
                # The answer may come after a sign of life that brings a longer time to live. The
                # task may have been given before that.
                nonlocal leased_until
                leased_until = self._until(clock_s())
                return stream.GetTask(request, timeout=timeout)

            try:
                answer = self._calls.call_on_stream(ask)
            except JobIsOver as error:
                return Ended(error.record.state, error.record.reason)
            with self._lock:
                del self._closed_streams[: len(closed)]
                self._to_close += [
                    (incarnation, (one.pass_number, one.task)) for one in answer.streams_to_close
                ]
        if answer.WhichOneof("answer") == "ended":
            return Ended(answer.ended.state, answer.ended.reason)
        if answer.WhichOneof("answer") != "task":
            return Wait(answer.wait_ms / 1000, answer.other_incarnation)
        lease = answer.task.lease
        return Task(
            kind=TASK_KINDS[lease.kind - 1],
            round=lease.round,
            number=lease.number,
            attempt=lease.attempt,
            shard=answer.task.shard,
            start=answer.task.start,
            count=answer.task.count,
            first_batch=answer.task.first_batch,
            shuffle_seed=answer.task.shuffle_seed,
            leased_until=leased_until,
            leader=answer.task.leader,
            evaluation=evaluation_of_message(answer.task),
            training=frozenset(answer.task.training),
            scored_values=tuple(answer.task.scored_values),
        )

    def streams_to_close(self, incarnation: tuple[int, int] | None = None) -> list[tuple[int, int]]:
        """Take the streams (pass, task) that this worker is to close for others.

        Args:
            incarnation: As of :meth:`get_task`. What was told for another one is dropped, and told
                again.
        """
        with self._lock:
            told, self._to_close = self._to_close, []
        return [stream for told_for, stream in told if told_for == incarnation]

    def stream_closed(self, pass_number: int, task: int) -> None:
        """Note that a stream is closed on all servers; the next :meth:`get_task` tells it."""
        with self._lock:
            self._closed_streams.append((pass_number, task))

    def lease(
        self,
        task: Task,
        leased: LeaseHolder | None = None,
        told: Callable[[], Acknowledged] | None = None,
    ) -> None:
        """Have the lease renewed; ``leased`` hears of it until the task ends in any way.

        Args:
            task: The task.
            leased: Who hears of it.
            told: Returns how far the task is, with what was predicted; default: ``leased`` knows.
        """
        with self._lock:
            self._leases[key_of(task)] = _Leased(task, leased, told)
        if leased is not None:
            leased.lease_until(task.leased_until)

    def complete(
        self,
        task: Task,
        *,
        batches: int,
        examples: int,
        loss: float | None = None,
        outputs: EvaluationOutputs | None = None,
        bad_record_count: int = 0,
        scores: bytes = b"",
    ) -> bool:
        """Tell that a task is done; returns when that is recorded.

        Args:
            task: The task.
            batches: Batches of the whole task, those before ``first_batch`` included.
            examples: Records of the task that were gone through, in all attempts.
            loss: Mean over those.
            outputs: Of an evaluation task.
            bad_record_count: Damaged records that were skipped.
            scores: Progressive metrics: the packed scores of all batches of this attempt.

        Returns:
            Whether this made the task done; false: another worker was first, or the job ended
            before the answer arrived.
        """
        request = job_pb2.CompleteRequest(
            worker=self._who,
            lease=lease_message(task, batches, scores),
            batches=batches,
            examples=examples,
            loss=loss,
            bad_record_count=bad_record_count,
        )
        if outputs is not None:
            request.outputs.CopyFrom(outputs_message(outputs))
        with self._lock:
            kept = self._leases.get(key_of(task))
            if kept is not None:
                kept.ending = True
        try:
            if request.ByteSize() > STREAM_REQUEST_BYTES_MAX:
                answer = self._calls.call(
                    lambda stub, timeout: stub.Complete(request, timeout=timeout)
                )
            else:
                answer = self._calls.call_on_stream(
                    lambda stream, timeout: stream.Complete(request, timeout=timeout)
                )
        except JobIsOver as error:
            # A job is done with all its tasks done: this one too, by an earlier send of this
            # request whose answer was lost with its job master, or by another worker.
            self._end_all(str(error))
            return False
        finally:
            self._let_go(task)
        return answer.first

    def give_back(
        self, task: Task, *, acknowledged_batches: int, reason: str, scores: bytes = b""
    ) -> None:
        """Return a task that others can go on with; ``scores`` as ``Acknowledged`` has them."""
        self._let_go(task)
        request = job_pb2.GiveBackRequest(
            worker=self._who,
            lease=lease_message(task, acknowledged_batches, scores),
            reason=reason[:ERROR_CHARACTERS_MAX],
        )
        self._calls.call(lambda stub, timeout: stub.GiveBack(request, timeout=timeout))

    def fail(
        self,
        task: Task,
        error: str,
        *,
        acknowledged_batches: int = 0,
        records: Sequence[int] = (),
        bad_records: BadRecordsMet = NO_BAD_RECORDS,
        scores: bytes = b"",
    ) -> bool:
        """Tell that a task failed by user code or data; returns whether it is dead-lettered now.

        Args:
            task: The task.
            error: What happened, with the end of the traceback.
            acknowledged_batches: Batches of it that are acknowledged everywhere.
            records: Positions within the task of the records concerned, as far as known.
            bad_records: Damaged ones that were met; more than the job allows end it.
            scores: As ``Acknowledged`` has them.
        """
        self._let_go(task)
        request = job_pb2.FailRequest(
            worker=self._who,
            lease=lease_message(task, acknowledged_batches, scores),
            error=error[-ERROR_CHARACTERS_MAX:],
            records=records,
            bad_records=bad_record_messages(bad_records.first),
            bad_record_count=bad_records.number,
        )
        answer = self._calls.call(lambda stub, timeout: stub.Fail(request, timeout=timeout))
        return answer.dead_lettered

    def figures(
        self,
        *,
        examples: int,
        steps: int,
        loss: float | None,
        stale_slots: int = 0,
        staleness_sum: int = 0,
        staleness_buckets: Sequence[int] = (),
    ) -> None:
        """Note what the next sign of life tells: sums since the process began."""
        with self._lock:
            self._figures.examples = examples
            self._figures.steps = steps
            self._figures.stale_slots = stale_slots
            self._figures.staleness_sum = staleness_sum
            self._figures.staleness_buckets[:] = staleness_buckets
            if loss is not None:
                self._figures.loss = loss

    @property
    def stop_reason(self) -> str | None:
        """Why this worker is to give everything back and end; None: it is not."""
        return self._stop_reason

    @property
    def job_steps(self) -> int:
        """Steps of the job, all workers together, as of the last sign of life."""
        return self._job_steps

    @property
    def instance(self) -> int:
        """What tells this process from others that had its name."""
        return self._who.instance

    def leave(self, reason: str = "") -> None:
        """Say that this worker ends in good order; its tasks go back.

        A job master that does not answer finds out by itself.
        """
        request = job_pb2.LeaveRequest(worker=self._who, reason=reason)
        try:
            self._calls.call(
                lambda stub, timeout: stub.Leave(request, timeout=timeout),
                deadline_s=LEAVE_DEADLINE_S,
            )
        except (ServerUnavailable, JobRefused, WorkerReplaced, UnknownJob) as error:
            log.info("left without a word: %s", error)

    def close(self) -> None:
        """End the thread and close the connections; the job master is told nothing."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        self._wake.set()
        self._calls.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _learn_nodes(self) -> None:
        """Know the other pservers, too, for when the given ones are gone."""
        try:
            self._calls.directory.cluster()
        except BackstayError as error:
            log.info("the cluster's other nodes are not known: %s", error)

    def _until(self, sent_s: float) -> float:
        return sent_s + self._ttl_s * (1 - MARGIN_PART)

    def _let_go(self, task: Task) -> None:
        with self._lock:
            self._leases.pop(key_of(task), None)

    def _keep(self) -> None:
        """Send signs of life until closed; the body of the thread."""
        while not self._closed:
            began_s = time.monotonic()
            try:
                self._keep_once()
            except ServerUnavailable as error:
                log.warning("the leases are not renewed: %s", error)
            except ClosedError:
                return
            except (WorkerReplaced, JobRefused, UnknownJob) as error:
                self._end_all(str(error))
                return
            except BackstayError as error:
                log.error("the leases cannot be renewed: %s", error)
            period_s = self._ttl_s / RENEWALS_PER_TTL
            self._wake.wait(max(0.0, period_s - (time.monotonic() - began_s)))

    def _keep_once(self) -> None:
        request = job_pb2.RenewLeasesRequest()
        with self._lock:
            request.CopyFrom(self._figures)
            leased = dict(self._leases)
        request.resident_bytes = _resident_bytes()
        for one in leased.values():
            told = _acknowledged(one)
            request.leases.append(lease_message(one.task, told.batches, told.scores))
        self.peers.tell(request)
        sent_s = asked_s = 0.0

        def ask(stream: CallStream, timeout: float) -> job_pb2.RenewLeasesResponse:
            nonlocal sent_s, asked_s
            sent_s, asked_s = clock_s(), time.monotonic()
            return stream.RenewLeases(request, timeout=timeout)

        # An answer that comes after the lease's end is of no use, so the call waits no longer. A
        # worker that gives up much sooner calls again, and adds to the load of a job master that
        # has fallen behind.
        attempt_s = max(min(self._ttl_s, ATTEMPT_S), self._ttl_s / 2)
        answer = self._calls.call_on_stream(ask, deadline_s=2 * self._ttl_s, attempt_s=attempt_s)
        self._ttl_s = answer.task_lease_ttl_ms / 1000
        self._job_steps = answer.job_steps
        self.peers.learn(answer, asked_s)
        revoked = {key_of_message(one) for one in answer.revoked}
        for key, one in leased.items():
            if one.leased is None or one.ending:
                continue
            if key in revoked:
                one.leased.revoke()
            else:
                one.leased.lease_until(self._until(sent_s))
        with self._lock:
            for key in revoked:
                kept = self._leases.get(key)
                if kept is not None and kept is leased.get(key) and not kept.ending:
                    del self._leases[key]
        if answer.stop:
            self._stop_reason = answer.stop_reason or "the job is over"

    def _end_all(self, reason: str) -> None:
        log.warning("%s", reason)
        self._stop_reason = reason
        with self._lock:
            leased, self._leases = list(self._leases.values()), {}
        for one in leased:
            if one.leased is not None:
                one.leased.revoke()


def _acknowledged(one: _Leased) -> Acknowledged:
    if one.told is not None:
        return one.told()
    return Acknowledged(one.task.first_batch if one.leased is None else one.leased.acknowledged)


def _resident_bytes() -> int:
    """Return how much memory of this process is in use; 0: the system does not tell it here."""
    try:
        return int(STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0
