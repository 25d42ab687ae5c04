"""Time passes: leases expire, stalled workers are found, silent ones are forgotten.

Leases last longer the more workers there are, so that the job master can answer all renewals.

May import ``job_engine``; does no I/O.
"""

from __future__ import annotations

import logging

from backstay.job_engine.job_rounds import JobRounds
from backstay.job_engine.known_workers import KnownWorkers
from backstay.job_engine.leases import wanted_lease_ttl_ms
from backstay.job_engine.stalls import Stalls
from backstay.job_engine.standing import Basis, Standing

__all__ = ["TimerEvents"]

log = logging.getLogger(__name__)


class TimerEvents:
    """The events of time."""

    def __init__(
        self,
        basis: Basis,
        job: Standing,
        rounds: JobRounds,
        known: KnownWorkers,
        stalls: Stalls,
        *,
        renewals_per_s_max: int,
    ) -> None:
        """Take the parts that time changes.

        ``renewals_per_s_max`` is how many renewals of leases a second the caller can answer.
        """
        self._basis = basis
        self._job = job
        self._rounds = rounds
        self._known = known
        self._stalls = stalls
        self._renewals_per_s_max = renewals_per_s_max

    def expire(self) -> float | None:
        """Expire the leases that were not renewed in time: their tasks may go to others.

        It also acts on stalled workers, forgets silent ones that have no place, and ends a window
        of progressive metrics whose time is over.

        Returns:
            A time before which none of today's leases expires; None: there is no lease.
        """
        self._stalls.check(self._basis.now())
        for opened in self._rounds.values():
            tasks = opened.ledger.expire(self._basis.now())
            if tasks:
                log.warning("%s: the leases of tasks %s have expired", opened.id, tasks)
                self._rounds.came_back(opened)
        # One that has a place is replaced first, which may take longer (``report``).
        self._known.forget_silent(self._basis.now(), kept=self._job.workers.has_place)
        self._job.look_at_scores()
        return self._rounds.next_expiry()

    def plan_lease_ttl(self) -> int | None:
        """Record a longer life of leases, if there are more workers than leases are made for.

        The caller waits for the journal and then calls :meth:`lengthen_leases`. The next job master
        takes leases over, and must not end one earlier than its worker was told.

        Returns:
            The life of a lease in ms; None: it is long enough.
        """
        # Workers that are wanted count before they join: a job master that falls behind while they
        # join stays behind.
        workers = max(len(self._known), self._job.workers.desired)
        least_ms = self._basis.spec.task_lease_ttl_ms
        wanted_ms = wanted_lease_ttl_ms(least_ms, workers, self._renewals_per_s_max)
        if wanted_ms > self._job.state.task_lease_ttl_ms:
            self._job.change(task_lease_ttl_ms=wanted_ms)
            self._job.stage()
        planned_ms = self._job.state.task_lease_ttl_ms
        return planned_ms if planned_ms > self._rounds.task_lease_ttl_ms else None

    def lengthen_leases(self, ttl_ms: int) -> None:
        """Give leases the life that is recorded by now.

        It never becomes shorter: a worker would not know, and work on after its lease.
        """
        self._rounds.lengthen_leases(ttl_ms)
