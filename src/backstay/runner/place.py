"""Places other than this machine where jobs run, and what commands and Python calls ask of one.

``LAUNCHERS`` (``backstay.job_spec``) has them by name; the one that a user names is imported then.
Nothing else outside of a place's own room knows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from backstay._proto.v1 import job_pb2
from backstay.job_spec import LAUNCHERS, JobSpec
from backstay.master.launcher import class_at
from backstay.runner.outcome import Outcome
from backstay.runner.show import Show
from backstay.runner.stop_signals import StopOrder

__all__ = [
    "BegunJob",
    "JobThere",
    "JobsThere",
    "Place",
    "Published",
    "Ran",
    "WorkerEnd",
    "place_named",
    "place_names",
]


class WorkerEnd(NamedTuple):
    """How a worker ended, and the end of its log."""

    worker: str
    how: str
    last_words: str


@dataclass(frozen=True)
class Published:
    """What a job's master tells those who cannot call it.

    Attributes:
        status: How the job goes; None: its job master has not said.
        over: The state in which the job has ended; empty: it has not.
        reason: Why it ended, if it is not done.
        counts: Ends of workers by reason, since the job master began.
        exits: The newest ends.
        audit: What the counters of records say, if the job has ``audit`` and is over.
    """

    status: job_pb2.JobStatus | None = None
    over: str = ""
    reason: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)
    exits: tuple[WorkerEnd, ...] = ()
    audit: Mapping[str, Any] | None = None

    @property
    def state(self) -> str:
        """The state of the job."""
        return self.over or ("starting" if self.status is None else self.status.state)


class JobThere(NamedTuple):
    """A job of a place.

    Attributes:
        name: Of the job.
        uid: Of the run; empty: no run of its schedule has begun.
        published: What its job master has said.
        schedule: When it runs, as a cron expression; empty: it has no schedule.
        schedule_text: The same for people, with how the runs went.
    """

    name: str
    uid: str
    published: Published
    schedule: str = ""
    schedule_text: str = ""

    @property
    def state(self) -> str:
        """The state of its run."""
        return self.published.state if self.uid else "scheduled"


class Ran(NamedTuple):
    """What a command of ``backstay jobs`` has printed beside a job's master, and its exit code."""

    output: str
    errors: str
    exit_code: int


class BegunJob(Protocol):
    """A job that goes on by itself. A context manager: at its end the connection is closed."""

    spec: JobSpec

    def __enter__(self) -> BegunJob:
        """Use it."""

    def __exit__(self, *_: object) -> None:
        """Close it."""

    def close(self) -> None:
        """Close the connection; the job goes on."""

    @property
    def how_to_end(self) -> str:
        """How a user ends the job without its job master."""

    def published(self) -> Published | None:
        """Return what its job master has said; None: the job was deleted."""

    def follow(
        self, show: Show, stops: StopOrder, asks_to_stop: Callable[[], bool]
    ) -> Outcome | None:
        """Look on at the job; return how it ended, None if it goes on without this.

        An order to stop ends this, if ``asks_to_stop`` does not say that the order is for the job.
        A job that was deleted is a ``JobError``.
        """

    def run(self, words: Sequence[str]) -> Ran:
        """Run a command of ``backstay jobs`` beside its job master; without one: ``JobRefused``."""


class JobsThere(Protocol):
    """The jobs of a place. A context manager: at its end the connection is closed."""

    def __enter__(self) -> JobsThere:
        """Use it."""

    def __exit__(self, *_: object) -> None:
        """Close it."""

    def jobs(self) -> Mapping[str, JobThere]:
        """Return all jobs, by name."""

    def job(self, name: str) -> JobThere:
        """Return one job, or raise ``UnknownJob``."""

    def waits_for(self, job: JobThere) -> str:
        """Return what a job waits for that has not begun; empty: for a moment only."""

    def logs(self, job: JobThere) -> Mapping[str, str]:
        """Return what has a log, by worker."""

    def log(self, job: JobThere, worker: str, lines: int) -> str:
        """Return the end of a log, or raise ``JobRefused``."""

    def run(self, job: JobThere, command: str, words: Sequence[str]) -> Ran:
        """Run a command of ``backstay jobs`` beside the job's master, or raise ``JobRefused``."""


class Place(Protocol):
    """Runs whole jobs. Errors are ``ConfigError`` and those of the place's API."""

    def check(self, config_file: Path | None, *, fresh: bool) -> None:
        """Refuse options of a command that have no meaning here."""

    def plan(self, spec: JobSpec) -> tuple[str, list[str]]:
        """Return what ``begin`` would make, as text, and what to warn of."""

    def begin(
        self, spec: JobSpec, say: Callable[[str], None], stopped: Callable[[float], bool]
    ) -> BegunJob | None:
        """Begin a job; return None if it has a schedule, and nothing runs now.

        Args:
            spec: The job.
            say: Takes warnings, and what was made.
            stopped: Waits for so many seconds; returns whether to give up.

        Raises:
            JobRefused: A job of the name runs already, with other settings or files.
        """

    def jobs(self, namespace: str) -> JobsThere:
        """Return the jobs of a namespace; empty: the one that is set."""


def place_names() -> tuple[str, ...]:
    """Return the names of the places."""
    return tuple(name for name, classes in LAUNCHERS.items() if classes.place)


def place_named(name: str) -> Place:
    """Return a place."""
    place: Place = class_at(LAUNCHERS[name].place)()
    return place
