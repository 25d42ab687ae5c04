"""Stalled workers: others wait for them, and they end no step, though they send signs of life.

A worker whose code hangs still renews its leases. Where other workers wait for it, the engine looks
at when it last ended a step: ``StepWatch``. ``Stalls`` acts on that: in sync mode the task of a
stalled leader goes to another worker; in bounded mode the others do not wait for it any more. Time
is an argument. Imports ``job_engine``, ``job_spec`` and ``schedule``; does no I/O.
"""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from backstay.job_engine.job_rounds import JobRounds
from backstay.job_engine.known_workers import KnownWorkers, WorkerSigns
from backstay.job_engine.leases import Median
from backstay.job_engine.open_round import OpenRound
from backstay.job_engine.task import Lease
from backstay.job_spec import JobSpec
from backstay.schedule.rounds import RoundId, RoundKind

__all__ = ["FIRST_STEP_FACTOR", "Stalls", "StepWatch", "clock_of_worker"]

# A step that has taken this part of its limit is shown to people.
SHOWN_PART = 1 / 6
# In its first step a process warms up its framework, and may compile the model.
FIRST_STEP_FACTOR = 4.0
# Each time that a task's step exceeds the limit, the limit doubles for the next worker, so that a
# model with slow steps succeeds in the end. So often at most.
DOUBLINGS_MAX = 10

log = logging.getLogger(__name__)


@dataclass
class _Steps:
    """What is known of one worker.

    Attributes:
        steps: That its process has ended.
        progress_s: When its step under way began; later if it waited for others or got a task.
        is_waiting: Whether it waits for other workers.
    """

    steps: int
    progress_s: float
    is_waiting: bool = False


class StepWatch:
    """Knows how long each worker has been in its step, and how long it may be.

    Args:
        limit_s: A step may take so long in any case.
        factor: And so many times the median of the steps before it.
    """

    def __init__(self, limit_s: float, factor: float) -> None:
        self._limit_s = limit_s
        self._factor = factor
        self._took_s = Median()
        self._workers: dict[str, _Steps] = {}

    def heard(self, worker: str, steps: int, now_s: float, *, is_waiting: bool) -> None:
        """Take in a sign of life.

        Args:
            worker: Whose.
            steps: That its process has ended.
            now_s: The time.
            is_waiting: Whether it waits for other workers; that time does not count as its own.
        """
        known = self._workers.get(worker)
        if known is None or known.steps > steps:
            self._workers[worker] = _Steps(steps, now_s, is_waiting)
            return
        if steps > known.steps and not known.is_waiting:
            self._took_s.add((now_s - known.progress_s) / (steps - known.steps))
        if steps > known.steps or is_waiting:
            known.progress_s = now_s
        known.steps, known.is_waiting = steps, is_waiting

    def task_given(self, worker: str, now_s: float) -> None:
        """Take note that a worker is given a task: its time begins anew."""
        known = self._workers.setdefault(worker, _Steps(0, now_s))
        known.progress_s = now_s

    def stalled_for_s(self, worker: str, now_s: float) -> float:
        """Return how long a worker has been in its step; 0 if it waits or was never heard of."""
        known = self._workers.get(worker)
        return 0.0 if known is None or known.is_waiting else now_s - known.progress_s

    def limit_s(self, worker: str, stalls: int = 0) -> float:
        """Return how long a worker's step may take.

        Args:
            worker: Whose.
            stalls: How often in a row the same task was taken from a stalled worker.
        """
        known, usual_s = self._workers.get(worker), self._took_s.value
        limit_s = max(self._limit_s, self._factor * (usual_s or 0.0))
        is_first = usual_s is None or known is None or known.steps == 0
        doubled = 1 << min(stalls, DOUBLINGS_MAX)
        return limit_s * doubled * (FIRST_STEP_FACTOR if is_first else 1.0)

    def keep_only(self, workers: set[str]) -> None:
        """Forget all workers but these."""
        for worker in self._workers.keys() - workers:
            del self._workers[worker]


