"""The order in which tasks are given out: first those that came back, then the others once over.

Being in here says nothing about a task's state; whoever takes one looks. Imports the standard
library.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

__all__ = ["TodoQueue"]


class TodoQueue:
    """Tasks in the order of their turn."""

    def __init__(self, order: Sequence[int]) -> None:
        """Begin with every task of the round, in this order."""
        self._order = order
        self._passed = 0
        self._front: deque[int] = deque()
        self._back: deque[int] = deque()
        self._queued: set[int] = set()

    def put(self, task: int, to_front: bool) -> None:
        """Put a task that was taken before back: before or after those never taken."""
        if task not in self._queued:
            self._queued.add(task)
            (self._front if to_front else self._back).append(task)

    def take(self) -> int | None:
        """Take the next task out; None if there is none."""
        if self._front:
            task = self._front.popleft()
        elif self._passed < len(self._order):
            self._passed += 1
            return self._order[self._passed - 1]
        elif self._back:
            task = self._back.popleft()
        else:
            return None
        self._queued.discard(task)
        return task
