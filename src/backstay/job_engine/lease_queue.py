"""Leases in the order of a number, and the median of how long tasks took.

Imports ``job_engine`` and the standard library; does no I/O.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable

from backstay.job_engine.task import Lease

__all__ = ["LeaseQueue", "Median"]


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
        # Behind one that lasts long, those that ended would pile up.
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

    def __init__(self, window: int = 255) -> None:
        self._window = window
        self._last: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, value: float) -> None:
        """Take in a number, and forget the oldest beyond the window."""
        self._last.append(value)
        insort(self._sorted, value)
        if len(self._last) > self._window:
            del self._sorted[bisect_left(self._sorted, self._last.popleft())]

    @property
    def value(self) -> float | None:
        """The median, the upper one of an even number of them; None of none."""
        return self._sorted[len(self._sorted) // 2] if self._sorted else None
