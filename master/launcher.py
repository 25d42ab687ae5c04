"""The launcher: what starts and ends worker processes for a job, wherever they run.

The job master wishes, a launcher makes it so and reports (``job_engine.launch`` has the values).
The field ``launcher`` of the job file says which one (``launcher_class``). Each is a class of the
shape of ``Launcher``, and ``LaunchLoop`` joins it to the job master. Both run in the command,
which reaches the job master by gRPC, or in the job master's process (``hosted_launcher``).

It imports ``job_engine``, ``job_spec``, ``backstay.errors`` and the messages. It starts no process.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

from backstay._proto.v1 import job_pb2
from backstay.errors import BackstayError
from backstay.job_engine.launch import ExitReason, LauncherReport, WorkerExit, WorkerWish
from backstay.job_spec import LAUNCHERS, JobSpec

__all__ = [
    "PATIENCE",
    "LaunchLoop",
    "Launcher",
    "LauncherPort",
    "WorkerProgram",
    "class_at",
    "launcher_class",
    "report_message",
    "report_of",
    "wish_message",
    "wish_of",
]

# How soon the job master hears of an exit, at the latest.
ASK_WAIT_MS = 250
RETRY_PAUSE_S = 0.25
JOIN_S = 10.0
LOOK_PAUSE_S = 0.05
# A job master that is being started or has just died is no news.
TROUBLE_AFTER_S = 3.0
# The servers were reached before a process of the job starts, so it waits for them without a limit.
PATIENCE = ("--first-contact-timeout-ms", "0")

log = logging.getLogger(__name__)


class WorkerProgram(NamedTuple):
    """What a launcher starts for each worker.

    Attributes:
        spec: The job.
        env: Variables on top of the launcher's own.
        owner: Of the job on Kubernetes, the uid of its Deployment; empty: any of its name.
    """

    spec: JobSpec
    env: Mapping[str, str]
    owner: str = ""

    def command(self, worker_id: str) -> list[str]:
        """Return the program and arguments of a worker on this machine."""
        return [sys.executable, *self.arguments(worker_id)]

    def arguments(self, worker_id: str) -> list[str]:
        """Return the arguments of a Python interpreter, on whatever machine it is."""
        words = ["-m", "backstay.trainer.worker.cli", "--job", self.spec.name]
        return [*words, "--worker-id", worker_id, *PATIENCE]


class Launcher(Protocol):
    """Runs workers. All calls come from one thread, and none waits for a worker to end."""

    # Whether it runs in the job master's process. Otherwise it runs in the command.
    IN_JOB_MASTER: ClassVar[bool]

    @classmethod
    def for_job(cls, program: WorkerProgram) -> Launcher:
        """Return the launcher of a job.

        Raises:
            ConfigError: A setting of the job does not fit it.
        """

    def reconcile(self, wanted: Collection[str]) -> None:
        """Start each wanted worker that does not run, and tell each other worker to end.

        It is called again and again: later calls make sure. A worker that has ended is not started
        again. Its exit is reported again instead.
        """

    def report(self) -> LauncherReport:
        """Return what runs and what has ended.

        If workers may outlive this process, what runs includes the workers that an earlier
        launcher of the same job started: this one takes them over.
        """

    def acknowledge(self, worker_ids: Collection[str]) -> None:
        """Forget the exits of these workers: the job master knows them."""

    def trouble(self) -> str:
        """Return why not all wanted workers run, for people; empty: nothing holds them up."""

    def close(self) -> None:
        """Let go. Workers that cannot outlive this process end: politely, then by force.

        It waits until they are gone. Workers that can outlive it go on, for the next launcher.
        """


def class_at(place: str) -> Any:
    """Return the class that ``module:Class`` names."""
    module, _, kind = place.partition(":")
    return getattr(importlib.import_module(module), kind)


def launcher_class(name: str) -> type[Launcher]:
    """Return the class that ``LAUNCHERS`` has for a value of the job file's ``launcher``."""
    found: type[Launcher] = class_at(LAUNCHERS[name].workers)
    return found


class LauncherPort(Protocol):
    """The job master, as a launcher sees it."""

    def __call__(self, report: LauncherReport, *, known_version: int, wait_ms: int) -> WorkerWish:
        """Report, and return what the job master wishes.

        Raises:
            BackstayError: No job master answers now.
        """


def _log_trouble(trouble: str) -> None:
    if trouble:
        log.warning("the job master does not answer the launcher: %s", trouble)


