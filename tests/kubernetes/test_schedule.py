"""A job with a schedule on a real cluster: one run after the other, and an end of all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from kubernetes.client import RbacAuthorizationV1Api

from backstay.kubernetes.names import RUN, schedule_name, status_name
from backstay.kubernetes.published_status import read_status
from tests.kubernetes.test_jobs import JOB, RECORDS, KubernetesJob, job

__all__ = ["job"]

pytestmark = [pytest.mark.kubernetes, pytest.mark.torch, pytest.mark.timeout(600)]

DEPLOY = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
NAME = f"backstay-{JOB}"
EACH_MINUTE = ("--set", "schedule='* * * * *'")
HOOKS = (
    "--set",
    "hooks.before=['echo fetched for $BACKSTAY_JOB']",
    "--set",
    "hooks.after=['echo it is $BACKSTAY_JOB_RESULT']",
)


def allow_runs(job: KubernetesJob) -> None:
    """Give runs the rights that deploy/ gives them."""
    rights = (DEPLOY / "job-master" / "job-schedule.yaml").read_text(encoding="utf-8")
    _, role, binding = yaml.safe_load_all(rights)
    namespace, rbac = job.namespace.name, RbacAuthorizationV1Api()
    account = {"metadata": binding["metadata"]}
    job.namespace.core.create_namespaced_service_account(namespace, account)
    rbac.create_namespaced_role(namespace, role)
    rbac.create_namespaced_role_binding(namespace, binding)


def run_of(job: KubernetesJob) -> str:
    """The run that has made the job's objects; empty: there are none."""
    found = job.api.get("deployments", NAME) or {"metadata": {}}
    run: str = found["metadata"].get("annotations", {}).get(RUN, "")
    return run


def is_over(job: KubernetesJob) -> bool:
    published = read_status(job.api, JOB)
    return published is not None and bool(published.over)


@pytest.mark.chaos
def test_each_run_trains_anew_and_the_end_of_the_schedule_is_the_end_of_all(
    job: KubernetesJob,
) -> None:
    allow_runs(job)
    given = ("--epochs", "1", *EACH_MINUTE, *HOOKS)
    made = job.train(*given)
    assert made.returncode == 0, made.stderr
    assert f"CronJob {NAME} in namespace {job.namespace.name} is made" in made.stderr
    assert f"kubectl delete cronjob {NAME} -n {job.namespace.name}" in made.stderr
    assert "is unchanged" in job.train(*given).stderr

    job.wait_until("the first run ends", lambda: run_of(job) != "" and is_over(job))
    first = run_of(job)
    ended = job.wait("its end", lambda one: bool(one.over))
    assert ended.over == "done", ended.reason
    assert ended.status is not None
    assert ended.status.examples == RECORDS
    assert "is changed" in job.train("--epochs", "2", *EACH_MINUTE, *HOOKS).stderr

    job.wait_until("the second run begins", lambda: run_of(job) not in ("", first))
    shown = job.jobs("show", JOB)
    assert "runs by `* * * * *` (Etc/UTC)" in shown.stdout, shown.stderr
    assert f"run under way: {run_of(job)}" in shown.stdout
    listed = job.jobs("list").stdout
    assert "* * * * *" in listed, listed
    second = run_of(job)
    job.wait_until("the second run ends", lambda: run_of(job) == second and is_over(job))
    ended = job.wait("its end", lambda one: bool(one.over))
    assert ended.status is not None
    # All passes again, and not only the one that was added.
    assert (ended.over, ended.status.examples) == ("done", 2 * RECORDS)
    assert "records_counted_once true" in job.audit()

    objects = [
        ("deployments", NAME),
        ("configmaps", NAME),
        ("configmaps", status_name(JOB)),
        ("configmaps", schedule_name(JOB)),
    ]
    # Otherwise the last look below would find nothing, whatever they are called.
    job.wait_until(
        "its objects are there", lambda: all(job.api.get(kind, name) for kind, name in objects)
    )
    job.wait_until("the hooks are done", lambda: has_both_hooks(run_log(job)))
    job.api.delete("cronjobs", NAME)
    job.wait_until("only the server is left", lambda: len(job.namespace.pods()) == 1)
    job.wait_until(
        "its objects are gone",
        lambda: not any(job.api.get(kind, name) for kind, name in objects),
    )


def has_both_hooks(log: str) -> bool:
    """Whether one log has them; the next look may be at the log of a newer run."""
    return f"fetched for {JOB}" in log and "it is done" in log


def run_log(job: KubernetesJob) -> str:
    """The end of the log of the newest run."""
    return job.jobs("logs", JOB, "--worker", "schedule", "-n", "1000").stdout


def test_a_schedule_without_a_run_says_so(job: KubernetesJob) -> None:
    assert job.train("--set", "schedule=0 0 1 1 *").returncode == 0
    assert "scheduled" in job.jobs("list").stdout
    (listed,) = json.loads(job.jobs("list", "--json").stdout)["jobs"]
    assert (listed["state"], listed["schedule"]) == ("scheduled", "0 0 1 1 *")
    shown = job.jobs("show", JOB)
    assert (shown.returncode, "run under way: none" in shown.stdout) == (0, True), shown.stderr
    assert json.loads(job.jobs("show", JOB, "--json").stdout)["state"] == "scheduled"
    stopped = job.jobs("stop", JOB)
    assert stopped.returncode == 1
    assert "no run of job 'clicks' is under way" in stopped.stderr
    assert f"`kubectl delete cronjob {NAME}" in stopped.stdout
    # The same name without a schedule is a run now; the schedule stays.
    assert job.train("--epochs", "1").returncode == 0
    assert job.api.get("cronjobs", NAME) is not None
    job.api.delete("cronjobs", NAME)
