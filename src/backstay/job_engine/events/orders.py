"""Orders: a user stops or scales the job or retries tasks; a rule scales it by itself.

May import ``job_engine``; does no I/O.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from backstay.errors import JobRefused
from backstay.job_engine.checkpoints import Checkpoints
from backstay.job_engine.job_rounds import JobRounds
from backstay.job_engine.standing import Basis, Standing

__all__ = ["OrderEvents"]

SCALINGS_KEPT = 5

log = logging.getLogger(__name__)


class OrderEvents:
    """The orders of users, and of the rule that scales."""

    def __init__(
        self, basis: Basis, job: Standing, rounds: JobRounds, checkpoints: Checkpoints
    ) -> None:
        """Take the parts that orders change."""
        self._basis = basis
        self._job = job
        self._rounds = rounds
        self._checkpoints = checkpoints
        # The newest changes of the numbers of workers and servers that a rule made, for people.
        self.scalings: deque[str] = deque(maxlen=SCALINGS_KEPT)

    def stop(self, reason: str) -> None:
        """End the job because an operator asks for it."""
        if self._checkpoints.unsaved:
            self._job.end_unsaved(self._checkpoints.unsaved)
        else:
            self._job.end("stopped", reason)

    def scale(self, workers: int) -> int:
        """Want so many workers; returns how many were wanted before.

        Raises:
            JobRefused: The job is over.
            InvalidRequest: That is outside of the job's min and max.
        """
        if self._job.is_over:
            raise JobRefused(f"job {self._basis.spec.name!r} is {self._job.state.state}")
        before = self._job.workers.desired
        self._job.workers.scale(workers)
        self._job.stage()
        self._basis.notify()
        return before

    def follow_scaling(self, workers: int, lent: int, told: str) -> None:
        """Take the number of workers that a scaling rule has decided.

        Args:
            workers: How many workers.
            lent: How many more are wanted once servers need their room no more.
            told: What changes, also of servers, and why; for people.

        Raises:
            InvalidRequest: The number is outside of the job's min and max.
        """
        if self._job.is_over:
            return
        if (workers, lent) != (self._job.workers.desired, self._job.workers.lent):
            self._job.workers.scale(workers, lent=lent)
            self._job.stage()
        log.info("%s", told)
        self.scalings.append(told)
        self._basis.notify()

    def retry_dead_letters(self, numbers: Sequence[int]) -> int:
        """Give dead-lettered tasks their tries again; none named: all of them.

        Raises:
            JobRefused: The job is over.
        """
        if self._job.is_over:
            raise JobRefused(
                f"job {self._basis.spec.name!r} is {self._job.state.state}; start it again: that "
                "tries its dead-lettered tasks once more"
            )
        count = 0
        # The schedule comes first in the journal: if it said that the round is over, a new job
        # master would take the tasks that were put back for dead-lettered.
        self._job.stage()
        for opened in self._rounds.values():
            back = opened.ledger.retry_dead_letters(numbers or None)
            if back:
                self._job.schedule.reopen(opened.id)
                self._rounds.came_back(opened)
            count += len(back)
        return count
