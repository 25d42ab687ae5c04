"""The batches of a round: those of tasks that are done, and those settled of tasks that are not.

Their sum is what the round adds to the job's steps. It follows from what the journal has, so a
master that goes on with a job counts nothing twice. Imports ``master.core`` and numpy; no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from backstay.master.core.task_bits import TaskBits

__all__ = ["BatchCount", "Sizes"]

Sizes = npt.NDArray[np.uint32]


class BatchCount:
    """Counts the batches of one round.

    Invariant: ``total`` is the batches of all tasks done, and the highest number of settled ones
    that was told of each of the others, whoever had them.
    """

    def __init__(self, done: TaskBits, sizes: Sizes | None) -> None:
        """Begin with the tasks that are done.

        Args:
            done: Those; the batches of a task that has fewer than its records give are kept there.
            sizes: Batches of each task by its records, shape (tasks,); None: tasks done count
                nothing.
        """
        self._done = done
        self._sizes = sizes
        # Of tasks that were begun and are not done.
        self._settled: dict[int, int] = {}
        # Those of them that nobody holds: the journal has them as held by nobody.
        self._aside: set[int] = set()
        self._aside_changed = False
        self.total = 0
        if sizes is not None:
            self.total = int(sizes[done.to_array().astype(bool)].sum(dtype=np.int64))
            self.total += sum(batches - int(sizes[task]) for task, batches in done.odd_sizes())

    def of(self, task: int) -> int:
        """Return how many batches of a task that is not done are settled."""
        return self._settled.get(task, 0)

    @property
    def begun(self) -> set[int]:
        """The tasks with settled batches that are not done."""
        return set(self._settled)

    def settle(self, task: int, settled: int) -> None:
        """Take note that so many batches of a task are settled; fewer than known is old news."""
        before = self.of(task)
        if settled > before:
            self._settled[task] = settled
            self.total += settled - before

    def forget(self, task: int) -> int:
        """Leave a task out, and return how many of its batches are settled; they stay counted."""
        self.take_up(task)
        return self._settled.pop(task, 0)

    def restore(self, task: int, settled: int) -> None:
        """Take in again what ``forget`` returned; it is counted already."""
        if settled:
            self._settled[task] = settled

    def finish(self, task: int, batches: int | None, settled: int) -> None:
        """A task is done, and its bit is set.

        Args:
            task: Which.
            batches: Of the whole task; None: as its records give.
            settled: How many of them were counted: what ``forget`` returned.
        """
        usual = settled if self._sizes is None else int(self._sizes[task])
        batches = usual if batches is None else batches
        self.total += batches - settled
        if self._sizes is not None and batches != usual:
            self._done.set_odd_size(task, batches)

    # Tasks that nobody holds.

    def put_aside(self, task: int) -> None:
        """Nobody holds a task any more: the journal must know its settled batches."""
        if task in self._settled:
            self._aside.add(task)
            self._aside_changed = True

    def take_up(self, task: int) -> None:
        """Somebody holds a task."""
        if task in self._aside:
            self._aside.remove(task)
            self._aside_changed = True

    def aside(self) -> Iterator[tuple[int, int]]:
        """Yield the tasks that nobody holds, and their settled batches, in their order."""
        for task in sorted(self._aside):
            yield task, self._settled[task]

    def take_aside_changed(self) -> bool:
        """Return whether ``aside`` yields something else than at the last call."""
        changed, self._aside_changed = self._aside_changed, False
        return changed
