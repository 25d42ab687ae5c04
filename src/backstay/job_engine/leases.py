"""Task leases: how long they last, which one expires next, and how long tasks usually take.

A worker renews its leases four times in their life. With 10,000 workers and a life of 2 s, the
renewals alone would be more calls than one job master answers, so the life grows with the number of
workers. Imports ``job_engine`` and the standard library; does no I/O.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable

from backstay.job_engine.task import Lease

__all__ = ["RENEWALS_PER_S_MAX", "RENEWALS_PER_TTL", "LeaseQueue", "Median", "wanted_lease_ttl_ms"]

RENEWALS_PER_TTL = 4
# Of all workers together. A job master answers some thousand calls a second. If more came for long,
# each call would wait until its deadline has passed, and none would succeed.
RENEWALS_PER_S_MAX = 1000


def wanted_lease_ttl_ms(
    least_ms: int, workers: int, renewals_per_s_max: int = RENEWALS_PER_S_MAX
) -> int:
    """Return how long leases should last: the least time, or a multiple of it.

    Args:
        least_ms: ``task_lease_ttl_ms`` of the job.
        workers: How many there are.
        renewals_per_s_max: How many renewals a second a job master answers.
    """
    needed_ms = RENEWALS_PER_TTL * workers * 1000 // renewals_per_s_max
    return least_ms * max(1, -(-needed_ms // least_ms))


# A median is of so many of the newest numbers.
MEDIAN_OF = 255


class LeaseQueue:
    """A priority queue of leases. Its entries are put right when they are met, not before.

    ``key_of`` returns the number by which a lease is ordered now; None: it does not belong here. A
    lease may have several entries; those that differ from ``key_of`` do not count.
    """

    def __init__(self, key_of: Callable[[Lease], float | None]) -> None:
        self._key_of = key_of
        self._heap: list[tuple[float, int, Lease]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, lease: Lease, leases: int) -> None:
        """Enter a lease; ``leases`` is the number of all leases, which bounds the queue."""
        key = self._key_of(lease)
        if key is not None:
            heapq.heappush(self._heap, (key, lease.attempt, lease))
        # Entries of ended leases would pile up behind one that lasts long.
        if len(self._heap) > 1024 + 4 * leases:
            self._heap = [
                (key, attempt, lease)
                for attempt, lease in {lease.attempt: lease for *_, lease in self._heap}.items()
                if (key := self._key_of(lease)) is not None
            ]
            heapq.heapify(self._heap)

    def first(self) -> tuple[float, Lease] | None:
        """Return the lowest number, and the lease that has it; None: the queue is empty."""
        heap = self._heap
        while heap:
            entered, attempt, lease = heap[0]
            key = self._key_of(lease)
            if key == entered:
                return key, lease
            if key is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (key, attempt, lease))
        return None

    def pop(self) -> None:
        """Take out what ``first`` returned."""
        heapq.heappop(self._heap)


class Median:
    """The median of the last numbers; one more costs O(window) moves in memory."""

    def __init__(self) -> None:
        self._last: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, value: float) -> None:
        """Take in a number, and forget the oldest beyond the window."""
        self._last.append(value)
        insort(self._sorted, value)
        if len(self._last) > MEDIAN_OF:
            del self._sorted[bisect_left(self._sorted, self._last.popleft())]

    @property
    def value(self) -> float | None:
        """The median, the upper one of an even number of them; None of none."""
        return self._sorted[len(self._sorted) // 2] if self._sorted else None
