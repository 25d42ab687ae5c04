"""Looks on at a job on Kubernetes until it is over, or the user leaves it.

It reads the published status. The job goes on without it. Nothing here prints or reads the
terminal.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from backstay.errors import JobError, KubernetesError
from backstay.job_spec import JobSpec
from backstay.kubernetes.api import KubernetesApi
from backstay.kubernetes.exec import run_in_master
from backstay.kubernetes.master_pod import master_pod, pserver_trouble
from backstay.kubernetes.objects import Owner
from backstay.kubernetes.published_status import PublishedStatus, read_status
from backstay.runner.audit import audit_of_mapping
from backstay.runner.progress import Servers, Show
from backstay.runner.stop_signals import StopOrder
from backstay.runner.supervisor import Outcome

__all__ = ["BegunJob"]

LOOK_PAUSE_S = 1.0
# After a status that has not changed for so long the job master's Pod is looked at.
STANDS_STILL_S = 3.0


class BegunJob:
    """A job whose objects are made. A context manager."""

    def __init__(self, api: KubernetesApi, spec: JobSpec, owner: Owner) -> None:
        """Take the connection over.

        Args:
            api: The namespace of the job.
            spec: The job.
            owner: Its Deployment.
        """
        self.api = api
        self.spec = spec
        self.owner = owner
        self._begun_s = time.monotonic()

    def __enter__(self) -> BegunJob:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.api.close()

    @property
    def deployment(self) -> str:
        """Name of its Deployment."""
        return self.owner.name

    def published(self) -> PublishedStatus | None:
        """Return what its job master has written; None: it was deleted.

        Raises:
            KubernetesError: The API refuses the call, or does not answer.
        """
        return read_status(self.api, self.spec.name, self.owner.uid)

    @property
    def namespace(self) -> str:
        """Of the job."""
        return self.api.namespace

    def follow(
        self, show: Show, stops: StopOrder, asks_to_stop: Callable[[], bool]
    ) -> Outcome | None:
        """Look on at the job.

        Args:
            show: Where its progress is shown.
            stops: Ends this, if ``asks_to_stop`` does not say that it stops the job.
            asks_to_stop: Whether the order is for the job.

        Returns:
            How the job ended; None: it goes on.

        Raises:
            JobError: Its objects were deleted.
        """
        end = _Follower(self, show, stops, asks_to_stop).follow()
        if end is None:
            return None
        audit = None if end.audit is None else audit_of_mapping(end.audit)
        seconds = time.monotonic() - self._begun_s
        return Outcome(end.status, end.over, end.reason, seconds, audit)


class _Follower:
    """Looks on at a job until it is over, or the user leaves it."""

    def __init__(
        self,
        begun: BegunJob,
        show: Show,
        stops: StopOrder,
        asks_to_stop: Callable[[], bool],
    ) -> None:
        self._begun = begun
        self._api = begun.api
        self._spec = begun.spec
        self._show = show
        self._stops = stops
        self._asks_to_stop = asks_to_stop
        self._said: set[str] = set()
        self._exits: set[str] = set()
        self._trouble_said = ""
        self._is_stopping = False
        self._last = PublishedStatus()
        self._changed_s = time.monotonic()

    def follow(self) -> PublishedStatus | None:
        """Return how the job ended; None: it goes on without this command."""
        while True:
            trouble = ""
            try:
                published = self._begun.published()
                if published is None:
                    raise JobError(f"the objects of job {self._spec.name!r} were deleted")
                if published.over:
                    self._look(published, "")
                    return published
                now_s = time.monotonic()
                if published != self._last:
                    self._last, self._changed_s = published, now_s
                if now_s - self._changed_s > STANDS_STILL_S:
                    waits = master_pod(self._api, self._spec.name).trouble
                    servers = pserver_trouble(self._api, self._spec.name)
                    trouble = "; ".join(filter(None, [waits, servers]))
            except KubernetesError as error:
                trouble = str(error)
            self._look(self._last, trouble)
            if self._stops.wait(LOOK_PAUSE_S) and not self._is_stopping and not self._stop():
                return None
            if self._is_stopping:
                # The order was given, so there is nothing to wait for but time.
                time.sleep(LOOK_PAUSE_S)

    def _look(self, published: PublishedStatus, trouble: str) -> None:
        """Show what is new."""
        for worker, how, last in published.exits:
            if worker not in self._exits:
                self._exits.add(worker)
                words = f":\n{last.strip()}" if last.strip() else ""
                self._show.say(f"worker {worker} {how}{words}")
        if published.status is not None:
            now = trouble or published.status.trouble
            if now and now != self._trouble_said:
                self._show.say(now)
            self._trouble_said = now
            self._show.update(published.status, Servers(), trouble)
        elif trouble and trouble not in self._said:
            self._said.add(trouble)
            self._show.say(trouble)

    def _stop(self) -> bool:
        """Find out what the order means; return whether to look on until the job has stopped."""
        if not self._asks_to_stop():
            return False
        words = ["stop", self._spec.name, "--reason", "Ctrl-C"]
        try:
            ran = run_in_master(self._api, self._spec.name, words)
        except JobError as error:
            # Such as a job master that is being replaced.
            self._show.say(f"the job is not stopped: {error}")
            return False
        self._show.say((ran.output + ran.errors).strip())
        self._is_stopping = ran.exit_code == 0
        return self._is_stopping
