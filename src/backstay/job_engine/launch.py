"""What the job master and a launcher tell each other: values only.

The job master wishes for worker processes (``WorkerWish``). The launcher reports what runs and
what has ended, and why (``LauncherReport``). Imports the standard library only; does no I/O.
"""

from __future__ import annotations

import enum
import signal
from typing import NamedTuple

__all__ = ["ExitReason", "LauncherReport", "WorkerExit", "WorkerWish"]

# As Popen has it, and as a shell or a container has it.
_KILLED = {code for number in (signal.SIGKILL, signal.SIGTERM) for code in (-number, 128 + number)}


class ExitReason(enum.Enum):
    """Why a worker's process ended; the value says it after the worker's name."""

    # Its program ended with exit code 0.
    FINISHED = "finished"
    # Its program ended with another exit code, or by a fault.
    FAILED = "failed"
    # Something outside told it to end or killed it (SIGTERM, SIGKILL).
    PREEMPTED = "preempted"
    # Its machine needed the room for other processes.
    EVICTED = "was evicted"
    # Its machine, or the launcher that ran it, is gone.
    NODE_LOST = "was lost"
    # It needed more memory than it may have.
    OUT_OF_MEMORY = "ran out of memory"
    # No process of it ever ran.
    CANNOT_START = "could not be started"
    # No process of it ever ran: the registry of its image did not answer.
    NO_IMAGE = "got no image"
    # No process of it ever ran: the launcher lacks a right that somebody may still give.
    NOT_ALLOWED = "was not allowed to start"
    # It was silent for too long, so the job master told it to end. Launchers do not know this.
    HUNG = "hung"

    @property
    def is_a_failure(self) -> bool:
        """Whether it counts against ``max_relaunches``; others are always replaced.

        A worker has no cause to finish while it is wanted.
        """
        return self not in _NO_FAILURES

    @classmethod
    def of_code(cls, code: int) -> ExitReason:
        """Return what an exit code says; negative: that signal, as ``Popen`` has it."""
        if code in _KILLED:
            return cls.PREEMPTED
        return cls.FAILED if code else cls.FINISHED


_NO_FAILURES = (
    ExitReason.PREEMPTED,
    ExitReason.EVICTED,
    ExitReason.NODE_LOST,
    ExitReason.NO_IMAGE,
    ExitReason.NOT_ALLOWED,
)


class WorkerExit(NamedTuple):
    """The end of a worker's process.

    Attributes:
        worker_id: Which one; an id stands for one process and is never used again.
        reason: Why it ended.
        code: Exit code; negative: ended by that signal; 0 if there is none.
        last_words: The end of its log, for people.
    """

    worker_id: str
    reason: ExitReason
    code: int = 0
    last_words: str = ""

    @property
    def how(self) -> str:
        """How it ended, in words that follow the worker's name."""
        code_tells = (ExitReason.FINISHED, ExitReason.FAILED, ExitReason.PREEMPTED)
        if self.reason in code_tells:
            by = f"signal {-self.code}" if self.code < 0 else f"exit code {self.code}"
            return f"ended with {by}"
        return self.reason.value


class LauncherReport(NamedTuple):
    """What a launcher tells.

    Attributes:
        running: Workers that run, also when they were told to end and have not yet, and workers
            that an earlier launcher of the job started.
        exits: Exits that were not acknowledged; each is told until it is.
        waiting: Of those that run: workers for which there is no room now.
    """

    running: tuple[str, ...] = ()
    exits: tuple[WorkerExit, ...] = ()
    waiting: tuple[str, ...] = ()


class WorkerWish(NamedTuple):
    """What the job master wishes.

    Attributes:
        version: Of the workers; give it back, and the answer waits for a change.
        workers: The ids that should run, oldest first. A launcher starts each of them that does
            not run, and tells each other worker that runs to end.
        acknowledged: Workers whose exits need not be told again.
        ended: The job is over: its state and the reason; None: it is not.
    """

    version: int
    workers: tuple[str, ...]
    acknowledged: tuple[str, ...] = ()
    ended: tuple[str, str] | None = None
