"""The Pods of job master and servers, as the commands of a user look at them and use them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from backstay.errors import JobRefused
from backstay.kubernetes.api import KubernetesApi
from backstay.kubernetes.names import MASTER, PSERVER, object_name, selector_of
from backstay.kubernetes.pod_exit import why_not_running
from backstay.runner.place import Ran

__all__ = ["MasterPod", "master_pod", "pserver_trouble", "pservers_running", "run_in_master"]


class MasterPod(NamedTuple):
    """The newest Pod of a job master.

    Attributes:
        name: Empty: there is none.
        trouble: Why it does not run; empty: it does.
    """

    name: str
    trouble: str


def master_pod(api: KubernetesApi, job: str) -> MasterPod:
    """Return the Pod of a job's job master."""
    pods = _pods(api, job, MASTER)
    if not pods:
        return MasterPod("", f"the job master has no Pod yet{_why_none(api, job)}")
    newest = max(pods, key=lambda one: str(one["metadata"].get("creationTimestamp", "")))
    why = why_not_running(newest, MASTER)
    name = newest["metadata"]["name"]
    return MasterPod(name, f"the job master waits for {why}" if why else "")


def run_in_master(api: KubernetesApi, job: str, words: Sequence[str]) -> Ran:
    """Run ``backstay jobs`` in the job master's Pod, where the cluster's addresses are known.

    Raises:
        JobRefused: No Pod of the job master runs now.
    """
    pod = master_pod(api, job)
    if not pod.name or pod.trouble:
        raise JobRefused(f"job {job!r} has no job master now: {pod.trouble or 'its Pod is gone'}")
    command = ["python3", "-m", "backstay.cli", "jobs", *words]
    return Ran(*api.run_in_pod(pod.name, MASTER, command))


def pserver_trouble(api: KubernetesApi, job: str) -> str:
    """Return why not all servers of a job's own run, for people; empty: all do, or it has none."""
    waits = Counter(why_not_running(one, PSERVER) for one in _pods(api, job, PSERVER))
    return "; ".join(
        f"{count} server{'s wait' if count > 1 else ' waits'} for {why}"
        for why, count in sorted(waits.items())
        if why
    )


def pservers_running(api: KubernetesApi, job: str) -> int:
    """Return how many servers of a job's own run."""
    return sum(not why_not_running(one, PSERVER) for one in _pods(api, job, PSERVER))


def _pods(api: KubernetesApi, job: str, role: str) -> list[Mapping[str, Any]]:
    """Return the Pods of a role that were not told to end."""
    listed = api.list_objects("pods", selector_of(job, role)).items
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
