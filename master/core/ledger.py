"""The ledger of one round: who works on which task, what is done, what is parked.

A task is to do, held by a worker (two, if the first is slow), done or parked; docs/internals/jobs.md
draws it. The ledger hands tasks out, takes them back when holds end, and says what the journal
must know. Its invariants:

- a task is done once: the first ``complete`` of a hold that is valid;
- a task is given out only if nobody holds it, or one worker does and is slow;
- a hold that was revoked never completes, fails or returns a task;
- a master that dies and reads its journal gives nothing out that is done or held.

Time is seconds on one monotonic clock of the caller's and never goes back. Each call costs
O(log n) or less, over its lifetime, whatever the number of tasks and workers. Imports
``master.core``, numpy and ``backstay.errors``; does no I/O and is not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from backstay.master.core.holds import (
    Changes,
    Counts,
    Failure,
    Grant,
    HeldTask,
    LedgerLimits,
    ParkedTask,
    WorkerRecord,
)
from backstay.master.core.rounds import RoundId
from backstay.master.core.task_bits import TaskBits

__all__ = ["NOBODY", "TaskLedger"]

# Has the streams to close whose worker is lost.
NOBODY = ""


class TaskLedger:
    """Who works on which task of a round, what is done, what is parked."""

    def __init__(
        self,
        round_id: RoundId,
        size: int,
        order_seed: int | None,
        limits: LedgerLimits,
        *,
        first_attempt: int = 1,
        done: TaskBits | None = None,
        parked: Iterable[ParkedTask] = (),
        keeps_streams: bool = False,
    ) -> None:
        """Begin a round, or go on with one from its journal (then ``adopt`` what is held).

        Args:
            round_id: Which round, for messages.
            size: Number of tasks, ``len(TaskTable)``.
            order_seed: Seed of the order in which tasks are given out; None takes them as they
                are numbered.
            limits: See there.
            first_attempt: Number of the first hold; a master that goes on with a job passes
                ``generation * ATTEMPTS_PER_MASTER`` with a generation no earlier one had.
            done: The tasks that are done already; it is copied.
            parked: The tasks that are parked.
            keeps_streams: Whether tasks have streams that must be closed (training).

        Raises:
            InvalidRequest: ``done`` or ``parked`` do not fit the number of tasks.
        """
        raise NotImplementedError

    # What workers ask and report.

    def assign(self, worker: str, now_s: float) -> Grant | None:
        """Give a worker a task: one to do, else one whose worker is slow; None if there is none."""
        raise NotImplementedError

    def renew(self, worker: str, holds: Iterable[HeldTask], now_s: float) -> list[HeldTask]:
        """Extend a worker's holds, take note of settled batches, and return those revoked.

        A hold whose time ran out but whose task nobody was given since is confirmed.
        """
        raise NotImplementedError

    def complete(
        self, worker: str, task: int, attempt: int, now_s: float, batches: int = 0
    ) -> bool:
        """Take note that a worker has done a task, and revoke its twin's hold.

        Args:
            batches: Number of batches of the whole task.

        Returns:
            Whether this attempt is the one that counts (also when it is told again), False if it
            was revoked before.

        Raises:
            InvalidRequest: There is no such task, or that attempt was never given.
        """
        raise NotImplementedError

    def fail(
        self, worker: str, task: int, attempt: int, failure: Failure, now_s: float, settled: int = 0
    ) -> Literal["retry", "parked", "revoked"]:
        """End a hold because the task failed; too often, and it is parked.

        Returns:
            What comes of it; "revoked" if that hold was over before, and nothing changed.

        Raises:
            InvalidRequest: There is no such task, or that attempt was never given.
        """
        raise NotImplementedError

    def give_back(
        self, worker: str, task: int, attempt: int, settled: int, now_s: float, reason: str = ""
    ) -> bool:
        """End a hold for no fault of the task; return False if it was over before.

        Raises:
            InvalidRequest: There is no such task, or that attempt was never given.
        """
        raise NotImplementedError

    def drop_worker(self, worker: str, now_s: float) -> list[int]:
        """End all holds of a worker that is surely gone, and return their tasks.

        Its streams to close go to the next workers that ask.
        """
        raise NotImplementedError

    def expire(self, now_s: float) -> list[int]:
        """Make tasks whose holds ran out available to others, and return them."""
        raise NotImplementedError

    def next_expiry(self) -> float | None:
        """Return a time before which no hold runs out, None if nothing is held."""
        raise NotImplementedError

    # Streams of done tasks.

    def streams_to_close(self, worker: str, most: int = 64) -> list[int]:
        """Give a worker streams to close whose worker is lost; they are its own from now on."""
        raise NotImplementedError

    def closed(self, tasks: Iterable[int]) -> None:
        """Take note that streams are closed; unknown ones are ignored."""
        raise NotImplementedError

    # Operators and the course.

    def retry_parked(self, tasks: Iterable[int] | None = None) -> list[int]:
        """Put parked tasks (all, if None) back with fresh limits; return those put back."""
        raise NotImplementedError

    def cut_short(self) -> None:
        """End the round: revoke all holds and give out nothing more. For good."""
        raise NotImplementedError

    # The journal.

    def adopt(self, worker: str, held: HeldTask, now_s: float) -> bool:
        """Take over a hold from the journal; its time begins anew. False if its task is over."""
        raise NotImplementedError

    def adopt_worker(self, worker: str, record: WorkerRecord, now_s: float) -> None:
        """Take over all that the journal keeps of a worker: its holds and its streams to close."""
        raise NotImplementedError

    def take_changes(self) -> Changes:
        """Return what differs from the journal, and take it for written."""
        raise NotImplementedError

    def mark_changed(self, changes: Changes) -> None:
        """Take back that these changes were written: the next ``take_changes`` has them again."""
        raise NotImplementedError

    def take_new_batches(self) -> int:
        """Return how many batches were newly settled since the last call."""
        raise NotImplementedError

    # What there is to see.

    @property
    def counts(self) -> Counts:
        """How many tasks are in which state."""
        raise NotImplementedError

    @property
    def is_over(self) -> bool:
        """Whether every task is done or parked, or the round was cut short."""
        raise NotImplementedError

    @property
    def is_cut_short(self) -> bool:
        """Whether ``cut_short`` was called."""
        raise NotImplementedError

    @property
    def done(self) -> TaskBits:
        """The tasks done; not to be changed by the caller (``copy`` it to keep it)."""
        raise NotImplementedError

    @property
    def parked(self) -> Mapping[int, ParkedTask]:
        """The parked tasks by number."""
        raise NotImplementedError

    @property
    def open_streams(self) -> int:
        """How many streams of done tasks are not confirmed closed."""
        raise NotImplementedError

    @property
    def workers(self) -> frozenset[str]:
        """The workers that hold a task or have streams to close."""
        raise NotImplementedError

    def record_of(self, worker: str) -> WorkerRecord:
        """Return a worker's holds and streams to close, as the journal keeps them."""
        raise NotImplementedError
