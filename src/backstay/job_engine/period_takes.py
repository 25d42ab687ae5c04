"""What the periods of a job have taken of training data without an end: their tables, recorded.

A period's table is recorded before any of its tasks is given out. It stays recorded for some
periods after its own, because a checkpoint that was begun then must have it: its slots may have
pushes of tasks that were taken while it was written, and after a restore these must be the same
tasks again. Imports ``job_engine``, ``schedule`` and the records of jobs; does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from backstay.consensus.records.keys import JobKeys
from backstay.errors import InvalidRequest
from backstay.job_engine.records import Records
from backstay.schedule.rounds import RoundId, RoundKind
from backstay.schedule.takes import TAKES_PER_RECORD, Take, with_takes
from backstay.schedule.task_table import TaskTable

__all__ = ["PeriodTakes", "period", "tables_of", "takes_after"]


def period(number: int) -> RoundId:
    """Return the round of a period."""
    return RoundId(RoundKind.TRAINING, number)


def tables_of(records: Mapping[str, str]) -> dict[int, TaskTable]:
    """Return the tables of periods, by number, from their records.

    Args:
        records: By the rest of their keys below ``JobKeys.all_takes``.

    Raises:
        InvalidRequest: A record cannot be read, or one is missing.
    """
    chunks: dict[int, dict[int, str]] = {}
    for key, text in records.items():
        name, _, chunk = key.partition("/")
        round_id = RoundId.parse(name)
        if round_id.kind is not RoundKind.TRAINING or not chunk.isdecimal():
            raise InvalidRequest(f"takes: {key!r} names no part of a period")
        chunks.setdefault(round_id.number, {})[int(chunk)] = text
    for number, parts in chunks.items():
        if set(parts) != set(range(len(parts))):
            raise InvalidRequest(f"takes of {period(number)}: records are missing")
    return {
        number: TaskTable.from_chunks(parts[chunk] for chunk in range(len(parts)))
        for number, parts in sorted(chunks.items())
    }


def takes_after(tables: Mapping[int, TaskTable], passes_over: int) -> list[tuple[str, int]]:
    """Return names and records of the takes of periods above a number, in their order."""
    numbers = sorted(number for number in tables if number > passes_over)
    return [shard for number in numbers for shard in tables[number].shards]


class PeriodTakes:
    """The tables of a job's periods: of the open one, of later and of earlier ones."""

    def __init__(
        self,
        tables: Mapping[int, TaskTable],
        records_per_task: int,
        keys: JobKeys,
        records: Records,
    ) -> None:
        """Begin with what is recorded.

        Args:
            tables: By the number of the period.
            records_per_task: Of a whole task.
            keys: The job's keys.
            records: Where changes go.
        """
        self._tables = dict(tables)
        self._empty = TaskTable((), (), records_per_task)
        self._keys = keys
        self._records = records

    def table(self, number: int) -> TaskTable:
        """Return what a period has taken."""
        return self._tables.get(number, self._empty)

    def take(self, number: int, takes: Iterable[Take]) -> TaskTable:
        """Have a period take more; returns its table, of which no task may be given out yet.

        It may be when the journal is written.
        """
        before = self.table(number)
        table = self._tables[number] = with_takes(before, takes)
        for chunk in range(before.shard_count // TAKES_PER_RECORD, _chunks(table)):
            self._stage(number, chunk)
        return table

    def after(self, passes_over: int) -> list[tuple[str, int]]:
        """Return the takes of all periods that are not over; see ``takes_after``."""
        return takes_after(self._tables, passes_over)

    def forget(self, numbers: Iterable[int]) -> None:
        """Have the journal remove what it has of some periods."""
        for number in numbers:
            table = self._tables.pop(number, self._empty)
            # The last one first: what is left, if the job master dies meanwhile, can be read.
            for chunk in reversed(range(_chunks(table))):
                self._records.stage_removal(self._keys.takes(str(period(number)), chunk))

    def replace(self, tables: Mapping[int, TaskTable]) -> None:
        """Have these tables in the place of all others."""
        self.forget(list(self._tables))
        self._tables = dict(tables)
        for number, table in tables.items():
            for chunk in range(_chunks(table)):
                self._stage(number, chunk)

    @property
    def numbers(self) -> list[int]:
        """The periods of which anything is recorded."""
        return list(self._tables)

    def _stage(self, number: int, chunk: int) -> None:
        key = self._keys.takes(str(period(number)), chunk)
        self._records.stage(key, partial(self._text, number, chunk))

    def _text(self, number: int, chunk: int) -> str | None:
        table = self.table(number)
        return table.chunk(chunk, TAKES_PER_RECORD) if chunk < _chunks(table) else None


def _chunks(table: TaskTable) -> int:
    """Return how many records a table takes; none if it is empty."""
    return -(-table.shard_count // TAKES_PER_RECORD)
