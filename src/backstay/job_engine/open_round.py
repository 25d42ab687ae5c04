"""A round of a job that is under way: its tasks, ledger and outputs.

It stages its own records. Nothing is decided here about the schedule.
Imports ``backstay.schedule`` and ``job_engine``; does no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from backstay.consensus.records.keys import JobKeys
from backstay.job.metrics import METRICS
from backstay.job_engine.ledger import NOBODY, TaskLedger
from backstay.job_engine.records import Records
from backstay.job_engine.round_scores import RoundScores
from backstay.job_engine.task_store import CHUNK_TASKS, TaskBits
from backstay.job_engine.values import DeadLetter, LeasedTask, LedgerLimits
from backstay.job_spec import JobSpec
from backstay.schedule.evaluation import RoundOutputs
from backstay.schedule.orders import task_order_seed
from backstay.schedule.rounds import RoundId, RoundKind
from backstay.schedule.task_table import TaskTable

__all__ = ["Assignment", "OpenRound", "open_round"]

# A factor and a time that no task reaches: it gets no speculative attempt.
NEVER = 1e9

log = logging.getLogger(__name__)


@dataclass
class OpenRound:
    """A round that is under way, or over with dead letters or open streams.

    Attributes:
        id: Which round.
        table: Its tasks: which records each has.
        ledger: Who works on which task, and what is done.
        outputs: Of an evaluation: what its tasks have brought.
        metrics: Of an evaluation: what to compute from the outputs, by name.
        steps: Steps of the job when the round was opened.
        scores: Progressive metrics: what was predicted of tasks that are not done.
    """

    id: RoundId
    table: TaskTable
    ledger: TaskLedger
    outputs: RoundOutputs = field(default_factory=RoundOutputs)
    metrics: dict[str, str] = field(default_factory=dict)
    steps: int = 0
    scores: RoundScores = field(default_factory=RoundScores)

    @property
    def is_evaluation(self) -> bool:
        """Whether it is one, so that its outputs must be put together when it is over."""
        return self.id.kind is RoundKind.EVALUATION

    def stage(self, records: Records, keys: JobKeys) -> Sequence[str]:
        """Have the journal write what has changed in the ledger.

        An evaluation's outputs are in memory only, so nothing of it is written: the next job master
        begins it anew.

        Returns:
            The workers whose leases or streams have changed.
        """
        changed = self.ledger.take_changed()
        if self.is_evaluation:
            return changed.workers
        name, ledger = str(self.id), self.ledger
        for task in changed.dead_letters:
            # Whoever tries it again goes on behind its acknowledged batches.
            self.record_scores(records, keys, task, self.scores.batches(task))
        for number in changed.chunks:
            records.stage(keys.done(name, number), partial(_done_text, ledger, number))
        for task in changed.dead_letters:
            records.stage(keys.dead_letters(name, task), partial(_dead_letter_text, ledger, task))
        for worker in changed.workers:
            records.stage(keys.leased(name, worker), partial(_worker_text, ledger, worker))
        return changed.workers

    def stage_all(self, records: Records, keys: JobKeys) -> None:
        """Have the journal write all that is done or dead-lettered."""
        name = str(self.id)
        for number in self.ledger.done.chunks():
            records.stage(keys.done(name, number), partial(_done_text, self.ledger, number))
        for task in self.ledger.dead_letters:
            records.stage(
                keys.dead_letters(name, task), partial(_dead_letter_text, self.ledger, task)
            )
        for task, batches in self.scores.recorded():
            text = self.scores.text(task, batches)
            records.stage_text(keys.progressive_begun(name, task, batches), text)

    def record_scores(self, records: Records, keys: JobKeys, task: int, batches: int) -> None:
        """Have the journal write the scores of the batches before an attempt's first one."""
        text = self.scores.begin(task, batches)
        if text is not None:
            records.stage_text(keys.progressive_begun(str(self.id), task, batches), text)

    def erase(self, records: Records, keys: JobKeys, *, keeps_done: bool = False) -> None:
        """Have the journal remove all records of this round.

        Args:
            records: Where changes go.
            keys: The job's keys.
            keeps_done: Whether the records of the tasks that are done stay.
        """
        # A worker or task that the ledger no longer knows may have a record: it is among the
        # changes.
        changed = self.ledger.take_changed()
        name = str(self.id)
        for number in range(-(-len(self.table) // CHUNK_TASKS)):
            if self.ledger.done.chunk(number) and not keeps_done:
                records.stage_removal(keys.done(name, number))
        for task in sorted({*self.ledger.dead_letters, *changed.dead_letters}):
            records.stage_removal(keys.dead_letters(name, task))
        for worker in sorted({NOBODY, *self.ledger.workers, *changed.workers}):
            records.stage_removal(keys.leased(name, worker))
        for task, batch in self.scores.recorded():
            records.stage_removal(keys.progressive_begun(name, task, batch))

    def grow(self, table: TaskTable, batch_size: int) -> None:
        """Have more tasks: those of a longer table, which is recorded."""
        more = len(table) - len(self.table)
        sizes = table.batches(batch_size)[len(self.table) :] if more else None
        self.ledger.grow(len(table), sizes)
        self.table = table

    def records_ahead(self) -> int:
        """Return how many records its tasks have that are neither done nor dead-lettered."""
        return self.table.records - self.table.records_of(self._over())

    def firsts_ahead(self) -> list[tuple[str, int]]:
        """Return the shards of these tasks, each with the first record of the first one."""
        return self.table.firsts(~self._over())

    def _over(self) -> npt.NDArray[np.bool_]:
        """Return which tasks are done or dead-lettered, shape (tasks,)."""
        over = self.ledger.done.to_array().astype(bool)
        over[list(self.ledger.dead_letters)] = True
        return over

    def compute(self) -> dict[str, float]:
        """Return the metrics of an evaluation; may take seconds, so call it in a thread."""
        return self.outputs.compute({name: METRICS[kind] for name, kind in self.metrics.items()})


class Assignment(NamedTuple):
    """A task for a worker that asked for one.

    Attributes:
        round: The round of the task.
        lease: Task, attempt, and the batches that are acknowledged.
        leader: Sync mode: the address of the worker that has the lease, and that this worker is to
            help. Empty: the lease is its own.
    """

    round: OpenRound
    lease: LeasedTask
    leader: str = ""


def _done_text(ledger: TaskLedger, chunk: int) -> str | None:
    return ledger.done.chunk(chunk) or None


def _dead_letter_text(ledger: TaskLedger, task: int) -> str | None:
    dead_letter = ledger.dead_letters.get(task)
    return None if dead_letter is None else dead_letter.to_json()


def _worker_text(ledger: TaskLedger, worker: str) -> str | None:
    record = ledger.record_of(worker)
    return record.to_json() if record else None


def open_round(
    round_id: RoundId,
    table: TaskTable,
    spec: JobSpec,
    *,
    first_attempt: int,
    task_lease_ttl_ms: int,
    steps: int,
    done: TaskBits | None = None,
    dead_letters: Iterable[DeadLetter] = (),
    begun_scores: Mapping[tuple[int, int], bytes] | None = None,
    is_sealed: bool = True,
) -> OpenRound:
    """Return a round that begins, or that continues what the journal or a checkpoint has of it.

    Raises:
        InvalidRequest: What is done or dead-lettered is not of this data.
    """
    trains = round_id.kind is RoundKind.TRAINING
    # Two workers must not save the model at once.
    speculative = round_id.kind is not RoundKind.TRAIN_END
    ledger = TaskLedger(
        round_id,
        len(table),
        task_order_seed(spec, round_id),
        _limits(spec, task_lease_ttl_ms, speculative=speculative),
        first_attempt=first_attempt,
        done=done,
        dead_letters=dead_letters,
        sizes=table.batches(spec.batch_size) if trains else None,
        keeps_streams=trains,
        is_sealed=is_sealed,
    )
    by = "" if spec.progressive is None else spec.progressive.by
    scores = RoundScores(by, begun_scores)
    return OpenRound(round_id, table, ledger, steps=steps, scores=scores)


def _limits(spec: JobSpec, task_lease_ttl_ms: int, *, speculative: bool = True) -> LedgerLimits:
    """Return how long leases last and how much may go wrong.

    Args:
        spec: Of the job.
        task_lease_ttl_ms: How long leases last by now.
        speculative: Whether a slow task is given to a second worker, too.
    """
    return LedgerLimits(
        lease_ttl_s=task_lease_ttl_ms / 1000,
        max_retries=spec.max_task_retries,
        straggler_factor=spec.straggler_factor if speculative else NEVER,
        straggler_min_s=spec.straggler_min_s if speculative else NEVER,
    )
