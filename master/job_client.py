"""A job as the commands see it: its master's figures and orders, and the jobs of a cluster.

Blocking calls. Needs a pserver's address only: the master's is in the job's record. Imports
:mod:`backstay.rpc` and the records of :mod:`backstay.consensus`; changes no record but to forget
a job that has no master.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from backstay._proto.v1 import job_pb2
from backstay.config import ClientConfig

__all__ = ["JobClient", "JobEntry", "forget_job", "list_jobs"]


@dataclass(frozen=True)
class JobEntry:
    """One job of a cluster, from its records: also while it has no master.

    Attributes:
        job: Its name.
        uid: What tells it from others of that name.
        state: ``running``, ``stopping``, ``done``, ``stopped``, ``failed`` or ``new``.
        reason: Why, if it is over.
        spec_json: Its spec.
        created_ms: Unix time.
        master_address: Of the process that is its master now; empty: none is.
        progress: One line for people, such as ``pass 2 of 10``.
    """

    job: str
    uid: str
    state: str
    reason: str
    spec_json: str
    created_ms: int
    master_address: str
    progress: str


def list_jobs(
    endpoints: str | Sequence[str], *, config: ClientConfig | None = None
) -> tuple[JobEntry, ...]:
    """Return the jobs of a cluster, by name.

    Raises:
        ServerUnavailable: No pserver answered within the deadline.
    """
    raise NotImplementedError


def forget_job(
    endpoints: str | Sequence[str], job: str, *, config: ClientConfig | None = None
) -> bool:
    """Remove all records of a job; returns whether there were any.

    Raises:
        JobRefused: It has a master; stop it first.
    """
    raise NotImplementedError


class JobClient:
    """Calls to one job's master; repeated while it is away, until the deadline."""

    def __init__(
        self,
        endpoints: str | Sequence[str],
        job: str,
        *,
        config: ClientConfig | None = None,
    ) -> None:
        """Prepare; nothing is asked yet.

        Args:
            endpoints: Control addresses of pservers.
            job: Name of the job.
            config: Security, and ``deadline_ms`` of each call.
        """
        raise NotImplementedError

    def status(self) -> job_pb2.JobStatus:
        """Return how the job goes.

        Raises:
            UnknownJob: There is no such job.
            ServerUnavailable: No master answered within the deadline.
        """
        raise NotImplementedError

    def watch(self, period_s: float = 1.0) -> Iterator[job_pb2.JobStatus]:
        """Yield how the job goes, through changes of the master, until the job is over.

        While no master answers for longer than the deadline ``ServerUnavailable`` is raised.
        """
        raise NotImplementedError

    def scale(self, workers: int) -> int:
        """Have so many workers; returns how many were wanted before.

        Raises:
            InvalidRequest: It is outside of the job's min and max.
        """
        raise NotImplementedError

    def stop(self, reason: str = "", *, keep_state: bool = True) -> None:
        """End the job; with ``keep_state`` the same command goes on with it later."""
        raise NotImplementedError

    def parked(self) -> tuple[job_pb2.ParkedTask, ...]:
        """Return the tasks that failed for good."""
        raise NotImplementedError

    def retry_parked(self, numbers: Sequence[int] = ()) -> int:
        """Give parked tasks of the round under way their tries again; none: all of them."""
        raise NotImplementedError

    def launch(
        self,
        launcher: str,
        alive: Sequence[str],
        exits: Sequence[job_pb2.WorkerExit],
        *,
        known_version: int = 0,
        wait_s: float = 1.0,
    ) -> job_pb2.LaunchResponse:
        """Tell which workers run and which have ended; return which should run.

        The id of a worker stands for one process and is never used again.

        Answers at once if that is not what ``known_version`` stands for, else after ``wait_s``.
        Repeat exits until they come back as acknowledged.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close the connections."""
        raise NotImplementedError
