"""The launcher of Pods and its two threads, on an API that fails as scripted."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import pytest

from backstay.backoff import Backoff
from backstay.errors import KubernetesError
from backstay.exit_codes import ExitCode
from backstay.job_engine.launch import ExitReason
from backstay.job_spec import JobSpec
from backstay.kubernetes import pod_launcher, worker_pods
from backstay.kubernetes.api import KubernetesApi, ObjectList, WatchEvent
from backstay.kubernetes.names import WORKER_ID
from backstay.kubernetes.objects import spec_in_pods
from backstay.kubernetes.pod_launcher import TOO_OLD, PodLauncher
from backstay.kubernetes.pod_memory import memory_limit
from backstay.kubernetes.worker_pods import WorkerPods
from backstay.master.launcher import WorkerProgram
from tests.unit.kubernetes.kubernetes_pods import running, terminated

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
ACCOUNT = "system:serviceaccount:team:backstay-job-master"
MAY_NOT = (
    f'Kubernetes: pods is forbidden: User "{ACCOUNT}" cannot %s resource "pods" in API group "" in '
    'the namespace "team"'
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
        return {"metadata": {"uid": "0f8fa"}, "spec": {"template": {"spec": {}}}}

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
    monkeypatch.setattr(pod_launcher, "RETRY", Backoff(0.01, 10.0))
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


@contextmanager
def launched(api: object, spec: JobSpec = SPEC) -> Iterator[PodLauncher]:
    launcher = PodLauncher(WorkerProgram(spec, {}, "0f8fa"), cast(KubernetesApi, api))
    try:
        yield launcher
    finally:
        launcher.close()


class Forbidding(Api):
    """Forbids calls until told otherwise."""

    def __init__(self, *verbs: str) -> None:
        super().__init__([ObjectList((), "1")] * 2, [Watch(), Watch()])
        self.forbidden = set(verbs)
        self.error_status = 403

    def create(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self._check("create")
        return super().create(kind, body)

    def list_objects(self, kind: str, selector: str) -> ObjectList:
        self._check("list")
        return super().list_objects(kind, selector)

    def _check(self, verb: str) -> None:
        if verb in self.forbidden:
            raise KubernetesError(MAY_NOT % verb, status=self.error_status, reason="Forbidden")


def eventually(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("verb", "what"),
    [("create", "no Pod can be made"), ("list", "the Pods of this job cannot be seen")],
)
def test_a_right_that_is_missing_is_told_and_tried_until_it_is_there(
    verb: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_launcher, "RETRY", Backoff(0.01, 10.0))
    api = Forbidding(verb)
    with launched(api) as launcher:
        launcher.reconcile(["w-0"])
        eventually(lambda: launcher.trouble() != "")
        right = f"The ServiceAccount backstay-job-master lacks the right to {verb} pods"
        assert launcher.trouble().startswith(f"{what}: {MAY_NOT % verb}. {right}")
        assert "if that lasts 10 minutes and no worker works, the job fails" in launcher.trouble()
        assert launcher.report().exits == ()
        api.forbidden.clear()

        def is_made() -> bool:
            launcher.reconcile(["w-0"])
            return launcher.report().running == ("w-0",) and not launcher.trouble()

        eventually(is_made)


@pytest.mark.parametrize("verb", ["create", "list"])
def test_a_right_that_does_not_come_is_an_exit_that_another_worker_would_share(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_launcher, "RETRY", Backoff(0.01, 10.0))
    monkeypatch.setattr(worker_pods, "FORBIDDEN_MAX_S", 0.2)
    with launched(Forbidding(verb)) as launcher:
        launcher.reconcile(["w-0"])
        eventually(lambda: launcher.report().exits != ())
        (end,) = launcher.report().exits
        assert (end.reason, end.code) == (ExitReason.NOT_ALLOWED, ExitCode.WRONG_SETTING)
        assert f"lacks the right to {verb} pods" in end.last_words
        # Nothing keeps the threads busy after that.
        plans = count_plans(monkeypatch)
        threading.Event().wait(0.3)
        assert len(plans) < 10


def count_plans(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list that each further plan is added to."""
    plans: list[float] = []
    plan = WorkerPods.plan

    def counted(pods: WorkerPods, now_s: float) -> Any:
        plans.append(now_s)
        return plan(pods, now_s)

    monkeypatch.setattr(WorkerPods, "plan", counted)
    return plans


