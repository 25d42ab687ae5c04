"""What starts and ends worker processes for a job, wherever those run.

The master says which workers should run (``WorkerSet`` decides it), a launcher makes it so and
tells what has become of them. ``local_launcher`` has the one for processes of this machine;
another kind of cluster needs another class of the same shape. ``LaunchFollower`` joins the two.

It imports ``backstay.errors`` only, and starts nothing itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from backstay.errors import BackstayError

__all__ = ["Launch", "LaunchFollower", "Launcher", "LauncherPort", "WorkerExit"]

# How soon the master hears of an exit, at the latest.
ASK_WAIT_MS = 250
RETRY_PAUSE_S = 0.25
JOIN_S = 10.0
LOOK_PAUSE_S = 0.05
# A master that is being started or has just died is no news.
TROUBLE_AFTER_S = 3.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerExit:
    """The end of a worker's process.

    Attributes:
        worker_id: Which one; an id stands for one process and is never used again.
        code: Exit code; negative: ended by that signal.
        last_words: The end of its log, for people.
    """

    worker_id: str
    code: int
    last_words: str = ""


class Launcher(Protocol):
    """Runs workers. All calls come from one thread, and none waits for a worker."""

    def reconcile(self, wanted: Collection[str]) -> None:
        """Start what is missing and tell the others to end, and make sure in later calls.

        One that has ended is not started again; its exit is told again instead.
        """

    def alive(self) -> Sequence[str]:
        """Return what runs, also what was told to end and has not yet."""

    def exits(self) -> Sequence[WorkerExit]:
        """Return the exits that were not acknowledged; every one until it is."""

    def acknowledge(self, worker_ids: Collection[str]) -> None:
        """Forget these exits: the master knows."""

    def close(self) -> None:
        """End all workers: politely, after a while by force; wait until they are gone."""


@dataclass(frozen=True)
class Launch:
    """What the master answers to a launcher.

    Attributes:
        version: Of the wanted set; give it back, and the answer waits for a change.
        wanted: The ids that should run.
        acknowledged: Exits that need not be told again.
        ended: The job is over: its state and the reason; None: it is not.
    """

    version: int
    wanted: tuple[str, ...]
    acknowledged: tuple[str, ...] = ()
    ended: tuple[str, str] | None = None


class LauncherPort(Protocol):
    """The master, as a launcher needs it."""

    def __call__(
        self,
        alive: Sequence[str],
        exits: Sequence[WorkerExit],
        *,
        known_version: int,
        wait_ms: int,
    ) -> Launch:
        """Tell what runs and what has ended; return what should run.

        Raises:
            BackstayError: No master answers now.
        """


class LaunchFollower:
    """Does what a master says, in a thread, from ``with`` to its end; masters may change.

    While no master answers, the workers go on as they are.
    """

    def __init__(
        self,
        launcher: Launcher,
        master: LauncherPort,
        *,
        on_trouble: Callable[[str], None],
        trouble_after_s: float = TROUBLE_AFTER_S,
    ) -> None:
        """Prepare.

        Args:
            launcher: Starts and ends the workers; the follower closes it at its end.
            master: Asks the master of the job.
            on_trouble: Told why no master answers, and "" when one does again; from the thread.
            trouble_after_s: How long there must have been none before that is told.
        """
        self._launcher = launcher
        self._master = master
        self._on_trouble = on_trouble
        self._trouble_after_s = trouble_after_s
        self._trouble_since_s: float | None = None
        self._trouble = ""
        self._stopping = threading.Event()
        self._wanted: tuple[str, ...] = ()
        self._thread = threading.Thread(target=self._run, name="launcher", daemon=True)

    def __enter__(self) -> LaunchFollower:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopping.set()
        self._thread.join(JOIN_S)
        self._launcher.close()

    @property
    def wanted(self) -> int:
        """How many workers should run, as last heard."""
        return len(self._wanted)

    def let_leave(self, timeout_s: float) -> bool:
        """Start no more workers, and wait until all have left by themselves.

        Args:
            timeout_s: How long at most; the end of ``with`` then ends those that are left.

        Returns:
            Whether all have.
        """
        self._stopping.set()
        self._thread.join(JOIN_S)
        deadline_s = time.monotonic() + timeout_s
        pause = threading.Event()
        while self._launcher.alive():
            if time.monotonic() >= deadline_s:
                return False
            pause.wait(LOOK_PAUSE_S)
        return True

    def _run(self) -> None:
        version = 0
        while not self._stopping.is_set():
            exits = self._launcher.exits()
            try:
                # With news there is nothing to wait for.
                wait_ms = 0 if exits else ASK_WAIT_MS
                told = self._launcher.alive()
                launch = self._master(told, exits, known_version=version, wait_ms=wait_ms)
            except BackstayError as error:
                # Another master may count its versions from the beginning.
                version = 0
                self._say(str(error))
                self._launcher.reconcile(self._wanted)
                self._stopping.wait(RETRY_PAUSE_S)
                continue
            self._say("")
            self._launcher.acknowledge(launch.acknowledged)
            if launch.ended is None:
                version, self._wanted = launch.version, launch.wanted
                self._launcher.reconcile(self._wanted)
            else:
                # The workers hear of it as well, and leave by themselves.
                self._stopping.wait(RETRY_PAUSE_S)
            if exits and not launch.acknowledged:
                # A master that does not take an exit now must not be asked without a pause.
                self._stopping.wait(RETRY_PAUSE_S)

    def _say(self, trouble: str) -> None:
        """Tell of a trouble that lasts, once, and of its end."""
        now_s = time.monotonic()
        if not trouble:
            self._trouble_since_s = None
        elif self._trouble_since_s is None:
            self._trouble_since_s = now_s
        if trouble and now_s - (self._trouble_since_s or now_s) < self._trouble_after_s:
            return
        if bool(trouble) != bool(self._trouble):
            self._trouble = trouble
            self._on_trouble(trouble)
