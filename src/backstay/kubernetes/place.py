"""Jobs on Kubernetes, as commands and Python calls ask for them: ``backstay.runner.place.Place``.

Makes the objects of a job: anew, or after those of an earlier job of its name. Nothing here prints.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from backstay.errors import ConfigError, JobRefused
from backstay.job_spec import JobSpec
from backstay.kubernetes.api import KubernetesApi
from backstay.kubernetes.follow import BegunJob
from backstay.kubernetes.jobs import JobsOfNamespace, removal_text
from backstay.kubernetes.manifest import objects_of, paths_outside, schedule_of, to_manifest
from backstay.kubernetes.names import CONTENT, JOB_NAME, annotation
from backstay.kubernetes.objects import JobObjects, Owner, ScheduleObjects
from backstay.kubernetes.pod_template import section
from backstay.kubernetes.submit import submit
from backstay.runner.outcome import what_is_not_kept
from backstay.runner.servers import chosen_servers

__all__ = ["KubernetesPlace"]


class KubernetesPlace:
    """Runs jobs as Pods of the cluster that KUBECONFIG names."""

    def check(self, config_file: Path | None, *, fresh: bool) -> None:
        """Refuse options that do not reach Pods."""
        if config_file is not None:
            raise ConfigError(
                "--config: is not carried to Pods; put its settings into a Secret as variables "
                "(BACKSTAY_TOKEN), and name it in kubernetes.secrets"
            )
        if fresh:
            raise ConfigError("--fresh: not with --on kubernetes; give the job another --name")

    def plan(self, spec: JobSpec) -> tuple[str, list[str]]:
        """Return the objects of a job as YAML, and warnings."""
        return to_manifest(_objects(spec), section(spec).namespace), paths_outside(spec)

    def begin(
        self, spec: JobSpec, say: Callable[[str], None], stopped: Callable[[float], bool]
    ) -> BegunJob | None:
        """Make the objects of a job, or the CronJob of one with a schedule.

        Raises:
            ConfigError: The job cannot run on Kubernetes as it is.
            JobRefused: A job of the name runs already, with other settings or files; or an object
                of the name is none of ours.
        """
        objects = _objects(spec)
        for warning in paths_outside(spec):
            say(warning)
        if warning := what_is_not_kept(spec, are_own=bool(chosen_servers(spec, os.environ).local)):
            say(f"warning: {warning}")
        api = KubernetesApi.of_kubeconfig(section(spec).namespace)
        try:
            if isinstance(objects, ScheduleObjects):
                say(_made_schedule(api, spec, objects))
                api.close()
                return None
            owner = submit(api, spec.name, objects, stopped)
        except BaseException:
            api.close()
            raise
        say(f"{spec.name}: Deployment {owner.name} in namespace {api.namespace}")
        return BegunJob(api, spec, owner)

    def jobs(self, namespace: str) -> JobsOfNamespace:
        """Return the jobs of a namespace; empty: that of the kubeconfig."""
        return JobsOfNamespace(KubernetesApi.of_kubeconfig(namespace))


def _objects(spec: JobSpec) -> JobObjects | ScheduleObjects:
    return objects_of(spec) if spec.schedule is None else schedule_of(spec)


def _made_schedule(api: KubernetesApi, spec: JobSpec, objects: ScheduleObjects) -> str:
    """Make the CronJob and then its ConfigMap, for which a run would wait; return what was done."""
    assert spec.schedule is not None
    name = objects.cron_job["metadata"]["name"]
    found, made = api.get("cronjobs", name), "is unchanged"
    if found is None:
        found, made = api.create("cronjobs", objects.cron_job), "is made"
    elif annotation(found, JOB_NAME) != spec.name:
        raise JobRefused(
            f"a CronJob {name} is there that is not of job {spec.name!r}; rename the job"
        )
    owner = Owner(name, found["metadata"]["uid"], "CronJob")
    owned = {**objects.files["metadata"], "ownerReferences": [owner.reference()]}
    files = {**objects.files, "metadata": owned}
    there = api.get("configmaps", owned["name"])
    if there is None:
        api.create("configmaps", files)
    elif there.get("data") != files["data"]:
        api.replace("configmaps", files)
    # The CronJob comes last: its content says that all of it was changed.
    if annotation(found, CONTENT) != objects.content:
        api.replace("cronjobs", objects.cron_job)
        made = "is changed"
    return (
        f"{spec.name}: CronJob {name} in namespace {api.namespace} {made}: runs by "
        f"`{spec.schedule.cron}` ({spec.schedule.time_zone}); "
        f"{removal_text(spec.name, api.namespace)}"
    )
