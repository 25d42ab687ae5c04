"""Makes the objects of a job on Kubernetes: anew, or after those of an earlier job of its name.

The command may end at any time: the same command goes on. Nothing here prints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from backstay.errors import JobError, JobRefused, KubernetesError
from backstay.kubernetes.api import KubernetesApi
from backstay.kubernetes.names import (
    CONTENT,
    JOB_NAME,
    REPLACES,
    RUN,
    annotation,
    object_name,
    pserver_name,
    status_name,
)
from backstay.kubernetes.objects import JobObjects, Owner, has_own_servers
from backstay.kubernetes.pserver_objects import cluster_of, replacing
from backstay.kubernetes.published_status import not_over, read_status

__all__ = ["check_free", "earlier_run", "submit"]

LOOK_PAUSE_S = 1.0
# What an earlier job of the name has left is waited for, at most.
GONE_LIMIT_S = 120.0
KINDS = {
    "ConfigMap": "configmaps",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "Service": "services",
    "StatefulSet": "statefulsets",
}


class _ExistingJob(NamedTuple):
    """What is there of a job of the name.

    Attributes:
        deployment: As the API gives it.
        over: The state in which it has ended; empty: it goes on.
        has_begun: Whether its job master has ever said how it goes.
        is_same: Whether it is the same job, or run.
        is_going: Whether it was deleted, and is not gone yet.
    """

    deployment: dict[str, Any]
    over: str
    has_begun: bool
    is_same: bool
    is_going: bool

    @property
    def is_unsaved(self) -> bool:
        """Whether it has ended, and only its servers have what the last checkpoint lacks."""
        return self.over == "unsaved" and not self.is_going and has_own_servers(self.deployment)

    @property
    def uid(self) -> str:
        uid: str = self.deployment["metadata"]["uid"]
        return uid

    @property
    def replicas(self) -> int:
        return int(self.deployment["spec"].get("replicas", 0))

    def is_run_of(self, schedule: Owner) -> bool:
        """Whether a run of this schedule has made it."""
        owners = self.deployment["metadata"].get("ownerReferences", ())
        return any(one["uid"] == schedule.uid for one in owners)


def check_free(api: KubernetesApi, job: str, objects: JobObjects) -> None:
    """Refuse what ``submit`` would refuse now.

    Raises:
        JobRefused: A job of the name runs already, with other settings or files.
    """
    there = _look(api, job, objects)
    if there is not None:
        _check(there, job, objects)


def earlier_run(
    api: KubernetesApi,
    job: str,
    objects: JobObjects,
    schedule: Owner,
    stopped: Callable[[float], bool],
) -> Owner | None:
    """Return an earlier run of a schedule that is not over; None: there is none.

    A run that has ended without its last checkpoint begins again, to write it. One that never
    began is removed: its Pod is gone, because two runs never overlap.

    Args:
        api: The namespace of the job.
        job: Its name.
        objects: Those of the run that is to begin.
        schedule: The CronJob.
        stopped: Waits for so many seconds; returns whether to give up.

    Raises:
        JobError: What the earlier run has left does not go, or the command is stopped.
    """
    there = _look(api, job, objects)
    if there is None or there.is_same or there.is_going or not there.is_run_of(schedule):
        return None
    name = objects.deployment["metadata"]["name"]
    if there.is_unsaved:
        there = _open_again(api, job, objects, there.uid, stopped)
    elif there.over:
        return None
    elif not (there.replicas or there.has_begun):
        _remove(api, objects, there.uid, stopped)
        return None
    owner = Owner(name, there.uid)
    _have_master(api, there, owner)
    return owner


def submit(
    api: KubernetesApi, job: str, objects: JobObjects, stopped: Callable[[float], bool]
) -> Owner:
    """Make the objects of a job; go on with the same job, or run, if its objects are there.

    The Deployment comes first, without a Pod: it owns the others. A command that ends in between
    leaves nothing that runs, and the same command goes on.

    Returns:
        The Deployment.

    Raises:
        JobRefused: A job of the name runs already, with other settings or files.
        JobError: What an earlier job of the name has left does not go, or the command is stopped.
    """
    name = objects.deployment["metadata"]["name"]
    there, earlier = _look(api, job, objects), ""
    if there is None:
        # A command that was killed while it removed an earlier job may have left its servers.
        earlier = _earlier_servers(api, job, objects)
    else:
        earlier = annotation(there.deployment, REPLACES)
        _check(there, job, objects)
        if objects.run and there.is_same and there.over and not there.is_going:
            return Owner(name, there.uid)
        if there.is_unsaved:
            there = _open_again(api, job, objects, there.uid, stopped)
        elif there.over or there.is_going:
            earlier = _earlier_servers(api, job, objects) or earlier
            _remove(api, objects, there.uid, stopped)
            there = None
    if there is None:
        waiting = {**objects.deployment["spec"], "replicas": 0}
        deployment = _noting(objects.deployment, earlier)
        made = api.create("deployments", {**deployment, "spec": waiting})
        there = _ExistingJob(made, "", has_begun=False, is_same=True, is_going=False)
    owner = Owner(name, there.uid)
    for one in objects.owned:
        has_records = one["kind"] == "StatefulSet" and earlier
        _make_owned(api, replacing(one, earlier) if has_records else one, owner, stopped)
    _have_master(api, there, owner)
    return owner


def _noting(deployment: Mapping[str, Any], earlier: str) -> dict[str, Any]:
    """Return a Deployment that tells the next command of an earlier cluster, if there was one.

    This command may be killed before it has made the servers that remove its records.
    """
    if not earlier:
        return dict(deployment)
    metadata = deployment["metadata"]
    annotations = {**metadata["annotations"], REPLACES: earlier}
    return {**deployment, "metadata": {**metadata, "annotations": annotations}}


def _earlier_servers(api: KubernetesApi, job: str, objects: JobObjects) -> str:
    """Return the cluster of earlier servers of a job's own, whose records they leave behind."""
    if objects.servers is None:
        # A job on a shared cluster needs no right to see servers.
        return ""
    found = api.get("statefulsets", pserver_name(job))
    name = "" if found is None else cluster_of(found)
    begins = f"{object_name(job)}-"
    # Those of another cluster are not ours to remove, nor those of a job of a longer name.
    return name if name.startswith(begins) and "-" not in name.removeprefix(begins) else ""


