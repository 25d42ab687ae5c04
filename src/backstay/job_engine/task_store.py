"""All tasks of a round: compact where they are to do or done, records for the others.

A task has a record from its first lease until it is done and its stream is closed. Before, it is a
number in the order of the round; after, a bit. This module owns both, counts the states, and
counts the batches. Imports ``job_engine``, numpy and ``backstay.errors``; does no I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from backstay.job_engine.task import TRANSITIONS, Event, IllegalTransition, State, Task
from backstay.job_engine.task_bits import TaskBits
from backstay.job_engine.values import Counts

__all__ = ["Sizes", "TaskStore"]

Sizes = npt.NDArray[np.uint32]


class TaskStore:
    """The tasks of a round by their numbers.

    Attributes:
        done: The tasks done.
        batches: Batches of all tasks done, and of each of the others the highest number of
            acknowledged ones that anybody told. It follows from the journal, so a new job master
            counts none twice.
        unleased: Tasks with acknowledged batches that no worker has a live lease of.
    """

    def __init__(self, done: TaskBits, order: Sequence[int], sizes: Sizes | None) -> None:
        """Begin with the tasks that are done; the others are to do, in the given order.

        Args:
            done: Those; it becomes this object's own.
            order: Every task of the round.
            sizes: Batches of each task by its records, shape (tasks,); None: tasks done count
                nothing.
        """
        self.done = done
        self._sizes = sizes
        self._records: dict[int, Task] = {}
        self._counts = [0] * len(State)
        self._counts[State.DONE] = len(done)
        self._counts[State.TODO] = done.size - len(done)
        self.unleased: set[int] = set()
        self.batches = 0
        if sizes is not None:
            self.batches = int(sizes[done.to_array().astype(bool)].sum(dtype=np.int64))
            self.batches += sum(batches - int(sizes[task]) for task, batches in done.odd_sizes())
        # The order of giving out: tasks that came back, then the others once over, then the rest.
        self._order = order
        self._passed = 0
        self._front: deque[int] = deque()
        self._back: deque[int] = deque()
        self._queued: set[int] = set()

    def __getitem__(self, number: int) -> Task:
        """Return a task's record; it is made if there is none."""
        task = self._records.get(number)
        if task is None:
            state = State.DONE if number in self.done else State.TODO
            task = self._records[number] = Task(number, state)
        return task

    def find(self, number: int) -> Task | None:
        """Return a task's record, None if it has none."""
        return self._records.get(number)

    def state_of(self, number: int) -> State:
        """Return a task's state."""
        task = self._records.get(number)
        if task is not None:
            return task.state
        return State.DONE if number in self.done else State.TODO

    def records(self) -> Iterator[Task]:
        """Yield the tasks that have a record."""
        yield from self._records.values()

    def drop(self, task: Task) -> None:
        """Forget the record of a task that is done and has no stream to close."""
        if task.state is State.DONE and task.closer is None:
            del self._records[task.number]

    @property
    def counts(self) -> Counts:
        """How many tasks are in which state; one whose leases have expired is to do."""
        todo, leased, expired, done, dead = self._counts
        return Counts(todo + expired, leased, done, dead)

    # Transitions and progress.

    def step(self, task: Task, event: Event) -> None:
        """Apply an event to a task.

        Raises:
            IllegalTransition: The task's state does not allow it; nothing has changed.
        """
        before = task.state
        after = TRANSITIONS[before].get(event)
        if after is None:
            raise IllegalTransition(f"task {task.number}: {event.name} while {before.name}")
        if before is after:
            return
        task.state = after
        self._counts[before] -= 1
        self._counts[after] += 1
        if after is State.DONE:
            self.done.add(task.number)

    def restore_dead_letter(self, number: int, acknowledged: int) -> None:
        """Begin with a task that is dead-lettered."""
        task = self[number]
        self._counts[task.state] -= 1
        task.state = State.DEAD_LETTERED
        self._counts[task.state] += 1
        self.acknowledge(task, acknowledged)

    def acknowledge(self, task: Task, acknowledged: int) -> None:
        """Take note that so many batches of a task are acknowledged; fewer than known is old."""
        if acknowledged > task.acknowledged:
            self.batches += acknowledged - task.acknowledged
            task.acknowledged = acknowledged

    def count_done(self, task: Task, batches: int | None) -> None:
        """Count a task that has just been done: so many batches, None: as its records give."""
        usual = task.acknowledged if self._sizes is None else int(self._sizes[task.number])
        batches = usual if batches is None else batches
        self.batches += batches - task.acknowledged
        if self._sizes is not None and batches != usual:
            self.done.set_odd_size(task.number, batches)

    def note_unleased(self, task: Task) -> bool:
        """Bring ``unleased`` up to date; return whether the journal must hear of the task."""
        if task.acknowledged and task.state in (State.TODO, State.EXPIRED):
            self.unleased.add(task.number)
            return True
        if task.number in self.unleased:
            self.unleased.remove(task.number)
            return True
        return False

    # The order of giving out.

    def put_back(self, number: int, *, to_front: bool) -> None:
        """Put a task that was taken before back: before or after all that were never taken."""
        if number not in self._queued:
            self._queued.add(number)
            (self._front if to_front else self._back).append(number)

    def take_next(self) -> Task | None:
        """Take the next task to do out of the queue; None if there is none."""
        if not self._counts[State.TODO] and not self._counts[State.EXPIRED]:
            return None
        while (number := self._take()) is not None:
            if self.state_of(number) in (State.TODO, State.EXPIRED):
                return self[number]
        return None

    def _take(self) -> int | None:
        if self._front:
            number = self._front.popleft()
        elif self._passed < len(self._order):
            self._passed += 1
            return self._order[self._passed - 1]
        elif self._back:
            number = self._back.popleft()
        else:
            return None
        self._queued.discard(number)
        return number
