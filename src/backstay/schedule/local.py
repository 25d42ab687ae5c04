"""The schedule of a job in one process: the tasks that a cluster's only worker would be given.

A property test holds it to the order in which a master gives tasks to one worker. Imports
``backstay.schedule`` and ``backstay.job_spec``; does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backstay.job_spec import JobSpec
from backstay.schedule.orders import record_order_seed, task_order, task_order_seed
from backstay.schedule.rounds import RoundId
from backstay.schedule.schedule import Schedule
from backstay.schedule.task_table import TaskRecords, TaskTable, round_table

__all__ = ["LocalSchedule", "LocalTask", "RoundOver"]


@dataclass(frozen=True)
class LocalTask:
    """A task whose turn it is.

    Attributes:
        round: Of which round.
        number: Of the task within the round.
        records: What it is of.
        shuffle_seed: Of the order of its records; 0: as they are.
    """

    round: RoundId
    number: int
    records: TaskRecords
    shuffle_seed: int


@dataclass(frozen=True)
class RoundOver:
    """All tasks of a round are done: the schedule is to be told, with an evaluation's metrics."""

    round: RoundId


@dataclass
class _Begun:
    """A round of which tasks were given: its tasks, their order, how many of it were taken."""

    table: TaskTable
    order: Sequence[int]
    taken: int = 0

    @property
    def is_over(self) -> bool:
        return self.taken == len(self.order)


class LocalSchedule:
    """One go over a job, from its beginning.

    Args:
        spec: The job.
        tables: The tasks of its data, by the names of their fields.
    """

    def __init__(self, spec: JobSpec, tables: Mapping[str, TaskTable]) -> None:
        self.schedule = Schedule.of(spec)
        self._spec = spec
        self._tables = tables
        self._begun: dict[RoundId, _Begun] = {}

    def next(self) -> LocalTask | RoundOver | None:
        """Return what comes now that all before it is done; None: the job is over."""
        rounds = self.schedule.open_rounds
        # A round that is over is told before another one goes on: it may change what comes next.
        for round_id in rounds:
            if round_id in self._begun and self._begun[round_id].is_over:
                return RoundOver(round_id)
        if not rounds:
            return None
        first = rounds[0]
        begun = self._begun.get(first)
        if begun is None:
            for over in self._begun.keys() - set(rounds):
                del self._begun[over]
            begun = self._begun[first] = self._begin(first)
            if begun.is_over:
                return RoundOver(first)
        task = begun.order[begun.taken]
        begun.taken += 1
        seed = record_order_seed(self._spec, first, task)
        return LocalTask(first, task, begun.table[task], seed)

    def _begin(self, round_id: RoundId) -> _Begun:
        table = round_table(self._tables, round_id)
        return _Begun(table, task_order(task_order_seed(self._spec, round_id), len(table)))