def growing() -> JobSpec:
    """A job that gives twice the memory after a worker had too little."""
    document = {
        "image": "registry/backstay:1",
        "worker": {"limits": {"memory": "1Gi"}, "requests": {"memory": "512Mi"}},
        "more_memory": {"factor": 2, "max": "3Gi"},
    }
    return spec_in_pods(
        JobSpec.from_mapping(
            {"name": "a", "model": "m.py", "training": "/a.csv", "kubernetes": document}
        ),
        ["ps-0:7000"],
    )


def out_of_memory() -> dict[str, Any]:
    short = terminated("w-0", 137, "OOMKilled")
    short["spec"]["containers"][0]["resources"] = {"limits": {"memory": "1Gi"}}
    return short


def test_a_worker_that_ran_out_of_memory_is_followed_by_one_with_more() -> None:
    api = Made([ObjectList((out_of_memory(),), "1")], [Watch()])
    with launched(api, growing()) as launcher:
        launcher.reconcile(["w-1"])
        assert api.resources.get(timeout=LIMIT_S) == {
            "limits": {"memory": "2048Mi"},
            "requests": {"memory": "1024Mi"},
        }


@pytest.mark.parametrize(
    ("most", "asked"), [(1536, ["2048Mi", "1536Mi"]), (1024, ["2048Mi", "1Gi"])]
)
def test_a_limit_range_below_the_memory_that_is_to_come_costs_one_call(
    most: int, asked: list[str]
) -> None:
    api = Limited([ObjectList((out_of_memory(),), "1")], [Watch()], most)
    with launched(api, growing()) as launcher:
        launcher.reconcile(["w-1"])
        assert api.created.get(timeout=LIMIT_S) == "w-1"
        assert [api.resources.get()["limits"]["memory"] for _ in asked] == asked
        assert api.resources.empty()
        eventually(lambda: f"maximum memory usage per Container is {most}Mi" in launcher.trouble())
        assert "the job fails" not in launcher.trouble()


def test_a_limit_range_below_the_memory_that_the_job_file_says_is_a_missing_right() -> None:
    api = Limited([ObjectList((out_of_memory(),), "1")], [Watch()], 512)
    with launched(api, growing()) as launcher:
        launcher.reconcile(["w-1"])
        eventually(lambda: "no Pod can be made: " in launcher.trouble())
        assert "maximum memory usage per Container is 512Mi" in launcher.trouble()
        assert "the job fails" in launcher.trouble()


class Made(Api):
    """Keeps what the Pods that are made may use."""

    def __init__(self, lists: list[ObjectList], watches: list[Watch | KubernetesError]) -> None:
        super().__init__(lists, watches)
        self.resources: queue.Queue[dict[str, Any]] = queue.Queue()

    def create(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self.resources.put(body["spec"]["containers"][0]["resources"])
        return super().create(kind, body)


class Limited(Made):
    """Has a LimitRange that allows a container so many MiB."""

    def __init__(
        self, lists: list[ObjectList], watches: list[Watch | KubernetesError], most: int
    ) -> None:
        super().__init__(lists, watches)
        self.most = most

    def create(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
        asked = memory_limit(body)
        if asked > self.most << 20:
            self.resources.put(body["spec"]["containers"][0]["resources"])
            why = f"maximum memory usage per Container is {self.most}Mi, but limit is {asked}"
            raise KubernetesError(
                f'Kubernetes: pods "a" is forbidden: {why}', status=403, reason="Forbidden"
            )
        return super().create(kind, body)
