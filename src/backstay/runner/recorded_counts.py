"""How often each record of a job should have been counted, from the records of the job.

A pass that is over counts each task once. In a pass that was cut short, is under way or has
dead-lettered tasks, each done task counts once, and some batches of the others may count. This
module does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from backstay.consensus.records.jobs import JobSpecRecord, JobStateRecord, stream_job_of
from backstay.consensus.records.keys import JobKeys
from backstay.errors import JobRefused
from backstay.job_engine.opening import StateIncarnation
from backstay.job_engine.period_takes import period, tables_of
from backstay.job_engine.task_store import TaskBits
from backstay.job_spec import JobSpec
from backstay.schedule.damaged import DamagedRecords
from backstay.schedule.rounds import RoundKind
from backstay.schedule.schedule import Schedule
from backstay.schedule.takes import part_and_offset
from backstay.schedule.task_table import TaskTable
from backstay.trainer.worker.audit import TaskCount

__all__ = ["RecordedCounts", "recorded_counts"]


class RecordedCounts(NamedTuple):
    """What an audit compares the counters with.

    Attributes:
        stream_job: What tells the job from others of its name.
        passes: Training passes that are over.
        tasks: All tasks of the training data.
        inexact: Since when and why records may count never or twice; empty: each counts once.
        incarnation: The state incarnation that the progress goes with.
    """

    stream_job: int
    passes: int
    tasks: Iterator[TaskCount]
    inexact: str
    incarnation: StateIncarnation


def recorded_counts(keys: JobKeys, records: Mapping[str, str]) -> RecordedCounts:
    """Return how often each record should have been counted.

    Args:
        keys: The keys of the job.
        records: All records below ``keys.root``, by key; no worker is at work any more.

    Raises:
        JobRefused: The job has no audit, or has not begun.
        InvalidRequest: A record cannot be read.
    """
    if keys.spec not in records or keys.state not in records:
        raise JobRefused(f"job {keys.job!r} has not begun: it has counted no records")
    identity = JobSpecRecord.from_json(records[keys.spec])
    state = JobStateRecord.from_json(records[keys.state])
    spec = JobSpec.from_json(identity.spec)
    if not spec.audit or spec.training is None:
        raise JobRefused(f"job {keys.job!r} has counted no records: it needs `audit: true`")
    schedule = Schedule.of(spec, state.schedule)
    damaged = DamagedRecords()
    damaged.learn(_below(records, keys.all_damaged))
    in_part = _passes_in_part(schedule, state.passes_begun)
    count = _count_periods if spec.is_stream else _count_passes
    return RecordedCounts(
        stream_job_of(identity.uid),
        schedule.passes_over,
        count(keys, records, schedule, damaged, in_part),
        state.inexact,
        StateIncarnation(state.restore_version, state.generation),
    )


def _count_passes(
    keys: JobKeys,
    records: Mapping[str, str],
    schedule: Schedule,
    damaged: DamagedRecords,
    in_part: set[int],
) -> Iterator[TaskCount]:
    """Return the tasks of data that each pass goes over."""
    table = TaskTable.from_chunks(_below(records, f"{keys.all_shards}training/").values())
    whole = sum(1 for number in range(1, schedule.passes_over + 1) if number not in in_part)
    least = np.full(len(table), whole, np.int64)
    for number in in_part:
        least += _done(keys, records, number, len(table))
    return (
        TaskCount(
            *(part.shard, part.start, part.count),
            damaged.of_task("training", task),
            int(least[task]),
            whole + len(in_part),
        )
        for task, part in ((task, table[task]) for task in range(len(table)))
    )


def _count_periods(
    keys: JobKeys,
    records: Mapping[str, str],
    schedule: Schedule,
    damaged: DamagedRecords,
    in_part: set[int],
) -> Iterator[TaskCount]:
    """Return the tasks of all periods: an offset that is in two of them counts too often."""
    for number, table in tables_of(_below(records, keys.all_takes)).items():
        is_whole = number <= schedule.passes_over and number not in in_part
        done = None if is_whole else _done(keys, records, number, len(table))
        for task in range(len(table)):
            records_of = table[task]
            part, first = part_and_offset(records_of.shard)
            yield TaskCount(
                *(part, first + records_of.start, records_of.count),
                damaged.of_task(str(period(number)), task),
                1 if done is None else int(done[task]),
                1,
            )


def _done(
    keys: JobKeys, records: Mapping[str, str], number: int, tasks: int
) -> npt.NDArray[np.uint8]:
    """Return 1 for each task of a pass that is done, else 0."""
    chunks = _below(records, f"{keys.all_done}{period(number)}/")
    texts = {int(chunk): text for chunk, text in chunks.items()}
    return TaskBits.from_chunks(tasks, texts).to_array()


def _passes_in_part(schedule: Schedule, begun: int) -> set[int]:
    """Return the passes of which not every task is done."""
    rounds = {*schedule.dead_letters, *schedule.open_rounds}
    passes = {one.number for one in rounds if one.kind is RoundKind.TRAINING}
    if begun > schedule.passes_over:
        passes.add(begun)
    return {number for number in passes if number <= begun}


def _below(records: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Return the records below a prefix, by the rest of their keys, in their order."""
    return {
        key.removeprefix(prefix): records[key] for key in sorted(records) if key.startswith(prefix)
    }
