"""Streams of tasks that are over but not yet closed on the servers, and who is to close them.

Imports the standard library.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["NOBODY", "StreamsToClose"]

# Has the streams whose worker is lost, until others are given them.
NOBODY = ""


class StreamsToClose:
    """Who closes which stream of a round."""

    def __init__(self) -> None:
        # Each stream's worker, and the attempt that did the task (0: it was never done).
        self._streams: dict[int, tuple[str, int]] = {}
        self._by_worker: dict[str, dict[int, int]] = {}
        # Of those, the ones a worker did not do itself and must be told of.
        self._handed: dict[str, set[int]] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, task: int) -> bool:
        return task in self._streams

    def add(self, task: int, worker: str, attempt: int) -> None:
        """Make a worker the one who closes a task's stream."""
        self._take_out(task)
        self._streams[task] = (worker, attempt)
        self._by_worker.setdefault(worker, {})[task] = attempt

    def attempt_of(self, task: int) -> int | None:
        """Return the attempt that did a task, as long as its stream is not closed."""
        entry = self._streams.get(task)
        return None if entry is None else entry[1]

    def of_worker(self, worker: str) -> list[tuple[int, int]]:
        """Return the (task, attempt) that a worker is to close, by task."""
        return sorted(self._by_worker.get(worker, {}).items())

    @property
    def workers(self) -> set[str]:
        """The workers with a stream to close; NOBODY among them."""
        return set(self._by_worker)

    def close(self, tasks: Iterable[int]) -> set[str]:
        """Forget streams that are closed; return the workers that had them."""
        return {worker for task in tasks if (worker := self._take_out(task)) is not None}

    def orphan(self, worker: str) -> bool:
        """Take a lost worker's streams from it; return whether it had any."""
        streams = self.of_worker(worker)
        for task, attempt in streams:
            self.add(task, NOBODY, attempt)
        return bool(streams)

    def hand_out(self, worker: str, most: int) -> tuple[list[int], bool]:
        """Return what a worker must be told to close, and whether some of it is newly its own.

        What it was told before is told again until it is closed: an answer may have been lost.
        """
        handed = self._handed.get(worker, set())
        orphans = self._by_worker.get(NOBODY, {})
        new: list[int] = []
        for task in orphans:
            if len(handed) + len(new) >= most:
                break
            new.append(task)
        for task in new:
            self.add(task, worker, orphans[task])
        if new:
            handed = self._handed.setdefault(worker, set())
            handed.update(new)
        return sorted(handed), bool(new)

    def _take_out(self, task: int) -> str | None:
        entry = self._streams.pop(task, None)
        if entry is None:
            return None
        worker = entry[0]
        mine = self._by_worker[worker]
        del mine[task]
        if not mine:
            del self._by_worker[worker]
        handed = self._handed.get(worker)
        if handed is not None:
            handed.discard(task)
            if not handed:
                del self._handed[worker]
        return worker
