"""Virtual time: a queue of things to do, one seed, one order."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import TypeAlias

__all__ = ["MS", "Clock", "EventQueue", "Micros", "S"]

Micros: TypeAlias = int
MS: Micros = 1_000
S: Micros = 1_000_000


class EventQueue:
    """What happens when; ties in the order in which they were scheduled."""

    def __init__(self, seed: int, *, trace: bool) -> None:
        self.now: Micros = 0
        self.random = Random(seed)
        self.trace = trace
        self.counts: Counter[str] = Counter()
        self._heap: list[tuple[Micros, int, Callable[[], None]]] = []
        self._next = 0

    def at(self, time: Micros, what: Callable[[], None]) -> None:
        """Do something at a time, or now if that has passed."""
        self._next += 1
        heapq.heappush(self._heap, (max(time, self.now), self._next, what))

    def after(self, delay: Micros, what: Callable[[], None]) -> None:
        """Do something after a delay."""
        # As ``at``, which is half of what a run does.
        self._next += 1
        heapq.heappush(self._heap, (self.now + delay, self._next, what))

    def run_until(self, time: Micros) -> None:
        """Let everything happen that is due by then."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= time:
            self.now, _, what = pop(heap)
            what()
        self.now = max(self.now, time)

    def log(self, who: str, text: Callable[[], str]) -> None:
        """Tell what happens, if somebody wants to read it."""
        if self.trace:
            print(f"{self.now / 1000:10.3f} ms  {who:<10} {text()}")

    def between(self, low: Micros, high: Micros) -> Micros:
        """Draw a time: short ones often, long ones now and then."""
        return low + int((high - low) * self.random.random() ** 3)


class Clock:
    """A process's monotonic clock: any origin, nearly the right speed."""

    def __init__(self, queue: EventQueue, rate_ppm: int) -> None:
        self._queue = queue
        self._origin = queue.random.randrange(1, 10_000) * S
        self._began = queue.now
        self._rate = 1_000_000 + rate_ppm

    def now(self) -> Micros:
        """Return the time on this clock."""
        return self._origin + (self._queue.now - self._began) * self._rate // 1_000_000
