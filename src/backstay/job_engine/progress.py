"""A job's progress as a checkpoint keeps it: the schedule, and the tasks done of its open rounds.

It is taken before the checkpoint begins. What is done by then is in the model that is saved; what
is done while it is written is in some slots, and is done again after a restore: slots skip what
they have. Imports ``job_engine``, ``schedule`` and ``json_record``; does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from backstay.consensus.records.jobs import JobSpecRecord, JobStateRecord, StreamRecord
from backstay.errors import InvalidRequest
from backstay.job_engine.period_takes import tables_of
from backstay.job_engine.task_store import TaskBits
from backstay.job_engine.values import DeadLetter
from backstay.json_record import Count, JsonRecord, dump
from backstay.schedule.rounds import RoundId, RoundKind
from backstay.schedule.task_table import TaskTable, round_table

__all__ = ["JobProgress", "KeptJob", "RoundProgress", "kept_job"]


@dataclass(frozen=True)
class RoundProgress:
    """How far a round is.

    Attributes:
        size: Number of its tasks.
        table_digest: ``TaskTable.digest()`` of the data it goes over.
        done: Chunk number -> tasks done, ``TaskBits.chunks()``.
        dead_letters: Its dead-lettered tasks.
    """

    size: int
    table_digest: str
    done: Mapping[int, str] = field(default_factory=dict)
    dead_letters: tuple[DeadLetter, ...] = ()

    def done_bits(self) -> TaskBits:
        """Return the tasks done; raises InvalidRequest if they do not fit ``size``."""
        return TaskBits.from_chunks(self.size, self.done)


@dataclass(frozen=True)
class JobProgress:
    """How far a job is.

    Attributes:
        job_uid: Which job.
        schedule: ``Schedule.to_json()``.
        rounds: Rounds that are open or have dead-lettered tasks. Evaluations are left out: they are
            begun again.
        figures: Sums over the job's life, such as of examples.
        inexact: Since when and why records may count never or twice; empty: each counts once.
        damaged: Damaged records of the data, as ``DamagedRecords.learn`` takes them.
        passes_begun: Training passes of which a task was given out, or may have been.
        progressive: What is counted of predictions, as ``Progressive`` takes it.
        stream: How far it is in training data without an end; None: they have one.
        takes: What periods have taken of such data, by the number of the period. Later ones than
            that of the schedule are taken again as they are: slots may have something of them.
    """

    job_uid: str
    schedule: str
    rounds: Mapping[RoundId, RoundProgress]
    figures: Mapping[str, int] = field(default_factory=dict)
    inexact: str = ""
    damaged: Mapping[str, str] = field(default_factory=dict)
    passes_begun: int = 0
    progressive: Mapping[str, str] = field(default_factory=dict)
    stream: StreamRecord | None = None
    takes: Mapping[int, TaskTable] = field(default_factory=dict)


class KeptJob(NamedTuple):
    """What a checkpoint keeps of a job.

    Attributes:
        identity: Which job, and its spec then.
        state: Where it stood.
        done: Its bitmaps, by round and chunk.
        dead_letters: Its dead-lettered tasks, by round and task.
        damaged: Damaged records of its data, by data and part.
        is_current: Whether it had followed the cluster's last restore when they were read.
        progressive: What was counted of predictions.
        takes: What its periods have taken, by round and part.
    """

    identity: JobSpecRecord
    state: JobStateRecord
    done: Mapping[str, str]
    dead_letters: Mapping[str, str]
    damaged: Mapping[str, str]
    is_current: bool
    progressive: Mapping[str, str] = MappingProxyType({})
    takes: Mapping[str, str] = MappingProxyType({})

    def progress(self, tables: Mapping[str, TaskTable]) -> JobProgress:
        """Return how far the job was.

        Raises:
            InvalidRequest: It is not the progress of the model, or not of this data.
        """
        if not self.is_current:
            raise InvalidRequest(
                "the checkpoint was written before the job had followed a restore or a loss of rows"
            )
        for name, table in tables.items():
            if self.state.data.get(name) != table.digest():
                raise InvalidRequest(f"the {name} data are not the data of the progress")
        names = {key.partition("/")[0] for key in (*self.done, *self.dead_letters)}
        takes = tables_of(self.takes)
        rounds = {RoundId.parse(name): self._round(name, tables, takes) for name in names}
        state = self.state
        return JobProgress(
            self.identity.uid,
            state.schedule,
            rounds,
            state.figures,
            state.inexact,
            self.damaged,
            state.passes_begun,
            self.progressive,
            state.stream,
            takes,
        )

    def _round(
        self, name: str, tables: Mapping[str, TaskTable], takes: Mapping[int, TaskTable]
    ) -> RoundProgress:
        round_id = RoundId.parse(name)
        table = round_table(tables, round_id)
        if round_id.kind is RoundKind.TRAINING:
            table = takes.get(round_id.number, table)
        return RoundProgress(
            size=len(table),
            table_digest=table.digest(),
            done={int(key): value for key, value in _below(self.done, name)},
            dead_letters=tuple(
                DeadLetter.from_json(value) for _, value in _below(self.dead_letters, name)
            ),
        )


def _below(records: Mapping[str, str], name: str) -> list[tuple[str, str]]:
    prefix = f"{name}/"
    return [
        (key.removeprefix(prefix), value)
        for key, value in records.items()
        if key.startswith(prefix)
    ]


def kept_job(progress: Any, job: str) -> KeptJob | None:
    """Return what a checkpoint keeps of a job, None if there was none of that name.

    Args:
        progress: As ``pserver.checkpoints.jobs`` reads it; None: there was no job at all.
        job: Its name.

    Raises:
        InvalidRequest: It is not of that form.
    """
    if progress is None:
        return None
    found = _JobsForm.from_json(dump(progress))
    document = found.jobs.get(job)
    if document is None:
        return None
    form = _JobForm.from_json(dump(document))
    state = JobStateRecord.from_json(form.state)
    return KeptJob(
        identity=JobSpecRecord.from_json(form.spec),
        state=state,
        done=form.done,
        dead_letters=form.dead_letters,
        damaged=form.damaged,
        takes=form.takes,
        is_current=(state.restore_version, state.generation)
        == (found.restore_version, found.generation),
        progressive=form.progressive,
    )


@dataclass(frozen=True)
class _JobsForm(JsonRecord, what="progress of jobs"):
    """What a checkpoint keeps of all jobs; each is read by itself."""

    restore_version: Count
    generation: Count
    jobs: Mapping[str, Any]


@dataclass(frozen=True)
class _JobForm(JsonRecord, what="progress of a job", added=("progressive", "takes")):
    """The records of one job, as JSON."""

    spec: str
    state: str
    done: Mapping[str, str]
    dead_letters: Mapping[str, str]
    damaged: Mapping[str, str]
    progressive: Mapping[str, str] = field(default_factory=dict)
    takes: Mapping[str, str] = field(default_factory=dict)
