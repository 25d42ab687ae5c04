"""What a job master and a worker tell each other, as values, and as messages.

Imports the generated messages and numpy; does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from backstay._proto.v1 import job_pb2
from backstay.job.callbacks import Evaluation

__all__ = [
    "TASK_KINDS",
    "Acknowledged",
    "BadRecordsMet",
    "Ended",
    "EvaluationOutputs",
    "JobTerms",
    "LeaseHolder",
    "Task",
    "TaskKind",
    "Wait",
    "bad_record_messages",
    "evaluation_of_message",
    "key_of",
    "key_of_message",
    "lease_message",
    "outputs_message",
]

TaskKind: TypeAlias = Literal["training", "evaluation", "prediction", "train_end"]
TASK_KINDS: tuple[TaskKind, ...] = get_args(TaskKind)

BAD_RECORDS_MAX = 100


@dataclass(frozen=True)
class JobTerms:
    """What a worker is told when it joins.

    Attributes:
        spec_json: The spec, for ``JobSpec.from_json``.
        stream_job: First part of the ids of the job's streams (u64).
        start: Which start of the job it is: how often a job master took it over.
    """

    spec_json: str
    stream_job: int
    start: int = 0


@dataclass(frozen=True)
class Task:
    """A task that this worker has a lease of.

    Attributes:
        kind: What to do with the records.
        round: 1, 2, ... within the kind; of training: the pass.
        number: Of the task within the round.
        attempt: Of this lease; grows each time the task is given.
        shard: Name of the file or table.
        start: First record.
        count: Number of records.
        first_batch: Begin with this batch; those before it are acknowledged everywhere.
        shuffle_seed: Of the order of the task's records; 0: as they are.
        leased_until: the moment of ``clock_s`` until which the lease is surely alive.
        leader: Sync mode: the lease is that of the worker at this address, and this one takes part
            in its steps. Empty: the lease is this worker's.
        evaluation: The newest one of the job that is over; None: none is.
        training: Bounded mode: the clocks of the workers that have a training task.
        scored_values: Progressive metrics: values of the column with figures of their own.
    """

    kind: TaskKind
    round: int
    number: int
    attempt: int
    shard: str
    start: int
    count: int
    first_batch: int
    shuffle_seed: int
    leased_until: float
    leader: str = ""
    evaluation: Evaluation | None = None
    training: frozenset[int] = frozenset()
    scored_values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wait:
    """Nothing to do now.

    Attributes:
        wait_s: Ask again after so long.
        other_incarnation: The job's progress is of another state incarnation than was named.
    """

    wait_s: float
    other_incarnation: bool = False


@dataclass(frozen=True)
class Ended:
    """There will be no more tasks.

    Attributes:
        state: ``done``, ``stopped`` or ``failed``.
        reason: Why.
    """

    state: str
    reason: str


@dataclass(frozen=True)
class EvaluationOutputs:
    """What an evaluation task brings.

    Attributes:
        predictions: float32, (n,) or (n, width); None if only ``values`` are wanted.
        labels: float32, (n,).
        values: Of metrics that are the user's functions, for this task's records.
        records: How many records these are of.
        metrics: Those to compute from predictions and labels of the whole round: name -> which
            one of ``auc``, ``logloss``, ``accuracy``, ``mse``, ``mae``.
    """

    predictions: NDArray[np.float32] | None
    labels: NDArray[np.float32] | None
    values: Mapping[str, float] = field(default_factory=dict)
    records: int = 0
    metrics: Mapping[str, str] = field(default_factory=dict)


class BadRecordsMet(NamedTuple):
    """Damaged records that were met in a task that failed.

    Attributes:
        number: How many until it failed.
        first: The first of them: (file, offset, reason).
    """

    number: int = 0
    first: tuple[tuple[str, int, str], ...] = ()


class LeaseHolder(Protocol):
    """What the link tells of a lease, from its own thread: a ``TaskStream``, for one."""

    def lease_until(self, moment_s: float) -> None:
        """The lease is alive until then, on ``clock_s``."""

    def revoke(self) -> None:
        """The lease is another worker's, or the task is done."""

    @property
    def acknowledged(self) -> int:
        """Batches of the task, from 0, that are acknowledged everywhere."""


@dataclass(frozen=True)
class Acknowledged:
    """How far an attempt at a task is.

    Attributes:
        batches: Batches of the task, from 0, that are acknowledged everywhere.
        scores: Progressive metrics: the packed scores of those from the attempt's first one on.
    """

    batches: int
    scores: bytes = b""


def key_of(task: Task) -> tuple[str, int, int]:
    """Return what tells a lease from the others, also from one of the same task."""
    return f"{task.kind}-{task.round}", task.number, task.attempt


def key_of_message(lease: job_pb2.TaskLease) -> tuple[str, int, int]:
    """Return the same for a message."""
    return f"{TASK_KINDS[lease.kind - 1]}-{lease.round}", lease.number, lease.attempt


def evaluation_of_message(task: job_pb2.Task) -> Evaluation | None:
    """Return the evaluation that a task comes with."""
    if not task.HasField("evaluation"):
        return None
    # Sorted: messages with the same content give equal strings, see ``Callbacks.evaluation_is``.
    return Evaluation(task.evaluation.round, dict(sorted(task.evaluation.metrics.items())))


def lease_message(task: Task, acknowledged: int, scores: bytes = b"") -> job_pb2.TaskLease:
    """Return the message for a lease; ``scores`` as ``Acknowledged`` has them."""
    return job_pb2.TaskLease(
        kind=TASK_KINDS.index(task.kind) + 1,  # type: ignore[arg-type]
        round=task.round,
        number=task.number,
        attempt=task.attempt,
        acknowledged_batches=acknowledged,
        scores=scores,
        scored_from=task.first_batch,
    )


def bad_record_messages(records: Iterable[tuple[str, int, str]]) -> list[job_pb2.BadRecord]:
    """Return the messages for damaged records, the first ones."""
    return [
        job_pb2.BadRecord(file=file, offset=offset, reason=reason)
        for file, offset, reason in list(records)[:BAD_RECORDS_MAX]
    ]


def outputs_message(outputs: EvaluationOutputs) -> job_pb2.EvaluationOutputs:
    """Return the message for what an evaluation task brings."""
    message = job_pb2.EvaluationOutputs(
        values=outputs.values, records=outputs.records, metrics=outputs.metrics
    )
    if outputs.predictions is not None and outputs.labels is not None:
        predictions = np.ascontiguousarray(outputs.predictions, "<f4")
        message.predictions = predictions.tobytes()
        message.prediction_width = predictions.shape[1] if predictions.ndim > 1 else 1
        message.labels = np.ascontiguousarray(outputs.labels, "<f4").tobytes()
    return message
