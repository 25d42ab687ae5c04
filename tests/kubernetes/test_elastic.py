"""Jobs that grow and shrink on a real cluster: with its room, and with each other's.

Each node has the CPUs of this machine. The Pods of a test ask for parts of one node.
"""

from __future__ import annotations

import os

import pytest
from kubernetes.client import AppsV1Api

from backstay.kubernetes.published_status import PublishedStatus
from tests.kubernetes.namespace import pod
from tests.kubernetes.test_jobs import JOB
from tests.kubernetes.test_own_servers import JobWithServers, is_over, job

__all__ = ["job"]

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.chaos,
    pytest.mark.torch,
    pytest.mark.timeout(600),
]
pytest.importorskip("torch")

# Of a node, in thousandths of a CPU.
NODE = 1000 * (os.cpu_count() or 1)


def asks(role: str, share: float) -> tuple[str, str]:
    """Words of the command: Pods of a role ask for this share of a node's CPU."""
    return ("--set", f"kubernetes.{role}.requests={{cpu: {int(share * NODE)}m}}")


def settings(**values: object) -> list[str]:
    """Words of the command; in a name ``__`` stands for a dot."""
    given = (f"{name.replace('__', '.')}={value}" for name, value in values.items())
    return [word for one in given for word in ("--set", one)]


def told(published: PublishedStatus, words: str) -> bool:
    """Whether a change of the numbers was told with these words."""
    status = published.status
    return status is not None and any(words in one for one in status.scalings)


def has_trouble(published: PublishedStatus, words: str) -> bool:
    return published.status is not None and words in published.status.trouble


def work(published: PublishedStatus, workers: int) -> bool:
    return published.status is not None and len(published.status.workers) == workers


def wanted(published: PublishedStatus, workers: int) -> bool:
    return published.status is not None and published.status.workers_desired == workers


def end_well(job: JobWithServers) -> None:
    ended = job.wait("the end", is_over)
    assert (ended.over, ended.reason) == ("done", "")
    assert ended.audit is not None
    assert ended.audit["records_counted_once"] is True


def test_a_worker_gives_its_room_to_a_server_and_comes_back(job: JobWithServers) -> None:
    # One server and two workers fill a node.
    sizes = (*asks("pserver", 0.3), *asks("worker", 0.325))
    numbers = settings(workers__initial=4, workers__max=4)
    assert job.train("--detach", "--epochs", "50", *sizes, *numbers).returncode == 0
    job.wait("four workers", lambda one: work(one, 4))
    job.ask_server("resize", "3", "--no-wait")
    job.wait("a worker goes", lambda one: told(one, "a worker gives up its room"))
    job.wait_until("three servers", lambda: len(job.servers()) == 3)
    job.wait("it is to come back", lambda one: told(one, "the worker comes back"))
    job.wait("it has no room", lambda one: has_trouble(one, "1 worker waits for room on a node"))
    shown = job.jobs("show", JOB)
    assert "3 workers wanted, 4 before: 1 server finds no room" in shown.stdout, shown.stderr

    job.wait_until("the plan is done", lambda: job.ask_server("plan")["plan"]["state"] == "done")
    job.ask_server("resize", "2", "--no-wait")
    job.wait("four workers again", lambda one: work(one, 4))
    end_well(job)


def test_fill_uses_a_node_as_soon_as_it_is_free(job: JobWithServers) -> None:
    # Two workers fill a node, and another Pod has one of the two nodes.
    node = {"kubernetes.io/hostname": "node2"}
    resources = {"resources": {"requests": {"cpu": f"{int(0.9 * NODE)}m"}}}
    sleep = ["python3", "-c", "import time; time.sleep(3600)"]
    job.namespace.run(pod("other", sleep, container=resources, nodeSelector=node))
    numbers = settings(
        workers__initial=1, workers__max=8, autoscale="{workers: fill, cool_down_s: 5}"
    )
    words = (*asks("worker", 0.45), *numbers)
    assert job.train("--detach", "--epochs", "100", *words).returncode == 0
    job.wait("two have room and one waits", lambda one: work(one, 2) and wanted(one, 3))
    job.delete("other", grace_s=0)
    job.wait("four have room and one waits", lambda one: work(one, 4) and wanted(one, 5))
    assert job.jobs("stop", JOB, "--reason", "enough").returncode == 0
    assert job.wait("it stops", is_over).over == "stopped"


def test_a_job_begins_with_its_least_servers_and_waits_below(job: JobWithServers) -> None:
    # A node has room for one server, so the third finds none.
    large = (*asks("pserver", 0.7), *settings(servers__local=3))
    assert job.train("--detach", *large).returncode == 0

    def shown() -> str:
        return job.jobs("show", JOB).stdout

    lacks = f"{JOB}: starting\ntrouble: 2 of at least 3 servers run; 1 server waits for room on a"
    job.wait_until("it is told", lambda: lacks in shown())
    assert job.workers() == {}
    AppsV1Api().delete_namespaced_deployment(f"backstay-{JOB}", job.namespace.name)
    job.wait_until("its Pods are gone", lambda: len(job.namespace.pods()) == 1)
    least = settings(servers__min=2)
    assert job.train("--detach", "--epochs", "4", *large, *least).returncode == 0
    job.wait("it is told", lambda one: has_trouble(one, "1 server waits for room on a node"))
    end_well(job)
