"""A job with a schedule and servers of its own on a real cluster: each run makes and ends them."""

from __future__ import annotations

import json

import pytest

from backstay.master.kubernetes.published_status import read_status
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


def test_each_run_has_servers_of_its_own_and_goes_on_with_the_rows_of_the_last(
    job: JobWithServers,
) -> None:
    allow_runs(job)
    made = job.train("--epochs", "1", *EACH_MINUTE, *HOOKS)
    assert made.returncode == 0, made.stderr
    assert job.servers() == {}

    job.wait_until("the first run ends", lambda: run_of(job) != "" and is_over(job))
    first, first_cluster, first_saved = run_of(job), cluster_of(job), job.saved()
    published = read_status(job.api, JOB)
    assert published is not None
    assert (published.over, published.reason) == ("done", "")
    assert published.status is not None
    assert published.status.examples == RECORDS
    assert published.audit is not None
    assert published.audit["records_counted_once"] is True
    assert first_saved
    job.wait_until("no server is wanted", lambda: job.server_replicas() == 0)
    job.wait_until("the hooks are done", lambda: "it is done" in run_log(job))

    job.wait_until("the second run ends", lambda: run_of(job) not in ("", first) and is_over(job))
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
