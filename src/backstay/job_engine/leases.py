"""Task leases: how long they last, which expires next, and the median of how long tasks took.

A worker renews its leases four times in the time that they last. At 10,000 workers and 2 s the
renewals alone would be more calls than one job master answers, so the time grows with the number of
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
# Of all workers together. A job master answers some thousand calls a second; when it cannot keep
# up, each waiting call is out of time when it comes to it, and none succeeds.
RENEWALS_PER_S_MAX = 1000


def wanted_lease_ttl_ms(
    least_ms: int, workers: int, renewals_per_s_max: int = RENEWALS_PER_S_MAX
) -> int:
    """Return how long leases are to last: the least time, or a multiple of it.

    Args:
        least_ms: ``task_lease_ttl_ms`` of the job.
        workers: How many there are.
        renewals_per_s_max: How many renewals a second a job master answers.
    """
    needed_ms = RENEWALS_PER_TTL * workers * 1000 // renewals_per_s_max
    return least_ms * max(1, -(-needed_ms // least_ms))


# The newest numbers that a median is of.
MEDIAN_OF = 255


class LeaseQueue:
    """Leases by a number, lowest first. Entries that no longer matter are dropped when met.

    A lease may have several entries; it counts where ``key_of`` says, None for "not here".
    """

    def __init__(self, key_of: Callable[[Lease], float | None]) -> None:
        self._key_of = key_of
        self._heap: list[tuple[float, int, Lease]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, lease: Lease, leases: int) -> None:
        """Enter a lease; ``leases``, the number of all, says how many entries can matter."""
        key = self._key_of(lease)
        if key is not None:
            heapq.heappush(self._heap, (key, lease.attempt, lease))
        # Behind one that lasts long, ended ones would pile up.
        if len(self._heap) > 1024 + 4 * leases:
            self._heap = [
                (key, attempt, lease)
                for attempt, lease in {lease.attempt: lease for *_, lease in self._heap}.items()
                if (key := self._key_of(lease)) is not None
            ]
            heapq.heapify(self._heap)

    def first(self) -> tuple[float, Lease] | None:
        """Return the lease with the lowest number, and that."""
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
    """The median of the last numbers, in O(window) memory moves for each."""

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
