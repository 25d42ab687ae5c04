"""One task of a round: its state, its leases, its progress and its failures.

``TRANSITIONS`` is the whole state machine, and docs/internals/jobs.md draws it. Only
``TaskStore`` changes a state: ``step`` by an event, ``restore_dead_letter`` when a round is opened.
An event that the table does not allow raises, and nothing changes.

Invariants of a task:

- LEASED: at least one of its leases is live. EXPIRED: it has leases, and all of them have expired.
  In every other state it has none.
- ``acknowledged`` only grows, in whichever attempt.

Imports ``job_engine``; does no I/O.
"""

from __future__ import annotations

from enum import IntEnum

from backstay.job_engine.values import DeadLetter, Failure, LedgerLimits

__all__ = ["TRANSITIONS", "Event", "IllegalTransition", "Lease", "State", "Task"]

# A task that made no progress so many times in a row is tried after all others.
_WITHOUT_PROGRESS_AT_FRONT = 2


class State(IntEnum):
    """The states of a task."""

    TODO = 0
    LEASED = 1
    EXPIRED = 2
    DONE = 3
    DEAD_LETTERED = 4


class Event(IntEnum):
    """What happens to a task.

    Attributes:
        LEASE: A worker gets a lease of it.
        RENEW: A worker renews its lease, which had expired.
        END_ONE: A lease ends or expires, and another one is live.
        EXPIRE: A lease ends or expires: none is live any more, and an expired one is left.
        RELEASE: Its last lease ends.
        COMPLETE: A worker with a lease has done it.
        RECOVER: A new job master finds in the journal that a worker has done it.
        DEAD_LETTER: It went wrong too often.
        RETRY: An operator puts it back.
    """

    LEASE = 0
    RENEW = 1
    END_ONE = 2
    EXPIRE = 3
    RELEASE = 4
    COMPLETE = 5
    RECOVER = 6
    DEAD_LETTER = 7
    RETRY = 8


TRANSITIONS: dict[State, dict[Event, State]] = {
    State.TODO: {
        Event.LEASE: State.LEASED,
        Event.RECOVER: State.DONE,
    },
    State.LEASED: {
        Event.LEASE: State.LEASED,
        Event.RENEW: State.LEASED,
        Event.END_ONE: State.LEASED,
        Event.EXPIRE: State.EXPIRED,
        Event.RELEASE: State.TODO,
        Event.COMPLETE: State.DONE,
        Event.RECOVER: State.DONE,
        Event.DEAD_LETTER: State.DEAD_LETTERED,
    },
    State.EXPIRED: {
        Event.LEASE: State.LEASED,
        Event.RENEW: State.LEASED,
        Event.EXPIRE: State.EXPIRED,
        Event.RELEASE: State.TODO,
        Event.COMPLETE: State.DONE,
        Event.DEAD_LETTER: State.DEAD_LETTERED,
    },
    State.DEAD_LETTERED: {
        Event.RETRY: State.TODO,
        Event.RECOVER: State.DONE,
    },
    State.DONE: {},
}


class IllegalTransition(RuntimeError):
    """The code applied an event to a task whose state does not allow it: a fault of the code."""


class Lease:
    """A worker's right to work on a task, until it expires.

    Attributes:
        worker: Whose.
        task: Of which task.
        attempt: Its number; later leases of the round have higher ones.
        first_batch: Batches of the task that were acknowledged when it was granted.
        granted_s: When it was granted.
        expires_s: When it expires unless it is renewed.
        expired: It was not renewed in time. The worker may renew it until another gets the task.
        ended: It is over for good.
        withdrawn: Why it cannot be renewed any more; empty: it can. See ``TaskLedger.withdraw``.
        timed: Whether the time from its grant to its end is that of the whole task.
    """

    __slots__ = (
        "attempt",
        "ended",
        "expired",
        "expires_s",
        "first_batch",
        "granted_s",
        "task",
        "timed",
        "withdrawn",
        "worker",
    )

    def __init__(
        self,
        worker: str,
        task: Task,
        attempt: int,
        first_batch: int,
        granted_s: float,
        expires_s: float,
    ) -> None:
        self.worker = worker
        self.task = task
        self.attempt = attempt
        self.first_batch = first_batch
        self.granted_s = granted_s
        self.expires_s = expires_s
        self.expired = False
        self.ended = False
        self.withdrawn = ""
        self.timed = False

    @property
    def is_live(self) -> bool:
        """Whether it has neither ended nor expired."""
        return not (self.ended or self.expired)


