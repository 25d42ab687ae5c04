"""Counts on the servers how often each record was trained: the judge of "exactly once".

With each batch a worker pushes the gradient -1 to the row of each record, under SGD of rate 1, in
the same stream as the model's own pushes: the row's value is then the number of passes that have
counted the record. May import numpy and the client; knows no framework.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backstay.tables import SGD, TableSpec, Zeros
from backstay.trainer.client import Client
from backstay.trainer.readers import Shard

__all__ = ["RecordCounter", "RecordsAudit", "audit_records", "records_table"]

# Rows asked for at once.
RECORDS_AT_ONCE = 1 << 16
# float32 counts to here without a gap.
PASSES_MAX = 1 << 24


@dataclass(frozen=True)
class RecordsAudit:
    """What the counters say.

    Attributes:
        passes: How often each record should have been counted.
        records: Records of the data.
        right: Those counted once in each pass.
        missing: Those counted less often.
        doubled: Those counted more often.
        damaged: Records that the reader skips in each pass: as many may be missing.
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
    first_wrong: tuple[tuple[str, int, int], ...]
    inexact: str = ""

    @property
    def records_counted_once(self) -> bool:
        """Whether each good record counts once in each pass."""
        return not self.inexact and self.doubled == 0 and self.missing == self.damaged


class RecordCounter:
    """A worker's side: counts the records of its batches.

    Args:
        client: Connected; pushes go into its open task stream.
        job: Name of the job.
    """

    def __init__(self, client: Client, job: str) -> None:
        self._client = client
        spec = TableSpec.sparse(records_table(job), 1, optimizer=SGD(1.0), initializer=Zeros())
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
            places: Their numbers within the task, each once, [n].
        """
        gradients = np.full((len(places), 1), -1.0, np.float32)
        self._client.push_async(self._table, _keys(shard, start + places), gradients)


def records_table(job: str) -> str:
    """Return the name of a job's table of counters."""
    return f"{job}/__records"


def audit_records(
    client: Client,
    job: str,
    shards: Iterable[Shard],
    passes: int,
    *,
    damaged: int = 0,
    wrong_kept_max: int = 20,
) -> RecordsAudit:
    """Read all counters. No worker may push any more.

    Args:
        client: Connected.
        job: Name of the job, which had ``audit`` set.
        shards: All of the training data.
        passes: How often each record should have been counted, at most 2**24.
        damaged: Records that each pass has skipped.
        wrong_kept_max: How many wrong records are named.

    Raises:
        UnknownTable: The job has counted nothing.
    """
    table = client.table(records_table(job))
    records = missing = doubled = 0
    wrong: list[tuple[str, int, int]] = []
    for shard in shards:
        for first in range(0, shard.records, RECORDS_AT_ONCE):
            numbers = np.arange(first, min(first + RECORDS_AT_ONCE, shard.records))
            counts = np.rint(client.pull(table, _keys(shard.name, numbers))[:, 0]).astype(int)
            records += len(counts)
            missing += int((counts < passes).sum())
            doubled += int((counts > passes).sum())
            places = np.flatnonzero(counts != passes)[: wrong_kept_max - len(wrong)]
            wrong += [(shard.name, int(numbers[place]), int(counts[place])) for place in places]
    right = records - missing - doubled
    return RecordsAudit(passes, records, right, missing, doubled, damaged, tuple(wrong))


def _keys(shard: str, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the key of each record: the shard's hash plus its number, modulo 2**64."""
    digest = hashlib.blake2b(shard.encode(), digest_size=8).digest()
    with np.errstate(over="ignore"):
        return np.uint64(int.from_bytes(digest, "little")) + numbers.astype(np.uint64)
