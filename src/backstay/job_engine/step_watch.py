"""Which workers get on with their steps, and how long a step may take.

A worker whose code hangs still sends signs of life. Where others wait for it, what counts is when
it ended a step last. Values only; time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

from backstay.job_engine.lease_queue import Median

__all__ = ["FIRST_STEP_FACTOR", "StepWatch"]

# The first step of a process has its framework to warm up, and perhaps a model to compile.
FIRST_STEP_FACTOR = 4.0
# A limit that was passed is doubled for the next try, so often at most: a model with slow steps
# gets there in the end.
DOUBLINGS_MAX = 10


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
