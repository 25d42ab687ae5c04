"""The holds of a round: found by task and by worker, by when they end and by how slow they are.

A hold is live, or it has lapsed: its time ran out, but nobody was given the task since, so that
its worker may still have it back. Imports the standard library.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator

__all__ = ["Hold", "HoldBook", "Median"]


class Hold:
    """A worker's right to work on a task."""

    __slots__ = (
        "attempt",
        "ended",
        "expires_s",
        "first_batch",
        "granted_s",
        "lapsed",
        "task",
        "timed",
        "withdrawn",
        "worker",
    )

    def __init__(
        self,
        worker: str,
        task: int,
        attempt: int,
        first_batch: int,
        granted_s: float,
        expires_s: float,
    ) -> None:
        self.worker = worker
        self.task = task
        self.attempt = attempt
        self.first_batch = first_batch
        self.granted_s = granted_s
        self.expires_s = expires_s
        self.lapsed = False
        self.ended = False
        # Why it is not renewed any more, so that it ends with its time; empty: it is.
        self.withdrawn = ""
        # Whether the time from its grant to its end is that of the whole task.
        self.timed = False


class _Queue:
    """Holds by a number, lowest first. Entries that no longer matter are dropped when met.

    A hold may have several entries; it counts where ``key_of`` says, None for "not here".
    """

    def __init__(self, key_of: Callable[[Hold], float | None]) -> None:
        self._key_of = key_of
        self._heap: list[tuple[float, int, Hold]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, hold: Hold, holds: int) -> None:
        """Enter a hold; ``holds``, the number of all, says how many entries can matter."""
        key = self._key_of(hold)
        if key is not None:
            heapq.heappush(self._heap, (key, hold.attempt, hold))
        # Behind one that lasts long, those that ended would pile up.
        if len(self._heap) > 1024 + 4 * holds:
            self._heap = [
                (key, attempt, hold)
                for attempt, hold in {hold.attempt: hold for *_, hold in self._heap}.items()
                if (key := self._key_of(hold)) is not None
            ]
            heapq.heapify(self._heap)

    def first(self) -> tuple[float, Hold] | None:
        """Return the hold with the lowest number, and that."""
        heap = self._heap
        while heap:
            entered, attempt, hold = heap[0]
            key = self._key_of(hold)
            if key == entered:
                return key, hold
            if key is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (key, attempt, hold))
        return None

    def pop(self) -> None:
        heapq.heappop(self._heap)


class HoldBook:
    """All holds of a round, live and lapsed."""

    def __init__(self) -> None:
        self._by_task: dict[int, list[Hold]] = {}
        self._by_worker: dict[str, dict[int, Hold]] = {}
        self._count = 0
        self._ends = _Queue(lambda hold: None if hold.ended or hold.lapsed else hold.expires_s)
        # Live holds whose task has no other live one, the oldest first.
        self._lonely = _Queue(lambda hold: hold.granted_s if self._is_lonely(hold) else None)

    def __len__(self) -> int:
        return self._count

    def of_task(self, task: int) -> list[Hold]:
        """Return a task's holds, live and lapsed."""
        return list(self._by_task.get(task, ()))

    def of_worker(self, worker: str) -> list[Hold]:
        """Return a worker's holds, live and lapsed, by attempt."""
        return sorted(self._by_worker.get(worker, {}).values(), key=lambda hold: hold.attempt)

    def count_of_worker(self, worker: str) -> int:
        """Return how many holds, live and lapsed, a worker has."""
        return len(self._by_worker.get(worker, ()))

    @property
    def workers(self) -> set[str]:
        """The workers with a hold."""
        return set(self._by_worker)

    @property
    def tasks(self) -> set[int]:
        """The tasks with a hold."""
        return set(self._by_task)

    def find(self, worker: str, task: int, attempt: int) -> Hold | None:
        """Return that very hold, live or lapsed."""
        hold = self._by_worker.get(worker, {}).get(task)
        return hold if hold is not None and hold.attempt == attempt else None

    def is_held(self, task: int) -> bool:
        """Return whether a task has a live hold."""
        return any(not hold.lapsed for hold in self._by_task.get(task, ()))

    def add(self, hold: Hold) -> None:
        """Enter a live hold. Its worker must have none on the task."""
        self._by_task.setdefault(hold.task, []).append(hold)
        self._by_worker.setdefault(hold.worker, {})[hold.task] = hold
        self._count += 1
        self._enter(hold)

    def end(self, hold: Hold) -> None:
        """Take a hold out. What is left of the task's may be lonely now."""
        hold.ended = True
        others = self._by_task[hold.task]
        others.remove(hold)
        if not others:
            del self._by_task[hold.task]
        mine = self._by_worker[hold.worker]
        del mine[hold.task]
        if not mine:
            del self._by_worker[hold.worker]
        self._count -= 1
        for other in others:
            self._lonely.push(other, self._count)

    def revive(self, hold: Hold) -> None:
        """Make a lapsed hold live again; its end must have been set."""
        hold.lapsed = False
        self._enter(hold)

    def _enter(self, hold: Hold) -> None:
        self._ends.push(hold, self._count)
        self._lonely.push(hold, self._count)

    def _is_lonely(self, hold: Hold) -> bool:
        if hold.ended or hold.lapsed:
            return False
        others = self._by_task[hold.task]
        return len(others) == 1 or all(other.lapsed for other in others if other is not hold)

    def lapse_next(self, now_s: float) -> Hold | None:
        """Let the next hold whose time is over lapse, and return it; None if there is none."""
        first = self._ends.first()
        if first is None or first[0] > now_s:
            return None
        self._ends.pop()
        hold = first[1]
        hold.lapsed = True
        for other in self._by_task[hold.task]:
            self._lonely.push(other, self._count)
        return hold

    def next_end(self) -> float | None:
        """Return when the next live hold runs out."""
        first = self._ends.first()
        return None if first is None else first[0]

    def slowest(self, begun_s: float, except_worker: str) -> Hold | None:
        """Return the oldest live hold that is its task's only one, granted by ``begun_s``.

        Tasks on which ``except_worker`` has a hold, live or lapsed, are passed over.
        """
        aside: list[Hold] = []
        found: Hold | None = None
        while (first := self._lonely.first()) is not None and first[0] <= begun_s:
            if first[1].task not in self._by_worker.get(except_worker, ()):
                found = first[1]
                break
            aside.append(first[1])
            self._lonely.pop()
        for hold in aside:  # as many as that worker has holds, at most
            self._lonely.push(hold, self._count)
        return found

    def __iter__(self) -> Iterator[Hold]:
        for holds in self._by_task.values():
            yield from holds


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
