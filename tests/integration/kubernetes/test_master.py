"""The job master's process on Kubernetes, on real servers: what it publishes, and when it serves.

The API of Kubernetes is a stand-in. ``tests/kubernetes`` has the whole on a real cluster.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest

from backstay._proto.v1 import job_pb2
from backstay.config import ENDPOINT_VARIABLE
from backstay.errors import ConfigError, KubernetesError, NeverReached, UnknownJob
from backstay.exit_codes import ExitCode
from backstay.job_engine.launch import ExitReason
from backstay.job_spec import AutoscaleSpec, JobSpec
from backstay.kubernetes import master as kubernetes_master
from backstay.kubernetes import pod_launcher, server_stop
from backstay.kubernetes.api import KubernetesApi
from backstay.kubernetes.names import object_name
from backstay.kubernetes.owned_job import OwnedJob
from backstay.kubernetes.pod_launcher import PodLauncher
from backstay.kubernetes.published_status import status_data
from backstay.kubernetes.server_scale import ServerScale
from backstay.kubernetes.spec import KubernetesSpec
from backstay.master.config import MasterConfig
from backstay.master.hosted_launcher import ExitsSeen
from backstay.master.job_client import JobClient
from backstay.master.launcher import WorkerProgram
from backstay.pserver.client.inspection import ClusterInspection, slots_short_of_copies
from backstay.pserver.local_cluster import LocalCluster
from tests.integration.counting_jobs import CLIENT, JOB, LIMIT_S, Eventually, counting_spec
from tests.unit.kubernetes.kubernetes_objects import Objects


def served(objects: Objects, endpoints: list[str], spec: JobSpec) -> str:
    """Serve the job as the process does; return how it ended."""
    api = cast(KubernetesApi, objects)
    owned = OwnedJob.find(api, JOB)
    config = MasterConfig(endpoints=tuple(endpoints), client=CLIENT, owner=owned.owner.uid)
    over = kubernetes_master._serve(lambda: config, spec, api, owned)
    asyncio.run(kubernetes_master._end_objects(owned, servers_end=over != "unsaved"))
    return over


def stop_when_open(endpoints: list[str], eventually: Eventually) -> None:
    with closing(JobClient(endpoints, JOB, config=CLIENT)) as client:

        def is_open() -> bool:
            try:
                return client.status().state == "running"
            except UnknownJob:
                return False

        eventually(is_open)
        client.stop("enough")


def test_a_stopped_job_is_over_for_each_job_master_of_its_owner_and_goes_on_under_another(
    endpoints: list[str],
    tmp_path: Path,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kubernetes_master, "PUBLISH_S", 0.05)
    spec, objects = counting_spec(tmp_path), Objects(JOB)
    for uid in ("a", "b"):
        # The user deletes the job and makes it anew.
        objects.make_job(uid)
        stopping = threading.Thread(target=stop_when_open, args=(endpoints, eventually))
        stopping.start()
        assert served(objects, endpoints, spec) == "stopped"
        stopping.join(LIMIT_S)
        data = objects.data()
        assert (data["over"], data["reason"]) == ("stopped", "enough")
        told = {one["message"]: one["involvedObject"]["uid"] for one in objects.events.values()}
        assert told["the job is stopped: enough"] == uid
        objects.events.clear()
        assert '"state": "stopped"' in data["status"]
        assert objects.replicas("deployments", object_name(JOB)) == 0
        # The published end was lost, or never written.
        objects.make_job(uid)
        assert served(objects, endpoints, spec) == "stopped"
        assert objects.data()["over"] == "stopped"
        # It was not: the job is not opened again.
        again = served(objects, endpoints, spec)
        assert (again, objects.data()["over"]) == ("stopped", "stopped")


def test_a_server_waits_for_other_copies_until_the_job_is_over(
    tmp_path: Path, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalCluster(servers=2) as cluster:
        (own, _) = cluster.endpoints
        monkeypatch.setenv(ENDPOINT_VARIABLE, own)
        assert server_stop.main(JOB, LIMIT_S) == 0
        cluster.kill(1)
        # It may have the only copy, and there is no job yet that would say that it is over.
        with ClusterInspection(own, CLIENT) as inspection:
            eventually(lambda: slots_short_of_copies(inspection.routing()) > 0)
        assert server_stop.main(JOB, 0.1) == ExitCode.FAILED
        objects = Objects(JOB)
        objects.make_job("a")
        stopping = threading.Thread(target=stop_when_open, args=([own], eventually))
        stopping.start()
        assert served(objects, [own], counting_spec(tmp_path)) == "stopped"
        stopping.join(LIMIT_S)
        assert server_stop.main(JOB, LIMIT_S) == 0
        cluster.kill(0)
        assert server_stop.main(JOB, LIMIT_S) == ExitCode.NO_ANSWER


def test_a_job_that_cannot_be_opened_leaves_no_workers(
    endpoints: list[str], tmp_path: Path
) -> None:
    spec, objects = counting_spec(tmp_path), Objects(JOB)
    (path,) = spec.data["training"].paths
    Path(path).write_text("", encoding="utf-8")
    objects.make_job("a")
    objects.make("pods", "w-0", "w-0", "a", status={"phase": "Running"})
    objects.found["pods", "w-0"]["metadata"]["name"] = "w-0"
    assert served(objects, endpoints, spec) == "failed"
    assert objects.data()["over"] == "failed"
    assert objects.deleted == ["w-0"]


def test_servers_on_lost_nodes_make_room_before_one_has_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    class Servers:
        def look(self) -> None:
            calls.append("look")

    def reach(*_: object) -> None:
        calls.append("reach")
        if len(calls) < 3:
            raise NeverReached("none has answered")

    monkeypatch.setattr(kubernetes_master, "reach", reach)
    config = MasterConfig(endpoints=("ps-0:7000",), client=CLIENT, servers_end=True)
    kubernetes_master._reach(config, cast(ServerScale, Servers()))
    assert calls == ["reach", "look", "reach"]
    calls.clear()
    with pytest.raises(NeverReached):
        kubernetes_master._reach(config, None)


def test_the_launcher_of_a_deleted_job_makes_no_workers_for_the_next_one(
    tmp_path: Path, eventually: Eventually
) -> None:
    objects = Objects(JOB)
    objects.make_job("b")
    spec = counting_spec(tmp_path, kubernetes=KubernetesSpec(image="registry/backstay:1"))
    launcher = PodLauncher(WorkerProgram(spec, {}, "a"), cast(KubernetesApi, objects))
    try:
        launcher.reconcile(["w-0"])
        eventually(lambda: "of this job is gone; no worker is started" in launcher.trouble())
        assert launcher.report().running == ()
    finally:
        launcher.close()


def test_a_pod_that_cannot_be_described_is_an_exit_of_its_worker(
    tmp_path: Path, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: object, **_more: object) -> None:
        raise TypeError("a fault of ours")

    monkeypatch.setattr(pod_launcher, "worker_pod", broken)
    objects = Objects(JOB)
    objects.make_job("a")
    spec = counting_spec(tmp_path, kubernetes=KubernetesSpec(image="registry/backstay:1"))
    launcher = PodLauncher(WorkerProgram(spec, {}, "a"), cast(KubernetesApi, objects))
    try:
        launcher.reconcile(["w-0"])
        eventually(lambda: launcher.report().exits != ())
        (end,) = launcher.report().exits
        assert (end.reason, end.last_words) == (
            ExitReason.CANNOT_START,
            "TypeError: a fault of ours",
        )
    finally:
        launcher.close()


def test_a_wrong_setting_ends_a_job_that_never_was_served_and_no_other(tmp_path: Path) -> None:
    def configure() -> MasterConfig:
        raise ConfigError("token: is missing")

    spec, objects = counting_spec(tmp_path), Objects(JOB)
    api = cast(KubernetesApi, objects)
    objects.make_job("a")
    assert kubernetes_master._serve(configure, spec, api, OwnedJob.find(api, JOB)) == "failed"
    assert objects.data()["over"] == "failed"
    # An earlier process has served it, and may serve it still.
    objects.make_job("b")
    owned = OwnedJob.find(api, JOB)
    owned.publish(status_data(job_pb2.JobStatus(master_starts=1), ExitsSeen()))
    with pytest.raises(ConfigError, match="token: is missing"):
        kubernetes_master._serve(configure, spec, api, owned)
    assert "over" not in objects.data()


def test_a_job_master_that_starts_while_the_api_is_away_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Away(Objects):
        calls = 0

        def get(self, kind: str, name: str) -> dict[str, Any] | None:
            self.calls += 1
            if self.calls < 3:
                raise KubernetesError("Kubernetes does not answer")
            return super().get(kind, name)

    monkeypatch.setattr(kubernetes_master, "RETRY_S", 0.0)
    objects = Away(JOB)
    objects.make_job("a")
    assert kubernetes_master._find(cast(KubernetesApi, objects), JOB).owner.uid == "a"


def test_a_job_master_without_a_right_ends_soon_and_says_which(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Forbidding(Objects):
        calls = 0

        def get(self, kind: str, name: str) -> dict[str, Any] | None:
            self.calls += 1
            raise KubernetesError(
                f'{kind} "{name}" is forbidden: User "system:serviceaccount:team:ours" cannot get '
                f'resource "{kind}" in API group "apps" in the namespace "team"',
                status=403,
            )

    monkeypatch.setattr(kubernetes_master, "RETRY_S", 0.0)
    objects = Forbidding(JOB)
    with pytest.raises(KubernetesError, match="ServiceAccount ours lacks the right to get deploy"):
        kubernetes_master._find(cast(KubernetesApi, objects), JOB)
    assert objects.calls == kubernetes_master.FORBIDDEN_TRIES_MAX


def test_a_right_that_the_numbers_need_is_shown_until_it_is_there(
    endpoints: list[str], tmp_path: Path, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Scale:
        is_forbidden = True

        async def look(self) -> None:
            if self.is_forbidden:
                raise KubernetesError(
                    'User "system:serviceaccount:team:ours" cannot patch resource '
                    '"statefulsets/scale" in API group "apps"',
                    status=403,
                )

    monkeypatch.setattr(kubernetes_master, "PLAN_PAUSE_S", 0.01)
    scale = Scale()
    monkeypatch.setattr(kubernetes_master, "JobScale", lambda *_: scale)
    spec, objects = counting_spec(tmp_path, autoscale=AutoscaleSpec()), Objects(JOB)
    objects.make_job("a")
    found: list[str] = []

    def look_on() -> None:
        with closing(JobClient(endpoints, JOB, config=CLIENT)) as client:

            def trouble() -> str:
                try:
                    return client.status().trouble
                except UnknownJob:
                    return "unknown"

            try:
                eventually(lambda: "lacks the right to patch statefulsets/scale" in trouble())
                scale.is_forbidden = False
                eventually(lambda: trouble() == "")
                found.append("told until it was there")
            finally:
                client.stop("enough")

    looking = threading.Thread(target=look_on)
    looking.start()
    assert served(objects, endpoints, spec) == "stopped"
    looking.join(LIMIT_S)
    assert found == ["told until it was there"]
