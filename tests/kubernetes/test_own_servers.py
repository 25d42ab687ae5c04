"""Jobs with servers of their own on a real cluster: they come with the job and go with it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.client import AppsV1Api, PolicyV1Api

from backstay.kubernetes.master_pod import pserver_trouble
from backstay.kubernetes.published_status import PublishedStatus
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.job_parts import run_etcd
from tests.kubernetes.namespace import Namespace, is_ready
from tests.kubernetes.test_jobs import JOB, LONGER, RECORDS, KubernetesJob, both_work

pytestmark = [pytest.mark.kubernetes, pytest.mark.torch, pytest.mark.timeout(600)]
pytest.importorskip("torch")

SERVERS = 2
DEPLOYMENT = f"backstay-{JOB}"
STATEFUL_SET = f"backstay-{JOB}-pserver"
CHECKPOINTS = "/checkpoints"
PASSES_LATER = 12
PASSES_WITH_LOSS = 25
LOST_NODE = "node2"


class JobWithServers(KubernetesJob):
    """One namespace with an etcd, and the command that runs a job with two servers on it."""

    def _serve(self) -> str:
        return run_etcd(self.namespace)

    def _write(self) -> None:
        super()._write()
        path = self.folder / "job.yaml"
        job = yaml.safe_load(path.read_text(encoding="utf-8"))
        self.checkpoints = self.folder / "checkpoints"
        self.checkpoints.mkdir()
        self.checkpoints.chmod(0o777)
        job["servers"] = {"local": SERVERS, "settings": {"store_endpoints": [self.endpoint]}}
        job["checkpoint"] = {"every": "pass", "url": CHECKPOINTS, "unsaved_wait_s": 3}
        job["kubernetes"]["pserver"] = {
            "limits": {"memory": "512Mi"},
            "volumes": [{"host_path": str(self.checkpoints), "mount_path": CHECKPOINTS}],
        }
        path.write_text(yaml.safe_dump(job), encoding="utf-8")

    def servers(self) -> dict[str, str]:
        """The uid of each server's Pod that is ready, by name."""
        return {
            one.metadata.name: one.metadata.uid
            for one in self.namespace.pods()
            if one.metadata.labels.get("app.kubernetes.io/component") == "pserver"
            and not one.metadata.deletion_timestamp
            and is_ready(one)
        }

    def ask_server(self, *words: str) -> dict[str, Any]:
        """Run ``pserverctl`` in the first server's Pod."""
        command = ["pserverctl", *words, "--json"]
        said, errors, code = self.api.run_in_pod(f"{STATEFUL_SET}-0", "pserver", command)
        assert code == 0, errors
        return dict(json.loads(said))

    def server_pods(self) -> list[str]:
        found = self.namespace.pods()
        return [one.metadata.name for one in found if one.metadata.name.startswith(STATEFUL_SET)]

    def server_replicas(self) -> int:
        found = AppsV1Api().read_namespaced_stateful_set(STATEFUL_SET, self.namespace.name)
        return int(found.spec.replicas)

    def wait_for_another(self, name: str, before: dict[str, str]) -> None:
        """Wait until a Pod of the name is ready that was not there before."""
        self.wait_until(
            f"another {name}", lambda: self.servers().get(name, before[name]) != before[name]
        )

    def wait_until_gone(self, kind: str) -> None:
        self.wait_until(f"no {kind}", lambda: self.api.get(kind, STATEFUL_SET) is None)

    def saved(self) -> list[str]:
        return sorted(one.name for one in self.checkpoints.glob("ckpt-*"))


@pytest.fixture
def job(
    cluster: Cluster, namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[JobWithServers]:
    # Restored after the test.
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    found = JobWithServers(namespace, cluster.kubeconfig, tmp_path)
    yield found
    AppsV1Api().delete_collection_namespaced_deployment(namespace.name)
    found.api.close()


def is_over(published: PublishedStatus) -> bool:
    return bool(published.over)


@pytest.mark.chaos
def test_a_job_goes_on_when_servers_of_its_own_are_deleted_and_leaves_nothing(
    job: JobWithServers,
) -> None:
    assert job.train("--detach", *LONGER).returncode == 0
    job.wait("two workers", both_work)
    job.wait_until("both servers are ready", lambda: len(job.servers()) == SERVERS)
    before = job.servers()
    assert set(before) == {f"{STATEFUL_SET}-{number}" for number in range(SERVERS)}

    # As a crash, and in good order: each comes back under its name, empty, and gets its copies.
    for number, grace_s in ((1, 0), (0, None)):
        job.delete(f"{STATEFUL_SET}-{number}", grace_s=grace_s)
        job.wait_for_another(f"{STATEFUL_SET}-{number}", before)
    assert set(job.servers()) == set(before)

    ended = job.wait("the end", is_over)
    assert (ended.over, ended.reason) == ("done", "")
    assert ended.audit is not None
    assert ended.audit["records_counted_once"] is True
    counted = job.jobs("audit", JOB)
    assert "records_counted_once true" in counted.stdout, counted.stderr
    shown = json.loads(job.jobs("show", JOB, "--json").stdout)
    assert shown["audit"]["records_counted_once"] is True
    job.wait_until("no server is wanted", lambda: job.server_replicas() == 0)
    job.wait_until("the servers' Pods are gone", lambda: job.server_pods() == [])
    assert job.saved()

    # The same command goes on with the checkpoint, with servers of its own again.
    done = job.train("--json", "--epochs", str(PASSES_LATER))
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["state"], summary["examples"]) == ("done", PASSES_LATER * RECORDS)
    assert summary["records_counted_once"] is True

    AppsV1Api().delete_namespaced_deployment(DEPLOYMENT, job.namespace.name)
    job.wait_until("the job's Pods are gone", lambda: len(job.namespace.pods()) == 1)
    for kind in ("statefulsets", "services", "poddisruptionbudgets"):
        job.wait_until_gone(kind)
    budgets = PolicyV1Api().list_namespaced_pod_disruption_budget(job.namespace.name)
    assert budgets.items == []


