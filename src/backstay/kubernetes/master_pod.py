"""The Pods of job master and servers, as the commands of a user look at them.

Imports ``api``, ``names`` and ``pod_exit``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from backstay.kubernetes.api import KubernetesApi
from backstay.kubernetes.names import MASTER, PSERVER, labels_of, object_name
from backstay.kubernetes.pod_exit import why_not_running

__all__ = ["MasterPod", "master_pod", "pserver_trouble", "pservers_running"]


class MasterPod(NamedTuple):
    """The newest Pod of a job master.

    Attributes:
        name: Empty: there is none.
        trouble: Why it does not run; empty: it does.
    """

    name: str
    trouble: str


def master_pod(api: KubernetesApi, job: str) -> MasterPod:
    """Return the Pod of a job's job master.

    Raises:
        KubernetesError: The API refuses the call, or does not answer.
    """
    pods = _pods(api, job, MASTER)
    if not pods:
        return MasterPod("", f"the job master has no Pod yet{_why_none(api, job)}")
    newest = max(pods, key=lambda one: str(one["metadata"].get("creationTimestamp", "")))
    why = why_not_running(newest, MASTER)
    name = newest["metadata"]["name"]
    return MasterPod(name, f"the job master waits for {why}" if why else "")


def pserver_trouble(api: KubernetesApi, job: str) -> str:
    """Return why not all servers of a job's own run, for people; empty: all do, or it has none.

    Raises:
        KubernetesError: The API refuses the call, or does not answer.
    """
    waits = Counter(why_not_running(one, PSERVER) for one in _pods(api, job, PSERVER))
    return "; ".join(
        f"{count} server{'s wait' if count > 1 else ' waits'} for {why}"
        for why, count in sorted(waits.items())
        if why
    )


def pservers_running(api: KubernetesApi, job: str) -> int:
    """Return how many servers of a job's own run.

    Raises:
        KubernetesError: The API refuses the call, or does not answer.
    """
    return sum(not why_not_running(one, PSERVER) for one in _pods(api, job, PSERVER))


def _pods(api: KubernetesApi, job: str, role: str) -> list[Mapping[str, Any]]:
    """Return the Pods of a role that were not told to end."""
    labels = ",".join(f"{name}={value}" for name, value in labels_of(job, role).items())
    listed = api.list_objects("pods", labels).items
    return [one for one in listed if "deletionTimestamp" not in one["metadata"]]


def _why_none(api: KubernetesApi, job: str) -> str:
    """Return why the Deployment makes no Pod, such as a quota or a missing ServiceAccount."""
    found = api.get("deployments", object_name(job)) or {}
    conditions = found.get("status", {}).get("conditions") or ()
    failure: Mapping[str, str] = next(
        (one for one in conditions if one["type"] == "ReplicaFailure" and one["status"] == "True"),
        {},
    )
    return f": {failure['message']}" if failure else ""