class Stalls:
    """Finds the stalled workers of a job, and acts on them.

    Args:
        spec: The job.
        known: Its workers. The note that people read of each is set there.
        rounds: The open rounds.
    """

    def __init__(self, spec: JobSpec, known: KnownWorkers, rounds: JobRounds) -> None:
        self._mode = spec.mode.kind
        self._workers_wait = self._mode in ("sync", "bounded")
        self._known = known
        self._rounds = rounds
        self._watch = StepWatch(spec.step_limit_s, spec.straggler_factor)
        # Sync mode: how often in a row each task was taken from a stalled worker.
        self._times: Counter[tuple[RoundId, int]] = Counter()
        # Bounded mode: the stalled workers, for which the others do not wait.
        self._left_behind: set[str] = set()
        # Bounded mode: the workers with a lease of a training task, live or expired, and their
        # clocks in order. Every sign of life is answered with the clocks. None: to be read anew.
        self._leased: set[str] | None = None
        self._clocks: list[int] = []

    def heard(self, worker: str, signs: WorkerSigns, now_s: float) -> None:
        """Take in a sign of life of a worker."""
        if not self._workers_wait:
            return
        self._watch.heard(worker, signs.steps, now_s, is_waiting=signs.waiting_s > 0)
        known = self._known.get(worker)
        if known is not None:
            known.waiting_s, known.waits_for = signs.waiting_s, signs.waits_for

    def task_given(self, worker: str, now_s: float) -> None:
        """Take note that a worker is given a task."""
        if self._workers_wait:
            self._watch.task_given(worker, now_s)

    def check(self, now_s: float) -> None:
        """Find the stalled workers and act on them; renew the notes for people."""
        self._follow_leases()
        if not self._workers_wait:
            return
        for known in self._known:
            known.note = self._waiting_text(known.waiting_s, known.waits_for)
        stalled: set[str] = set()
        for opened, lease in self._training_leases():
            times = self._times[opened.id, lease.task.number]
            limit_s = self._watch.limit_s(lease.worker, times)
            stalled_s = self._watch.stalled_for_s(lease.worker, now_s)
            if stalled_s >= limit_s:
                stalled.add(lease.worker)
                if self._mode == "sync":
                    self._withdraw(opened, lease, stalled_s)
            known_worker = self._known.get(lease.worker)
            if known_worker is None:
                continue
            if lease.withdrawn:
                known_worker.note = f"{lease.withdrawn}: its task goes to another worker"
            elif stalled_s >= SHOWN_PART * limit_s:
                known_worker.note = self._stalled_text(stalled_s, limit_s)
        self._note_left_behind(stalled)
        self._forget_done()
        self._watch.keep_only({known.id for known in self._known})

    def clocks(self) -> Sequence[int]:
        """Return, in bounded mode, the clocks of the workers that others wait for."""
        if self._mode != "bounded":
            return []
        self._follow_leases()
        if self._leased is None:
            self._leased = {lease.worker for _, lease in self._training_leases(expired_too=True)}
            self._clocks = sorted(map(clock_of_worker, self._leased))
        if not self._left_behind:
            return self._clocks
        without = set(map(clock_of_worker, self._left_behind))
        return [clock for clock in self._clocks if clock not in without]

    def _follow_leases(self) -> None:
        """Take note of the leases that began or ended."""
        workers = self._rounds.take_lease_changes()
        if workers is None or self._leased is None:
            self._leased = None
            return
        for worker in workers:
            has_one = any(
                opened.ledger.has_lease(worker)
                for opened in self._rounds.values()
                if opened.id.kind is RoundKind.TRAINING
            )
            if has_one and worker not in self._leased:
                self._leased.add(worker)
                insort(self._clocks, clock_of_worker(worker))
            elif not has_one and worker in self._leased:
                self._leased.remove(worker)
                del self._clocks[bisect_left(self._clocks, clock_of_worker(worker))]

    def leading_lease(self) -> tuple[RoundId, Lease] | None:
        """Return, in sync mode, the lease of the worker that leads now."""
        if self._mode == "sync":
            for opened, lease in self._training_leases():
                if not lease.withdrawn:
                    return opened.id, lease
        return None

    def _training_leases(self, *, expired_too: bool = False) -> Iterator[tuple[OpenRound, Lease]]:
        for opened in self._rounds.values():
            if opened.id.kind is RoundKind.TRAINING:
                for lease in opened.ledger.leases:
                    if expired_too or not lease.expired:
                        yield opened, lease

    def _withdraw(self, opened: OpenRound, lease: Lease, stalled_s: float) -> None:
        why = f"{lease.worker} completed no step for {stalled_s:.0f} s"
        if not opened.ledger.withdraw(lease, why):
            return
        self._times[opened.id, lease.task.number] += 1
        log.warning("%s: %s task %d goes to another worker", why, opened.id, lease.task.number)

    def _forget_done(self) -> None:
        if self._times:
            done = {opened.id: opened.ledger.done for opened in self._rounds.values()}
            for round_id, task in list(self._times):
                if round_id not in done or task in done[round_id]:
                    del self._times[round_id, task]

    def _note_left_behind(self, stalled: set[str]) -> None:
        if self._mode != "bounded":
            return
        for worker in sorted(stalled - self._left_behind):
            log.warning("%s completes no step: the others no longer wait for it", worker)
        for worker in sorted(self._left_behind - stalled):
            log.info("the others wait for %s again, or it has no task any more", worker)
        self._left_behind = stalled

    def _stalled_text(self, stalled_s: float, limit_s: float) -> str:
        text = f"the others wait for it: no step for {stalled_s:.0f} s"
        if self._mode == "sync":
            return f"{text}; after {limit_s:.0f} s its task goes to another worker"
        if stalled_s >= limit_s:
            return f"no step for {stalled_s:.0f} s: the others no longer wait for it"
        return f"{text}; after {limit_s:.0f} s they stop waiting"

    def _waiting_text(self, waiting_s: float, waits_for: Sequence[str]) -> str:
        if waiting_s <= 1.0:
            return ""
        whom = ", ".join(waits_for) or "those behind"
        what_then = "; it will compute their pieces itself" if self._mode == "sync" else ""
        return f"waits for {whom}, {waiting_s:.0f} s so far{what_then}"


@lru_cache(maxsize=32_768)
def clock_of_worker(worker_id: str) -> int:
    """Return the key (u64) of a worker's clock in bounded mode; the worker's name gives it."""
    return int.from_bytes(hashlib.blake2b(worker_id.encode(), digest_size=8).digest(), "little")
