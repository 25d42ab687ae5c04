"""Which Pods of a run another one takes the place of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from backstay._proto.v1 import job_pb2
from backstay.errors import BackstayError, ConfigError, JobError, JobRefused, KubernetesError
from backstay.exit_codes import ExitCode
from backstay.job_spec import HooksSpec
from backstay.kubernetes import scheduled_run
from backstay.kubernetes.api import KubernetesApi
from backstay.kubernetes.names import RUN
from backstay.kubernetes.objects import JobObjects, Owner
from backstay.kubernetes.published_status import status_data
from backstay.kubernetes.scheduled_run import exit_code_of
from backstay.kubernetes.submit import submit
from backstay.master.hosted_launcher import ExitsSeen
from backstay.runner.outcome import Outcome
from backstay.runner.stop_signals import StopOrder
from tests.unit.kubernetes.test_submit import (
    JOB,
    NAME,
    Cluster,
    api_of,
    never,
    objects_of,
    publish,
    spec_of,
)

SCHEDULE = Owner(NAME, "cronjob-1", "CronJob")


@pytest.mark.parametrize(
    ("error", "stopped", "code"),
    [
        (KubernetesError("no answer"), False, ExitCode.AGAIN),
        (KubernetesError("conflict", status=409), False, ExitCode.AGAIN),
        (KubernetesError("unavailable", status=503), False, ExitCode.AGAIN),
        (KubernetesError("too many requests", status=429), False, ExitCode.AGAIN),
        (KubernetesError("forbidden: exceeded quota: pods", status=403), False, ExitCode.AGAIN),
        # It was tried a few times then.
        (KubernetesError("forbidden", status=403), False, 1),
        (KubernetesError("invalid", status=422), False, 1),
        (JobRefused("a job of the name runs"), False, 1),
        (JobError("the hook was stopped"), True, ExitCode.AGAIN),
        (JobError("the hook failed"), False, 1),
        (ConfigError("the CronJob is gone"), True, 2),
    ],
)
def test_a_run_goes_on_in_another_pod_unless_that_would_end_in_the_same_way(
    error: BackstayError, stopped: bool, code: int
) -> None:
    assert exit_code_of(error, stopped=stopped) == code


class Runs:
    """One run of a schedule, on objects that the API has; what it calls is noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cluster = Cluster(JOB)
        self.cluster.found["cronjobs", NAME] = {"metadata": {"uid": SCHEDULE.uid}}
        self.called: list[tuple[str, ...]] = []
        self.waited = 0
        self._monkeypatch = monkeypatch

    def has_made(self, objects: JobObjects, owner: Owner | None = SCHEDULE) -> None:
        """Have the objects of an earlier run, or of a job that the schedule did not make."""
        submit(api_of(self.cluster), JOB, objects, never)
        if owner is not None:
            metadata = self.cluster.found["deployments", NAME]["metadata"]
            metadata["ownerReferences"] = [owner.reference()]

    def run(self, name: str, meanwhile: Callable[[], None]) -> Outcome | None:
        """Carry out a run; whenever it waits, something happens."""
        self.stops = stops = StopOrder()

        def wait(_timeout_s: float) -> bool:
            self.waited += 1
            meanwhile()
            return stops.asked

        self._monkeypatch.setattr(stops, "wait", wait)
        self._monkeypatch.setattr(KubernetesApi, "in_pod", lambda _: api_of(self.cluster))
        made = objects_of(run=name)
        self._monkeypatch.setattr(scheduled_run, "objects_of", lambda *_: made)
        self._monkeypatch.setattr(
            scheduled_run, "run_hooks", lambda hooks, *_, **__: self.called.append(hooks)
        )
        spec = replace(spec_of(), hooks=HooksSpec(before=("fetch",), after=("report",)))
        return scheduled_run._Run(spec, name, stops).to_its_end()

    def end(self, over: str) -> None:
        """Do what a job master does at the end of a job."""
        status = status_data(job_pb2.JobStatus(master_starts=1), ExitsSeen())
        publish(self.cluster, **status, over=over, reason=f"it is {over}")
        self.cluster.patch("deployments", NAME, {"spec": {"replicas": 0}})

    @property
    def run_there(self) -> str:
        run: str = self.cluster.found["deployments", NAME]["metadata"]["annotations"].get(RUN, "")
        return run


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(monkeypatch)


def test_a_run_that_is_refused_calls_no_hook(runs: Runs) -> None:
    runs.has_made(objects_of(files={"model.py": "# other"}), owner=None)
    with pytest.raises(JobRefused, match="runs on Kubernetes already"):
        runs.run("census-2", lambda: None)
    assert runs.called == []


