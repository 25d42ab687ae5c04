"""A stand-in for the API of Kubernetes: objects with their uid and version.

So an object is replaced, or a write is delayed, at a known moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from backstay.errors import KubernetesError
from backstay.kubernetes.api import ObjectList
from backstay.kubernetes.names import (
    object_name,
    pserver_name,
    status_name,
    worker_selector,
)

__all__ = ["Objects"]


class Objects:
    """What the API has; a change names the version or the uid that it is meant for."""

    def __init__(self, job: str) -> None:
        self.job = job
        self.found: dict[tuple[str, str], dict[str, Any]] = {}
        self.deleted: list[str] = []
        self.events: dict[str, dict[str, Any]] = {}
        self.namespace = "team"
        self.before_patch: Callable[[], None] = lambda: None
        self._numbers = count(1)

    def make(self, kind: str, name: str, uid: str, owner: str = "", **more: Any) -> None:
        owners = [{"uid": owner}] if owner else []
        metadata = {"uid": uid, "ownerReferences": owners, "resourceVersion": self._version()}
        self.found[kind, name] = {"metadata": metadata, **more}

    def make_job(self, uid: str) -> None:
        """Have the objects of a job: anew, if there are some."""
        self.make("deployments", object_name(self.job), uid, spec={"replicas": 1})
        self.make("configmaps", status_name(self.job), f"{uid}-status", uid, data={})
        self.make(
            "statefulsets", pserver_name(self.job), f"{uid}-servers", uid, spec={"replicas": 2}
        )

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        return self.found.get((kind.partition("/")[0], name))

    def create(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
        assert kind == "events"
        name = body["metadata"]["name"]
        if name in self.events:
            raise KubernetesError("already exists", status=409)
        self.events[name] = dict(body)
        return self.events[name]

    def patch(self, kind: str, name: str, change: Mapping[str, Any]) -> dict[str, Any]:
        before, self.before_patch = self.before_patch, lambda: None
        before()
        found = self.get(kind, name)
        if found is None:
            raise KubernetesError("not found", status=404)
        for field, value in change.get("metadata", {}).items():
            if found["metadata"][field] != value:
                raise KubernetesError("the object has been modified", status=409)
        for part in ("data", "spec"):
            if part in change:
                found[part] = {**found[part], **change[part]}
        found["metadata"] = {**found["metadata"], "resourceVersion": self._version()}
        return found

    def list_objects(self, kind: str, selector: str) -> ObjectList:
        found = [
            one
            for (each, _), one in self.found.items()
            for owner in one["metadata"]["ownerReferences"]
            if each == kind and selector == worker_selector(owner["uid"])
        ]
        return ObjectList(tuple(found), "1")

    def delete(self, kind: str, name: str, *, at_once: bool = False, uid: str = "") -> None:
        self.deleted.append(name)

    def watch_pods(self, selector: str, version: str) -> None:
        raise KubernetesError("nothing is watched here")

    def close(self) -> None:
        """There is no connection."""

    def data(self) -> dict[str, str]:
        data: dict[str, str] = self.found["configmaps", status_name(self.job)]["data"]
        return data

    def replicas(self, kind: str, name: str) -> int:
        return int(self.found[kind, name]["spec"]["replicas"])

    def _version(self) -> str:
        return str(next(self._numbers))
