"""The workers that a job master has heard of: who they are, how fast, since when silent.

Nothing of this is recorded: after a restart of the job master each worker calls again. What a
worker leases is in the ledgers. Time is an argument. Imports ``job_engine`` and
``backstay.errors``; does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from backstay.errors import InvalidRequest, LimitExceeded, WorkerReplaced
from backstay.job_engine.open_round import Assignment

__all__ = ["KnownWorker", "KnownWorkers", "WorkerSigns"]

WORKERS_MAX = 20_000
# A worker that was silent for so long and has no place among the wanted ones is forgotten.
FORGET_S = 60.0
# Examples a second are a mean over about this time.
RATE_S = 10.0


class WorkerSigns(NamedTuple):
    """What a worker tells of itself each time that it renews its leases.

    Attributes:
        examples: That it has trained since its process began.
        steps: That it has ended, likewise.
        loss: Running mean; None: none yet.
        waiting_s: How long it has been waiting for other workers; 0: it does not.
        waits_for: For whom, as far as it knows.
        resident_bytes: Memory of its process that is in use; 0: not known.
        stale_slots: Slots of its pushes of which it is known how stale they were.
        staleness_sum: All of that together.
        staleness_buckets: Of how many slots the mean staleness of the push was below 1, 2, 4 ...
    """

    examples: int
    steps: int
    loss: float | None = None
    waiting_s: float = 0.0
    waits_for: tuple[str, ...] = ()
    resident_bytes: int = 0
    stale_slots: int = 0
    staleness_sum: int = 0
    staleness_buckets: tuple[int, ...] = ()


@dataclass
class KnownWorker:
    """One worker.

    Attributes:
        id: Its name.
        instance: The instance of its process.
        host: Its machine.
        pid: Its process id there.
        heard_s: When it was heard of last.
        examples: Examples that its process has trained.
        steps: Steps that its process has ended.
        loss: Running mean; None: none yet.
        examples_per_s: Examples a second, over the last ten seconds or so.
        request: Number of its last request for a task.
        answer: The task that it was given for that; None: none.
        knows_end: Whether it was told that the job is over.
        waiting_s: How long it has been waiting for other workers; 0: it does not.
        waits_for: For whom, as far as it knows.
        note: What people should know of it; empty: nothing.
        sync_address: Sync mode: where other workers can take part in its steps; empty: nowhere.
        has_program: Whether its model file runs and has the tables of the job.
        measured_s: When its examples were told last; 0: never.
        resident_bytes: Memory of its process that was in use then; 0: not known.
        stale_slots: Slots of its pushes of which it is known how stale they were.
        staleness_sum: All of that together.
        staleness_buckets: Of how many slots the mean staleness of the push was below 1, 2, 4 ...
    """

    id: str
    instance: int
    host: str
    pid: int
    heard_s: float
    examples: int = 0
    steps: int = 0
    loss: float | None = None
    examples_per_s: float = 0.0
    request: int = 0
    answer: Assignment | None = None
    knows_end: bool = False
    waiting_s: float = 0.0
    waits_for: tuple[str, ...] = ()
    note: str = ""
    sync_address: str = ""
    has_program: bool = False
    measured_s: float = 0.0
    resident_bytes: int = 0
    stale_slots: int = 0
    staleness_sum: int = 0
    staleness_buckets: tuple[int, ...] = ()

    def measure(self, signs: WorkerSigns, now_s: float) -> None:
        """Take in what a sign of life tells."""
        if self.measured_s and now_s > self.measured_s:
            passed_s = now_s - self.measured_s
            rate = max(0, signs.examples - self.examples) / passed_s
            weight = min(1.0, passed_s / RATE_S)
            self.examples_per_s += weight * (rate - self.examples_per_s)
        self.measured_s = now_s
        self.examples, self.steps = signs.examples, signs.steps
        self.resident_bytes = signs.resident_bytes
        self.stale_slots, self.staleness_sum = signs.stale_slots, signs.staleness_sum
        self.staleness_buckets = signs.staleness_buckets
        if signs.loss is not None:
            self.loss = signs.loss


class KnownWorkers:
    """All workers of a job, by name."""

    def __init__(self) -> None:
        """Begin with none."""
        self._workers: dict[str, KnownWorker] = {}

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[KnownWorker]:
        return iter(self._workers.values())

    def get(self, worker: str) -> KnownWorker | None:
        """Return a worker, None if it is not known."""
        return self._workers.get(worker)

    def join(
        self, worker: str, instance: int, host: str, pid: int, now_s: float
    ) -> tuple[KnownWorker, bool]:
        """Take note of a process; returns it, and whether it replaces another one of its name.

        Raises:
            InvalidRequest: Name or instance is missing.
            LimitExceeded: There are too many workers.
        """
        if not worker or "/" in worker or len(worker) > 128 or not instance:
            raise InvalidRequest(f"worker {worker!r}, instance {instance}: both must be given")
        before = self._workers.get(worker)
        if before is None and len(self._workers) >= WORKERS_MAX:
            raise LimitExceeded(f"there are {WORKERS_MAX} workers already")
        if before is not None and before.instance == instance:
            before.heard_s = now_s
            return before, False
        known = KnownWorker(worker, instance, host, pid, now_s)
        self._workers[worker] = known
        return known, before is not None

    def hear(self, worker: str, instance: int, host: str, pid: int, now_s: float) -> KnownWorker:
        """Take note of a call. A worker may have joined at an earlier job master.

        Raises:
            WorkerReplaced: Another process has joined under its name.
        """
        known = self._workers.get(worker)
        if known is None:
            return self.join(worker, instance, host, pid, now_s)[0]
        if known.instance != instance:
            raise WorkerReplaced(
                f"another process has joined as worker {worker!r} (process {known.pid} on "
                f"{known.host or 'an unknown host'}); this one is to end"
            )
        known.heard_s = now_s
        return known

    def have_program(self) -> bool:
        """Return whether there is a worker whose program runs."""
        return any(one.has_program for one in self)

    def forget(self, worker: str) -> None:
        """Forget a worker that is gone."""
        self._workers.pop(worker, None)

    def forget_silent(self, now_s: float, kept: Callable[[str], bool]) -> None:
        """Forget workers that were silent for long, and are not to be kept."""
        silent = [one.id for one in self if now_s - one.heard_s > FORGET_S]
        for worker in silent:
            if not kept(worker):
                del self._workers[worker]
