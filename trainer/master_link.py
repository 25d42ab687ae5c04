"""A worker's link to its job's master: tasks in, progress out, through changes of the master.

Blocking calls, each with retries and backoff while no master answers, up to a deadline; every
call may be repeated, so a retry does no harm. A thread renews the holds. The master's address is
read from the job's record through any pserver, and read anew when a call does not get through.
Imports :mod:`backstay.rpc` and the records of :mod:`backstay.consensus`; never moves rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from backstay.config import ClientConfig

__all__ = [
    "Ended",
    "EvaluationOutputs",
    "HeldTask",
    "JobTerms",
    "MasterLink",
    "Task",
    "TaskKind",
    "Wait",
]

TaskKind: TypeAlias = Literal["training", "evaluation", "prediction", "train_end"]


@dataclass(frozen=True)
class JobTerms:
    """What a worker is told when it joins.

    Attributes:
        job_uid: What tells this job from others of its name.
        spec_json: The spec, for ``JobSpec.from_json``.
        stream_job: First part of the ids of the job's streams (u64).
        hold_ttl_ms: How long a hold lives after the call that renewed it was sent.
        tables: Names of the job's tables in their order; empty: nobody has declared them yet.
        restore_version: Which restore of the cluster the progress goes with; 0: none.
    """

    job_uid: str
    spec_json: str
    stream_job: int
    hold_ttl_ms: int
    tables: tuple[str, ...]
    restore_version: int


@dataclass(frozen=True)
class Task:
    """A task that this worker holds.

    Attributes:
        kind: What to do with the records.
        round: 1, 2, ... within the kind; of training: the pass.
        number: Of the task within the round.
        attempt: Of this hold; grows each time the task is given.
        shard: Name of the file or table.
        start: First record.
        count: Number of records.
        first_batch: Begin with this batch; those before it are acknowledged everywhere.
        shuffle_seed: Of the order of the task's records; 0: as they are.
        held_until: ``time.monotonic()`` seconds until which the hold is surely alive.
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
    held_until: float


@dataclass(frozen=True)
class Wait:
    """Nothing to do now.

    Attributes:
        wait_s: Ask again after so long.
    """

    wait_s: float


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


class HeldTask(Protocol):
    """What the link tells of a hold, from its own thread: a ``TaskStream``, for one."""

    def hold_until(self, monotonic_s: float) -> None:
        """The hold is alive until then, on ``time.monotonic()``."""

    def revoke(self) -> None:
        """The hold is another worker's, or the task is done."""

    @property
    def settled(self) -> int:
        """Batches of the task, from 0, that are acknowledged everywhere."""


class MasterLink:
    """One worker's link; all methods may be called from any thread."""

    def __init__(
        self,
        endpoints: str | Sequence[str],
        job: str,
        worker_id: str,
        *,
        config: ClientConfig | None = None,
        instance: int | None = None,
    ) -> None:
        """Prepare; nothing is asked yet.

        Args:
            endpoints: Control addresses of pservers, where the master's address is read.
            job: Name of the job.
            worker_id: Name of this worker, unique in the job.
            config: Security, and ``deadline_ms``: how long a call is tried while no master
                answers.
            instance: Of this process; default: drawn at random.
        """
        raise NotImplementedError

    def join(self) -> JobTerms:
        """Join the job, and begin to send signs of life.

        Raises:
            JobRefused: The job is over.
            UnknownJob: There is no such job.
            ServerUnavailable: No master answered within the deadline.
        """
        raise NotImplementedError

    def declare_tables(self, names: Sequence[str]) -> None:
        """Tell the names of the job's tables, in the order in which the program made them.

        Raises:
            JobRefused: Another worker's list differs; the message says where.
        """
        raise NotImplementedError

    def get_task(self) -> Task | Wait | Ended:
        """Return a task, or how long to wait, or that there will be none.

        Streams that :meth:`stream_closed` told are sent along; streams that others have left
        behind come into :meth:`streams_to_close`.
        """
        raise NotImplementedError

    def streams_to_close(self) -> list[tuple[int, int]]:
        """Take the streams (pass, task) that this worker is to close for others."""
        raise NotImplementedError

    def stream_closed(self, pass_number: int, task: int) -> None:
        """Note that a stream is closed on all servers; the next :meth:`get_task` tells it."""
        raise NotImplementedError

    def hold(self, task: Task, held: HeldTask) -> None:
        """Have the hold renewed; ``held`` hears of it until the task ends in any way."""
        raise NotImplementedError

    def complete(
        self,
        task: Task,
        *,
        batches: int,
        examples: int,
        loss: float | None = None,
        outputs: EvaluationOutputs | None = None,
        bad_records: Sequence[tuple[str, int, str]] = (),
        bad_record_count: int | None = None,
    ) -> bool:
        """Tell that a task is done; returns when that is recorded.

        Args:
            task: The task.
            batches: Batches of the whole task, those before ``first_batch`` included.
            examples: Records that this worker went through.
            loss: Mean over those.
            outputs: Of an evaluation task.
            bad_records: The first damaged ones: (file, offset, reason).
            bad_record_count: All of them; default: those given.

        Returns:
            Whether this made the task done; false: its twin was first.
        """
        raise NotImplementedError

    def give_back(self, task: Task, *, settled_batches: int, reason: str) -> None:
        """Return a task that others can go on with."""
        raise NotImplementedError

    def fail(
        self,
        task: Task,
        error: str,
        *,
        records: Sequence[int] = (),
        bad_records: Sequence[tuple[str, int, str]] = (),
    ) -> bool:
        """Tell that a task failed by user code or data; returns whether it is parked now.

        Args:
            task: The task.
            error: What happened, with the end of the traceback.
            records: Positions within the task of the records concerned, as far as known.
            bad_records: Damaged ones: (file, offset, reason).
        """
        raise NotImplementedError

    def figures(self, *, examples: int, steps: int, loss: float | None) -> None:
        """Note what the next sign of life tells: sums since the process began."""
        raise NotImplementedError

    @property
    def stop_reason(self) -> str | None:
        """Why the master wants this worker to give everything back and end; None: it does not."""
        raise NotImplementedError

    @property
    def job_steps(self) -> int:
        """Steps of the job, all workers together, as of the last sign of life."""
        raise NotImplementedError

    def leave(self, reason: str = "") -> None:
        """Say that this worker ends in good order; what it holds goes back."""
        raise NotImplementedError

    def close(self) -> None:
        """End the thread and close the connections; the master is told nothing."""
        raise NotImplementedError
