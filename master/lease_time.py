"""How long leases last: longer where workers are too many to be heard of that often.

A worker sends a sign of life four times in the time that a lease lasts. At 10,000 workers and 2 s
these alone would be more calls than one process answers, so the time grows with the number of
workers. A longer time is recorded before any worker is told of it: the next master takes over what
they have, and must not take it for over too soon. It never gets shorter again, as a worker may not
have heard of that. Imports ``master`` and the rate of signs of life.
"""

from __future__ import annotations

import asyncio

from backstay.errors import StoreUnavailable
from backstay.job.messages import SIGNS_PER_TTL
from backstay.master.job import Job

__all__ = ["keep_lease_time", "lengthen_leases", "task_lease_ttl_ms"]

# Signs of life of all workers together. Python's gRPC server answers some thousand calls a second;
# when it cannot keep up, those that wait are out of time when it comes to them, and none succeeds.
SIGNS_PER_S_MAX = 1000
LOOK_S = 0.25
DURABLE_S = 4.0


def task_lease_ttl_ms(least_ms: int, workers: int) -> int:
    """Return how long leases are to last: the least time, or a multiple of it.

    Args:
        least_ms: ``task_lease_ttl_ms`` of the job.
        workers: How many there are.
    """
    needed_ms = SIGNS_PER_TTL * workers * 1000 // SIGNS_PER_S_MAX
    return least_ms * max(1, -(-needed_ms // least_ms))


async def lengthen_leases(job: Job) -> None:
    """Have leases last as long as the number of workers asks for, once that is recorded.

    If the store does not answer, they last as long as before; call again.
    """
    # Those that are on their way as well: a master that falls behind while they come stays there.
    workers = max(len(job.known), job.workers.desired)
    ttl_ms = task_lease_ttl_ms(job.spec.task_lease_ttl_ms, workers)
    if ttl_ms <= job.task_lease_ttl_ms:
        return
    job.plan_lease_time(ttl_ms)
    try:
        await job.journal.durable(DURABLE_S)
    except StoreUnavailable:
        return
    job.take_lease_time()


async def keep_lease_time(job: Job) -> None:
    """Look after it for as long as the job is served; never returns."""
    while True:
        await asyncio.sleep(LOOK_S)
        await lengthen_leases(job)
