"""Jobs as Pods on a real cluster: they end, and go on when Pods of theirs are taken away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.client import AppsV1Api

from backstay.kubernetes.api import KubernetesApi
from backstay.kubernetes.published_status import PublishedStatus, read_status
from tests.integration.tiny_jobs import write_clicks, write_model
from tests.kubernetes.backstay_image import FRAMEWORKS_FOLDER, IMAGE, frameworks
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.job_parts import allow_job_master
from tests.kubernetes.namespace import Namespace, is_ready, pod

pytestmark = [pytest.mark.kubernetes, pytest.mark.torch, pytest.mark.timeout(600)]
pytest.importorskip("torch")

JOB = "clicks"
RECORDS = 8000
PASSES = 3
# For a test that interferes with the job.
LONGER = ("--epochs", "10")
LIMIT_S = 240.0
PAUSE_S = 0.5
LOG_LINES = 200
SERVE = (
    "exec pserver serve --node-id ps-0 --cluster test --replicas 1 --insecure "
    "--listen-control $POD_IP:7000 --listen-data $POD_IP:7100"
)
# A batch takes so long that a test can interfere with the job.
SLOW = """

import time

_feed = feed


def feed(records, mode, metadata):
    time.sleep(0.1)
    return _feed(records, mode, metadata)
