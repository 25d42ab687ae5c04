"""A namespace of the cluster, as a test uses it: Pods, their logs, commands in them, waits.

Every wait watches the API server and has a limit; a watch that breaks, as when the API server is
killed, begins again with a list.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kubernetes.client import ApiException, CoreV1Api, V1Pod
from kubernetes.stream import stream
from kubernetes.watch import Watch
from urllib3.exceptions import HTTPError

from tests.kubernetes.backstay_image import IMAGE, USER_ID

__all__ = ["Namespace", "is_ready", "pod", "termination", "wait_for"]

WAIT_LIMIT_S = 60.0
# Between two attempts to reach an API server that is down.
RETRY_PAUSE_S = 0.2
WATCH_LIMIT_S = 10


def pod(name: str, command: list[str], **spec: Any) -> dict[str, Any]:
    """Return a Pod with one container of our image, as restricted as the image allows.

    Args:
        name: Of the Pod, and its label ``app``.
        command: What it runs.
        spec: Further fields of the Pod's spec. ``container`` has those of its container.
    """
    container = {
        "name": "main",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": command,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    return {
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "containers": [container | spec.pop("container", {})],
            **spec,
        },
    }


def is_ready(found: V1Pod) -> bool:
    """Whether the Pod is ready, and so an endpoint of its Services."""
    conditions = found.status.conditions or []
    return any(c.type == "Ready" and c.status == "True" for c in conditions)


def termination(found: V1Pod) -> Any:
    """How the Pod's container ended, or None."""
    statuses = found.status.container_statuses
    return statuses[0].state.terminated if statuses else None


def wait_for(
    what: str,
    list_call: Callable[..., Any],
    holds: Callable[[Any], bool],
    *,
    limit_s: float = WAIT_LIMIT_S,
    **selection: Any,
) -> Any:
    """Watch objects until one fulfils the condition, and return it.

    Args:
        what: For the error.
        list_call: Of the client, as ``CoreV1Api().list_node``.
        holds: Called with each object, as it is and at each change.
        limit_s: Then an AssertionError tells the state last seen.
        selection: Arguments of the call.
    """
    deadline = time.monotonic() + limit_s
    seen: Any = None
    while (left := deadline - time.monotonic()) > 0:
        try:
            listed = list_call(**selection, _request_timeout=left)
            for item in listed.items:
                seen = item
                if holds(item):
                    return item
            changes = Watch().stream(
                list_call,
                **selection,
                resource_version=listed.metadata.resource_version,
                timeout_seconds=max(1, min(WATCH_LIMIT_S, int(left))),
                _request_timeout=left + 1,
            )
            for change in changes:
                seen = change["object"]
                if change["type"] != "DELETED" and holds(seen):
                    return seen
        except (ApiException, HTTPError, OSError):
            time.sleep(RETRY_PAUSE_S)
    raise AssertionError(f"{what}: not within {limit_s:.0f} s; last seen:\n{seen}")


class Namespace:
    """One namespace; its test is alone in it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.core = CoreV1Api()

    def run(self, body: dict[str, Any]) -> None:
        """Create a Pod."""
        self.core.create_namespaced_pod(self.name, body)

    def pod(self, name: str) -> V1Pod:
        """Return the Pod as it is now."""
        return self.core.read_namespaced_pod(name, self.name)

    def pods(self) -> list[V1Pod]:
        """Return all Pods as they are now."""
        return list(self.core.list_namespaced_pod(self.name).items)

    def wait(
        self, name: str, holds: Callable[[V1Pod], bool], limit_s: float = WAIT_LIMIT_S
    ) -> V1Pod:
        """Wait for a Pod to fulfil the condition, and return it."""
        return wait_for(
            f"Pod {name}",
            self.core.list_namespaced_pod,
            holds,
            limit_s=limit_s,
            namespace=self.name,
            field_selector=f"metadata.name={name}",
        )

    def output(self, name: str, limit_s: float = WAIT_LIMIT_S) -> str:
        """Wait for the Pod's container to end well, and return what it printed."""
        found = self.wait(name, lambda p: p.status.phase in {"Succeeded", "Failed"}, limit_s)
        # As it is: the client takes a log that is JSON for an object.
        answer = self.core.read_namespaced_pod_log(name, self.name, _preload_content=False)
        log = str(answer.data.decode())
        assert found.status.phase == "Succeeded", f"Pod {name} failed:\n{log}"
        return log

    def execute(self, name: str, *command: str) -> str:
        """Run a command in the Pod's container, and return what it prints."""
        running = stream(
            self.core.connect_get_namespaced_pod_exec,
            name,
            self.name,
            command=list(command),
            stdin=False,
            stdout=True,
            stderr=True,
            tty=False,
            # So that the socket can be closed: the client's own reading leaves it open.
            _preload_content=False,
        )
        try:
            running.run_forever(timeout=WAIT_LIMIT_S)
            return str(running.read_all())
        finally:
            # Its close() leaves the socket open once the other side has closed.
            running.sock.shutdown()
