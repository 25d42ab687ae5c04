"""Calls to a job master, from any process that knows a pserver: find it, call, try again.

The job master's address is in the job's record, which any pserver reads from the coordination
store. A call is repeated with a pause while no job master answers or the one that does is none
(yet), until a deadline; every call to a job master may be repeated. The frequent calls of a process
go on one stream, which is opened again when it has ended. Used by workers and by commands. Imports
:mod:`backstay.rpc`, the generated messages and the records of :mod:`backstay.consensus`.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from typing import TypeVar

import grpc

from backstay import rpc
from backstay._proto.v1 import job_pb2, job_pb2_grpc, store_pb2, store_pb2_grpc
from backstay.backoff import Backoff
from backstay.cluster.directory import Directory
from backstay.config import ClientConfig
from backstay.consensus.records.jobs import JobStateRecord, MasterRecord
from backstay.consensus.records.keys import JobKeys
from backstay.errors import (
    BackstayError,
    ClosedError,
    DeadlineExceeded,
    JobRefused,
    NotJobMaster,
    ServerUnavailable,
    Stopping,
    StoreUnavailable,
    UnknownJob,
)

__all__ = ["CallStream", "JobCalls", "JobIsOver", "read_keys"]

ResultT = TypeVar("ResultT")

# Thousands of workers wait for one new job master: they are not to come at one time.
RETRY = Backoff(first_s=0.05, longest_s=0.5, jitter=0.5)
# One try: the job master itself waits up to 4 s for the store.
ATTEMPT_S = 6.0
SILENCE_S = 5.0
DIRECTORY_DEADLINE_MS = 2000
# Channels to job masters: the oldest are closed first. Only former masters are that old, and no
# call waits for them.
CHANNELS_MAX = 8

_AGAIN = (ServerUnavailable, Stopping, DeadlineExceeded, NotJobMaster, StoreUnavailable)
# Calls that wait for their answers; the job master's limit.
WAITING_MAX = 1024

log = logging.getLogger(__name__)


class CallStream:
    """The calls of one process to one job master on one gRPC stream, from any thread.

    A call on the stream costs the job master a fifth of a call of its own. The methods are named,
    and fail, like those of the stub. When the stream ends, the calls that wait fail, and their
    callers repeat them on a new one. The answer to a call that came too late for its caller is
    dropped.
    """

    def __init__(self, stub: job_pb2_grpc.JobServiceStub, address: str) -> None:
        """Open it; a job master that cannot be reached fails the calls.

        Args:
            stub: Of the job master.
            address: Its address, for messages.
        """
        self.address = address
        self._changed = threading.Condition()
        self._unsent: list[job_pb2.WorkerCall] = []
        self._waiting: dict[int, Future[job_pb2.WorkerAnswer]] = {}
        self._last_id = 0
        self._why_over: BackstayError | None = None
        self._stream = stub.CallStream(self._messages())
        threading.Thread(target=self._read, name="backstay-answers", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether calls must go on another stream."""
        return self._why_over is not None

    # The calls below have the names and arguments of the gRPC stub.

    def RenewLeases(  # noqa: N802 (the name is the service's)
        self, request: job_pb2.RenewLeasesRequest, *, timeout: float
    ) -> job_pb2.RenewLeasesResponse:
        """Renew leases."""
        return self._ask(job_pb2.WorkerCall(renew_leases=request), timeout).renew_leases

    def GetTask(  # noqa: N802
        self, request: job_pb2.GetTaskRequest, *, timeout: float
    ) -> job_pb2.GetTaskResponse:
        """Ask for a task."""
        return self._ask(job_pb2.WorkerCall(get_task=request), timeout).get_task

    def Complete(  # noqa: N802
        self, request: job_pb2.CompleteRequest, *, timeout: float
    ) -> job_pb2.CompleteResponse:
        """Tell that a task is done."""
        return self._ask(job_pb2.WorkerCall(complete=request), timeout).complete

    def close(self, why: BackstayError | None = None) -> None:
        """End the stream and the calls that wait."""
        self._end(why or ClosedError("the link to the job master is closed"))
        self._stream.cancel()

    def _ask(self, call: job_pb2.WorkerCall, timeout_s: float) -> job_pb2.WorkerAnswer:
        future: Future[job_pb2.WorkerAnswer] = Future()
        with self._changed:
            if self._why_over is not None:
                raise _copy_of(self._why_over)
            if len(self._waiting) >= WAITING_MAX:
                raise ServerUnavailable(f"{self.address}: {WAITING_MAX} calls wait for an answer")
            self._last_id += 1
            call.id = self._last_id
            self._waiting[call.id] = future
            self._unsent.append(call)
            self._changed.notify_all()
        try:
            answer = future.result(timeout_s)
        except FutureTimeoutError:
            with self._changed:
                self._waiting.pop(call.id, None)
                if call in self._unsent:
                    self._unsent.remove(call)
            raise DeadlineExceeded(f"{self.address}: did not answer in time") from None
        if answer.HasField("error"):
            raise rpc.named_error(answer.error.error, answer.error.text, self.address)
        return answer

    def _messages(self) -> Iterator[job_pb2.WorkerCalls]:
        """Yield what is to be sent; gRPC asks for the next message when it has room for it."""
        while True:
            with self._changed:
                while not self._unsent and self._why_over is None:
                    self._changed.wait()
                if self._why_over is not None:
                    return
                calls, self._unsent = self._unsent, []
            yield job_pb2.WorkerCalls(calls=calls)

    def _read(self) -> None:
        """Hand out answers until the stream ends; the body of a thread."""
        why: BackstayError = ServerUnavailable(f"{self.address} ended the stream")
        try:
            for message in self._stream:
                for answer in message.answers:
                    with self._changed:
                        future = self._waiting.pop(answer.id, None)
                    if future is not None:
                        future.set_result(answer)
        except grpc.RpcError as error:
            why = rpc.error_of(error, self.address)
        self._end(why)

    def _end(self, why: BackstayError) -> None:
        """Fail the calls that wait; the first reason counts."""
        with self._changed:
            self._why_over = self._why_over or why
            waiting, self._waiting = list(self._waiting.values()), {}
            self._unsent.clear()
            self._changed.notify_all()
        for future in waiting:
            future.set_exception(_copy_of(self._why_over))


