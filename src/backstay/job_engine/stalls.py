"""Workers that others wait for and that do not get on, though they send signs of life.

In sync mode such a leader's task goes to another worker; in bounded mode nobody waits for it any
more. Belongs to one job and its event loop; time is an argument. Does no I/O.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache

from backstay.job_engine.known_workers import KnownWorkers
from backstay.job_engine.open_round import OpenRound
from backstay.job_engine.step_watch import StepWatch
from backstay.job_engine.task import Lease
from backstay.job_spec import JobSpec
from backstay.schedule.rounds import RoundId, RoundKind

__all__ = ["Stalls", "clock_of_worker"]

# People are told of a step once it takes so much of what it may.
SHOWN_PART = 1 / 6

log = logging.getLogger(__name__)


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

    def heard(
        self, worker: str, steps: int, waiting_s: float, waits_for: Sequence[str], now_s: float
    ) -> None:
        """Take in a sign of life.

        Args:
            worker: Whose.
            steps: That its process has ended.
            waiting_s: How long it has been waiting for others; 0: it does not.
            waits_for: For whom, as far as it knows.
            now_s: The time.
        """
        if not self._is_waited_for:
            return
        self._watch.heard(worker, steps, now_s, is_waiting=waiting_s > 0)
        known = self._known.get(worker)
        if known is not None:
            known.waiting_s, known.waits_for = waiting_s, tuple(waits_for)

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

    def clocks(self) -> list[int]:
        """Return, in bounded mode, the clocks of the workers that others wait for."""
        if self._mode != "bounded":
            return []
        workers = {lease.worker for _, lease in self._training_leases(expired_too=True)}
        return sorted(map(clock_of_worker, workers - self._not_waited_for))

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
        if lease.withdrawn:
            return
        lease.withdrawn = f"{lease.worker} ended no step for {stands_s:.0f} s"
        times = self._times
        times[opened.id, lease.task.number] = times.get((opened.id, lease.task.number), 0) + 1
        log.warning(
            "%s: %s task %d goes to another worker", lease.withdrawn, opened.id, lease.task.number
        )

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
        return f"{text}; after {may_take_s:.0f} s they do so no more"

    def _waits(self, waiting_s: float, waits_for: Sequence[str]) -> str:
        if waiting_s <= 1.0:
            return ""
        whom = ", ".join(waits_for) or "those behind"
        what_then = "; later it computes their pieces itself" if self._mode == "sync" else ""
        return f"waits for {whom}, {waiting_s:.0f} s so far{what_then}"


@lru_cache(maxsize=32_768)
def clock_of_worker(worker_id: str) -> int:
    """Return the key (u64) of a worker's clock in bounded mode; any master knows it by the name."""
    return int.from_bytes(hashlib.blake2b(worker_id.encode(), digest_size=8).digest(), "little")
