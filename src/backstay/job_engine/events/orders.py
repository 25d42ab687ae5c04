"""Orders: a user stops or scales the job or retries tasks; a rule scales it by itself.

May import ``job_engine``; does no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from backstay.errors import JobRefused
from backstay.job_engine.core import JobCore

__all__ = ["OrderEvents"]

log = logging.getLogger(__name__)


class OrderEvents(JobCore):
    """The orders of users, and of the rule that scales."""

    def stop(self, reason: str) -> None:
        """End the job because an operator asks for it."""
        if self.unsaved:
            self.end_unsaved(self.unsaved)
        else:
            self.end("stopped", reason)

    def scale(self, workers: int) -> int:
        """Want so many workers; returns how many were wanted before.

        Raises:
            JobRefused: The job is over.
            InvalidRequest: That is outside of the job's min and max.
        """
        if self.is_over:
            raise JobRefused(f"job {self.spec.name!r} is {self.state.state}")
        before = self.workers.desired
        self.workers.scale(workers)
        self.stage_state()
        self.notify()
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
        if self.is_over:
            return
        if (workers, lent) != (self.workers.desired, self.workers.lent):
            self.workers.scale(workers, lent=lent)
            self.stage_state()
        log.info("%s", told)
        self.scalings.append(told)
        self.notify()

    def retry_dead_letters(self, numbers: Sequence[int]) -> int:
        """Give dead-lettered tasks their tries again; none named: all of them.

        Raises:
            JobRefused: The job is over.
        """
        if self.is_over:
            raise JobRefused(
                f"job {self.spec.name!r} is {self.state.state}; start it again: that tries its "
                "dead-lettered tasks once more"
            )
        count = 0
        # The schedule comes first in the journal: if it said that the round is over, a new job
        # master would take the tasks that were put back for dead-lettered.
        self.stage_state()
        for opened in self.rounds.values():
            back = opened.ledger.retry_dead_letters(numbers or None)
            if back:
                self.schedule.reopen(opened.id)
                self._came_back(opened)
            count += len(back)
        return count
