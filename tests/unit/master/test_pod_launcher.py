"""The launcher of Pods and its two threads, on an API that fails as scripted."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from typing import Any, cast

import pytest

from backstay.errors import KubernetesError
from backstay.job_engine.launch import ExitReason
from backstay.job_spec import JobSpec
from backstay.master.kubernetes import pod_launcher
from backstay.master.kubernetes.api import KubernetesApi, ObjectList, WatchEvent
from backstay.master.kubernetes.names import WORKER_ID
from backstay.master.kubernetes.objects import spec_in_pods
from backstay.master.kubernetes.pod_launcher import TOO_OLD, PodLauncher
from backstay.master.launcher import WorkerProgram
from tests.unit.master.kubernetes_pods import running, terminated

LIMIT_S = 30.0
SPEC = spec_in_pods(
    JobSpec.from_mapping(
        {
            "name": "census",
            "model": "/home/me/zoo/model.py",
            "training": "/data/a.csv",
            "kubernetes": {"image": "registry/backstay:1"},
        }
    ),
    ["ps-0:7000"],
)
BROKEN = KubernetesError("a watch of Kubernetes broke")
AWAY = KubernetesError("Kubernetes does not answer")
EXPIRED = KubernetesError("too old resource version", status=TOO_OLD)


class Watch:
    """Tells its events, then fails; without an error it goes on until ``close``."""

    def __init__(self, *events: WatchEvent, error: KubernetesError | None = None) -> None:
        self.begun = threading.Event()
        self._events = events
        self._error = error
        self._closed = threading.Event()

    def __iter__(self) -> Iterator[WatchEvent]:
        self.begun.set()
        yield from self._events
        if self._error is not None:
            raise self._error
        assert self._closed.wait(LIMIT_S)

    def close(self) -> None:
        self._closed.set()


class Api:
    """Answers lists and watches in the given order, and keeps the calls that change Pods."""

    def __init__(self, lists: list[ObjectList], watches: list[Watch | KubernetesError]) -> None:
        self._lists = iter(lists)
        self._watches = iter(watches)
        self.watched_from: list[str] = []
        self.created: queue.Queue[str] = queue.Queue()
        self.deleted: queue.Queue[str] = queue.Queue()

    def get(self, kind: str, name: str) -> dict[str, Any]:
        return {"metadata": {"uid": "0f8fa"}}

    def list_objects(self, kind: str, selector: str) -> ObjectList:
        return next(self._lists)

    def watch_pods(self, selector: str, version: str) -> Watch:
        self.watched_from.append(version)
        watch = next(self._watches)
        if isinstance(watch, KubernetesError):
            raise watch
        return watch

    def create(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
        worker_id = body["metadata"]["labels"][WORKER_ID]
        self.created.put(worker_id)
        return running(worker_id)

    def delete(self, kind: str, name: str) -> None:
        self.deleted.put(name)

    def close(self) -> None:
        """There is no connection."""


def test_a_worker_that_ends_while_the_api_is_away_is_known_and_replaced_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pod_launcher, "RETRY_FIRST_S", 0.01)
    bookmark = WatchEvent("BOOKMARK", {}, "5")
    last = Watch()
    api = Api(
        [
            ObjectList((running("w-0"), running("w-1")), "1"),
            ObjectList((terminated("w-0", 137), running("w-1")), "9"),
        ],
        [Watch(bookmark, error=BROKEN), AWAY, Watch(error=EXPIRED), last],
    )
    launcher = PodLauncher(WorkerProgram(SPEC, {}, "0f8fa"), cast(KubernetesApi, api))
    try:
        launcher.reconcile(["w-0", "w-1"])
        assert last.begun.wait(LIMIT_S)
        # It goes on from what it saw last, and lists again when the API does not know that.
        assert api.watched_from == ["1", "5", "5", "9"]
        report = launcher.report()
        assert report.running == ("w-1",)
        assert [(one.worker_id, one.reason) for one in report.exits] == [
            ("w-0", ExitReason.PREEMPTED)
        ]
        assert launcher.trouble() == ""
        launcher.acknowledge(["w-0"])
        launcher.reconcile(["w-1", "w-2"])
        assert api.created.get(timeout=LIMIT_S) == "w-2"
        assert api.deleted.get(timeout=LIMIT_S) == terminated("w-0", 137)["metadata"]["name"]
    finally:
        launcher.close()
    assert api.created.empty()
    assert api.deleted.empty()
