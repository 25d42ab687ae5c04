"""Jobs from Python, for notebooks and programs: ``backstay.train`` and ``backstay.submit``.

They run what the commands ``backstay train`` and ``backstay jobs`` run. They never print, read the
terminal, handle signals or end the process. What the commands would say goes to the logger
``backstay.jobs_api``. Errors are those of ``backstay.errors``. May import every package.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backstay._proto.v1 import job_pb2
from backstay.errors import ConfigError, JobError, JobRefused, UnknownJob
from backstay.job_spec import JobSpec
from backstay.runner.cluster_jobs import Cluster
from backstay.runner.job_run import DATA_OF_USE, RunOptions, job_of, supervisor_of
from backstay.runner.metrics_log import evaluations_of, figures_of
from backstay.runner.outcome import Outcome
from backstay.runner.place import BegunJob, Published, place_named, place_names
from backstay.runner.show import Servers, Show
from backstay.runner.stop_signals import StopOrder

__all__ = ["Job", "submit", "train"]

HOOKS_OUTPUT = "hooks.log"

log = logging.getLogger(__name__)
# Without a handler of the program's own, Python would print warnings.
logging.getLogger("backstay").addHandler(logging.NullHandler())


class Job(ABC):
    """A job that was submitted. Its calls may come from any thread."""

    def __init__(self, spec: JobSpec) -> None:
        """Use ``submit``."""
        self._spec = spec

    @property
    def name(self) -> str:
        """Its name."""
        return self._spec.name

    @property
    @abstractmethod
    def state(self) -> str:
        """``starting``, ``running``, ``done``, ``stopped``, ``failed`` or ``unsaved``."""

    @property
    def metrics(self) -> dict[str, Any]:
        """The newest figures: those of a line of ``metrics.jsonl``, and ``evaluations``.

        ``evaluations`` has round, step and metrics of each evaluation. Empty: there are none yet.
        """
        status = self._status()
        if status is None:
            return {}
        known = {"state": self.state, "evaluations": evaluations_of(status)}
        return {**figures_of(status), **known}

    @abstractmethod
    def scale(self, workers: int) -> int:
        """Have so many workers; return how many were wanted before.

        Raises:
            InvalidRequest: It is outside of the job's min and max (on Kubernetes: ``JobRefused``).
            JobRefused: The job has no job master now.
        """

    @abstractmethod
    def stop(self, reason: str = "Job.stop") -> None:
        """Have the job end in good order; the same call goes on with it later.

        Returns at once; ``wait`` waits for the end.

        Args:
            reason: Shown wherever the job is.

        Raises:
            JobRefused: On Kubernetes: the job has no job master now.
        """

    @abstractmethod
    def wait(self, timeout: float | None = None) -> dict[str, Any] | None:
        """Wait until the job is over.

        Args:
            timeout: Seconds; None: no limit.

        Returns:
            What ``backstay train --json`` prints; ``state`` says whether all went well. None: the
            job is not over yet.

        Raises:
            BackstayError: What the command would end with, such as a ``ConfigError``.
        """

    @abstractmethod
    def _status(self) -> job_pb2.JobStatus | None:
        """Return how the job goes; None: not known yet."""

    @abstractmethod
    def _interrupted(self) -> None:
        """Take in that the user has interrupted ``train``."""


def submit(
    job: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    on: str | None = None,
    use: str = "training",
    fresh: bool = False,
    config_file: str | os.PathLike[str] | None = None,
    **fields: Any,
) -> Job:
    """Begin a job, and return at once.

    On this machine its processes belong to this one, and end with it. On Kubernetes the job goes on
    by itself, and the same call finds it again.

    Args:
        job: A job file, or the job as a mapping; None: ``fields`` say everything.
        on: ``"kubernetes"``: as Pods of the cluster that KUBECONFIG names. None: on this machine.
        use: ``"training"``, ``"evaluation"`` or ``"prediction"``.
        fresh: Forget what the job has done before.
        config_file: TOML file with token, certificates and deadlines, section ``[client]``.
        **fields: Fields of the job; they win. Parts of a section are merged:
            ``workers={"initial": 4}``.

    Raises:
        ConfigError: A field is wrong or missing. What only a look at the model file or the data
            shows, ``Job.wait`` raises.
        JobRefused: On Kubernetes: a job of the name runs with other settings or files.
        KubernetesError: The API refuses a call, or does not answer.

    Example:
        >>> job = backstay.submit("job.yaml", on="kubernetes", epochs=3)  # doctest: +SKIP
        >>> job.scale(8)  # doctest: +SKIP
        2
        >>> job.wait()["state"]  # doctest: +SKIP
        'done'
    """
    if on is not None and on not in place_names():
        raise ConfigError(
            f"on: {on!r} is neither None nor {' nor '.join(map(repr, place_names()))}"
        )
    if use not in DATA_OF_USE:
        raise ConfigError(f"use: {use!r} is not one of {', '.join(DATA_OF_USE)}")
    options = RunOptions(
        config_file=None if config_file is None else Path(config_file),
        place=on,
        fresh=fresh,
    )
    given = {**job, **fields} if isinstance(job, Mapping) else fields
    path = None if job is None or isinstance(job, Mapping) else Path(job)
    spec = job_of(path, given, options, use=use, given_by="the call")
    if spec.schedule is not None:
        raise ConfigError(
            f"schedule: `backstay train --on {on}` makes it; to run the job now, schedule=None"
        )
    show = _Logged()
    if on is None:
        return _JobHere(spec, options, show)
    begun = place_named(on).begin(spec, show.say, _sleeps)
    assert begun is not None, "a job without a schedule begins"
    return _JobThere(begun, show)


def train(
    job: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    on: str | None = None,
    use: str = "training",
    fresh: bool = False,
    config_file: str | os.PathLike[str] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """Run a job to its end. ``submit`` has the arguments.

    An interrupt (Ctrl-C, or that of a notebook) stops a job of this machine in good order. A job on
    Kubernetes goes on. ``KeyboardInterrupt`` is raised in both cases.

    Returns:
        What ``backstay train --json`` prints. ``state`` says whether all went well: ``done``,
        ``stopped``, ``failed`` or ``unsaved``.

    Raises:
        BackstayError: See ``submit`` and ``Job.wait``.
    """
    begun = submit(job, on=on, use=use, fresh=fresh, config_file=config_file, **fields)
    try:
        summary = begun.wait()
    except KeyboardInterrupt:
        begun._interrupted()
        raise
    if summary is None:
        raise JobError(f"job {begun.name!r} is not over, and nothing looks on at it any more")
    return summary


class _JobHere(Job):
    """A job on this machine: a thread runs the supervisor, as ``backstay train`` does."""

    def __init__(self, spec: JobSpec, options: RunOptions, show: Show) -> None:
        super().__init__(spec)
        self._stops = StopOrder()
        hooks_output = Path(spec.log_dir) / HOOKS_OUTPUT
        self._supervisor = supervisor_of(spec, options, show, hooks_output=hooks_output)
        self._outcome: Outcome | None = None
        self._error: Exception | None = None
        self._over = threading.Event()
        # As with the command, the end of this process ends the job.
        threading.Thread(target=self._run, name=f"job {spec.name}", daemon=True).start()

    @property
    def state(self) -> str:
        if self._over.is_set():
            return "failed" if self._outcome is None else self._outcome.state
        status = self._supervisor.status
        return "starting" if status is None else status.state

    def scale(self, workers: int) -> int:
        if self._over.is_set():
            raise JobRefused(f"job {self.name!r} is {self.state}: it has no job master any more")
        if not self._supervisor.endpoints:
            raise JobRefused(f"job {self.name!r} has no servers yet; try again when it runs")
        cluster = Cluster.at(self._supervisor.endpoints, self._supervisor.config)
        with cluster.master(self.name) as master:
            return master.scale(workers)

    def stop(self, reason: str = "Job.stop") -> None:
        self._stops.ask(reason)

    def wait(self, timeout: float | None = None) -> dict[str, Any] | None:
        if not self._over.wait(timeout):
            return None
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome.to_mapping(self._spec)

    def _status(self) -> job_pb2.JobStatus | None:
        return self._supervisor.status

    def _interrupted(self) -> None:
        self.stop("interrupted")
        self._over.wait()

    def _run(self) -> None:
        try:
            self._outcome = self._supervisor.run(self._stops)
        except Exception as error:  # noqa: BLE001 (raised again by the thread that waits)
            self._error = error
        self._over.set()


class _JobThere(Job):
    """A job that runs elsewhere; nothing of it runs here."""

    def __init__(self, begun: BegunJob, show: Show) -> None:
        super().__init__(begun.spec)
        self._begun = begun
        self._show = show
        # The connection ends with the last use of this object.
        weakref.finalize(self, begun.close)

    @property
    def state(self) -> str:
        return self._published().state

    def scale(self, workers: int) -> int:
        before: int = self._order("scale", self.name, str(workers))["before"]
        return before

    def stop(self, reason: str = "Job.stop") -> None:
        self._order("stop", self.name, "--reason", reason)

    def wait(self, timeout: float | None = None) -> dict[str, Any] | None:
        outcome = self._begun.follow(self._show, _Deadline(timeout), lambda: False)
        return None if outcome is None else outcome.to_mapping(self._spec)

    def _status(self) -> job_pb2.JobStatus | None:
        return self._published().status

    def _interrupted(self) -> None:
        """Leave the job alone: it goes on."""

    def _published(self) -> Published:
        published = self._begun.published()
        if published is None:
            raise UnknownJob(f"the objects of job {self.name!r} were deleted")
        return published

    def _order(self, *words: str) -> dict[str, Any]:
        """Run a command of ``backstay jobs`` beside the job's master; return its result."""
        if over := self._published().over:
            raise JobRefused(f"job {self.name!r} is {over}: it has no job master any more")
        ran = self._begun.run([*words, "--json"])
        try:
            result: dict[str, Any] = json.loads(ran.output)
        except ValueError:
            # It was ended before it could print its result.
            result = {}
        if ran.exit_code:
            raise JobRefused(result.get("error", f"job {self.name!r}: exit code {ran.exit_code}"))
        return result


class _Deadline(StopOrder):
    """Says stop when a time is over."""

    def __init__(self, timeout_s: float | None) -> None:
        super().__init__()
        self._end_s = None if timeout_s is None else time.monotonic() + timeout_s

    def wait(self, timeout_s: float) -> bool:
        if self._end_s is None:
            return super().wait(timeout_s)
        super().wait(max(0.0, min(timeout_s, self._end_s - time.monotonic())))
        return time.monotonic() >= self._end_s


class _Logged:
    """Shows nothing; what the command would say is logged."""

    def __init__(self) -> None:
        self._trouble = ""

    def __enter__(self) -> _Logged:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, text: str) -> None:
        log.info("%s", text)

    def update(self, status: job_pb2.JobStatus, servers: Servers, trouble: str = "") -> None:
        if trouble and trouble != self._trouble:
            log.info("%s", trouble)
        self._trouble = trouble


def _sleeps(seconds: float) -> bool:
    time.sleep(seconds)
    return False
