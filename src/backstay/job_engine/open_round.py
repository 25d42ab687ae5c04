"""A round under way: its tasks, its ledger, and what an evaluation brought so far.

Puts the values of ``backstay.schedule``, of ``job_engine`` and the job's settings together. Does
no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from backstay.consensus.keys import JobKeys
from backstay.job.metrics import METRICS
from backstay.job_engine.ledger import NOBODY, TaskLedger
from backstay.job_engine.records import Records
from backstay.job_engine.task_bits import CHUNK_TASKS, TaskBits
from backstay.job_engine.values import DeadLetter, LeasedTask, LedgerLimits
from backstay.job_engine.worker_set import WorkerPolicy
from backstay.job_spec import JobSpec
from backstay.schedule.evaluation import RoundOutputs
from backstay.schedule.orders import record_order_seed, task_order_seed
from backstay.schedule.rounds import RoundId, RoundKind
from backstay.schedule.task_table import TaskTable, round_table

__all__ = [
    "Assignment",
    "OpenRound",
    "ledger_limits",
    "open_round",
    "worker_policy",
]

NEVER_S = 1e9


@dataclass
class OpenRound:
    """A round.

    Attributes:
        id: Which.
        table: Its tasks.
        ledger: Who works on them.
        outputs: Of an evaluation.
        metrics: Of an evaluation: what to compute from the outputs, by name.
        steps: Of the job when it was opened.
    """

    id: RoundId
    table: TaskTable
    ledger: TaskLedger
    outputs: RoundOutputs = field(default_factory=RoundOutputs)
    metrics: dict[str, str] = field(default_factory=dict)
    steps: int = 0

    @property
    def is_evaluation(self) -> bool:
        """Whether it is one, so that its outputs must be put together when it is over."""
        return self.id.kind is RoundKind.EVALUATION

    def stage(self, records: Records, keys: JobKeys) -> None:
        """Have the journal write what has changed in the ledger.

        An evaluation's outputs are in memory only, so nothing of it is written: the next master
        begins it anew.
        """
        changes = self.ledger.take_changes()
        if self.is_evaluation:
            return
        name, ledger = str(self.id), self.ledger
        for number in changes.done:
            records.stage(keys.done(name, number), partial(_done, ledger, number))
        for task in changes.dead_letters:
            records.stage(keys.dead_letters(name, task), partial(_dead_letter, ledger, task))
        for worker in changes.workers:
            records.stage(keys.leased(name, worker), partial(_worker_record, ledger, worker))

    def stage_all(self, records: Records, keys: JobKeys) -> None:
        """Have the journal write everything that it is to have of this round."""
        name = str(self.id)
        for number in self.ledger.done.chunks():
            records.stage(keys.done(name, number), partial(_done, self.ledger, number))
        for task in self.ledger.dead_letters:
            records.stage(keys.dead_letters(name, task), partial(_dead_letter, self.ledger, task))

    def erase(self, records: Records, keys: JobKeys, *, keeps_done: bool = False) -> None:
        """Have the journal remove everything that it has of this round.

        Args:
            records: Where.
            keys: The job's keys.
            keeps_done: All but which tasks are done.
        """
        # Records that were read and are of nothing any more are among the changes only.
        changes = self.ledger.take_changes()
        name = str(self.id)
        for number in range(-(-len(self.table) // CHUNK_TASKS)):
            if self.ledger.done.chunk(number) and not keeps_done:
                records.stage_removal(keys.done(name, number))
        for task in sorted({*self.ledger.dead_letters, *changes.dead_letters}):
            records.stage_removal(keys.dead_letters(name, task))
        for worker in sorted({NOBODY, *self.ledger.workers, *changes.workers}):
            records.stage_removal(keys.leased(name, worker))

    def compute(self) -> dict[str, float]:
        """Return the metrics of an evaluation; takes its time, call it in a thread."""
        return self.outputs.compute({name: METRICS[kind] for name, kind in self.metrics.items()})

    def seed_of(self, spec: JobSpec, task: int) -> int:
        """Return the seed of the order of a task's records, 0 for the order that they have."""
        return record_order_seed(spec, self.id, task)


class Assignment(NamedTuple):
    """What a worker that asks for a task is given.

    Attributes:
        round: Of which round.
        lease: Task, attempt, and the batches that are acknowledged.
        leader: Sync mode: the lease is another worker's, who is reached here. Empty: it is its own.
    """

    round: OpenRound
    lease: LeasedTask
    leader: str = ""


def _done(ledger: TaskLedger, chunk: int) -> str | None:
    return ledger.done.chunk(chunk) or None


def _dead_letter(ledger: TaskLedger, task: int) -> str | None:
    dead_letter = ledger.dead_letters.get(task)
    return None if dead_letter is None else dead_letter.to_json()


def _worker_record(ledger: TaskLedger, worker: str) -> str | None:
    record = ledger.record_of(worker)
    return record.to_json() if record else None


def open_round(
    round_id: RoundId,
    tables: Mapping[str, TaskTable],
    spec: JobSpec,
    *,
    first_attempt: int,
    task_lease_ttl_ms: int,
    steps: int,
    done: TaskBits | None = None,
    dead_letters: Iterable[DeadLetter] = (),
) -> OpenRound:
    """Return a round that begins, or goes on from what the journal or a checkpoint has of it.

    Raises:
        InvalidRequest: What is done or dead-lettered is not of this data.
    """
    table = round_table(tables, round_id)
    trains = round_id.kind is RoundKind.TRAINING
    ledger = TaskLedger(
        round_id,
        len(table),
        task_order_seed(spec, round_id),
        ledger_limits(
            spec, task_lease_ttl_ms, speculative=round_id.kind is not RoundKind.TRAIN_END
        ),
        first_attempt=first_attempt,
        done=done,
        dead_letters=dead_letters,
        sizes=table.batches(spec.batch_size) if trains else None,
        keeps_streams=trains,
    )
    return OpenRound(round_id, table, ledger, steps=steps)


def ledger_limits(
    spec: JobSpec, task_lease_ttl_ms: int, *, speculative: bool = True
) -> LedgerLimits:
    """Return how long leases last and how much may go wrong.

    Args:
        spec: Of the job.
        task_lease_ttl_ms: How long leases last by now.
        speculative: Whether a slow task is given to a second worker. What is done at the end of
            the training should be done by one.
    """
    return LedgerLimits(
        lease_ttl_s=task_lease_ttl_ms / 1000,
        max_retries=spec.max_task_retries,
        straggler_factor=spec.straggler_factor if speculative else NEVER_S,
        straggler_min_s=spec.straggler_min_s if speculative else NEVER_S,
    )


def worker_policy(spec: JobSpec) -> WorkerPolicy:
    """Return how many workers there are to be."""
    workers = spec.workers
    return WorkerPolicy(
        initial=workers.initial,
        least=workers.min,
        most=workers.max,
        max_relaunches=workers.max_relaunches,
    )