def _copy_of(error: BackstayError) -> BackstayError:
    """Return an error for another thread to raise."""
    return type(error)(str(error))


class JobIsOver(JobRefused):
    """The job has ended, and has no job master any more; attributes tell how."""

    def __init__(self, job: str, record: JobStateRecord) -> None:
        """Make it from the job's state record."""
        super().__init__(f"job {job!r} is {record.state}: {record.reason or 'no reason given'}")
        self.record = record


def read_keys(directory: Directory, prefix: str, *, single: bool = False) -> dict[str, str]:
    """Return the records below a prefix of the coordination store, or one record, by key.

    Raises:
        ServerUnavailable: No pserver answered within the deadline.
        StoreUnavailable: The pservers' store does not answer.
    """
    request = store_pb2.StoreRangeRequest(prefix=prefix, single=single)
    answer = directory.call(
        lambda channel, timeout_s: store_pb2_grpc.StoreServiceStub(channel).Range(
            request, timeout=timeout_s
        )
    )
    return {item.key: item.value for item in answer.items}


class JobCalls:
    """Calls to one job master; from any thread."""

    def __init__(
        self, endpoints: str | Sequence[str], job: str, config: ClientConfig | None = None
    ) -> None:
        """Prepare; nothing is asked yet.

        Args:
            endpoints: Control addresses of pservers.
            job: Name of the job.
            config: Security, and ``deadline_ms`` of each call.
        """
        self.job = job
        self.config = config or ClientConfig.load()
        self._keys = JobKeys(job)
        # It tries for a moment only: how long to go on is decided here.
        patience_ms = min(self.config.deadline_ms, DIRECTORY_DEADLINE_MS)
        self.directory = Directory(endpoints, replace(self.config, deadline_ms=patience_ms))
        self._lock = threading.Lock()
        self._address = ""
        # A channel is not closed while another thread may wait on it.
        self._channels: dict[str, grpc.Channel] = {}
        self._stream: CallStream | None = None
        self._draw = random.Random().random
        self._closed = threading.Event()

    def call(
        self,
        call: Callable[[job_pb2_grpc.JobServiceStub, float], ResultT],
        *,
        deadline_s: float | None = None,
        attempt_s: float = ATTEMPT_S,
    ) -> ResultT:
        """Make a call that may be repeated, until a job master answers it.

        Args:
            call: Takes the stub and a timeout in seconds.
            deadline_s: How long to try; default: ``deadline_ms`` of the config.
            attempt_s: How long one try may take.

        Raises:
            UnknownJob: There is no such job.
            JobRefused: It is over (``JobIsOver``), or the job master refuses.
            ServerUnavailable: No job master answered within the deadline.
            BackstayError: The job master refuses.
        """

        def attempt(timeout_s: float) -> ResultT:
            address, stub = self._stub()
            with rpc.mapped_errors(address):
                return call(stub, timeout_s)

        return self._repeat(attempt, deadline_s, attempt_s)

    def call_on_stream(
        self,
        call: Callable[[CallStream, float], ResultT],
        *,
        deadline_s: float | None = None,
        attempt_s: float = ATTEMPT_S,
    ) -> ResultT:
        """Make a call as ``call`` does, on the call stream of this process to the job master."""
        return self._repeat(
            lambda timeout_s: call(self._open_stream(), timeout_s), deadline_s, attempt_s
        )

    def _repeat(
        self, attempt: Callable[[float], ResultT], deadline_s: float | None, attempt_s: float
    ) -> ResultT:
        limit_s = self.config.deadline_ms / 1000 if deadline_s is None else deadline_s
        started = time.monotonic()
        retries = RETRY.begin(until_s=started + limit_s, draw=self._draw)
        warned = False
        while True:
            left_s = limit_s - (time.monotonic() - started)
            try:
                return attempt(max(min(attempt_s, left_s), 0.001))
            except _AGAIN as error:
                why = error
                self._forget_address()
            pause_s, now_s = retries.next_s(), time.monotonic()
            passed_s = now_s - started
            if retries.is_over(now_s):
                raise ServerUnavailable(
                    f"no job master of job {self.job!r} answered within {passed_s:.1f} s: {why}"
                ) from why
            if passed_s > SILENCE_S and not warned:
                warned = True
                log.warning("waiting for the job master of job %r: %s", self.job, why)
            if self._closed.wait(pause_s):
                raise ClosedError("the link to the job master is closed")

    def master(self) -> MasterRecord | None:
        """Return the process that is the job master now, None if there is none.

        Raises:
            UnknownJob: There is no such job.
            ServerUnavailable: No pserver answers.
        """
        found = read_keys(self.directory, self._keys.master, single=True)
        if found:
            return MasterRecord.from_json(next(iter(found.values())))
        names = read_keys(self.directory, self._keys.names())
        if self._keys.name in names:
            return None
        others = ", ".join(key.rpartition("/")[2] for key in names) or "none"
        raise UnknownJob(f"the cluster has no job {self.job!r}; it has: {others}")

    def close(self) -> None:
        """End calls under way and close the connections."""
        with self._lock:
            self._closed.set()
            channels, self._channels = list(self._channels.values()), {}
            stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        for channel in channels:
            channel.close()
        self.directory.close()

    def _stub(self) -> tuple[str, job_pb2_grpc.JobServiceStub]:
        if self._closed.is_set():
            raise ClosedError("the link to the job master is closed")
        with self._lock:
            address = self._address
        if not address:
            record = self.master()
            if record is None:
                self._raise_if_over()
                raise ServerUnavailable(f"job {self.job!r} has no job master now")
            address = record.address
        with self._lock:
            if self._closed.is_set():
                raise ClosedError("the link to the job master is closed")
            self._address = address
            channel = self._channels.pop(address, None)
            if channel is None:
                while len(self._channels) >= CHANNELS_MAX:
                    self._channels.pop(next(iter(self._channels))).close()
                security = self.config.security
                channel = rpc.open_channel(address, security, tls_name=security.job_tls_name)
            # The last is the one used last; the first is closed when there are too many.
            self._channels[address] = channel
            return address, job_pb2_grpc.JobServiceStub(channel)

    def _open_stream(self) -> CallStream:
        """Return the call stream to the job master that is known now, a new one if it has ended."""
        address, stub = self._stub()
        with self._lock:
            if self._closed.is_set():
                raise ClosedError("the link to the job master is closed")
            former = self._stream
            if former is not None and former.address == address and not former.is_over:
                return former
            self._stream = stream = CallStream(stub, address)
        if former is not None:
            former.close(ServerUnavailable(f"{former.address} is not the job master any more"))
        return stream

    def _raise_if_over(self) -> None:
        """Do not wait for a job master that no process will start."""
        text = read_keys(self.directory, self._keys.state, single=True).get(self._keys.state)
        record = JobStateRecord.from_json(text) if text is not None else None
        if record is not None and record.state != "running":
            raise JobIsOver(self.job, record)

    def _forget_address(self) -> None:
        """Look for the job master anew with the next try."""
        with self._lock:
            self._address = ""