def test_a_resize_adds_pods_and_takes_empty_ones_away(job: JobWithServers) -> None:
    assert job.train("--detach", "--epochs", str(PASSES_LATER)).returncode == 0
    job.wait("two workers", both_work)
    job.wait_until("both servers are ready", lambda: len(job.servers()) == SERVERS)

    def resized(nodes: int) -> dict[str, int]:
        """Have so many servers, and return how many copies each of them has."""
        assert job.ask_server("resize", str(nodes))["plan"]["state"] == "done"
        there = job.ask_server("status")["nodes"]
        return {one["node_id"]: one["master_slots"] + one["in_sync_slots"] for one in there}

    grown = resized(SERVERS + 1)
    last = f"{STATEFUL_SET}-{SERVERS}"
    assert grown[last] > 0
    assert job.server_replicas() == SERVERS + 1
    shrunk = resized(SERVERS)
    assert shrunk.get(last, 0) == 0
    assert min(shrunk[f"{STATEFUL_SET}-{number}"] for number in range(SERVERS)) > 0
    job.wait_until("the last Pod is gone", lambda: last not in job.server_pods())
    assert job.server_replicas() == SERVERS

    ended = job.wait("the end", is_over)
    assert (ended.over, ended.reason) == ("done", "")
    assert ended.audit is not None
    assert ended.audit["records_counted_once"] is True


@pytest.mark.chaos
def test_a_server_whose_node_is_lost_comes_back_on_another_node(
    job: JobWithServers, cluster: Cluster
) -> None:
    assert job.train("--detach", "--epochs", str(PASSES_WITH_LOSS)).returncode == 0
    job.wait("two workers", both_work)
    job.wait_until("both servers are ready", lambda: len(job.servers()) == SERVERS)
    before = job.servers()
    lost = next(one for one in before if job.namespace.pod(one).spec.node_name == LOST_NODE)
    cluster.kill_kubelet(int(LOST_NODE.removeprefix("node")))
    try:
        # With its node the process ends.
        kill_process_with(f"BACKSTAY_NODE_ID={lost}", f"POD_NAMESPACE={job.namespace.name}")
        job.wait_for_another(lost, before)
        assert job.namespace.pod(lost).spec.node_name != LOST_NODE
    finally:
        cluster.start_kubelet(int(LOST_NODE.removeprefix("node")))
    ended = job.wait("the end", is_over)
    assert (ended.over, ended.reason) == ("done", "")
    assert ended.audit is not None
    assert ended.audit["records_counted_once"] is True


def test_servers_that_find_no_room_are_waited_for_and_told(job: JobWithServers) -> None:
    nowhere = "kubernetes.pserver.node_selector={disk: nowhere}"
    assert job.train("--detach", "--set", nowhere).returncode == 0
    job.wait_until(
        "it is told",
        lambda: pserver_trouble(job.api, JOB).startswith("2 servers wait for room on a node"),
    )


def kill_process_with(*variables: str) -> None:
    """Kill the one container's process whose environment has these variables."""
    wanted = {one.encode() for one in variables}
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            there = set(path.read_bytes().split(b"\0"))
        except OSError:
            # It has ended.
            continue
        if wanted <= there and b"backstay.pserver.serve_cli" in _command_line(path.parent):
            found.append(int(path.parent.name))
    assert len(found) == 1, found
    os.kill(found[0], signal.SIGKILL)


def _command_line(process: Path) -> list[bytes]:
    return (process / "cmdline").read_bytes().split(b"\0")


@pytest.mark.chaos
def test_a_stopped_job_keeps_no_server_and_goes_on_from_what_it_saved(job: JobWithServers) -> None:
    assert job.train("--detach", *LONGER).returncode == 0
    job.wait("a pass", lambda one: one.status is not None and one.status.examples > RECORDS)
    assert job.jobs("stop", JOB, "--reason", "enough").returncode == 0
    stopped = job.wait("it stops", is_over)
    assert (stopped.over, stopped.reason) == ("stopped", "enough")
    job.wait_until("its Pods are gone", lambda: len(job.namespace.pods()) == 1)
    done = job.train("--json", *LONGER)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["records_counted_once"] is True


@pytest.mark.chaos
def test_a_job_that_is_not_saved_keeps_its_servers_until_it_is(job: JobWithServers) -> None:
    job.checkpoints.chmod(0o755)
    unsaved = job.train()
    assert "the last checkpoint was not written" in unsaved.stdout, unsaved.stderr
    assert job.server_replicas() == SERVERS
    servers = job.servers()
    assert len(servers) == SERVERS

    other = job.train(*LONGER)
    assert "has ended without its last checkpoint, and its servers are kept" in other.stderr

    job.checkpoints.chmod(0o777)
    done = job.train("--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] == "done"
    assert job.saved()
    job.wait_until("no server is wanted", lambda: job.server_replicas() == 0)
