"""What readers of training data have in common: shards, places, damaged records.

A shard is a file or a table. Its records are numbered from 0, and a damaged record keeps its number
(its *place*): ``read(shard, start, count)`` looks at the places ``start`` to ``start + count - 1``
and yields the good ones, the same ones in the same order each time and on each machine.

Imports the errors and ``backstay.data.batch``; no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from backstay.data.batch import Batch, Column, Record
from backstay.errors import DataChanged, DataDamaged, InvalidRequest, TooManyBadRecords

__all__ = [
    "BadRecord",
    "BadRecords",
    "Metadata",
    "NoHeader",
    "Reader",
    "Shard",
    "check_range",
    "read_batch",
]

REASON_CHARACTERS_MAX = 300


@dataclass(frozen=True)
class Shard:
    """A file or table, and how many places it has (damaged records included)."""

    name: str
    records: int


@dataclass(frozen=True)
class Metadata:
    """What a feed is told of the data: the columns in order; none where records are bytes."""

    column_names: tuple[str, ...]


class NoHeader(DataDamaged):
    """A file has nothing in it, and no other one tells what its columns would be."""


@dataclass(frozen=True)
class BadRecord:
    """Where damaged records are and what is wrong: ``offset`` counts bytes or rows (``unit``)."""

    file: str
    offset: int
    reason: str
    unit: str = "byte"
    records: int = 1

    def __str__(self) -> str:
        many = f" ({self.records} records)" if self.records > 1 else ""
        return f"{self.file}, {self.unit} {self.offset}{many}: {self.reason}"


class BadRecords:
    """Counts and reports damaged records, and ends the reading when there are too many.

    For use by one thread at a time.

    Args:
        limit: As many may be skipped; one more raises.
        kept: As many reports are kept, the first ones.
    """

    def __init__(self, limit: int = 0, *, kept: int = 100) -> None:
        self.limit = limit
        self.count = 0
        self._kept = kept
        self._reports: list[BadRecord] = []

    @property
    def reports(self) -> tuple[BadRecord, ...]:
        """The first damaged records, in the order in which they were met."""
        return tuple(self._reports)

    def add(
        self, file: str, offset: int, reason: str, *, unit: str = "byte", records: int = 1
    ) -> None:
        """Count damaged records.

        Args:
            file: The shard.
            offset: Where they begin: a byte of the file, decompressed where it is a .gz, or a row.
            reason: What is wrong.
            unit: What ``offset`` counts, ``"byte"`` or ``"row"``.
            records: How many these are, where a whole part of the file is damaged.

        Raises:
            TooManyBadRecords: That is more than the limit.
        """
        report = BadRecord(file, offset, reason[:REASON_CHARACTERS_MAX], unit, records)
        self.count += records
        if len(self._reports) < self._kept:
            self._reports.append(report)
        if self.count > self.limit:
            raise TooManyBadRecords(
                f"{self.count} damaged records, and max_bad_records allows {self.limit}; "
                f"the last one: {report}"
            )


@runtime_checkable
class Reader(Protocol):
    """A source of records, whatever the format."""

    @property
    def metadata(self) -> Metadata:
        """The columns; opens the first shard.

        Raises:
            DataUnavailable: It cannot be read.
            DataDamaged: It is not of this format.
            ConfigError: The options do not fit it.
        """
        ...

    def shards(self) -> Iterable[Shard]:
        """Yield the shards, always in the same order; see each reader for what it costs.

        Raises:
            DataUnavailable, DataDamaged, ConfigError: As ``metadata`` does.
        """
        ...

    def read(self, shard: str, start: int, count: int, bad: BadRecords) -> Iterator[Record]:
        """Yield the good records of the places ``start`` to ``start + count - 1``.

        Raises:
            DataChanged: The shard ends before that, or was changed since it was first read here.
            DataUnavailable: It cannot be read.
            DataDamaged: It is not of this format.
            TooManyBadRecords: More than ``bad`` allows are damaged.
        """
        ...

    def read_columns(
        self, shard: str, start: int, count: int, bad: BadRecords | None = None
    ) -> Mapping[str, Column] | None:
        """Return the same records as columns, or None where the format has none.

        Args:
            shard: Name of a shard.
            start: First place.
            count: Number of places.
            bad: Where damaged records are counted; without it, none is allowed.

        Returns:
            An array for each column. Its first dimension is the number of good records.

        Raises:
            The same as ``read``.
        """
        ...


def read_batch(reader: Reader, shard: str, start: int, count: int, bad: BadRecords) -> Batch:
    """Return the good records of a range as a batch, by columns where the reader has them.

    Raises:
        The same as ``Reader.read``.
    """
    columns = reader.read_columns(shard, start, count, bad)
    if columns is not None:
        return Batch.of_columns(columns)
    return Batch.of_records(list(reader.read(shard, start, count, bad)))


def check_range(shard: str, start: int, count: int, records: int | None = None) -> None:
    """Refuse a range that is none, or that does not lie in the shard.

    Raises:
        InvalidRequest: A negative number.
        DataChanged: The shard has fewer records.
    """
    if start < 0 or count < 0:
        raise InvalidRequest(f"{shard}: no range of records: start {start}, count {count}")
    if records is not None and start + count > records:
        raise DataChanged(
            f"{shard}: has {records} records, and {start} to {start + count - 1} are asked for; "
            "it is not the file from which the tasks were made. Put that one back, or begin a "
            "new job"
        )
