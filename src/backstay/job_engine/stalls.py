"""Workers that others wait for and that do not get on, though they send signs of life.

A worker whose code hangs still sends signs of life. Where others wait for it, what counts is when
it ended a step last: ``StepWatch``. In sync mode such a leader's task goes to another worker; in
bounded mode no worker waits for it any more: ``Stalls``. Belongs to one job and its event loop;
time is an argument. Does no I/O.
"""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from backstay.job_engine.known_workers import KnownWorkers, WorkerSigns
from backstay.job_engine.leases import Median
from backstay.job_engine.open_round import OpenRound
from backstay.job_engine.task import Lease
from backstay.job_spec import JobSpec
from backstay.schedule.rounds import RoundId, RoundKind

__all__ = ["FIRST_STEP_FACTOR", "Stalls", "StepWatch", "clock_of_worker"]

# People are told of a step once it takes so much of what it may.
SHOWN_PART = 1 / 6
# The first step of a process has its framework to warm up, and perhaps a model to compile.
FIRST_STEP_FACTOR = 4.0
# A limit that was passed is doubled for the next try, so often at most: a model with slow steps
# gets there in the end.
DOUBLINGS_MAX = 10

log = logging.getLogger(__name__)


@dataclass
class _Steps:
    steps: int
    got_on_s: float
    is_waiting: bool = False


class StepWatch:
    """Knows of each worker when it got on last.

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
            is_waiting: Whether it waits for other workers: that is no time of its own.
        """
        known = self._workers.get(worker)
        if known is None or known.steps > steps:
            self._workers[worker] = _Steps(steps, now_s, is_waiting)
            return
        if steps > known.steps and not known.is_waiting:
            self._took_s.add((now_s - known.got_on_s) / (steps - known.steps))
        if steps > known.steps or is_waiting:
            known.got_on_s = now_s
        known.steps, known.is_waiting = steps, is_waiting

    def begins(self, worker: str, now_s: float) -> None:
        """A worker is given a task: its time begins anew."""
        known = self._workers.setdefault(worker, _Steps(0, now_s))
        known.got_on_s = now_s

    def stands_s(self, worker: str, now_s: float) -> float:
        """Return how long ago a worker got on last; 0 for one that waits or was never heard of."""
        known = self._workers.get(worker)
        return 0.0 if known is None or known.is_waiting else now_s - known.got_on_s

    def may_take_s(self, worker: str, stalls: int = 0) -> float:
        """Return how long a worker's step may take.

        Args:
            worker: Whose.
            stalls: How often in a row the same work took too long before.
        """
        known, usual_s = self._workers.get(worker), self._took_s.value
        limit_s = max(self._limit_s, self._factor * (usual_s or 0.0))
        is_first = usual_s is None or known is None or known.steps == 0
        return (
            limit_s * (FIRST_STEP_FACTOR if is_first else 1.0) * (1 << min(stalls, DOUBLINGS_MAX))
        )

    def keep_only(self, workers: set[str]) -> None:
        """Forget all others."""
        for worker in self._workers.keys() - workers:
            del self._workers[worker]


