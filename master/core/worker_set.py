"""Which worker processes should run: their number, relaunches with a pause and a limit.

Level-triggered: the launcher reports who is alive and who ended how; ``wanted`` says which ids
should run. An id stands for one process and is never used again. Imports ``backstay.errors`` and
``json_fields``; does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["WorkerPolicy", "WorkerSet"]


@dataclass(frozen=True)
class WorkerPolicy:
    """How many workers, and how often one is replaced.

    Attributes:
        initial, least, most: Number at the start, and the bounds of ``scale``.
        max_relaunches: How often in a row a worker that failed by itself is replaced; one that was
            killed (signal 9 or 15) always is.
        backoff_s: Pause before a replacement; doubled with each in a row.
        backoff_max_s: The longest such pause.
        steady_s: A worker that ran so long begins its count anew.
    """

    initial: int = 1
    least: int = 1
    most: int = 1
    max_relaunches: int = 10
    backoff_s: float = 0.5
    backoff_max_s: float = 30.0
    steady_s: float = 300.0


class WorkerSet:
    """The workers of a job."""

    def __init__(self, policy: WorkerPolicy) -> None:
        """Begin with ``initial`` workers wanted."""
        raise NotImplementedError

    def wanted(self, now_s: float) -> tuple[str, ...]:
        """Return the ids that should run, oldest first; makes the ids that are due."""
        raise NotImplementedError

    def next_change_s(self) -> float | None:
        """Return when a pause ends and ``wanted`` may have one more; None if none is waited for."""
        raise NotImplementedError

    def alive(self, workers: Iterable[str], now_s: float) -> list[str]:
        """Take over a launcher's list of running processes; return those found to be lost.

        Lost is who was in an earlier list, is not in this one, and whose end was not reported:
        it counts as killed.
        """
        raise NotImplementedError

    def exited(self, worker: str, code: int, now_s: float) -> None:
        """Take note that a process ended; ``code`` is negative for a signal, as Popen has it."""
        raise NotImplementedError

    def replace(self, worker: str, now_s: float) -> bool:
        """Want another process instead of this one, which hangs; False if it is not wanted."""
        raise NotImplementedError

    def scale(self, workers: int) -> None:
        """Want so many workers; the newest are stopped first.

        Raises:
            InvalidRequest: That is outside ``least`` to ``most``.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Want no workers any more."""
        raise NotImplementedError

    @property
    def desired(self) -> int:
        """How many workers are wanted in all."""
        raise NotImplementedError

    @property
    def failed(self) -> str:
        """Why fewer than ``least`` workers can be kept, which ends the job; else empty."""
        raise NotImplementedError

    def to_json(self) -> str:
        """Return the set as JSON; pauses and times are left out."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, policy: WorkerPolicy, text: str) -> WorkerSet:
        """Return the set that ``to_json`` wrote, under a policy that may have changed.

        Raises:
            InvalidRequest: It is no such text.
        """
        raise NotImplementedError