def _have_master(api: KubernetesApi, there: _ExistingJob, owner: Owner) -> None:
    """Have a job master, if there is none."""
    if not there.replicas:
        change = {"metadata": {"uid": owner.uid}, "spec": {"replicas": 1}}
        api.patch("deployments/scale", owner.name, change)


def _look(api: KubernetesApi, job: str, objects: JobObjects) -> _ExistingJob | None:
    """Return what is there of a job of the name; None: nothing."""
    found = api.get("deployments", objects.deployment["metadata"]["name"])
    if found is None:
        return None
    published = read_status(api, job)
    is_same = annotation(found, CONTENT) == objects.content
    if objects.run:
        is_same = annotation(found, RUN) == objects.run
    over = "" if published is None else published.over
    has_begun = published is not None and published.status is not None
    return _ExistingJob(found, over, has_begun, is_same, "deletionTimestamp" in found["metadata"])


def _check(there: _ExistingJob, job: str, objects: JobObjects) -> None:
    """Refuse to touch another job, one that runs, and one that has rows that no checkpoint has."""
    name = objects.deployment["metadata"]["name"]
    if annotation(there.deployment, JOB_NAME) != job:
        raise JobRefused(f"a Deployment {name} is there that is not of job {job!r}; rename the job")
    if there.is_unsaved and not there.is_same:
        raise JobRefused(
            f"job {job!r} has ended without its last checkpoint, and its servers are kept. Run "
            "the same command as then, which tries it again, or give the rows up: kubectl "
            f"delete deployment {name}"
        )
    if not (there.over or there.is_going or there.is_same):
        raise JobRefused(
            f"job {job!r} runs on Kubernetes already, with other settings or files. Follow it "
            f"with those, or end it: backstay jobs --on kubernetes stop {job}, or kubectl "
            f"delete deployment {name}"
        )


def _open_again(
    api: KubernetesApi,
    job: str,
    objects: JobObjects,
    uid: str,
    stopped: Callable[[float], bool],
) -> _ExistingJob:
    """Have a job go on that has ended without its last checkpoint; it has no job master yet.

    The job master that has ended it takes the Deployment to no replicas. It would do so also after
    the job has begun again, so that is waited for.
    """
    name = objects.deployment["metadata"]["name"]
    deadline_s = time.monotonic() + GONE_LIMIT_S
    while True:
        there = _look(api, job, objects)
        if there is None or there.uid != uid:
            raise JobError(f"the objects of job {job!r} were deleted meanwhile; try again")
        if not there.replicas:
            api.patch("configmaps", status_name(job), {"data": not_over()})
            return there
        _wait_until_gone(name, deadline_s, stopped)


def _make_owned(
    api: KubernetesApi,
    body: dict[str, Any],
    owner: Owner,
    stopped: Callable[[float], bool],
) -> None:
    """Make an object of a job, after the one that a deleted job of the name may have left.

    Raises:
        JobRefused: One that nobody owns has its name.
        JobError: The one that is there does not go, or the command is stopped.
    """
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
        there = api.get(kind, name)
        owners = () if there is None else there["metadata"].get("ownerReferences", ())
        if any(one["uid"] == owner.uid for one in owners):
            return
        if there is not None and not owners and "deletionTimestamp" not in there["metadata"]:
            # Nothing would ever delete it.
            raise JobRefused(
                f"a {body['kind']} {name} is there that is of no job; delete it, or rename the job"
            )
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