@pytest.mark.parametrize("ended", ["", "unsaved"])
def test_a_run_begins_once_the_one_before_it_is_over(runs: Runs, ended: str) -> None:
    runs.has_made(objects_of(run="census-1"))
    if ended:
        runs.end(ended)
    looks: list[tuple[str, int]] = []

    def ends() -> None:
        looks.append((runs.run_there, runs.cluster.replicas("deployments", NAME)))
        runs.end("done")

    outcome = runs.run("census-2", ends)
    assert outcome is not None
    assert outcome.state == "done"
    # The earlier one has a job master, which ends it.
    assert looks[0] == ("census-1", 1)
    assert looks[-1] == ("census-2", 1)
    assert runs.called == [("fetch",), ("report",)]


def test_rows_that_no_checkpoint_has_are_not_given_up_for_a_new_run(runs: Runs) -> None:
    runs.has_made(objects_of(run="census-1"))
    runs.end("unsaved")
    with pytest.raises(JobError, match=r"is not saved \(it is unsaved\), so no run begins"):
        runs.run("census-2", lambda: runs.end("unsaved"))
    assert runs.run_there == "census-1"
    assert runs.cluster.deleted == []
    assert runs.called == []


def test_rows_are_not_given_up_for_a_job_that_trains_on_another_cluster(runs: Runs) -> None:
    runs.has_made(objects_of())
    runs.end("unsaved")
    with pytest.raises(JobRefused, match="its servers are kept"):
        submit(api_of(runs.cluster), JOB, objects_of(has_own=False), never)
    assert runs.cluster.deleted == []


def test_a_pod_that_is_told_to_end_leaves_the_earlier_run_to_the_next_one(runs: Runs) -> None:
    runs.has_made(objects_of(run="census-1"))
    runs.end("unsaved")
    assert runs.run("census-2", lambda: runs.stops.ask("SIGTERM")) is None
    assert runs.run_there == "census-1"
    # The next Pod of the run looks on at it.
    outcome = runs.run("census-2", lambda: runs.end("done"))
    assert outcome is not None
    assert runs.run_there == "census-2"


def test_a_run_that_never_began_is_not_waited_for(runs: Runs) -> None:
    runs.has_made(objects_of(run="census-1"))
    runs.cluster.patch("deployments", NAME, {"spec": {"replicas": 0}})
    outcome = runs.run("census-2", lambda: runs.end("done"))
    assert outcome is not None
    assert runs.cluster.deleted == [NAME]
    assert runs.run_there == "census-2"


class Beginning(Cluster):
    """An API server that begins: it knows no rights yet, for so many calls of a kind."""

    def __init__(self, status: int, calls: int) -> None:
        super().__init__(JOB)
        self.status = status
        self.left = {"get": calls, "create": calls}

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        self._refuse("get")
        return super().get(kind, name)

    def create(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self._refuse("create")
        return super().create(kind, body)

    def _refuse(self, verb: str) -> None:
        if self.left[verb]:
            self.left[verb] -= 1
            raise KubernetesError("not yet", status=self.status)


@pytest.mark.parametrize("status", [401, 403])
def test_a_run_begins_although_the_api_server_begins_too(runs: Runs, status: int) -> None:
    refused = scheduled_run.FORBIDDEN_TRIES_MAX - 1
    there, runs.cluster = runs.cluster.found, Beginning(status, refused)
    runs.cluster.found = there
    looks = 2 * refused

    def ends() -> None:
        if runs.waited > looks:
            runs.end("done")

    outcome = runs.run("census-1", ends)
    assert outcome is not None
    assert outcome.state == "done"
    assert runs.called == [("fetch",), ("report",)]


def test_a_run_without_a_right_fails_after_a_few_tries(runs: Runs) -> None:
    runs.cluster = Beginning(403, 1000)
    with pytest.raises(KubernetesError, match="not yet") as raised:
        runs.run("census-1", lambda: None)
    assert runs.waited == scheduled_run.FORBIDDEN_TRIES_MAX - 1
    assert exit_code_of(raised.value, stopped=False) == 1
    assert runs.called == []


def test_a_pod_that_is_told_to_end_makes_no_more_tries(runs: Runs) -> None:
    runs.cluster = Beginning(403, 1000)
    with pytest.raises(KubernetesError, match="not yet"):
        runs.run("census-1", lambda: runs.stops.ask("SIGTERM"))
    assert runs.waited == 1