class Task:
    """What a round knows of one task.

    Attributes:
        number: Which task.
        state: See ``State``; only ``TaskStore`` changes it.
        leases: Live and expired ones; at most two are live.
        acknowledged: How many of its batches every server has acknowledged, as far as workers told.
        failures: How often it failed, since it was last put back.
        without_progress: How many attempts in a row ended without a failure and without a newly
            acknowledged batch. Such an end is mostly not the task's fault, but it may be what kills
            its workers.
        closer: Who closes its stream on the servers: ``NOBODY`` until a worker is told to. None if
            there is no stream to close.
        done_by: The attempt that did it, as long as its stream is open; 0: it was never done.
    """

    __slots__ = (
        "_failure",
        "_last_end",
        "acknowledged",
        "closer",
        "done_by",
        "failures",
        "leases",
        "number",
        "state",
        "without_progress",
    )

    def __init__(self, number: int, state: State) -> None:
        self.number = number
        self.state = state
        self.leases: list[Lease] = []
        self.acknowledged = 0
        self.failures = 0
        self.without_progress = 0
        self.closer: str | None = None
        self.done_by = 0
        self._failure: Failure | None = None
        self._last_end: Failure | None = None

    @property
    def is_leased(self) -> bool:
        """Whether one of its leases is live."""
        return any(lease.is_live for lease in self.leases)

    @property
    def was_begun(self) -> bool:
        """Whether the servers may have a stream of it, though it is not done."""
        went_wrong = self.failures or self.without_progress or self.state is State.DEAD_LETTERED
        return self.state is not State.DONE and bool(self.leases or self.acknowledged or went_wrong)

    # What went wrong. Only memory has it: a new job master counts anew.

    def failed(self, failure: Failure) -> None:
        """Count a failure: the task's own fault, and few are too many."""
        self.failures += 1
        self._failure = failure

    def ended_without_failure(self, lease: Lease, why: str, *, was_begun: bool) -> None:
        """Count the end of a lease that no failure ended, unless the attempt made progress."""
        if self.acknowledged > lease.first_batch:
            self.without_progress = 0
        elif was_begun:
            self.without_progress += 1
            error = (
                f"{self.without_progress} attempts in a row ended without a result; the last: {why}"
            )
            self._last_end = Failure(error, lease.worker)

    def forget_trouble(self) -> None:
        """Begin both counts anew."""
        self.failures = self.without_progress = 0
        self._failure = self._last_end = None

    @property
    def comes_first(self) -> bool:
        """Whether it may be tried before all others when it comes back."""
        return self.without_progress <= _WITHOUT_PROGRESS_AT_FRONT

    def is_last_chance_over(self, limits: LedgerLimits) -> bool:
        """Return whether it is dead-lettered if its expired leases end without progress, too."""
        expired = len(self.leases)
        return expired > 0 and self.without_progress + expired > limits.max_without_progress

    def dead_letter(self, limits: LedgerLimits) -> DeadLetter | None:
        """Return what is recorded of a task that went wrong too often; None: it may be tried."""
        why = None
        if self._failure is not None and self.failures > limits.max_retries:
            why = self._failure
        elif self._last_end is not None and self.without_progress > limits.max_without_progress:
            why = self._last_end
        if why is None:
            return None
        return DeadLetter(self.number, self.failures, why, self.acknowledged)
