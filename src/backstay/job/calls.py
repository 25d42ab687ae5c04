"""Calls to a job's master, from any process that knows a pserver: find it, call, try again.

The master's address is in the job's record, which any pserver reads from the coordination store.
A call is repeated with a pause while no master answers or the one that does is none (yet), until
a deadline; every call to a master may be repeated. Used by workers and by commands. Imports
:mod:`backstay.rpc` and the records of :mod:`backstay.consensus`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import grpc

from backstay import rpc
from backstay._proto.v1 import job_pb2_grpc, store_pb2, store_pb2_grpc
from backstay.cluster.directory import Directory
from backstay.config import ClientConfig
from backstay.consensus.job_records import JobStateRecord, MasterRecord
from backstay.consensus.keys import JobKeys
from backstay.errors import (
    ClosedError,
    DeadlineExceeded,
    JobRefused,
    NotJobMaster,
    ServerUnavailable,
    Stopping,
    StoreUnavailable,
    UnknownJob,
)

__all__ = ["JobCalls", "JobIsOver", "read_keys"]

ResultT = TypeVar("ResultT")

FIRST_PAUSE_S = 0.05
PAUSE_MAX_S = 0.5
# One try: the master itself waits up to 4 s for the store.
ATTEMPT_S = 6.0
SILENCE_S = 5.0
DIRECTORY_DEADLINE_MS = 2000
# Channels to job masters: the oldest are closed first. Only former masters are that old, and no
# call waits for them.
CHANNELS_MAX = 8

_AGAIN = (ServerUnavailable, Stopping, DeadlineExceeded, NotJobMaster, StoreUnavailable)

log = logging.getLogger(__name__)


class JobIsOver(JobRefused):
    """The job has ended, and has no master any more; attributes tell how."""

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
    """Calls to one job's master; from any thread."""

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
        self._closed = threading.Event()

    def call(
        self,
        call: Callable[[job_pb2_grpc.JobServiceStub, float], ResultT],
        *,
        deadline_s: float | None = None,
        attempt_s: float = ATTEMPT_S,
    ) -> ResultT:
        """Make a call that may be repeated, until a master answers it.

        Args:
            call: Takes the stub and a timeout in seconds.
            deadline_s: How long to try; default: ``deadline_ms`` of the config.
            attempt_s: How long one try may take.

        Raises:
            UnknownJob: There is no such job.
            JobRefused: It is over (``JobIsOver``), or the master refuses.
            ServerUnavailable: No master answered within the deadline.
            BackstayError: The master refuses.
        """
        limit_s = self.config.deadline_ms / 1000 if deadline_s is None else deadline_s
        started = time.monotonic()
        pause_s, warned = FIRST_PAUSE_S, False
        while True:
            left_s = limit_s - (time.monotonic() - started)
            try:
                address, stub = self._stub()
                with rpc.mapped_errors(address):
                    return call(stub, max(min(attempt_s, left_s), 0.001))
            except _AGAIN as error:
                why = error
                self._forget_address()
            passed_s = time.monotonic() - started
            if passed_s + pause_s >= limit_s:
                raise ServerUnavailable(
                    f"no master of job {self.job!r} answered within {passed_s:.1f} s: {why}"
                ) from why
            if passed_s > SILENCE_S and not warned:
                warned = True
                log.warning("waiting for the master of job %r: %s", self.job, why)
            if self._closed.wait(pause_s):
                raise ClosedError("the link to the job's master is closed")
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    def master(self) -> MasterRecord | None:
        """Return the process that is the job's master now, None if there is none.

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
        for channel in channels:
            channel.close()
        self.directory.close()

    def _stub(self) -> tuple[str, job_pb2_grpc.JobServiceStub]:
        if self._closed.is_set():
            raise ClosedError("the link to the job's master is closed")
        with self._lock:
            address = self._address
        if not address:
            record = self.master()
            if record is None:
                self._raise_if_over()
                raise ServerUnavailable(f"job {self.job!r} has no master now")
            address = record.address
        with self._lock:
            if self._closed.is_set():
                raise ClosedError("the link to the job's master is closed")
            self._address = address
            channel = self._channels.get(address)
            if channel is None:
                while len(self._channels) >= CHANNELS_MAX:
                    self._channels.pop(next(iter(self._channels))).close()
                channel = rpc.open_channel(address, self.config.security)
                self._channels[address] = channel
            return address, job_pb2_grpc.JobServiceStub(channel)

    def _raise_if_over(self) -> None:
        """Do not wait for a master that no process will start."""
        text = read_keys(self.directory, self._keys.state, single=True).get(self._keys.state)
        record = JobStateRecord.from_json(text) if text is not None else None
        if record is not None and record.state != "running":
            raise JobIsOver(self.job, record)

    def _forget_address(self) -> None:
        """Look for the master anew with the next try."""
        with self._lock:
            self._address = ""
