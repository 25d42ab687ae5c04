"""Time passes: leases expire, stalled workers are found, silent ones are forgotten.

Leases last longer the more workers there are, so that the job master can answer all renewals.

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
        """Expire the leases that were not renewed in time: their tasks may go to others.

        It also acts on stalled workers, forgets silent ones that have no place, and ends a window
        of progressive metrics whose time is over.

        Returns:
            A time before which none of today's leases expires; None: there is no lease.
        """
        self.stalls.check(self.now())
        for opened in self.rounds.values():
            tasks = opened.ledger.expire(self.now())
            if tasks:
                log.warning("%s: the leases of tasks %s have expired", opened.id, tasks)
                self._came_back(opened)
        # One that has a place is replaced first, which may take longer (``report``).
        self.known.forget_silent(self.now(), kept=self.workers.has_place)
        self._look_at_scores()
        return self.rounds.next_expiry()

    def plan_lease_ttl(self) -> int | None:
        """Record a longer life of leases, if there are more workers than leases are made for.

        The caller waits for the journal and then calls :meth:`lengthen_leases`. The next job master
        takes leases over, and must not end one earlier than its worker was told.

        Returns:
            The life of a lease in ms; None: it is long enough.
        """
        # Workers that are wanted count before they join: a job master that falls behind while they
        # join stays behind.
        workers = max(len(self.known), self.workers.desired)
        least_ms = self.spec.task_lease_ttl_ms
        wanted_ms = wanted_lease_ttl_ms(least_ms, workers, self._renewals_per_s_max)
        if wanted_ms > self.state.task_lease_ttl_ms:
            self.state = replace(self.state, task_lease_ttl_ms=wanted_ms)
            self.stage_state()
        planned_ms = self.state.task_lease_ttl_ms
        return planned_ms if planned_ms > self.task_lease_ttl_ms else None

    def lengthen_leases(self, ttl_ms: int) -> None:
        """Give leases the life that is recorded by now.

        It never becomes shorter: a worker would not know, and work on after its lease.
        """
        self.task_lease_ttl_ms = max(self.task_lease_ttl_ms, ttl_ms)
        self.rounds.set_lease_ttl(self.task_lease_ttl_ms)
