"""Makes the objects of a job on Kubernetes: anew, or after those of an earlier job of its name.

The command may end at any time: the same command goes on. Nothing here prints.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from backstay.cli.kubernetes_follow import BegunJob
from backstay.cli.kubernetes_manifest import objects_of, paths_outside
from backstay.cli.supervisor import what_is_not_kept
from backstay.errors import JobError, JobRefused, KubernetesError
from backstay.job_spec import JobSpec
from backstay.master.kubernetes.api import KubernetesApi
from backstay.master.kubernetes.names import CONTENT, RUN, status_name
from backstay.master.kubernetes.objects import JobObjects, Owner, section
from backstay.master.kubernetes.published_status import not_over, read_status

__all__ = ["begin_on_kubernetes", "submit"]

LOOK_PAUSE_S = 1.0
# What an earlier job of the name has left is waited for, at most.
GONE_LIMIT_S = 120.0
KINDS = {
    "ConfigMap": "configmaps",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "Service": "services",
    "StatefulSet": "statefulsets",
}


def begin_on_kubernetes(
    spec: JobSpec, say: Callable[[str], None], stopped: Callable[[float], bool]
) -> BegunJob:
    """Make the objects of a job.

    Args:
        spec: The job.
        say: Takes warnings, and what was made.
        stopped: Waits for so many seconds; returns whether to give up.

    Raises:
        ConfigError: The job cannot run on Kubernetes as it is.
        JobRefused: A job of the name runs already, with other settings or files.
        KubernetesError: The API refuses a call, or does not answer.
    """
    objects = objects_of(spec)
    for warning in paths_outside(spec):
        say(warning)
    if warning := what_is_not_kept(spec, are_own=objects.servers is not None):
        say(f"warning: {warning}")
    api = KubernetesApi.of_kubeconfig(section(spec).namespace)
    try:
        submit(api, spec.name, objects, stopped)
    except BaseException:
        api.close()
        raise
    name = objects.deployment["metadata"]["name"]
    say(f"{spec.name}: Deployment {name} in namespace {api.namespace}")
    return BegunJob(api, spec, name)


def submit(
    api: KubernetesApi, job: str, objects: JobObjects, stopped: Callable[[float], bool]
) -> None:
    """Make the objects of a job; go on with the same job, or run, if its objects are there.

    The Deployment comes first, without a Pod: it owns the others. A command that ends in between
    leaves nothing that runs, and the same command goes on.

    Raises:
        JobRefused: A job of the name runs already, with other settings or files.
        JobError: What an earlier job of the name has left does not go, or the command is stopped.
    """
    name = objects.deployment["metadata"]["name"]
    found = api.get("deployments", name)
    if found is not None:
        published = read_status(api, job)
        over = "" if published is None else published.over
        is_going = "deletionTimestamp" in found["metadata"]
        is_unsaved = over == "unsaved" and objects.servers is not None and not is_going
        annotations = found["metadata"].get("annotations", {})
        is_same = annotations.get(CONTENT) == objects.content
        if objects.run:
            is_same = annotations.get(RUN) == objects.run
            if is_same and over and not is_going:
                return
        if is_unsaved and is_same:
            # Its servers still have what the last checkpoint lacks.
            api.patch("configmaps", status_name(job), {"data": not_over()})
        elif is_unsaved:
            raise JobRefused(
                f"job {job!r} has ended without its last checkpoint, and its servers are kept. Run "
                "the same command as then, which tries it again, or give the rows up: kubectl "
                f"delete deployment {name}"
            )
        elif over or is_going:
            _remove(api, objects, found["metadata"]["uid"], stopped)
            found = None
        elif not is_same:
            raise JobRefused(
                f"job {job!r} runs on Kubernetes already, with other settings or files. Follow it "
                f"with those, or end it: backstay jobs --on kubernetes stop {job}, or kubectl "
                f"delete deployment {name}"
            )
    if found is None:
        waiting = {**objects.deployment["spec"], "replicas": 0}
        found = api.create("deployments", {**objects.deployment, "spec": waiting})
    owner = Owner(name, found["metadata"]["uid"])
    for one in objects.owned:
        _make_owned(api, one, owner, stopped)
    if not found["spec"].get("replicas", 0):
        change = {"metadata": {"uid": owner.uid}, "spec": {"replicas": 1}}
        api.patch("deployments/scale", name, change)


def _make_owned(
    api: KubernetesApi,
    body: dict[str, Any],
    owner: Owner,
    stopped: Callable[[float], bool],
) -> None:
    """Make an object of a job, after the one that a deleted job of the name may have left."""
    owned = {**body["metadata"], "ownerReferences": [owner.reference()]}
    kind, name = KINDS[body["kind"]], owned["name"]
    deadline_s = time.monotonic() + GONE_LIMIT_S
    while True:
        try:
            api.create(kind, {**body, "metadata": owned})
            return
        except KubernetesError as error:
            if error.reason != "AlreadyExists":
                raise
        there = api.get(kind, name) or {"metadata": {}}
        if any(one["uid"] == owner.uid for one in there["metadata"].get("ownerReferences", ())):
            return
        _wait_until_gone(name, deadline_s, stopped)


def _remove(
    api: KubernetesApi, objects: JobObjects, uid: str, stopped: Callable[[float], bool]
) -> None:
    """Delete what an ended job of the name has left, and wait until it is gone."""
    name = objects.deployment["metadata"]["name"]
    api.delete("deployments", name, uid=uid)
    names = [(KINDS[one["kind"]], one["metadata"]["name"]) for one in objects.owned]
    deadline_s = time.monotonic() + GONE_LIMIT_S
    while api.get("deployments", name) or any(api.get(*one) for one in names):
        _wait_until_gone(name, deadline_s, stopped)


def _wait_until_gone(name: str, deadline_s: float, stopped: Callable[[float], bool]) -> None:
    """Wait a moment for what an earlier job has left.

    Raises:
        JobError: The command is stopped, or it has waited long enough.
    """
    if stopped(LOOK_PAUSE_S):
        raise JobError("stopped before the job had begun")
    if time.monotonic() >= deadline_s:
        raise JobError(
            f"what an earlier job has left is not gone after {GONE_LIMIT_S:.0f} s: kubectl get "
            f"deployment,configmap,statefulset -l app.kubernetes.io/instance={name}"
        )
