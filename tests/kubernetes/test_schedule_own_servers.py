"""A job with a schedule and servers of its own on a real cluster: each run makes and ends them."""

from __future__ import annotations

import asyncio
import json

import pytest

from backstay.config import ServerConfig
from backstay.consensus.store.opening import open_etcd
from backstay.kubernetes.published_status import read_status
from tests.kubernetes.test_jobs import JOB, RECORDS
from tests.kubernetes.test_own_servers import JobWithServers, job
from tests.kubernetes.test_schedule import EACH_MINUTE, HOOKS, allow_runs, is_over, run_log, run_of

__all__ = ["job"]

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.chaos,
    pytest.mark.torch,
    pytest.mark.timeout(600),
]
pytest.importorskip("torch")


def cluster_of(job: JobWithServers) -> str:
    """The name that the servers of the newest run have; empty: there are none."""
    found = job.api.get("statefulsets", f"backstay-{JOB}-pserver")
    if found is None:
        return ""
    (container,) = found["spec"]["template"]["spec"]["containers"]
    return str(next(one["value"] for one in container["env"] if one["name"] == "BACKSTAY_CLUSTER"))


def records_of(job: JobWithServers, cluster: str) -> int:
    """How many records a cluster has in etcd."""

    async def count() -> int:
        config = ServerConfig(store="etcd", store_endpoints=(job.endpoint,))
        store = open_etcd(config, cluster)
        try:
            return len((await store.range("")).items)
        finally:
            await store.close()

    return asyncio.run(count())


def suspend(job: JobWithServers, suspended: bool) -> None:
    job.api.patch("cronjobs", f"backstay-{JOB}", {"spec": {"suspend": suspended}})


def test_each_run_has_servers_of_its_own_and_goes_on_with_the_rows_of_the_last(
    job: JobWithServers,
) -> None:
    allow_runs(job)
    made = job.train("--epochs", "1", *EACH_MINUTE, *HOOKS)
    assert made.returncode == 0, made.stderr
    assert job.servers() == {}

    job.wait_until("the first run begins", lambda: run_of(job) != "")
    # Otherwise the next one would begin, at some moment.
    suspend(job, True)
    job.wait_until("the first run ends", lambda: is_over(job))
    first, first_cluster, first_saved = run_of(job), cluster_of(job), job.saved()
    published = read_status(job.api, JOB)
    assert published is not None
    assert (published.over, published.reason) == ("done", "")
    assert published.status is not None
    assert published.status.examples == RECORDS
    assert published.audit is not None
    assert published.audit["records_counted_once"] is True
    assert first_saved
    assert records_of(job, first_cluster) > 0
    job.wait_until("no server is wanted", lambda: job.server_replicas() == 0)
    job.wait_until("the hooks are done", lambda: "it is done" in run_log(job))

    suspend(job, False)
    job.wait_until("the second run begins", lambda: run_of(job) not in ("", first))
    suspend(job, True)
    job.wait_until("the first run's records go", lambda: records_of(job, first_cluster) == 0)
    second = job.wait("its end", lambda one: bool(one.over))
    assert second.status is not None
    assert (second.over, second.reason) == ("done", "")
    # All passes again, by other servers, on the rows that the first run has saved.
    assert second.status.examples == RECORDS
    assert cluster_of(job) not in ("", first_cluster)
    assert job.saved()[-1] not in first_saved
    shown = json.loads(job.jobs("show", JOB, "--json").stdout)
    assert shown["state"] == "done"

    job.api.delete("cronjobs", f"backstay-{JOB}")
    for kind in ("statefulsets", "services", "poddisruptionbudgets"):
        job.wait_until_gone(kind)
    job.wait_until("only etcd is left", lambda: len(job.namespace.pods()) == 1)