"""


class KubernetesJob:
    """One namespace with a server, and the command that runs a job on it."""

    def __init__(self, namespace: Namespace, kubeconfig: Path, folder: Path) -> None:
        self.namespace = namespace
        self.folder = folder
        self.env = {**os.environ, "KUBECONFIG": str(kubeconfig), "BACKSTAY_ENDPOINT": ""}
        self.api = KubernetesApi.of_kubeconfig(namespace.name)
        allow_job_master(namespace)
        self.endpoint = self._serve()
        self._write()

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run ``backstay`` to its end."""
        return subprocess.run(
            [sys.executable, "-m", "backstay.cli", *words],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    def train(self, *words: str) -> subprocess.CompletedProcess[str]:
        given = ("--on", "kubernetes", "--namespace", self.namespace.name)
        return self.command("train", "job.yaml", *given, *words)

    def jobs(self, *words: str) -> subprocess.CompletedProcess[str]:
        given = ("--on", "kubernetes", "--namespace", self.namespace.name)
        return self.command("jobs", *given, *words)

    def audit(self) -> str:
        """Count the records of the job that is over, beside its server."""
        command = ("backstay", "jobs", "--endpoint", self.endpoint, "audit", JOB)
        return self.namespace.execute("server", *command)

    def wait(self, what: str, holds: Callable[[PublishedStatus], bool]) -> PublishedStatus:
        """Wait until the published status fulfils the condition."""
        published = None
        deadline_s = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline_s:
            published = read_status(self.api, JOB)
            if published is not None and holds(published):
                return published
            time.sleep(PAUSE_S)
        raise AssertionError(
            f"{what}: not within {LIMIT_S:.0f} s; last seen: {published}\n{self._state()}"
        )

    def wait_until(self, what: str, holds: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while not holds():
            if time.monotonic() >= deadline_s:
                raise AssertionError(f"{what}: not within {LIMIT_S:.0f} s\n{self._state()}")
            time.sleep(PAUSE_S)

    def _state(self) -> str:
        """What tells why a wait was in vain: Pods, events and the job master's log."""
        pods = self.namespace.pods()
        events = self.namespace.core.list_namespaced_event(self.namespace.name).items
        lines = [f"{one.metadata.name}: {one.status}" for one in pods]
        lines += [f"{e.last_timestamp} {e.involved_object.name} {e.message}" for e in events]
        lines += [
            self.api.log(one.metadata.name, lines=LOG_LINES)
            for one in pods
            if one.metadata.labels.get("app.kubernetes.io/component") == "job-master"
            and one.status.phase == "Running"
        ]
        return "\n".join(lines)

    def events(self) -> dict[str, dict[str, int]]:
        """How often the Events of the job were told: by reason and message."""
        found: dict[str, dict[str, int]] = {}
        for one in self.namespace.core.list_namespaced_event(self.namespace.name).items:
            if one.source.component == "backstay-job-master":
                assert (one.involved_object.kind, one.involved_object.name) == (
                    "Deployment",
                    f"backstay-{JOB}",
                )
                found.setdefault(one.reason, {})[one.message] = one.count
        return found

    def workers(self) -> dict[str, str]:
        """The uid of each worker's Pod that was not told to end, by worker id."""
        return {
            one.metadata.labels["backstay/worker"]: one.metadata.uid
            for one in self.namespace.pods()
            if "backstay/worker" in one.metadata.labels and not one.metadata.deletion_timestamp
        }

    def pod_of(self, worker: str) -> str:
        return next(
            str(one.metadata.name)
            for one in self.namespace.pods()
            if one.metadata.labels.get("backstay/worker") == worker
        )

    def master(self) -> str:
        """The name of the job master's Pod."""
        return next(
            str(one.metadata.name)
            for one in self.namespace.pods()
            if one.metadata.labels.get("app.kubernetes.io/component") == "job-master"
            and not one.metadata.deletion_timestamp
        )

    def delete(self, pod_name: str, *, grace_s: int | None = None) -> None:
        more = {} if grace_s is None else {"grace_period_seconds": grace_s}
        self.namespace.core.delete_namespaced_pod(pod_name, self.namespace.name, **more)

    def _serve(self) -> str:
        address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
        probe = {"grpc": {"port": 7000}, "periodSeconds": 1}
        scratch = {"name": "scratch", "mountPath": "/tmp"}
        self.namespace.run(
            pod(
                "server",
                ["sh", "-c", SERVE],
                container={"env": [address], "readinessProbe": probe, "volumeMounts": [scratch]},
                volumes=[{"name": "scratch", "emptyDir": {}}],
            )
        )
        return f"{self.namespace.wait('server', is_ready).status.pod_ip}:7000"

    def _write(self) -> None:
        model = write_model(self.folder, "torch", SLOW)
        data = write_clicks(self.folder / "clicks.csv", RECORDS).read_text(encoding="utf-8")
        self.namespace.core.create_namespaced_config_map(
            self.namespace.name, {"metadata": {"name": "data"}, "data": {"clicks.csv": data}}
        )
        job: dict[str, Any] = {
            "name": JOB,
            "model": model.name,
            "framework": "torch",
            "training": "/data/clicks.csv",
            "epochs": PASSES,
            "batch_size": 100,
            "records_per_task": 200,
            "audit": True,
            "checkpoint": "none",
            "workers": {"initial": 2, "min": 1, "max": 3, "max_relaunches": 0},
            "servers": {"endpoints": [self.endpoint]},
            "kubernetes": {
                "image": IMAGE,
                "pull_policy": "Never",
                "insecure": True,
                "volumes": [
                    {"config_map": "data", "mount_path": "/data", "read_only": True},
                    {
                        "host_path": str(frameworks()),
                        "mount_path": FRAMEWORKS_FOLDER,
                        "read_only": True,
                    },
                ],
            },
        }
        (self.folder / "job.yaml").write_text(yaml.safe_dump(job), encoding="utf-8")


@pytest.fixture
def job(
    cluster: Cluster, namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[KubernetesJob]:
    # Restored after the test.
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    found = KubernetesJob(namespace, cluster.kubeconfig, tmp_path)
    yield found
    AppsV1Api().delete_collection_namespaced_deployment(namespace.name)
    found.api.close()


def both_work(published: PublishedStatus) -> bool:
    status = published.status
    return status is not None and len(status.workers) == 2


def test_a_job_runs_to_its_end_and_each_record_counts_once(job: KubernetesJob) -> None:
    done = job.train("--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["state"], summary["examples"]) == ("done", PASSES * RECORDS)
    assert "records_counted_once true" in job.audit()
    shown = job.jobs("show", JOB)
    assert f"{JOB}: done" in shown.stdout, shown.stderr

    apps = AppsV1Api()
    name = f"backstay-{JOB}"
    assert apps.read_namespaced_deployment(name, job.namespace.name).spec.replicas == 0
    apps.delete_namespaced_deployment(name, job.namespace.name)
    # At once again: its ConfigMaps are still to be collected, and say that the job is over.
    assert job.train("--detach", *LONGER).returncode == 0
    assert not job.wait("the new job works", both_work).over
    apps.delete_namespaced_deployment(name, job.namespace.name)
    job.wait_until("the job's Pods are gone", lambda: len(job.namespace.pods()) == 1)
    job.wait_until("its ConfigMaps are gone", lambda: read_status(job.api, JOB) is None)
    assert job.api.get("configmaps", name) is None


def test_a_job_goes_on_when_its_pods_are_deleted(job: KubernetesJob) -> None:
    assert job.train("--detach", *LONGER).returncode == 0
    job.wait("two workers", both_work)
    job.delete(job.pod_of("w-0"))
    job.delete(job.pod_of("w-1"), grace_s=0)
    job.wait_until("two others", lambda: set(job.workers()) == {"w-2", "w-3"})
    job.wait("both work", lambda one: _ended(one) == {"w-0", "w-1"} and both_work(one))

    # The next job master takes over the Pods that run.
    workers = job.workers()
    job.delete(job.master())
    second = job.wait("a second job master", lambda one: _starts(one) == 2 and both_work(one))
    assert not second.over
    assert job.workers() == workers
    job.delete(job.master(), grace_s=0)
    third = job.wait("a third job master", lambda one: _starts(one) == 3 and both_work(one))
    assert not third.over
    assert job.workers() == workers

    ended = job.wait("the end", lambda one: bool(one.over))
    assert (ended.over, ended.reason) == ("done", "")
    assert "records_counted_once true" in job.audit()
    told = job.events()
    assert {"WorkerPreempted", "JobDone"} <= told.keys(), told
    assert sum(told["WorkerPreempted"].values()) == 2


def test_a_missing_image_is_told_at_once_and_ends_the_job(job: KubernetesJob) -> None:
    done = job.train("--set", "kubernetes.worker.image=localhost/nothing:1")
    assert done.returncode == 1, done.stderr
    assert "could not be started:\nErrImageNeverPull" in done.stderr
    assert "could not be started" in done.stdout


def test_a_job_without_a_token_fails_and_says_what_to_do(job: KubernetesJob) -> None:
    done = job.train("--set", "kubernetes.insecure=false")
    assert done.returncode == 1, done.stderr
    assert "name the Secret that has BACKSTAY_TOKEN in kubernetes.secrets" in done.stdout
    listed = json.loads(job.jobs("list", "--json").stdout)
    assert [(one["job"], one["state"]) for one in listed["jobs"]] == [(JOB, "failed")]
    late = job.jobs("audit", JOB)
    assert late.returncode == 1
    assert f"job '{JOB}' is failed, so it has no job master" in late.stderr


def test_a_job_is_scaled_and_stopped_from_outside_and_the_same_command_goes_on(
    job: KubernetesJob,
) -> None:
    assert job.train("--detach", *LONGER).returncode == 0
    job.wait("two workers", both_work)
    scaled = job.jobs("scale", JOB, "3")
    assert scaled.stdout == f"{JOB}: 3 workers wanted, 2 before\n", scaled.stderr
    job.wait_until("three workers", lambda: len(job.workers()) == 3)
    assert job.jobs("stop", JOB, "--reason", "enough").returncode == 0
    stopped = job.wait("it stops", lambda one: bool(one.over))
    assert (stopped.over, stopped.reason) == ("stopped", "enough")
    job.wait_until("its Pods are gone", lambda: len(job.namespace.pods()) == 1)
    done = job.train(*LONGER)
    assert done.returncode == 0, done.stderr
    assert "records_counted_once true" in job.audit()


def _ended(published: PublishedStatus) -> set[str]:
    return {worker for worker, _how, _last in published.exits}


def _starts(published: PublishedStatus) -> int:
    return 0 if published.status is None else published.status.master_starts
