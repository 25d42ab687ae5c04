"""The objects of one job, as its job master changes them: found by name, checked by their owner.

A job that was deleted and made anew has objects of the same names, but another owner. They are
left alone. The status is written on top of the version that was read, so a write that was delayed
changes nothing. Imports the modules beside it; decides nothing about the job.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from backstay.errors import KubernetesError
from backstay.kubernetes.api import KubernetesApi
from backstay.kubernetes.event_writer import EventWriter
from backstay.kubernetes.names import object_name, pserver_name, status_name, worker_selector
from backstay.kubernetes.objects import Owner
from backstay.kubernetes.pod_exit import unfinished
from backstay.kubernetes.published_status import (
    GrownServers,
    PublishedStatus,
    growth_data,
    may_replace,
)

__all__ = ["OwnedJob"]

CONFLICT = 409
NOT_FOUND = 404
# Another write came between; what it wrote is read, and then it is tried again.
CONFLICTS_MAX = 5

log = logging.getLogger(__name__)


class OwnedJob:
    """The objects that one Deployment owns; thread-safe."""

    def __init__(self, api: KubernetesApi, job: str, owner: Owner) -> None:
        """Use ``find``."""
        self._api = api
        self._job = job
        self.owner = owner
        self.events = EventWriter(api, owner)
        # Of the status: its version and what it said, as it was read or written last.
        self._version = ""
        self._data: dict[str, str] = {}
        self._writing = threading.Lock()

    @classmethod
    def find(cls, api: KubernetesApi, job: str) -> OwnedJob:
        """Return the objects of the job whose job master this is.

        Raises:
            KubernetesError: There is no such job, the API refuses the call, or does not answer.
        """
        name = object_name(job)
        found = api.get("deployments", name)
        if found is None:
            raise _gone(name)
        return cls(api, job, Owner(name, found["metadata"]["uid"]))

    def read(self) -> PublishedStatus:
        """Return what is published."""
        with self._writing:
            self._read()
            return PublishedStatus.of_data(self._data)

    def publish(self, data: Mapping[str, str]) -> bool:
        """Write how the job goes, with ``over``: that it has ended.

        Returns:
            Whether it was written. The end of the job, and what a later job master says, stays.
        """
        with self._writing:
            return self._write(lambda: data if may_replace(self._data, data) else None)

    def note_growth(self, grown: GrownServers) -> None:
        """Record that servers are added for a plan; what is recorded for that plan stays."""

        def change() -> Mapping[str, str] | None:
            noted = PublishedStatus.of_data(self._data).grown
            is_noted = noted is not None and noted.plan_id == grown.plan_id
            return None if is_noted else growth_data(grown)

        with self._writing:
            self._write(change)

    def forget_growth(self, grown: GrownServers) -> None:
        """Record that a growth needs not be undone any more."""

        def change() -> Mapping[str, str] | None:
            noted = PublishedStatus.of_data(self._data).grown
            return growth_data(None) if noted == grown else None

        with self._writing:
            self._write(change)

    def delete_workers(self) -> None:
        """Have the worker Pods deleted that have not ended. The others are kept for their logs."""
        listed = self._api.list_objects("pods", worker_selector(self.owner.uid))
        for name in unfinished(listed.items):
            self._api.delete("pods", name)

    def end_servers(self) -> None:
        """Have no servers of the job's own any more; a job that never had them is no error."""
        name = pserver_name(self._job)
        found = self._api.get("statefulsets/scale", name)
        # What was there before the owner was seen is the owner's.
        if found is not None and self._has_owner():
            uid = found["metadata"]["uid"]
            self._if_owned(lambda: _scale_to_zero(self._api, "statefulsets/scale", name, uid))

    def scale_to_zero(self) -> None:
        """Have no job master any more: the job is over."""
        name, uid = self.owner.name, self.owner.uid
        self._if_owned(lambda: _scale_to_zero(self._api, "deployments/scale", name, uid))

    def _read(self) -> None:
        name = status_name(self._job)
        found = self._api.get("configmaps", name)
        owners = () if found is None else found["metadata"].get("ownerReferences", ())
        if found is None or all(one["uid"] != self.owner.uid for one in owners):
            raise _gone(name)
        self._version = found["metadata"]["resourceVersion"]
        self._data = dict(found.get("data") or {})

    def _write(self, change: Callable[[], Mapping[str, str] | None]) -> bool:
        """Write what ``change`` makes of what is published; False: it changes nothing."""
        name = status_name(self._job)
        for _ in range(CONFLICTS_MAX):
            if not self._version:
                self._read()
            data = change()
            if data is None:
                return False
            version, self._version = self._version, ""
            body = {"metadata": {"resourceVersion": version}, "data": dict(data)}
            try:
                made = self._api.patch("configmaps", name, body)
            except KubernetesError as error:
                if error.status != CONFLICT:
                    raise
                continue
            self._version = made["metadata"]["resourceVersion"]
            self._data |= data
            return True
        raise KubernetesError(
            f"Kubernetes: ConfigMap {name} was changed during each of {CONFLICTS_MAX} writes",
            status=CONFLICT,
        )

    def _has_owner(self) -> bool:
        found = self._api.get("deployments", self.owner.name)
        return found is not None and found["metadata"]["uid"] == self.owner.uid

    def _if_owned(self, call: Callable[[], object]) -> None:
        """Make a call that is refused where the object is another one."""
        try:
            call()
        except KubernetesError as error:
            if error.status not in (CONFLICT, NOT_FOUND) or self._has_owner():
                raise
            log.warning("the objects of this job are gone: %s", error)


def _scale_to_zero(api: KubernetesApi, kind: str, name: str, uid: str) -> dict[str, Any]:
    return api.patch(kind, name, {"metadata": {"uid": uid}, "spec": {"replicas": 0}})


def _gone(name: str) -> KubernetesError:
    return KubernetesError(
        f"Kubernetes: {name} of this job is gone: the job was deleted", status=NOT_FOUND
    )
