"""Makes the CronJob of a job with a schedule, or changes it. Nothing here prints."""

from __future__ import annotations

import os
from collections.abc import Callable

from backstay.errors import JobRefused
from backstay.job_spec import JobSpec
from backstay.kubernetes.api import KubernetesApi
from backstay.kubernetes.manifest import paths_outside, schedule_of
from backstay.kubernetes.names import CONTENT, JOB_NAME, object_name
from backstay.kubernetes.objects import Owner, ScheduleObjects, section
from backstay.runner.servers import chosen_servers
from backstay.runner.supervisor import what_is_not_kept

__all__ = ["begin_schedule", "removal_text"]


def begin_schedule(spec: JobSpec, say: Callable[[str], None]) -> None:
    """Make the CronJob of a job with a schedule, or change the one that is there.

    Raises:
        ConfigError: The job cannot run on Kubernetes as it is.
        JobRefused: A CronJob of the name is not ours.
        KubernetesError: The API refuses a call, or does not answer.
    """
    assert spec.schedule is not None
    objects = schedule_of(spec)
    for warning in paths_outside(spec):
        say(warning)
    if warning := what_is_not_kept(spec, are_own=bool(chosen_servers(spec, os.environ).local)):
        say(f"warning: {warning}")
    api = KubernetesApi.of_kubeconfig(section(spec).namespace)
    try:
        made = _make_schedule(api, spec.name, objects)
        cron_job = objects.cron_job["metadata"]["name"]
        say(
            f"{spec.name}: CronJob {cron_job} in namespace {api.namespace} {made}: runs by "
            f"`{spec.schedule.cron}` ({spec.schedule.time_zone}); "
            f"{removal_text(spec.name, api.namespace)}"
        )
    finally:
        api.close()


def removal_text(job: str, namespace: str) -> str:
    """Return how a schedule is removed, for people."""
    return (
        f"`kubectl delete cronjob {object_name(job)} -n {namespace}` removes the schedule, and a "
        "run that is under way"
    )


def _make_schedule(api: KubernetesApi, job: str, objects: ScheduleObjects) -> str:
    """Make the CronJob and then its ConfigMap, for which a run would wait; return what was done."""
    name = objects.cron_job["metadata"]["name"]
    found, made = api.get("cronjobs", name), "is unchanged"
    if found is None:
        found, made = api.create("cronjobs", objects.cron_job), "is made"
    elif found["metadata"].get("annotations", {}).get(JOB_NAME) != job:
        raise JobRefused(f"a CronJob {name} is there that is not of job {job!r}; rename the job")
    owner = Owner(name, found["metadata"]["uid"], "CronJob")
    owned = {**objects.files["metadata"], "ownerReferences": [owner.reference()]}
    files = {**objects.files, "metadata": owned}
    there = api.get("configmaps", owned["name"])
    if there is None:
        api.create("configmaps", files)
    elif there.get("data") != files["data"]:
        api.replace("configmaps", files)
    # The CronJob comes last: its content says that all of it was changed.
    if found["metadata"].get("annotations", {}).get(CONTENT) != objects.content:
        api.replace("cronjobs", objects.cron_job)
        made = "is changed"
    return made
