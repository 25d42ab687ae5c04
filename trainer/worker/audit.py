"""Counts on the servers how often each record was trained: the judge of "exactly once".

With each batch a worker pushes the gradient -1 to the row of each record, under SGD of rate 1, in
the same stream as the model's own pushes: the row's value is then the number of passes that have
counted the record. May import numpy and the client; knows no framework.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from backstay.tables import SGD, TableSpec, Zeros
from backstay.trainer.client import Client

__all__ = ["RecordCounter", "RecordsAudit", "TaskCount", "audit_records", "records_table"]

# Rows asked for at once.
RECORDS_AT_ONCE = 1 << 16
# Wrong records that are named.
WRONG_KEPT_MAX = 20


class TaskCount(NamedTuple):
    """How often the good records of a task should have been counted.

    Attributes:
        shard: Name of the file or table.
        start: Its first record.
        records: How many it has, damaged ones included.
        damaged: As many of its last numbers stand for no record: see ``RecordCounter.count``.
        least: In so many passes the task is done.
        most: In so many passes it was begun, or may have been: its batches count in part.
    """

    shard: str
    start: int
    records: int
    damaged: int
    least: int
    most: int


@dataclass(frozen=True)
class RecordsAudit:
    """What the counters say.

    Attributes:
        passes: Whole passes over the data.
        records: Records of the data.
        right: Those counted as often as their tasks are done.
        missing: Those counted less often.
        doubled: Those counted more often than they may be.
        damaged: Records that the reader skips; they are none of the others.
        unfinished: Records of tasks that some pass has dropped or dead-lettered: those may have
            been counted in it, once; all others are judged exactly.
        first_wrong: The first records that are not right: (shard, record, count).
        inexact: Since when and why records may count never or twice in the model, whatever their
            counters say; empty: each counts once.
    """

    passes: int
    records: int
    right: int
    missing: int
    doubled: int
    damaged: int
    unfinished: int
    first_wrong: tuple[tuple[str, int, int], ...]
    inexact: str = ""

    @property
    def records_counted_once(self) -> bool:
        """Whether each good record counts once for each time that its task is done."""
        return not self.inexact and self.doubled == self.missing == 0


class RecordCounter:
    """A worker's side: counts the records of its batches.

    Args:
        client: Connected; pushes go into its open task stream.
        job: Name of the job.
        stream_job: What tells it from others of that name; see ``JobTerms``.
    """

    def __init__(self, client: Client, job: str, stream_job: int) -> None:
        self._client = client
        name = records_table(job, stream_job)
        spec = TableSpec.sparse(name, 1, optimizer=SGD(1.0), initializer=Zeros())
        self._table = client.create_table(spec)

    @property
    def table_name(self) -> str:
        """The table that is pushed to."""
        return self._table.name

    def count(self, shard: str, start: int, places: NDArray[np.int64]) -> None:
        """Count records once; waits for nothing, the stream knows of failures.

        Args:
            shard: Name of their shard.
            start: First record of the task.
            places: Their numbers among the good records of the task, each once, [n].
        """
        gradients = np.full((len(places), 1), -1.0, np.float32)
        self._client.push_async(self._table, _keys(shard, start + places), gradients)


def records_table(job: str, stream_job: int) -> str:
    """Return the name of a job's table of counters: one that is begun anew begins with none."""
    return f"{job}/__records-{stream_job:016x}"


def audit_records(
    client: Client,
    job: str,
    stream_job: int,
    tasks: Iterable[TaskCount],
    *,
    passes: int,
) -> RecordsAudit:
    """Read all counters. No worker may push any more.

    Args:
        client: Connected.
        job: Name of the job, which had ``audit`` set.
        stream_job: What tells it from others of that name; see ``JobTerms``.
        tasks: All tasks of the training data.
        passes: Whole passes, for the report.

    Raises:
        UnknownTable: The job has counted nothing.
    """
    table = client.table(records_table(job, stream_job))
    records = right = missing = doubled = damaged = unfinished = 0
    wrong: list[tuple[str, int, int]] = []
    for part in _parts(tasks):
        counts = np.rint(client.pull(table, part.keys)[:, 0]).astype(np.int64)
        records += len(counts)
        damaged += int((~part.good).sum())
        unfinished += int((part.least < part.most).sum())
        missing += int((counts < part.least).sum())
        doubled += int((counts > part.most).sum())
        is_wrong = (counts < part.least) | (counts > part.most)
        right += int((part.good & ~is_wrong).sum())
        wrong += [
            (part.shards[place], int(part.numbers[place]), int(counts[place]))
            for place in np.flatnonzero(is_wrong)[: WRONG_KEPT_MAX - len(wrong)]
        ]
    return RecordsAudit(passes, records, right, missing, doubled, damaged, unfinished, tuple(wrong))


class _Part(NamedTuple):
    """Records that are asked for at once; all arrays have one entry for each."""

    shards: list[str]
    numbers: NDArray[np.int64]
    keys: NDArray[np.uint64]
    least: NDArray[np.int64]
    most: NDArray[np.int64]
    good: NDArray[np.bool_]


def _parts(tasks: Iterable[TaskCount]) -> Iterator[_Part]:
    """Yield the records of tasks in parts of at most ``RECORDS_AT_ONCE``."""
    waiting: list[TaskCount] = []
    size = 0
    for task in tasks:
        for piece in _pieces(task):
            if size + piece.records > RECORDS_AT_ONCE:
                yield _part(waiting)
                waiting, size = [], 0
            waiting.append(piece)
            size += piece.records
    if waiting:
        yield _part(waiting)


def _pieces(task: TaskCount) -> Iterator[TaskCount]:
    """Yield a task, or pieces of one that is too large; damaged are the last numbers of it."""
    good_end = task.start + task.records - task.damaged
    for start in range(task.start, task.start + task.records, RECORDS_AT_ONCE):
        count = min(RECORDS_AT_ONCE, task.start + task.records - start)
        damaged = count - min(count, max(0, good_end - start))
        yield task._replace(start=start, records=count, damaged=damaged)


def _part(tasks: list[TaskCount]) -> _Part:
    shards: list[str] = []
    numbers, keys, least, most, good = [], [], [], [], []
    for task in tasks:
        these = np.arange(task.start, task.start + task.records, dtype=np.int64)
        is_good = np.arange(task.records) < task.records - task.damaged
        shards += [task.shard] * task.records
        numbers.append(these)
        keys.append(_keys(task.shard, these))
        least.append(np.where(is_good, task.least, 0))
        most.append(np.where(is_good, task.most, 0))
        good.append(is_good)
    return _Part(
        shards,
        np.concatenate(numbers),
        np.concatenate(keys),
        np.concatenate(least),
        np.concatenate(most),
        np.concatenate(good),
    )


def _keys(shard: str, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the key of each record: the shard's hash plus its number, modulo 2**64."""
    digest = hashlib.blake2b(shard.encode(), digest_size=8).digest()
    with np.errstate(over="ignore"):
        return np.uint64(int.from_bytes(digest, "little")) + numbers.astype(np.uint64)