class Stalls:
    """Looks for such workers, and says what becomes of them.

    Args:
        spec: The job.
        known: Its workers; what people are to know of each goes there.
        rounds: Returns those of the job.
    """

    def __init__(
        self, spec: JobSpec, known: KnownWorkers, rounds: Callable[[], Iterable[OpenRound]]
    ) -> None:
        self._mode = spec.mode.kind
        self._is_waited_for = self._mode in ("sync", "bounded")
        self._known = known
        self._rounds = rounds
        self._watch = StepWatch(spec.step_limit_s, spec.straggler_factor)
        # How often in a row each task was taken from a worker that hung.
        self._times: dict[tuple[RoundId, int], int] = {}
        self._not_waited_for: set[str] = set()
        # Bounded mode: the workers with a lease of a training task, live or expired, and their
        # clocks in order. Every sign of life is answered with the clocks. None: to be read anew.
        self._leased: set[str] | None = None
        self._clocks: list[int] = []

    def heard(self, worker: str, signs: WorkerSigns, now_s: float) -> None:
        """Take in a sign of life of a worker."""
        if not self._is_waited_for:
            return
        self._watch.heard(worker, signs.steps, now_s, is_waiting=signs.waiting_s > 0)
        known = self._known.get(worker)
        if known is not None:
            known.waiting_s, known.waits_for = signs.waiting_s, signs.waits_for

    def begins(self, worker: str, now_s: float) -> None:
        """A worker is given a task."""
        if self._is_waited_for:
            self._watch.begins(worker, now_s)

    def look(self, now_s: float) -> None:
        """See who takes too long, and do what is to be done then."""
        if not self._is_waited_for:
            return
        for known in self._known:
            known.note = self._waits(known.waiting_s, known.waits_for)
        stalled: set[str] = set()
        for opened, lease in self._training_leases():
            times = self._times.get((opened.id, lease.task.number), 0)
            may_take_s = self._watch.may_take_s(lease.worker, times)
            stands_s = self._watch.stands_s(lease.worker, now_s)
            if stands_s >= may_take_s:
                stalled.add(lease.worker)
                if self._mode == "sync":
                    self._withdraw(opened, lease, stands_s)
            known_worker = self._known.get(lease.worker)
            if known_worker is None:
                continue
            if lease.withdrawn:
                known_worker.note = f"{lease.withdrawn}: its task goes to another worker"
            elif stands_s >= SHOWN_PART * may_take_s:
                known_worker.note = self._stands(stands_s, may_take_s)
        self._tell(stalled)
        self._forget_done()
        self._watch.keep_only({known.id for known in self._known})

    def clocks(self) -> Sequence[int]:
        """Return, in bounded mode, the clocks of the workers that others wait for."""
        if self._mode != "bounded":
            return []
        if self._leased is None:
            self._leased = {lease.worker for _, lease in self._training_leases(expired_too=True)}
            self._clocks = sorted(map(clock_of_worker, self._leased))
        if not self._not_waited_for:
            return self._clocks
        without = set(map(clock_of_worker, self._not_waited_for))
        return [clock for clock in self._clocks if clock not in without]

    def leases_changed(self, workers: Iterable[str] | None) -> None:
        """Take note that leases of these workers began or ended; None: of any."""
        if workers is None or self._leased is None:
            self._leased = None
            return
        for worker in workers:
            has_one = any(
                opened.ledger.has_lease(worker)
                for opened in self._rounds()
                if opened.id.kind is RoundKind.TRAINING
            )
            if has_one and worker not in self._leased:
                self._leased.add(worker)
                insort(self._clocks, clock_of_worker(worker))
            elif not has_one and worker in self._leased:
                self._leased.remove(worker)
                del self._clocks[bisect_left(self._clocks, clock_of_worker(worker))]

    def led(self) -> tuple[RoundId, Lease] | None:
        """Return, in sync mode, the lease of the worker that leads now."""
        if self._mode == "sync":
            for opened, lease in self._training_leases():
                if not lease.withdrawn:
                    return opened.id, lease
        return None

    def _training_leases(self, *, expired_too: bool = False) -> Iterator[tuple[OpenRound, Lease]]:
        for opened in self._rounds():
            if opened.id.kind is RoundKind.TRAINING:
                for lease in opened.ledger.leases:
                    if expired_too or not lease.expired:
                        yield opened, lease

    def _withdraw(self, opened: OpenRound, lease: Lease, stands_s: float) -> None:
        why = f"{lease.worker} ended no step for {stands_s:.0f} s"
        if not opened.ledger.withdraw(lease, why):
            return
        times = self._times
        times[opened.id, lease.task.number] = times.get((opened.id, lease.task.number), 0) + 1
        log.warning("%s: %s task %d goes to another worker", why, opened.id, lease.task.number)

    def _forget_done(self) -> None:
        if self._times:
            done = {opened.id: opened.ledger.done for opened in self._rounds()}
            self._times = {
                (round_id, task): times
                for (round_id, task), times in self._times.items()
                if round_id in done and task not in done[round_id]
            }

    def _tell(self, stalled: set[str]) -> None:
        if self._mode != "bounded":
            return
        for worker in sorted(stalled - self._not_waited_for):
            log.warning("%s ends no step: the others do not wait for it any more", worker)
        for worker in sorted(self._not_waited_for - stalled):
            log.info("%s is waited for again, or has no task any more", worker)
        self._not_waited_for = stalled

    def _stands(self, stands_s: float, may_take_s: float) -> str:
        text = f"the others wait for it: no step for {stands_s:.0f} s"
        if self._mode == "sync":
            return f"{text}; after {may_take_s:.0f} s its task goes to another worker"
        if stands_s >= may_take_s:
            return f"no step for {stands_s:.0f} s: the others do not wait for it any more"
        return f"{text}; after {may_take_s:.0f} s they stop waiting"

    def _waits(self, waiting_s: float, waits_for: Sequence[str]) -> str:
        if waiting_s <= 1.0:
            return ""
        whom = ", ".join(waits_for) or "those behind"
        what_then = "; later it computes their pieces itself" if self._mode == "sync" else ""
        return f"waits for {whom}, {waiting_s:.0f} s so far{what_then}"


@lru_cache(maxsize=32_768)
def clock_of_worker(worker_id: str) -> int:
    """Return the key (u64) of a worker's clock in bounded mode; the worker's name gives it."""
    return int.from_bytes(hashlib.blake2b(worker_id.encode(), digest_size=8).digest(), "little")
