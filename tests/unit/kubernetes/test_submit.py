"""What a submission does with what is there already, and what a handle of a job looks at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, cast

import pytest

from backstay._proto.v1 import job_pb2
from backstay.cli.progress import Display
from backstay.consensus.records.jobs import OVER_STATES
from backstay.errors import JobError, JobRefused, KubernetesError, UnknownJob
from backstay.job_spec import JobSpec
from backstay.jobs_api import _JobThere
from backstay.kubernetes import follow as kubernetes_follow
from backstay.kubernetes import jobs as kubernetes_jobs
from backstay.kubernetes.api import KubernetesApi
from backstay.kubernetes.follow import BegunJob
from backstay.kubernetes.names import object_name
from backstay.kubernetes.objects import (
    JobObjects,
    Owner,
    OwnServers,
    job_objects,
    spec_in_pods,
)
from backstay.kubernetes.pserver_objects import server_settings
from backstay.kubernetes.published_status import status_data
from backstay.kubernetes.submit import check_free, earlier_run, submit
from backstay.master.hosted_launcher import ExitsSeen
from backstay.runner.place import Ran
from backstay.runner.stop_signals import StopOrder
from tests.unit.kubernetes.kubernetes_objects import Objects

JOB = "census"
NAME = object_name(JOB)


class Cluster(Objects):
    """Objects that can be made; what a test does meanwhile happens while a command waits."""

    def create(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
        name = body["metadata"]["name"]
        if (kind, name) in self.found:
            raise KubernetesError("already exists", status=409, reason="AlreadyExists")
        version = self._version()
        given = {"ownerReferences": [], **body["metadata"]}
        made = {**body, "metadata": {**given, "uid": f"{kind}-{version}"}}
        made["metadata"]["resourceVersion"] = version
        self.found[kind, name] = made
        return made

    def delete(self, kind: str, name: str, *, at_once: bool = False, uid: str = "") -> None:
        gone = self.found.pop((kind, name))
        assert gone["metadata"]["uid"] == uid
        self.deleted.append(name)
        for key, one in list(self.found.items()):
            if any(owner["uid"] == uid for owner in one["metadata"].get("ownerReferences", ())):
                del self.found[key]


def spec_of(job: str = JOB) -> JobSpec:
    document = {
        "name": job,
        "model": "/home/me/zoo/model.py",
        "training": "/data/a.csv",
        "checkpoint": {"every": "none"},
        "servers": {"local": 1, "settings": {"store_endpoints": ["etcd:2379"]}},
        "kubernetes": {"image": "registry/backstay:1", "insecure": True},
    }
    return JobSpec.from_mapping(document)


def objects_of(
    job: str = JOB,
    files: Mapping[str, str] | None = None,
    run: str = "",
    *,
    has_own: bool = True,
    cluster: str = "run",
) -> JobObjects:
    spec = spec_of(job)
    own = OwnServers(server_settings(spec, 1), cluster) if has_own else None
    in_pods = spec_in_pods(spec, ["ps-0:7000"])
    return job_objects(in_pods, files or {"model.py": ""}, own, run=run)


def never(_seconds: float) -> bool:
    return False


def api_of(cluster: Cluster) -> KubernetesApi:
    return cast(KubernetesApi, cluster)


def publish(cluster: Cluster, **data: str) -> None:
    cluster.patch("configmaps", f"{NAME}.status", {"data": data})


def test_an_unsaved_job_goes_on_once_its_last_job_master_has_left() -> None:
    cluster, objects = Cluster(JOB), objects_of()
    submit(api_of(cluster), JOB, objects, never)
    publish(cluster, over="unsaved")
    said_before: list[str] = []

    def leave(_seconds: float) -> bool:
        # The order of the old job master comes late.
        said_before.append(cluster.data()["over"])
        cluster.patch("deployments", NAME, {"spec": {"replicas": 0}})
        return False

    submit(api_of(cluster), JOB, objects, leave)
    assert said_before == ["unsaved"]
    assert cluster.replicas("deployments", NAME) == 1
    assert not cluster.data()["over"]


def test_new_servers_remove_the_records_of_those_before_them() -> None:
    cluster = Cluster(JOB)
    submit(api_of(cluster), JOB, objects_of(run="census-1", cluster="first"), never)
    publish(cluster, over="done")
    submit(api_of(cluster), JOB, objects_of(run="census-2", cluster="second"), never)
    stateful_set = cluster.found["statefulsets", f"{NAME}-pserver"]
    (container,) = stateful_set["spec"]["template"]["spec"]["containers"]
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert variables["BACKSTAY_CLUSTER"] == f"{NAME}-second"
    assert variables["BACKSTAY_REPLACES_CLUSTER"] == f"{NAME}-first"
    # The same run again makes nothing anew.
    submit(api_of(cluster), JOB, objects_of(run="census-2", cluster="third"), never)
    assert cluster.found["statefulsets", f"{NAME}-pserver"] is stateful_set


@pytest.mark.parametrize("killed_at", ["deployments", "configmaps", "services"])
def test_a_command_that_is_killed_between_two_runs_leaves_no_records_behind(killed_at: str) -> None:
    class Killed(BaseException):
        """As a signal ends a process: at once."""

    class UntilKilled(Cluster):
        is_killed_at = ""

        def create(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
            if kind == self.is_killed_at:
                raise Killed
            return super().create(kind, body)

        def delete(self, kind: str, name: str, *, at_once: bool = False, uid: str = "") -> None:
            servers = self.found["statefulsets", f"{NAME}-pserver"]
            super().delete(kind, name, at_once=at_once, uid=uid)
            if self.is_killed_at == "deployments":
                # What the Deployment owned goes after it.
                self.found["statefulsets", f"{NAME}-pserver"] = servers
                raise Killed

    cluster = UntilKilled(JOB)
    submit(api_of(cluster), JOB, objects_of(cluster="first"), never)
    publish(cluster, over="done")
    cluster.is_killed_at = killed_at
    with pytest.raises(Killed):
        submit(api_of(cluster), JOB, objects_of(cluster="second"), never)
    cluster.is_killed_at = ""

    def go(_seconds: float) -> bool:
        cluster.found.pop(("statefulsets", f"{NAME}-pserver"))
        return False

    submit(api_of(cluster), JOB, objects_of(cluster="third"), go)
    (container,) = cluster.found["statefulsets", f"{NAME}-pserver"]["spec"]["template"]["spec"][
        "containers"
    ]
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert variables["BACKSTAY_CLUSTER"] == f"{NAME}-third"
    assert variables["BACKSTAY_REPLACES_CLUSTER"] == f"{NAME}-first"


def test_a_job_on_a_shared_cluster_begins_again_without_the_right_to_see_servers() -> None:
    class WithoutServers(Cluster):
        def get(self, kind: str, name: str) -> dict[str, Any] | None:
            if kind == "statefulsets":
                raise KubernetesError("forbidden", status=403, reason="Forbidden")
            return super().get(kind, name)

    cluster = WithoutServers(JOB)
    submit(api_of(cluster), JOB, objects_of(run="census-1", has_own=False), never)
    publish(cluster, over="done")
    submit(api_of(cluster), JOB, objects_of(run="census-2", has_own=False), never)
    assert cluster.deleted == [NAME]


@pytest.mark.parametrize("other", ["production", f"{NAME}-two-first", f"{NAME}x-first", NAME])
def test_records_of_a_cluster_that_is_not_of_the_job_are_left_alone(other: str) -> None:
    cluster = Cluster(JOB)
    submit(api_of(cluster), JOB, objects_of(run="census-1", cluster="first"), never)
    publish(cluster, over="done")
    container = container_of(cluster)
    (said,) = [one for one in container["env"] if one["name"] == "BACKSTAY_CLUSTER"]
    said["value"] = other
    submit(api_of(cluster), JOB, objects_of(run="census-2", cluster="second"), never)
    names = [one["name"] for one in container_of(cluster)["env"]]
    assert "BACKSTAY_REPLACES_CLUSTER" not in names


def container_of(cluster: Cluster) -> dict[str, Any]:
    stateful_set = cluster.found["statefulsets", f"{NAME}-pserver"]
    (container,) = stateful_set["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = container
    return found


def test_a_deployment_of_another_job_is_left_alone() -> None:
    cluster = Cluster(JOB)
    submit(api_of(cluster), JOB, objects_of(), never)
    publish(cluster, over="done")
    cluster.found["deployments", NAME]["metadata"]["annotations"]["backstay/job-name"] = "other"
    with pytest.raises(JobRefused, match="that is not of job 'census'; rename the job"):
        submit(api_of(cluster), JOB, objects_of(), never)
    assert cluster.deleted == []


def test_an_object_that_belongs_to_nobody_is_not_waited_for() -> None:
    cluster = Cluster(JOB)
    name = objects_of().files["metadata"]["name"]
    cluster.create("configmaps", {"metadata": {"name": name}})
    with pytest.raises(JobRefused, match=f"a ConfigMap {name} is there that is of no job"):
        submit(api_of(cluster), JOB, objects_of(), lambda _: True)


def test_a_run_sees_that_another_job_runs_before_it_begins() -> None:
    cluster = Cluster(JOB)
    run = objects_of(run="census-2")
    check_free(api_of(cluster), JOB, run)
    submit(api_of(cluster), JOB, objects_of(files={"model.py": "# other"}), never)
    with pytest.raises(JobRefused, match="runs on Kubernetes already"):
        check_free(api_of(cluster), JOB, run)
    publish(cluster, over="done")
    check_free(api_of(cluster), JOB, run)


SCHEDULE = Owner(NAME, "cronjob-1", "CronJob")
STATES = [
    (over, begun, replicas, has_own, made_by)
    for over in ("", *OVER_STATES)
    for begun in (False, True)
    for replicas in (0, 1)
    for has_own in (False, True)
    for made_by in ("user", "other user", "run", "other run")
]


@cache
def objects_by(whose: str, has_own: bool) -> JobObjects:
    """What a user or a run makes; "user" and "run" are those that ask."""
    files = {"model.py": "# other"} if whose == "other user" else None
    run = {"run": "census-1", "other run": "census-0"}.get(whose, "")
    return objects_of(files=files, run=run, has_own=has_own)


class Asked(Exception):
    """A command has waited."""


def waits(_seconds: float) -> bool:
    raise Asked


@pytest.mark.parametrize(("over", "begun", "replicas", "has_own", "made_by"), STATES)
@pytest.mark.parametrize("asks", ["user", "run"])
def test_no_command_gives_up_a_job_that_runs_or_rows_that_no_checkpoint_has(
    over: str, begun: bool, replicas: int, has_own: bool, made_by: str, asks: str
) -> None:
    """Whatever is there, and whoever asks: what must stay stays, and one job is begun at most."""
    cluster = Cluster(JOB)
    is_run = made_by.endswith("run")
    submit(api_of(cluster), JOB, objects_by(made_by, has_own), never)
    deployment = cluster.found["deployments", NAME]
    if is_run:
        deployment["metadata"]["ownerReferences"] = [SCHEDULE.reference()]
    cluster.patch("deployments", NAME, {"spec": {"replicas": replicas}})
    status = status_data(job_pb2.JobStatus(master_starts=1), ExitsSeen()) if begun else {}
    publish(cluster, **status, over=over)
    before = deployment["metadata"]["uid"]
    objects = objects_by(asks, has_own=True)
    goes_on: Owner | None = None
    try:
        if asks == "run":
            goes_on = earlier_run(api_of(cluster), JOB, objects, SCHEDULE, waits)
        if goes_on is None:
            submit(api_of(cluster), JOB, objects, waits)
    except (Asked, JobRefused):
        assert cluster.deleted == []
    else:
        assert cluster.replicas("deployments", NAME) == 1 or (made_by == asks == "run" and over)
    never_began = made_by == "other run" and asks == "run" and not (begun or replicas or over)
    must_stay = (not over and not never_began) or (over == "unsaved" and has_own)
    if must_stay:
        assert cluster.found["deployments", NAME]["metadata"]["uid"] == before
    if goes_on is not None:
        # Only a run of the same schedule is waited for.
        assert (made_by, goes_on.uid) == ("other run", before)
        assert over in ("", "unsaved")


def test_the_status_of_jobs_is_found_without_their_files() -> None:
    objects = objects_of()
    wanted = dict(pair.split("=") for pair in kubernetes_jobs.STATUS_SELECTOR.split(","))
    assert wanted.items() <= objects.status["metadata"]["labels"].items()
    assert not wanted.items() <= objects.files["metadata"]["labels"].items()


def handle(cluster: Cluster) -> _JobThere:
    owner = submit(api_of(cluster), JOB, objects_of(), never)
    begun = BegunJob(api_of(cluster), spec_of(), owner)
    return _JobThere(begun, Display(JOB))


def test_a_handle_does_not_take_another_job_of_the_name_for_its_own() -> None:
    cluster = Cluster(JOB)
    job = handle(cluster)
    assert job.state == "starting"
    cluster.make_job("another")
    for use in (lambda: job.state, lambda: job.scale(2), job.stop):
        with pytest.raises(UnknownJob, match="were deleted"):
            use()
    with pytest.raises(JobError, match="were deleted"):
        job.wait(timeout=0)


def test_a_job_that_is_over_takes_no_orders_and_says_why() -> None:
    cluster = Cluster(JOB)
    job = handle(cluster)
    publish(cluster, over="done")
    for use in (lambda: job.scale(2), job.stop):
        with pytest.raises(JobRefused, match="job 'census' is done: it has no job master any more"):
            use()


def test_a_stop_that_does_not_reach_the_job_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, stops = Cluster(JOB), StopOrder()
    said: list[str] = []
    owner = submit(api_of(cluster), JOB, objects_of(), never)
    publish(cluster, **status_data(job_pb2.JobStatus(master_starts=1), ExitsSeen()))

    def no_master(*_: object) -> None:
        raise JobRefused("it has no job master now")

    monkeypatch.setattr(kubernetes_follow, "run_in_master", no_master)
    show = Display(JOB)
    monkeypatch.setattr(show, "say", said.append)
    stops.ask("Ctrl-C")
    begun = BegunJob(api_of(cluster), spec_of(), owner)
    assert begun.follow(show, stops, lambda: True) is None
    assert said[-1] == "the job is not stopped: it has no job master now"


@pytest.mark.parametrize(
    ("ran", "said"),
    [
        (Ran('{"error": "workers: 9 is more than max"}', "Error: other words", 1), "more than max"),
        (Ran("", "Killed", 137), "job 'census': exit code 137"),
    ],
)
def test_a_refused_order_says_why_by_its_field(ran: Ran, said: str) -> None:
    class Refusing(BegunJob):
        def run(self, words: Sequence[str]) -> Ran:
            assert [*words] == ["scale", JOB, "9", "--json"]
            return ran

    cluster = Cluster(JOB)
    owner = submit(api_of(cluster), JOB, objects_of(), never)
    publish(cluster, **status_data(job_pb2.JobStatus(master_starts=1), ExitsSeen()))
    job = _JobThere(Refusing(api_of(cluster), spec_of(), owner), Display(JOB))
    with pytest.raises(JobRefused, match=said):
        job.scale(9)
