"""Parts of a real cluster fail while a job trains: its API, its nodes; each record counts once."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from kubernetes.client import V1Pod

from backstay.kubernetes.published_status import PublishedStatus
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.conftest import NODES
from tests.kubernetes.namespace import is_ready
from tests.kubernetes.test_jobs import JOB, RECORDS, KubernetesJob, both_work, job

__all__ = ["job"]

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.chaos,
    pytest.mark.torch,
    pytest.mark.timeout(600),
]

# More than two minutes for one worker.
PASSES = 20
TRAIN = ("--detach", "--epochs", str(PASSES))
OUTAGE_S = 30.0


@contextmanager
def api_server_away(cluster: Cluster) -> Iterator[float]:
    """Kill the API server for the block; yield when it must have been away for long enough."""
    cluster.kill_api_server()
    try:
        yield time.monotonic() + OUTAGE_S
    finally:
        cluster.start_api_server()


def examples(job: KubernetesJob) -> int:
    """The records of done tasks, as the job master says without the API of Kubernetes."""
    shown = job.command("jobs", "--endpoint", job.endpoint, "show", JOB, "--json")
    assert shown.returncode == 0, shown.stderr
    return int(json.loads(shown.stdout)["status"].get("examples", 0))


def train(job: KubernetesJob) -> None:
    begun = job.train(*TRAIN)
    assert begun.returncode == 0, begun.stderr
    job.wait("two workers", both_work)


def found_again(job: KubernetesJob) -> None:
    """Wait until the test reaches the API server that was started again."""
    job.namespace.wait("server", is_ready)


def master_starts(published: PublishedStatus) -> int:
    return 0 if published.status is None else published.status.master_starts


def pods_of_job(job: KubernetesJob) -> list[V1Pod]:
    """The Pods of job master and workers that were not told to end."""
    return [
        one
        for one in job.namespace.pods()
        if "app.kubernetes.io/component" in one.metadata.labels
        and not one.metadata.deletion_timestamp
    ]


def nodes_of(job: KubernetesJob) -> set[str]:
    return {one.spec.node_name for one in pods_of_job(job)}


def ends_with_each_record_counted_once(job: KubernetesJob) -> None:
    ended = job.wait("the end", lambda one: bool(one.over))
    assert (ended.over, ended.reason) == ("done", "")
    assert ended.status is not None
    assert ended.status.examples == PASSES * RECORDS
    assert "records_counted_once true" in job.audit()


def test_training_goes_on_while_the_api_server_is_away_and_nothing_is_started_twice(
    job: KubernetesJob, cluster: Cluster
) -> None:
    train(job)
    before, master = job.workers(), job.master()
    assert set(before) == {"w-0", "w-1"}
    with api_server_away(cluster) as over_s:
        first = examples(job)
        cluster.kill_containers(before["w-0"])
        job.wait_until("the other worker trains", lambda: examples(job) > first)
        job.wait_until("the outage is over", lambda: time.monotonic() >= over_s)
        second = examples(job)
        job.wait_until("it still trains", lambda: examples(job) > second)
    found_again(job)
    job.wait_until("another worker", lambda: set(job.workers()) == {"w-1", "w-2"})
    after = job.wait("both work", both_work)
    assert not after.over
    assert job.workers()["w-1"] == before["w-1"]
    assert job.master() == master
    assert master_starts(after) == 1
    ends_with_each_record_counted_once(job)


def test_the_job_master_and_the_api_server_are_away_at_once(
    job: KubernetesJob, cluster: Cluster
) -> None:
    train(job)
    before, master = job.workers(), job.namespace.pod(job.master())
    with api_server_away(cluster) as over_s:
        cluster.kill_containers(master.metadata.uid)
        job.wait_until("the outage is over", lambda: time.monotonic() >= over_s)
    found_again(job)
    after = job.wait("it goes on", lambda one: master_starts(one) > 1 and both_work(one))
    assert not after.over
    # The next job master takes over the Pods that run.
    assert job.workers() == before
    ends_with_each_record_counted_once(job)


@contextmanager
def on_one_node(job: KubernetesJob, cluster: Cluster) -> Iterator[str]:
    """Train with job master and workers on the node without the server; yield its name."""
    home = job.namespace.pod("server").spec.node_name
    (other,) = {f"node{number}" for number in range(1, NODES + 1)} - {home}
    cluster.cordon(home)
    try:
        train(job)
    finally:
        cluster.uncordon(home)
    assert nodes_of(job) == {other}
    yield other
    assert nodes_of(job) == {home}


def test_a_node_with_the_job_master_and_all_workers_is_drained(
    job: KubernetesJob, cluster: Cluster
) -> None:
    with on_one_node(job, cluster) as node:
        cluster.drain(node)
        try:
            job.wait("they work elsewhere", lambda one: master_starts(one) > 1 and both_work(one))
            job.wait_until("two workers", lambda: set(job.workers()) == {"w-2", "w-3"})
        finally:
            cluster.uncordon(node)
    ends_with_each_record_counted_once(job)


def test_a_node_with_the_job_master_and_all_workers_is_lost(
    job: KubernetesJob, cluster: Cluster
) -> None:
    with on_one_node(job, cluster) as node:
        number = int(node.removeprefix("node"))
        lost = [one.metadata.uid for one in pods_of_job(job)]
        cluster.kill_kubelet(number)
        try:
            # With their node the processes end.
            for uid in lost:
                cluster.kill_containers(uid)
            job.wait("they work elsewhere", lambda one: master_starts(one) > 1 and both_work(one))
            job.wait_until("two workers", lambda: set(job.workers()) == {"w-2", "w-3"})
        finally:
            cluster.start_kubelet(number)
    ends_with_each_record_counted_once(job)
