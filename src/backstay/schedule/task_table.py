"""A job's data cut into tasks: task number -> (shard, first record, number of records).

Nothing is stored for each task, only for each shard: a million tasks of a thousand files take
some kilobytes. Imports ``backstay.schedule.rounds``, ``backstay.job_spec``, ``backstay.errors``,
``json_record`` and numpy; does no I/O.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from backstay.errors import ConfigError, InvalidRequest, LimitExceeded
from backstay.job_spec import JobSpec
from backstay.json_record import Count, JsonRecord
from backstay.listing import listed
from backstay.schedule.rounds import RoundId, RoundKind, data_of

__all__ = [
    "TASKS_MAX",
    "ShardLike",
    "TaskRecords",
    "TaskTable",
    "cut_data",
    "no_records",
    "round_table",
    "shown_places",
]

# The queue, the bitmap and the streams of a round stay small up to here.
TASKS_MAX = 1 << 24


class ShardLike(Protocol):
    """A file or a table, as the readers' index scan finds it."""

    @property
    def name(self) -> str:
        """What the reader finds it by."""

    @property
    def records(self) -> int:
        """How many records it holds."""


@dataclass(frozen=True, slots=True)
class TaskRecords:
    """The records of one task."""

    shard: str
    start: int
    count: int


class TaskTable:
    """All tasks of a round, by number from 0; it never changes.

    Where data grow, ``with_shards`` gives a longer one in which each task keeps its number.
    """

    __slots__ = ("_first_tasks", "_names", "_records", "_size", "records_per_task")

    def __init__(self, names: Sequence[str], records: Sequence[int], records_per_task: int) -> None:
        """Cut shards into tasks; prefer ``from_shards``.

        Args:
            names: Each shard's name, in the readers' order.
            records: Each shard's number of records, at least 0.
            records_per_task: The most records of a task; a shard's last task may have fewer.

        Raises:
            InvalidRequest: A number is out of range, or a name comes twice.
            LimitExceeded: There would be more than ``TASKS_MAX`` tasks.
        """
        if records_per_task < 1:
            raise InvalidRequest(f"records_per_task: {records_per_task}: must be at least 1")
        if len(names) != len(records):
            raise InvalidRequest(f"{len(names)} shard names against {len(records)} record counts")
        if len(set(names)) != len(names):
            seen: set[str] = set()
            twice = next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise InvalidRequest(f"shard {twice!r} is there twice: its records would count twice")
        self._names = tuple(names)
        self._records = array("q", records)
        self._first_tasks = array("q")
        self.records_per_task = records_per_task
        size = 0
        for name, count in zip(names, records, strict=True):
            if count < 0:
                raise InvalidRequest(f"shard {name!r} has {count} records")
            self._first_tasks.append(size)
            size += -(-count // records_per_task)
        if size > TASKS_MAX:
            raise LimitExceeded(
                f"{size} tasks of {records_per_task} records are more than {TASKS_MAX}: "
                "raise records_per_task"
            )
        self._size = size

    @classmethod
    def from_shards(cls, shards: Iterable[ShardLike], records_per_task: int) -> TaskTable:
        """Cut what an index scan found into tasks; see the constructor for errors."""
        found = list(shards)
        return cls(
            [shard.name for shard in found], [shard.records for shard in found], records_per_task
        )

    def with_shards(self, names: Sequence[str], records: Sequence[int]) -> TaskTable:
        """Return the table with more shards at its end; see the constructor for errors."""
        more = TaskTable(names, records, self.records_per_task)
        if not set(names).isdisjoint(self._names):
            twice = next(name for name in names if name in self._names)
            raise InvalidRequest(f"shard {twice!r} is there twice: its records would count twice")
        if self._size + len(more) > TASKS_MAX:
            raise LimitExceeded(f"more than {TASKS_MAX} tasks: raise records_per_task")
        longer = TaskTable((), (), self.records_per_task)
        longer._names = self._names + more._names
        longer._records = self._records + more._records
        firsts = (self._size + first for first in more._first_tasks)
        longer._first_tasks = self._first_tasks + array("q", firsts)
        longer._size = self._size + len(more)
        return longer

    def __len__(self) -> int:
        """Return the number of tasks."""
        return self._size

    def __getitem__(self, task: int) -> TaskRecords:
        """Return the records of a task, in O(log shards).

        Raises:
            IndexError: There is no such task.
        """
        if not 0 <= task < self._size:
            raise IndexError(f"task {task} of {self._size}")
        # Shards without records begin where the next one does: the last of them has the task.
        shard = bisect_right(self._first_tasks, task) - 1
        start = (task - self._first_tasks[shard]) * self.records_per_task
        return TaskRecords(
            self._names[shard], start, min(self.records_per_task, self._records[shard] - start)
        )

    @property
    def records(self) -> int:
        """The number of records of all tasks."""
        return sum(self._records)

    @property
    def shards(self) -> Iterator[tuple[str, int]]:
        """The names of all shards and their numbers of records, in order."""
        return zip(self._names, self._records, strict=True)

    @property
    def shard_count(self) -> int:
        """The number of shards."""
        return len(self._names)

    def batches(self, batch_size: int) -> npt.NDArray[np.uint32]:
        """Return how many batches of so many records each task has, shape (tasks,)."""
        batches = np.full(self._size, -(-self.records_per_task // batch_size), np.uint32)
        tasks, records = self._short_tasks()
        batches[tasks] = -(-records // batch_size)
        return batches

    def records_of(self, tasks: npt.NDArray[np.bool_]) -> int:
        """Return how many records some tasks have together.

        Args:
            tasks: Which, shape (tasks,).
        """
        short, records = self._short_tasks()
        lacking = (self.records_per_task - records)[tasks[short]]
        return int(np.count_nonzero(tasks)) * self.records_per_task - int(lacking.sum())

    def firsts(self, tasks: npt.NDArray[np.bool_]) -> list[tuple[str, int]]:
        """Return where the first one of some tasks begins in each shard that has any of them.

        Args:
            tasks: Which, shape (tasks,).

        Returns:
            Names of shards, and the first record there.
        """
        numbers = np.flatnonzero(tasks)
        if not len(numbers):
            return []
        firsts = np.array(self._first_tasks, np.int64)
        # Shards without records begin where the next one does: the last of them has the task.
        shards, at = np.unique(np.searchsorted(firsts, numbers, "right") - 1, return_index=True)
        return [
            (self._names[shard], int(numbers[one] - firsts[shard]) * self.records_per_task)
            for shard, one in zip(shards.tolist(), at.tolist(), strict=True)
        ]

    def _short_tasks(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the tasks that have fewer records than others, and how many each has."""
        firsts, counts = (np.array(one, np.int64) for one in (self._first_tasks, self._records))
        rest = counts % self.records_per_task
        is_short = rest > 0
        return (firsts + counts // self.records_per_task)[is_short], rest[is_short]

    def first_task_only(self) -> TaskTable:
        """Return the table of a round at the end of training: one task, of the first records."""
        if not self._size:
            return TaskTable((), (), self.records_per_task)
        first = self[0]
        return TaskTable((first.shard,), (first.count,), self.records_per_task)

    def digest(self) -> str:
        """Return what tells two tables apart, 32 hex digits.

        A job that goes on must find the data it began with: task numbers mean nothing otherwise.
        """
        document = json.dumps(
            [self.records_per_task, self._names, self._records.tolist()], separators=(",", ":")
        )
        return hashlib.blake2b(document.encode(), digest_size=16).hexdigest()

    def to_chunks(self, shards_per_chunk: int = 1024) -> list[str]:
        """Return the table as JSON strings of few enough shards for a record each; at least one."""
        count = -(-max(1, len(self._names)) // shards_per_chunk)
        return [self.chunk(number, shards_per_chunk) for number in range(count)]

    def chunk(self, number: int, shards_per_chunk: int) -> str:
        """Return one of the strings of ``to_chunks``."""
        part = slice(number * shards_per_chunk, (number + 1) * shards_per_chunk)
        return _Chunk(
            self.records_per_task, self._names[part], tuple(self._records[part].tolist())
        ).to_json()

    @classmethod
    def from_chunks(cls, chunks: Iterable[str]) -> TaskTable:
        """Return the table that ``to_chunks`` wrote, given its strings in their order.

        Raises:
            InvalidRequest: They are no such strings.
        """
        names: list[str] = []
        records: list[int] = []
        sizes: set[int] = set()
        for chunk in chunks:
            read = _Chunk.from_json(chunk)
            names += read.names
            records += read.records
            sizes.add(read.records_per_task)
        if len(sizes) != 1:
            raise InvalidRequest(f"shards: {len(sizes)} different records_per_task, expected one")
        return cls(names, records, sizes.pop())


@dataclass(frozen=True)
class _Chunk(JsonRecord, what="shards"):
    """The JSON form of some shards of a table: their names, and how many records each has."""

    records_per_task: int
    names: tuple[str, ...]
    records: tuple[Count, ...]


def cut_data(name: str, shards: Iterable[ShardLike], spec: JobSpec) -> TaskTable:
    """Return the tasks of one of a job's data, given what an index scan of it found.

    Raises:
        ConfigError: There are no records.
        InvalidRequest: A shard is there twice.
        LimitExceeded: There would be more than ``TASKS_MAX`` tasks.
    """
    found = list(shards)
    table = TaskTable.from_shards(found, spec.records_per_task)
    if not len(table):
        raise no_records(name, [shard.name for shard in found] or spec.data[name].paths)
    return table


def no_records(name: str, places: Sequence[str]) -> ConfigError:
    """Return the error for data without a single record.

    Args:
        name: ``training``, ``validation`` or ``prediction``.
        places: Files or tables that have none; the first ones are named.
    """
    shown = shown_places(places) or "what the custom reader names"
    return ConfigError(
        f"{name}: there are no records in {shown}; a file with nothing but a header has none. Name "
        "data with at least one record"
    )


def shown_places(places: Sequence[str]) -> str:
    """Return the first ones of many files or tables, for people."""
    return listed(places)


def round_table(tables: Mapping[str, TaskTable], round_id: RoundId) -> TaskTable:
    """Return the tasks of a round, given those of the job's data by the names of their fields.

    Training data without an end have no task here: each period has its own. The end of such a
    training has one task all the same, of no records.
    """
    table = tables[data_of(round_id.kind)]
    if round_id.kind is not RoundKind.TRAIN_END:
        return table
    return table.first_task_only() if len(table) else TaskTable(("",), (1,), 1)
