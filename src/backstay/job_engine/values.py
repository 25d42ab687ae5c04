"""The values that a ledger takes and gives: limits, grants, leases, failures, changes.

Imports ``backstay.errors`` and ``json_record``; does no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from backstay.errors import ConfigError
from backstay.json_record import Count, JsonRecord

__all__ = [
    "ATTEMPTS_PER_MASTER",
    "Changed",
    "Counts",
    "DeadLetter",
    "Failure",
    "Grant",
    "LeasedTask",
    "LedgerLimits",
    "PassUpkeep",
    "WorkerRecord",
    "first_attempt",
]

# A new job master numbers attempts from its number of starts times this on. So it never repeats a
# number that an earlier one gave and did not write down. Readable in decimal.
ATTEMPTS_PER_MASTER = 1_000_000_000
# What is kept of a failure: an error text and the records it names.
ERROR_CHARACTERS_MAX = 4096
RECORDS_MAX = 100


def first_attempt(starts: int) -> int:
    """Return the first attempt of the job master that is the ``starts``-th of its job."""
    return starts * ATTEMPTS_PER_MASTER


@dataclass(frozen=True)
class LedgerLimits:
    """How long a lease lasts, and how much a task may go wrong.

    Attributes:
        lease_ttl_s: A lease that was not renewed for so long is over.
        max_retries: How often a task that failed is tried again; the failure after that
            dead-letters it.
        max_without_progress: How many attempts in a row may end without a failure and without one
            newly acknowledged batch (the worker died, or gave the task back) until the task is
            dead-lettered.
        straggler_factor: A task that takes so many times the median of the done ones gets a
            second worker.
        straggler_min_s: Not before so long, while other tasks wait to be begun.
        leases_per_worker_max: A worker with so many leases gets no more tasks.
    """

    lease_ttl_s: float = 2.0
    max_retries: int = 3
    max_without_progress: int = 30
    straggler_factor: float = 3.0
    straggler_min_s: float = 30.0
    leases_per_worker_max: int = 16

    def __post_init__(self) -> None:
        for name, lowest in (
            ("lease_ttl_s", 1e-3),
            ("max_retries", 0),
            ("max_without_progress", 1),
            ("straggler_factor", 1.0),
            ("straggler_min_s", 0.0),
            ("leases_per_worker_max", 1),
        ):
            value = getattr(self, name)
            if not value >= lowest:
                raise ConfigError(f"{name} = {value}: must be at least {lowest:g}")


class Grant(NamedTuple):
    """A task given to a worker.

    Attributes:
        task: Its number.
        attempt: Number of this lease; later leases of the round have higher ones.
        first_batch: Batches that are acknowledged already: begin with this one.
        speculative: Whether another worker has a lease of the task too, and is slow.
    """

    task: int
    attempt: int
    first_batch: int
    speculative: bool


class LeasedTask(NamedTuple):
    """A lease as a worker is told it, as it reports it, and as the journal keeps it.

    Attributes:
        task: Its number.
        attempt: Number of the lease; 0: no worker has one, it is only known what is acknowledged.
        acknowledged: How many batches of the task are acknowledged by now, in whichever attempt: a
            worker that is given the lease begins with the next one.
    """

    task: Count
    attempt: Count
    acknowledged: Count


@dataclass(frozen=True)
class Failure:
    """Why an attempt failed.

    Attributes:
        error: The error's text; cut after 4096 characters.
        worker: Who failed.
        records: Positions of the records concerned, as far as known; the first 100 are kept.
    """

    error: str
    worker: str
    records: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "error", self.error[:ERROR_CHARACTERS_MAX])
        object.__setattr__(self, "records", tuple(self.records[:RECORDS_MAX]))


@dataclass(frozen=True)
class DeadLetter:
    """A task that is not tried again until an operator puts it back.

    Attributes:
        task: Its number.
        failures: How often it failed.
        failure: The last failure.
        acknowledged: Batches of it that had been acknowledged, and stay counted.
    """

    task: int
    failures: int
    failure: Failure
    acknowledged: int

    def to_json(self) -> str:
        """Return the record as JSON."""
        failure = self.failure
        form = _DeadLetterForm(
            self.task,
            self.failures,
            failure.error,
            failure.worker,
            failure.records,
            self.acknowledged,
        )
        return form.to_json()

    @classmethod
    def from_json(cls, text: str) -> DeadLetter:
        """Return the task that ``to_json`` wrote.

        Raises:
            InvalidRequest: It is no such string.
        """
        form = _DeadLetterForm.from_json(text)
        failure = Failure(form.error, form.worker, form.records)
        return cls(form.task, form.failures, failure, form.acknowledged)


@dataclass(frozen=True)
class _DeadLetterForm(JsonRecord, what="dead-lettered task"):
    """The JSON form of a ``DeadLetter``: its last failure is no object of its own."""

    task: Count
    failures: Count
    error: str
    worker: str
    records: tuple[Count, ...]
    acknowledged: Count


@dataclass(frozen=True)
class WorkerRecord(JsonRecord, what="worker's leases"):
    """What the journal keeps of a worker in one round; an empty one need not be kept.

    Attributes:
        leased: The tasks it may work on.
        to_close: Tasks that it has done and whose streams it has not yet closed, and the attempts
            that did them.
    """

    leased: tuple[LeasedTask, ...] = ()
    to_close: tuple[tuple[Count, Count], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.leased or self.to_close)


class Counts(NamedTuple):
    """How many tasks of a round are in which state; they add up to ``total``."""

    todo: int
    doing: int
    done: int
    dead_letters: int

    @property
    def total(self) -> int:
        """The number of tasks of the round."""
        return self.todo + self.doing + self.done + self.dead_letters


class Changed(NamedTuple):
    """What differs from the journal, in order, without the values.

    Attributes:
        chunks: Numbers of the chunks of done tasks.
        workers: Whose record; the worker "" has the streams that nobody has been given to close.
        dead_letters: Tasks that are dead-lettered now, or no longer.
    """

    chunks: Sequence[int]
    workers: Sequence[str]
    dead_letters: Sequence[int]


class PassUpkeep(NamedTuple):
    """What is to be done to the rows of a job at the end of a pass.

    Attributes:
        pass_number: Which pass has ended.
        start: Of the job: an upkeep that was begun under another one does not count.
        period: Of the decay, in milliseconds of Unix time: when the pass ended. The same for this
            pass of this job whoever asks, and above that of each pass before.
        unseen_since_s: Rows that no push has named since this Unix time are to expire; None: none.
        is_new: Whether the pass ended under this job master, so no other one has begun with it.
    """

    pass_number: int
    start: int
    period: int
    unseen_since_s: int | None
    is_new: bool
