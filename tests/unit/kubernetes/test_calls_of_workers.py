"""How many calls of the API the workers of a job take: counted on the launcher with its threads.

The job master's side is the real one, too (``WorkerSet``). The API is a stand-in that keeps Pods
and tells watches of each change.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import pytest

from backstay.backoff import Backoff
from backstay.errors import KubernetesError
from backstay.job_engine.worker_set import WorkerPolicy, WorkerSet
from backstay.job_spec import JobSpec
from backstay.kubernetes import pod_launcher
from backstay.kubernetes.api import KubernetesApi, ObjectList, WatchEvent
from backstay.kubernetes.names import WORKER_ID
from backstay.kubernetes.objects import spec_in_pods
from backstay.kubernetes.pod_launcher import TOO_OLD, PodLauncher
from backstay.kubernetes.worker_pods import FAILED_KEPT
from backstay.master.launcher import WorkerProgram
from tests.unit.kubernetes.kubernetes_pods import deleted, disrupted, running, terminated

LIMIT_S = 120.0
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
RELISTS = 3
Pod = dict[str, Any]


class Watch:
    """Tells its events until it is closed or breaks."""

    def __init__(self) -> None:
        self.events: queue.Queue[WatchEvent | KubernetesError | None] = queue.Queue()

    def __iter__(self) -> Iterator[WatchEvent]:
        while (event := self.events.get(timeout=LIMIT_S)) is not None:
            if isinstance(event, KubernetesError):
                raise event
            yield event

    def close(self) -> None:
        self.events.put(None)


class Api:
    """Keeps Pods, and counts the calls."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.listed = 0
        self._pods: dict[str, Pod] = {}
        self._watches: list[Watch] = []
        self._version = 0
        self._lock = threading.Lock()

    def get(self, kind: str, name: str) -> Pod:
        self.calls["get"] += 1
        return {"metadata": {"uid": "0f8fa"}}

    def list_objects(self, kind: str, selector: str) -> ObjectList:
        with self._lock:
            self.calls["list"] += 1
            self.listed += len(self._pods)
            return ObjectList(tuple(self._pods.values()), str(self._version))

    def watch_pods(self, selector: str, version: str) -> Watch:
        with self._lock:
            self.calls["watch"] += 1
            if version != str(self._version):
                raise KubernetesError("too old resource version", status=TOO_OLD)
            self._watches.append(Watch())
            return self._watches[-1]

    def create(self, kind: str, body: Mapping[str, Any]) -> Pod:
        pod = running(body["metadata"]["labels"][WORKER_ID])
        with self._lock:
            self.calls["create"] += 1
            self._pods[pod["metadata"]["name"]] = pod
            self._tell("ADDED", pod)
        return pod

    def delete(self, kind: str, name: str) -> None:
        with self._lock:
            self.calls["delete"] += 1
            self._remove(name, deleted(self._pods[name]))

    def close(self) -> None:
        """There is no connection."""

    # What happens to the Pods.

    def take_all(self) -> None:
        """Have all Pods preempted at once."""
        with self._lock:
            for name, pod in list(self._pods.items()):
                self._remove(name, deleted(disrupted(pod, "PreemptionByScheduler")))

    def fail_all(self) -> None:
        """Have all workers fail at once."""
        with self._lock:
            for name, pod in self._pods.items():
                self._pods[name] = terminated(pod["metadata"]["labels"][WORKER_ID], 1, "Error")
                self._tell("MODIFIED", self._pods[name])

    def break_watches(self) -> None:
        """Have each watch end, and know its version no more."""
        with self._lock:
            self._version += 1
            watches, self._watches = self._watches, []
        for one in watches:
            one.events.put(KubernetesError("too old resource version", status=TOO_OLD))

    def _remove(self, name: str, pod: Pod) -> None:
        del self._pods[name]
        self._tell("MODIFIED", pod)
        self._tell("DELETED", pod)

    def _tell(self, kind: str, pod: Pod) -> None:
        self._version += 1
        for one in self._watches:
            one.events.put(WatchEvent(kind, pod, str(self._version)))


class Job:
    """A job master that has so many workers."""

    def __init__(self, launcher: PodLauncher, workers: int) -> None:
        self.launcher = launcher
        policy = WorkerPolicy(workers, 1, workers, max_relaunches=1_000_000, backoff_s=0.0)
        self.workers = WorkerSet(policy)
        self.ended = 0

    def until(self, holds: Callable[[], bool]) -> None:
        """Pass wishes and exits on until then."""
        deadline_s = time.monotonic() + LIMIT_S
        while not holds():
            assert time.monotonic() < deadline_s, self.launcher.trouble()
            report = self.launcher.report()
            for end in report.exits:
                self.ended += self.workers.has_place(end.worker_id)
                self.workers.exited(end, time.monotonic())
            self.launcher.acknowledge([one.worker_id for one in report.exits])
            self.launcher.reconcile(self.workers.wanted(time.monotonic()))
            time.sleep(0.002)

    def all_run(self) -> bool:
        """Whether each wanted worker has a Pod, and no other worker has one."""
        return set(self.launcher.report().running) == set(self.workers.wanted(time.monotonic()))


def calls_of(workers: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Counter[str], int]:
    """Play the life of a job; return its calls, and how many Pods all lists had."""
    monkeypatch.setattr(pod_launcher, "RETRY", Backoff(0.01, 10.0))
    api = Api()
    launcher = PodLauncher(WorkerProgram(SPEC, {}, "0f8fa"), cast(KubernetesApi, api))
    try:
        job = Job(launcher, workers)
        job.until(lambda: api.calls["create"] == workers and job.all_run())
        api.take_all()
        job.until(lambda: job.ended == workers and job.all_run())
        api.fail_all()
        job.until(lambda: job.ended == 2 * workers and job.all_run())
        job.until(lambda: api.calls["delete"] == workers - FAILED_KEPT)
        for number in range(RELISTS):
            api.break_watches()
            job.until(lambda number=number: api.calls["watch"] == 2 + number)  # type: ignore[misc]
        job.workers.finish()
        job.until(lambda: not launcher.report().running)
        return api.calls, api.listed
    finally:
        launcher.close()


@pytest.mark.parametrize("workers", [125, 250, 500])
def test_calls_grow_with_the_workers_and_not_with_their_square(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, listed = calls_of(workers, monkeypatch)
    assert calls == {
        "get": 1,
        # At the beginning, and after each watch that broke.
        "list": 1 + RELISTS,
        "watch": 1 + RELISTS,
        # At the start, after all were preempted at once, and after all failed at once.
        "create": 3 * workers,
        # Those that failed, but for the newest, and at the end all that run.
        "delete": 2 * workers - FAILED_KEPT,
    }
    assert listed == RELISTS * (workers + FAILED_KEPT)
