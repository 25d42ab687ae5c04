"""What a worker counts: its batches and records, the mean of its last losses, the job's steps.

This module imports the link, which tells the job master. It decides nothing.
"""

from __future__ import annotations

from collections import deque

from backstay.trainer.client import ClientStats
from backstay.trainer.worker.master_link import MasterLink

__all__ = ["Figures"]

LOSSES_KEPT = 50


class Figures:
    """Sums since the process began.

    Args:
        link: Whose next sign of life tells them.
    """

    def __init__(self, link: MasterLink) -> None:
        self._link = link
        self._losses: deque[float] = deque(maxlen=LOSSES_KEPT)
        self._examples = self._steps = 0
        self._told_steps = self._steps_when_told = 0

    def trained(self, examples: int, loss: float, stats: ClientStats) -> None:
        """Count a batch.

        Args:
            examples: Its records.
            loss: Mean over them.
            stats: What the worker's client has done.
        """
        self._steps += 1
        self._examples += examples
        self._losses.append(loss)
        mean = sum(self._losses) / len(self._losses)
        self._link.figures(
            examples=self._examples,
            steps=self._steps,
            loss=mean,
            stale_slots=stats.stale_slots,
            staleness_sum=stats.staleness_sum,
            staleness_buckets=stats.staleness_buckets,
        )

    def job_steps(self) -> int:
        """Return the steps of all workers so far: what was told last, and this one's since."""
        told = self._link.job_steps
        if told != self._told_steps:
            self._told_steps, self._steps_when_told = told, self._steps
        return told + self._steps - self._steps_when_told
