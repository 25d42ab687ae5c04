"""The worker processes of a job: which should run, which have ended, and what they leave behind.

The worker set decides; what it decided is recorded, and the tasks of a process that is gone go
back. Does no I/O of its own.
"""

from __future__ import annotations

from collections.abc import Callable

from backstay.job_engine.known_workers import KnownWorkers
from backstay.job_engine.launch import LauncherReport, WorkerExit
from backstay.job_engine.worker_set import WorkerPolicy, WorkerSet

__all__ = ["JobWorkers"]


class JobWorkers:
    """The worker processes of one job; belongs to one event loop."""

    def __init__(
        self,
        workers: WorkerSet,
        known: KnownWorkers,
        clock: Callable[[], float],
        *,
        drop: Callable[[str, str], None],
        changed: Callable[[], None],
    ) -> None:
        """Take over what the records say.

        Args:
            workers: Which are wanted.
            known: Which were heard of.
            clock: Monotonic seconds.
            drop: Takes back all tasks of a worker that is gone; is told why.
            changed: Has the journal write which are wanted.
        """
        self._set = workers
        self._known = known
        self._now = clock
        self._drop = drop
        self._changed = changed
        self._wanted: tuple[str, ...] = ()

    def join(self, worker: str, instance: int, host: str, pid: int) -> None:
        """Take note of a process; the tasks of another one of its name go back.

        Raises:
            InvalidRequest: Name or instance is missing.
            LimitExceeded: There are too many workers.
        """
        _, replaces = self._known.join(worker, instance, host, pid, self._now())
        if replaces:
            self._drop(worker, "another process has joined in its place")
            self._known.join(worker, instance, host, pid, self._now())

    def report(self, report: LauncherReport) -> None:
        """Take in what a launcher reports. The tasks of each worker that has ended go back."""
        for end in report.exits:
            self._ended(end)
        for end in self._set.running(report.running, self._now()):
            self._ended(end)

    def _ended(self, end: WorkerExit) -> None:
        self._set.exited(end, self._now())
        self._drop(end.worker_id, f"it {end.how}")
        self._changed()

    def replace(self, worker: str, why: str) -> bool:
        """Want another process instead of one that hangs; False if it is not wanted."""
        if not self._set.replace(worker, self._now()):
            return False
        self._drop(worker, why)
        self._changed()
        return True

    def wanted(self) -> tuple[str, ...]:
        """Return the workers that should run; wait for the journal before they are started."""
        wanted = self._set.wanted(self._now())
        if wanted != self._wanted:
            self._wanted = wanted
            self._changed()
        return wanted

    def next_change_s(self) -> float | None:
        """Return when ``wanted`` may have one more; None if none is waited for."""
        return self._set.next_change_s()

    def scale(self, workers: int) -> int:
        """Want so many; returns how many were wanted before.

        Raises:
            InvalidRequest: That is outside of the job's min and max.
        """
        before = self._set.desired
        self._set.scale(workers)
        self._changed()
        return before

    def finish(self) -> None:
        """Want none any more."""
        self._set.finish()

    def begin_anew(self, policy: WorkerPolicy) -> None:
        """Want as many as at the beginning of the job."""
        self._set = WorkerSet(policy)

    @property
    def desired(self) -> int:
        """How many are wanted in all."""
        return self._set.desired

    @property
    def failed(self) -> str:
        """Why too few can be kept, which ends the job; else empty."""
        return self._set.failed

    def to_json(self) -> str:
        """Return which are wanted, for the record."""
        return self._set.to_json()
