"""All tasks of a round: compact where they are to do or done, records for the others.

A task has a record from its first lease until it is done and its stream is closed. Before, it is a
number in the order of the round; after, a bit. This module owns both, counts the states, and
counts the batches. The bits are in chunks that are single records of the journal. A chunk also
names the tasks that had another number of batches than their records give: damaged records are no
part of a batch. Imports ``job_engine``, numpy and ``backstay.errors``; does no I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from backstay.errors import InvalidRequest
from backstay.job_engine.task import TRANSITIONS, Event, IllegalTransition, State, Task
from backstay.job_engine.values import Counts

__all__ = ["CHUNK_TASKS", "Sizes", "TaskBits", "TaskStore", "chunk_of"]

Sizes = npt.NDArray[np.uint32]

# 512 bytes, 1 KiB as hex: one record.
CHUNK_TASKS = 4096
_CHUNK_BYTES = CHUNK_TASKS // 8


def chunk_of(task: int) -> int:
    """Return the chunk that holds a task's bit."""
    return task // CHUNK_TASKS


class TaskBits:
    """A set of tasks of one round; bit ``task % 8`` of byte ``task // 8``."""

    __slots__ = ("_bytes", "_count", "_odd", "_size")

    def __init__(self, size: int) -> None:
        """Begin empty, for the tasks 0 to ``size`` - 1."""
        self._size = size
        self._bytes = bytearray(-(-size // 8))
        self._count = 0
        # Chunk -> task -> batches.
        self._odd: dict[int, dict[int, int]] = {}

    def __len__(self) -> int:
        """Return how many tasks are in the set."""
        return self._count

    def __contains__(self, task: int) -> bool:
        """Return whether a task, which must be one of the round, is in the set."""
        return bool(self._bytes[task >> 3] >> (task & 7) & 1)

    @property
    def size(self) -> int:
        """The number of tasks of the round."""
        return self._size

    def grow(self, size: int) -> None:
        """Have the set be one of a round that has more tasks now: ``size``, not fewer."""
        self._bytes.extend(bytes(-(-size // 8) - len(self._bytes)))
        self._size = size

    def add(self, task: int) -> None:
        """Put a task, which must be one of the round, into the set."""
        if task not in self:
            self._bytes[task >> 3] |= 1 << (task & 7)
            self._count += 1

    def set_odd_size(self, task: int, batches: int) -> None:
        """Keep how many batches a task of the set had: not as many as its records give."""
        self._odd.setdefault(chunk_of(task), {})[task] = batches

    def odd_sizes(self) -> Iterator[tuple[int, int]]:
        """Yield the tasks of which :meth:`set_odd_size` told, and their batches."""
        for chunk in self._odd.values():
            yield from chunk.items()

    def chunk(self, number: int) -> str:
        """Return a chunk as a string; an empty one if it has no bit.

        Its bits as hex, without the zeros at its end; then " task:batches" for odd sizes.
        """
        at = number * _CHUNK_BYTES
        odd = sorted(self._odd.get(number, {}).items())
        bits = self._bytes[at : at + _CHUNK_BYTES].rstrip(b"\0").hex()
        return " ".join([bits, *(f"{task}:{batches}" for task, batches in odd)])

    def chunks(self) -> dict[int, str]:
        """Return all chunks that have a bit, by their numbers."""
        count = -(-self._size // CHUNK_TASKS)
        return {number: text for number in range(count) if (text := self.chunk(number))}

    @classmethod
    def full(cls, size: int) -> TaskBits:
        """Return the set of all tasks of a round."""
        bits = cls(size)
        bits._bytes = bytearray(b"\xff") * len(bits._bytes)
        if size % 8:
            bits._bytes[-1] = (1 << size % 8) - 1
        bits._count = size
        return bits

    @classmethod
    def from_chunks(cls, size: int, chunks: Mapping[int, str]) -> TaskBits:
        """Return the set that ``chunks`` wrote.

        Raises:
            InvalidRequest: A chunk is no such string, or has a task that the round has not.
        """
        bits = cls(size)
        for number, text in chunks.items():
            hexadecimal, *odd = text.split(" ")
            try:
                part = bytes.fromhex(hexadecimal)
            except ValueError as error:
                raise InvalidRequest(f"chunk {number} of the tasks done: {error}") from error
            at = number * _CHUNK_BYTES
            part = part.rstrip(b"\0")
            if (
                number < 0
                or len(part) > _CHUNK_BYTES
                or (part and at + len(part) > len(bits._bytes))
            ):
                raise InvalidRequest(f"chunk {number} of the tasks done: more than {size} tasks")
            bits._bytes[at : at + len(part)] = part
            bits._read_odd(number, odd)
        if size % 8 and bits._bytes[-1] >> size % 8:
            raise InvalidRequest(f"tasks done: a bit above the {size} tasks is set")
        bits._count = int.from_bytes(bits._bytes, "little").bit_count()
        return bits

    def to_array(self) -> npt.NDArray[np.uint8]:
        """Return 1 for each task in the set, else 0; shape (size,)."""
        packed = np.frombuffer(self._bytes, dtype=np.uint8)
        return np.unpackbits(packed, count=self._size, bitorder="little")

    def copy(self) -> TaskBits:
        """Return an independent copy."""
        other = TaskBits(0)
        other._size, other._bytes, other._count = self._size, self._bytes[:], self._count
        other._odd = {number: dict(odd) for number, odd in self._odd.items()}
        return other

    def _read_odd(self, number: int, odd: Sequence[str]) -> None:
        for text in odd:
            task, _, batches = text.partition(":")
            if not (task.isdecimal() and batches.isdecimal() and chunk_of(int(task)) == number):
                raise InvalidRequest(f"chunk {number} of the tasks done: {text!r} is no odd size")
            if int(task) >= self._size or int(task) not in self:
                raise InvalidRequest(f"chunk {number} of the tasks done: {task} is not done")
            self.set_odd_size(int(task), int(batches))


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
        # The order of giving out: tasks that came back, then the others once over, then the rest:
        # each after all tasks that there were when it was put back.
        self._order = order
        self._passed = 0
        self._front: deque[int] = deque()
        self._back: deque[tuple[int, int]] = deque()
        self._queued: set[int] = set()

    def grow(self, order: Sequence[int], sizes: Sizes | None) -> None:
        """Have more tasks, which are to do after those that there are.

        Args:
            order: Every task of the round; begins with the order of before.
            sizes: Batches of each of the new tasks; None exactly if it was so of the others.
        """
        more = len(order) - self.done.size
        self.done.grow(len(order))
        self._counts[State.TODO] += more
        self._order = order
        if self._sizes is not None and sizes is not None:
            self._sizes = np.concatenate([self._sizes, sizes])

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
        if number in self._queued:
            return
        self._queued.add(number)
        if to_front:
            self._front.append(number)
        else:
            self._back.append((number, len(self._order)))

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
        elif self._back and self._back[0][1] <= self._passed:
            number, _ = self._back.popleft()
        elif self._passed < len(self._order):
            self._passed += 1
            return self._order[self._passed - 1]
        else:
            return None
        self._queued.discard(number)
        return number
