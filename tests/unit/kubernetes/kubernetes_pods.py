"""Pods as the API of Kubernetes gives them, made of what a test is about."""

from __future__ import annotations

from typing import Any

from backstay.kubernetes.names import WORKER_ID

__all__ = [
    "condition",
    "deleted",
    "disrupted",
    "ended",
    "first_ended",
    "first_waits",
    "on_silent_node",
    "pending",
    "running",
    "terminated",
]

Pod = dict[str, Any]


def _pod(worker_id: str, phase: str, state: dict[str, Any] | None = None) -> Pod:
    statuses = [] if state is None else [{"name": "worker", "state": state}]
    return {
        "metadata": {
            "name": f"backstay-census-0f8fa-{worker_id}",
            "labels": {WORKER_ID: worker_id},
        },
        "spec": {"containers": [{"name": "worker"}]},
        "status": {"phase": phase, "containerStatuses": statuses},
    }


def running(worker_id: str) -> Pod:
    return _pod(worker_id, "Running", {"running": {}})


def pending(worker_id: str, reason: str = "", message: str = "") -> Pod:
    state = {"waiting": {"reason": reason, "message": message}} if reason else None
    return _pod(worker_id, "Pending", state)


def terminated(worker_id: str, code: int, reason: str = "", message: str = "") -> Pod:
    state = {"terminated": {"exitCode": code, "reason": reason, "message": message}}
    return _pod(worker_id, "Failed" if code else "Succeeded", state)


def ended(worker_id: str, reason: str, message: str = "") -> Pod:
    """A Pod that failed as a whole, before or after its container ran."""
    pod = _pod(worker_id, "Failed")
    pod["status"] |= {"reason": reason, "message": message}
    return pod


def first_ended(worker_id: str, code: int, reason: str = "Error", message: str = "") -> Pod:
    """A Pod whose init container ended; its worker's container was never begun."""
    pod = _pod(worker_id, "Failed", {"waiting": {"reason": "PodInitializing"}})
    end = {"exitCode": code, "reason": reason, "message": message}
    pod["status"]["initContainerStatuses"] = [
        {"name": "mount", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}},
        {"name": "fetch", "state": {"terminated": end}},
    ]
    return pod


def first_waits(worker_id: str, reason: str, message: str = "") -> Pod:
    """A Pod whose init container waits."""
    pod = _pod(worker_id, "Pending", {"waiting": {"reason": "PodInitializing"}})
    waiting = {"reason": reason, "message": message}
    pod["status"]["initContainerStatuses"] = [{"name": "fetch", "state": {"waiting": waiting}}]
    return pod


def on_silent_node(pod: Pod) -> Pod:
    """The Pod after Kubernetes has marked it, because its node does not answer."""
    return condition(condition(pod, "Ready", "False"), "ContainersReady", "True")


def deleted(pod: Pod) -> Pod:
    """The Pod after it was told to end."""
    metadata = {**pod["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}
    return {**pod, "metadata": metadata}


def condition(pod: Pod, kind: str, status: str, reason: str = "", message: str = "") -> Pod:
    one = {"type": kind, "status": status, "reason": reason, "message": message}
    conditions = [*pod["status"].get("conditions", ()), one]
    return {**pod, "status": {**pod["status"], "conditions": conditions}}


def disrupted(pod: Pod, reason: str, message: str = "") -> Pod:
    return condition(pod, "DisruptionTarget", "True", reason, message)
