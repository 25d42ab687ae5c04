"""Looks on at a job on Kubernetes until it is over, or the user leaves it.

It reads the published status. The job goes on without it. Nothing here prints or reads the
terminal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from backstay.errors import JobError, KubernetesError
from backstay.job_spec import JobSpec
from backstay.kubernetes.api import KubernetesApi
from backstay.kubernetes.master_pod import master_pod, pserver_trouble, run_in_master
from backstay.kubernetes.objects import Owner
from backstay.kubernetes.published_status import PublishedStatus, read_status
from backstay.runner.audit import audit_of_mapping
from backstay.runner.outcome import Outcome
from backstay.runner.place import Ran
from backstay.runner.show import Servers, Show
from backstay.runner.stop_signals import StopOrder

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

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the job goes on."""
        self.api.close()

    @property
    def how_to_end(self) -> str:
        """How a user ends the job without its job master."""
        return f"kubectl delete deployment {self.owner.name} -n {self.api.namespace}"

    def run(self, words: Sequence[str]) -> Ran:
        """Run a command of ``backstay jobs`` beside its job master.

        Raises:
            JobRefused: No Pod of the job master runs now.
        """
        return run_in_master(self.api, self.spec.name, words)

    def published(self) -> PublishedStatus | None:
        """Return what its job master has written; None: it was deleted."""
        return read_status(self.api, self.spec.name, self.owner.uid)

    def follow(
        self, show: Show, stops: StopOrder, asks_to_stop: Callable[[], bool]
    ) -> Outcome | None:
        """Look on at the job, as ``backstay.runner.place.BegunJob`` has it."""
        news, is_stopping = _News(show), False
        while True:
            trouble = ""
            try:
                published = self.published()
                if published is None:
                    raise JobError(f"the objects of job {self.spec.name!r} were deleted")
                if published.over:
                    news.show(published, "")
                    return self._outcome(published)
                if news.stands_still(published):
                    waits = master_pod(self.api, self.spec.name).trouble
                    servers = pserver_trouble(self.api, self.spec.name)
                    trouble = "; ".join(filter(None, [waits, servers]))
            except KubernetesError as error:
                trouble = str(error)
            news.show(news.last, trouble)
            if stops.wait(LOOK_PAUSE_S) and not is_stopping:
                is_stopping = asks_to_stop() and self._stop(show)
                if not is_stopping:
                    return None
            if is_stopping:
                # The order was given, so there is nothing to wait for but time.
                time.sleep(LOOK_PAUSE_S)

    def _outcome(self, end: PublishedStatus) -> Outcome:
        audit = None if end.audit is None else audit_of_mapping(end.audit)
        seconds = time.monotonic() - self._begun_s
        return Outcome(end.status, end.over, end.reason, seconds, audit)

    def _stop(self, show: Show) -> bool:
        """Have the job stop; return whether it will."""
        try:
            ran = self.run(["stop", self.spec.name, "--reason", "Ctrl-C"])
        except JobError as error:
            # Such as a job master that is being replaced.
            show.say(f"the job is not stopped: {error}")
            return False
        show.say((ran.output + ran.errors).strip())
        return ran.exit_code == 0


class _News:
    """Shows what is new of a job."""

    def __init__(self, show: Show) -> None:
        self._show = show
        self._said: set[str] = set()
        self._exits: set[str] = set()
        self._trouble_said = ""
        self.last = PublishedStatus()
        self._changed_s = time.monotonic()

    def stands_still(self, published: PublishedStatus) -> bool:
        """Take in what is published; return whether it has not changed for a while."""
        now_s = time.monotonic()
        if published != self.last:
            self.last, self._changed_s = published, now_s
        return now_s - self._changed_s > STANDS_STILL_S

    def show(self, published: PublishedStatus, trouble: str) -> None:
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
