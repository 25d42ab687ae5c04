"""Time passes: leases expire, hanging workers are seen, and leases grow with the number of workers.

May import ``job_engine``; does no I/O.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from backstay.job_engine.core import JobCore
from backstay.job_engine.leases import wanted_lease_ttl_ms

__all__ = ["TimerEvents"]

log = logging.getLogger(__name__)


class TimerEvents(JobCore):
    """The events of time."""

    def expire(self) -> float | None:
        """Take back the tasks whose leases have run out, or whose workers hang.

        Workers that were silent for long are forgotten.

        Returns:
            A time before which no lease runs out that there is now; None: there is none.
        """
        self.stalls.check(self.now())
        for opened in self.rounds.values():
            tasks = opened.ledger.expire(self.now())
            if tasks:
                log.warning("%s: the leases of tasks %s have run out", opened.id, tasks)
                self._came_back(opened)
        self.known.forget_silent(self.now())
        return self.rounds.next_expiry()

    def plan_lease_ttl(self) -> int | None:
        """Have the record say how long leases are to last, if that is longer than they do.

        The caller waits for the journal and then calls :meth:`lengthen_leases`: the next job master
        takes leases over, and must not end one earlier than its worker was told.

        Returns:
            The time in ms. None: they last long enough.
        """
        # Workers on their way count as well: a job master that falls behind while they come stays
        # behind.
        workers = max(len(self.known), self.workers.desired)
        least_ms = self.spec.task_lease_ttl_ms
        wanted_ms = wanted_lease_ttl_ms(least_ms, workers, self._renewals_per_s_max)
        if wanted_ms > self.state.task_lease_ttl_ms:
            self.state = replace(self.state, task_lease_ttl_ms=wanted_ms)
            self.stage_state()
        planned_ms = self.state.task_lease_ttl_ms
        return planned_ms if planned_ms > self.task_lease_ttl_ms else None

    def lengthen_leases(self, ttl_ms: int) -> None:
        """Have leases last so long, as the record says by now; never shorter than before.

        A worker may not have heard of a shorter time.
        """
        self.task_lease_ttl_ms = max(self.task_lease_ttl_ms, ttl_ms)
        self.rounds.set_lease_ttl(self.task_lease_ttl_ms)