class LaunchLoop:
    """Passes the job master's wish to the launcher, in a thread that lives inside ``with``.

    It goes on when another job master takes over. While none answers, the workers stay as they are.
    """

    def __init__(
        self,
        launcher: Launcher,
        master: LauncherPort,
        *,
        on_trouble: Callable[[str], None] = _log_trouble,
        on_exit: Callable[[WorkerExit], None] = lambda _: None,
        trouble_after_s: float = TROUBLE_AFTER_S,
    ) -> None:
        """Prepare.

        Args:
            launcher: Starts and ends the workers; the follower closes it at its end.
            master: Asks the job master.
            on_trouble: Told why no job master answers, and "" when one does again; from the thread.
            on_exit: Told each exit, perhaps more than once; from the thread.
            trouble_after_s: How long there must have been none before that is told.
        """
        self._launcher = launcher
        self._master = master
        self._on_trouble = on_trouble
        self._on_exit = on_exit
        self._trouble_after_s = trouble_after_s
        self._trouble_since_s: float | None = None
        self._trouble = ""
        self._stopping = threading.Event()
        self._wanted: tuple[str, ...] = ()
        self._thread = threading.Thread(target=self._run, name="launcher", daemon=True)

    def __enter__(self) -> LaunchLoop:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
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
            timeout_s: How long at most; workers that are left then are told to end.

        Returns:
            Whether all have.
        """
        self._stopping.set()
        self._thread.join(JOIN_S)
        deadline_s = time.monotonic() + timeout_s
        pause = threading.Event()
        while self._launcher.report().running:
            if time.monotonic() >= deadline_s:
                self._launcher.reconcile(())
                return False
            pause.wait(LOOK_PAUSE_S)
        self._launcher.reconcile(())
        return True

    def _run(self) -> None:
        version = 0
        while not self._stopping.is_set():
            report = self._launcher.report()
            for end in report.exits:
                self._on_exit(end)
            try:
                # A report with news is sent at once.
                wait_ms = 0 if report.exits else ASK_WAIT_MS
                wish = self._master(report, known_version=version, wait_ms=wait_ms)
            except BackstayError as error:
                # Another job master may count its versions from the beginning.
                version = 0
                self._say(str(error))
                if not self._launcher.IN_JOB_MASTER:
                    self._launcher.reconcile(self._wanted)
                # Otherwise another process may be the job master now, and have other wishes.
                self._stopping.wait(RETRY_PAUSE_S)
                continue
            self._say("")
            self._launcher.acknowledge(wish.acknowledged)
            if wish.ended is None:
                version, self._wanted = wish.version, wish.workers
                self._launcher.reconcile(self._wanted)
            else:
                # The workers hear of it as well, and leave by themselves.
                self._stopping.wait(RETRY_PAUSE_S)
            if report.exits and not wish.acknowledged:
                # A job master that does not take an exit now must not be asked without a pause.
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


# The values as messages.

_REASONS = {job_pb2.ExitReason.Value(f"EXIT_REASON_{one.name}"): one for one in ExitReason}


def report_message(
    report: LauncherReport, *, known_version: int, wait_ms: int
) -> job_pb2.LaunchRequest:
    """Return a report as the message of the call."""
    exits = [
        job_pb2.WorkerExit(
            worker_id=one.worker_id,
            reason=job_pb2.ExitReason.Value(f"EXIT_REASON_{one.reason.name}"),
            code=one.code,
            last_words=one.last_words,
        )
        for one in report.exits
    ]
    return job_pb2.LaunchRequest(
        running=report.running, exits=exits, known_version=known_version, wait_ms=wait_ms
    )


def report_of(message: job_pb2.LaunchRequest) -> LauncherReport:
    """Return the report of a message. A reason that this version does not know is a failure."""
    exits = (
        WorkerExit(
            one.worker_id,
            _REASONS.get(one.reason, ExitReason.FAILED),
            one.code,
            one.last_words,
        )
        for one in message.exits
    )
    return LauncherReport(tuple(message.running), tuple(exits))


def wish_message(wish: WorkerWish) -> job_pb2.LaunchResponse:
    """Return a wish as a message."""
    answer = job_pb2.LaunchResponse(
        version=wish.version, wanted=wish.workers, acknowledged=wish.acknowledged
    )
    if wish.ended is not None:
        answer.ended.CopyFrom(job_pb2.JobEnded(state=wish.ended[0], reason=wish.ended[1]))
    return answer


def wish_of(message: job_pb2.LaunchResponse) -> WorkerWish:
    """Return the wish of a message."""
    ended = (message.ended.state, message.ended.reason) if message.HasField("ended") else None
    return WorkerWish(message.version, tuple(message.wanted), tuple(message.acknowledged), ended)
