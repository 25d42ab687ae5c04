"""Which Pods servers of a job's own are to have: by the plan of a resize, and on lost nodes."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, cast

import pytest

from backstay.config import ClientConfig
from backstay.consensus.records.plans import LeavingNode, PlanKind, PlanState, ResizePlan
from backstay.errors import KubernetesError, ServerUnavailable
from backstay.kubernetes import server_scale
from backstay.kubernetes.api import KubernetesApi, ObjectList
from backstay.kubernetes.names import pserver_name
from backstay.kubernetes.owned_job import OwnedJob
from backstay.kubernetes.server_scale import CpuUse, cpu_share, lost_pods, wanted_replicas
from tests.unit.kubernetes.kubernetes_objects import Objects

NAME = "backstay-census-pserver"


def plan(nodes: int, state: PlanState, *leaving: int, kind: PlanKind = "resize") -> ResizePlan:
    names = tuple(LeavingNode(f"{NAME}-{number}", 1) for number in leaving)
    more: dict[str, Any] = {"state": state, "numbered": True}
    return ResizePlan("p", kind, nodes, names, **more)


@pytest.mark.parametrize(
    ("asked", "replicas", "wanted"),
    [
        (None, 3, 3),
        (plan(5, "waiting_for_nodes"), 3, 5),
        # A Pod is away for a moment: the StatefulSet brings it back.
        (plan(3, "waiting_for_nodes"), 3, 3),
        (plan(2, "waiting_for_nodes"), 3, 3),
        (plan(5, "moving"), 5, 5),
        # None is ended before it is empty.
        (plan(2, "moving", 2, 3), 4, 4),
        (plan(2, "done", 2, 3), 4, 2),
        (plan(5, "done"), 5, 5),
        # One came after the plan was done, and may hold rows.
        (plan(2, "done", 2), 4, 4),
        (plan(2, "done", 3), 4, 3),
        (plan(2, "done", 1, 2), 3, 2),
        (plan(2, "cancelled"), 3, 3),
        (plan(5, "failed"), 3, 3),
        (plan(2, "done", 2, kind="drain"), 3, 3),
        # The job is over.
        (plan(5, "waiting_for_nodes"), 0, 0),
    ],
)
def test_pods_follow_the_plan(asked: ResizePlan | None, replicas: int, wanted: int) -> None:
    assert wanted_replicas(asked, NAME, replicas) == wanted


@pytest.mark.parametrize(
    ("asked", "before", "idle", "wanted"),
    [
        # They found no room, and nothing waits for them any more.
        (plan(5, "failed"), 3, (3, 4), 3),
        (plan(5, "cancelled"), 3, (3, 4), 3),
        # The first of them has come, and may hold rows.
        (plan(5, "failed"), 3, (4,), 4),
        (plan(5, "failed"), 3, (3,), 5),
        # One that was there before the plan comes back.
        (plan(5, "failed"), 3, (2, 3, 4), 3),
        # It has not grown for this plan.
        (plan(5, "failed"), None, (3, 4), 5),
        # An earlier plan has added them: this one needs as many as it says.
        (plan(4, "waiting_for_nodes"), 3, (3, 4), 4),
        (plan(4, "moving"), 3, (4,), 4),
        (plan(3, "done"), 3, (3, 4), 3),
        (plan(2, "done", 2), 3, (3, 4), 2),
        (plan(3, "done"), 3, (4,), 4),
        (plan(6, "waiting_for_nodes"), 3, (3, 4), 6),
        # Two stay, one was drained.
        (plan(2, "done", 1, kind="drain"), 3, (3, 4), 3),
        (plan(4, "moving", kind="rebalance"), 3, (4,), 4),
    ],
)
def test_servers_that_came_in_vain_go(
    asked: ResizePlan, before: int | None, idle: tuple[int, ...], wanted: int
) -> None:
    names = {f"{NAME}-{number}" for number in idle}
    assert wanted_replicas(asked, NAME, 5, before=before, idle=names) == wanted


def pod(number: int, *, reason: str = "", is_deleted: bool = True) -> dict[str, Any]:
    conditions = [{"type": "DisruptionTarget", "status": "True", "reason": reason}]
    deleted = {"deletionTimestamp": "2026-11-23T00:00:00Z"} if is_deleted else {}
    return {
        "metadata": {"name": f"{NAME}-{number}", **deleted},
        "status": {"conditions": conditions if reason else []},
    }


def test_a_pod_on_a_lost_node_makes_room_for_another_of_its_name() -> None:
    lost = "DeletionByTaintManager"
    shut_down = pod(5, reason="TerminationByKubelet")
    shut_down["status"]["reason"] = "Terminated"
    pods = [
        pod(0, reason=lost),
        # It serves: only Kubernetes has lost sight of it.
        pod(1, reason=lost),
        pod(2, reason="EvictionByEvictionAPI"),
        pod(3),
        pod(4, reason=lost, is_deleted=False),
        # Its node shuts down in order, and says when it has ended.
        shut_down,
    ]
    assert lost_pods(pods, {f"{NAME}-1"}) == [f"{NAME}-0"]


def test_cpu_is_what_the_same_processes_used_between_two_looks() -> None:
    before = {"a": CpuUse(1, 10.0, 100.0), "b": CpuUse(2, 0.0, 100.0), "c": CpuUse(3, 5.0, 100.0)}
    # The process of c began anew, d was not there.
    now = {
        "a": CpuUse(1, 20.0, 110.0),
        "b": CpuUse(2, 5.0, 110.0),
        "c": CpuUse(4, 90.0, 110.0),
        "d": CpuUse(5, 90.0, 110.0),
    }
    assert cpu_share(before, now, 2.0) == pytest.approx((1.0 + 0.5) / 2 / 2.0)
    assert cpu_share({}, now, 2.0) is None
    assert cpu_share(before, now, 0.0) is None
    assert cpu_share(now, now, 2.0) is None


class LostServers(Objects):
    """A job whose servers were all on nodes that are lost."""

    def __init__(self) -> None:
        super().__init__("census")
        self.make_job("a")
        lost = [pod(number, reason="DeletionByTaintManager") for number in range(2)]
        for one in lost:
            one["metadata"]["uid"] = one["metadata"]["name"]
        self.pods = ObjectList(tuple(lost), "1")

    def list_objects(self, kind: str, selector: str) -> ObjectList:
        return self.pods

    def delete(self, kind: str, name: str, *, at_once: bool = False, uid: str = "") -> None:
        assert (at_once, uid) == (True, name)
        self.deleted.append(name)


def scale_of(api: KubernetesApi) -> server_scale.ServerScale:
    """As a job master begins with it."""
    objects = OwnedJob.find(api, "census")
    return server_scale.ServerScale(api, "census", ["ps-0:7000"], ClientConfig(), objects)


class Silent:
    """Servers that do not answer."""

    def __init__(self, *_: object) -> None:
        raise ServerUnavailable("no server answers")


def test_all_servers_on_lost_nodes_make_room_once_none_has_answered_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [10.0]
    monkeypatch.setattr(server_scale, "ClusterInspection", Silent)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    objects = LostServers()
    api = cast(KubernetesApi, objects)
    servers = scale_of(api)
    for passed_s in (0.0, server_scale.SILENT_S - server_scale.LOOK_PAUSE_SHORT_S):
        clock[0] = 10.0 + passed_s
        servers.look()
        assert objects.deleted == []
    clock[0] = 10.0 + server_scale.SILENT_S
    servers.look()
    assert objects.deleted == [f"{NAME}-0", f"{NAME}-1"]
    servers._objects.events.write_rest()
    assert [(one["reason"], one["message"]) for one in objects.events.values()] == [
        ("ServerLost", f"the node of server {NAME}-{number} is lost: another Pod takes its place")
        for number in range(2)
    ]


class Planning:
    """Servers that tell of one plan."""

    now = plan(5, "waiting_for_nodes")

    def __init__(self, *_: object) -> None:
        """There is no connection."""

    def __enter__(self) -> Planning:
        return self

    def __exit__(self, *_: object) -> None:
        """There is no connection."""

    def plan(self) -> ResizePlan:
        return self.now


class GrowingServers(Objects):
    """A job with three servers, and the Pods that its StatefulSet has."""

    def __init__(self) -> None:
        super().__init__("census")
        self.make_job("a")
        self.patch("statefulsets", NAME, {"spec": {"replicas": 3}})
        self.idle: set[int] = set()

    @property
    def servers(self) -> int:
        return self.replicas("statefulsets", pserver_name("census"))

    def list_objects(self, kind: str, selector: str) -> ObjectList:
        pods = [
            {"metadata": {"name": f"{NAME}-{number}"}, "status": {"containerStatuses": state}}
            for number in range(self.servers)
            for state in (
                [] if number in self.idle else [{"name": "pserver", "state": {"running": {}}}],
            )
        ]
        return ObjectList(tuple(pods), "1")


@pytest.mark.parametrize("end", ["failed", "cancelled"])
def test_the_next_job_master_undoes_a_growth_that_came_in_vain(
    monkeypatch: pytest.MonkeyPatch, end: PlanState
) -> None:
    monkeypatch.setattr(server_scale, "ClusterResizing", Planning)
    objects = GrowingServers()
    api = cast(KubernetesApi, objects)
    scale_of(api).follow()
    assert objects.servers == 5
    # A second one begins before the plan is given up, and sees five.
    second = scale_of(api)
    second.follow()
    objects.idle = {4}
    monkeypatch.setattr(Planning, "now", plan(5, end))
    scale_of(api).follow()
    assert objects.servers == 4
    second.follow()
    # The fourth came, and later waits for its node: no job master takes it for one in vain.
    objects.idle = {3}
    scale_of(api).follow()
    assert objects.servers == 4


@pytest.mark.parametrize(
    ("nodes", "replicas"),
    # Back to what there was; less; more, which then fails, too.
    [(3, 3), (2, 3), (6, 3)],
)
def test_a_growth_for_a_plan_that_another_one_follows_unseen_is_undone(
    monkeypatch: pytest.MonkeyPatch, nodes: int, replicas: int
) -> None:
    monkeypatch.setattr(server_scale, "ClusterResizing", Planning)
    objects = GrowingServers()
    servers = scale_of(cast(KubernetesApi, objects))
    servers.follow()
    assert objects.servers == 5
    objects.idle = {3, 4, 5}
    # The resize to 5 was cancelled, and the next one asked for, within two seconds.
    asked = replace(plan(nodes, "waiting_for_nodes"), plan_id="q")
    monkeypatch.setattr(Planning, "now", asked)
    servers.follow()
    assert objects.servers == max(nodes, 3)
    monkeypatch.setattr(Planning, "now", replace(asked, state="failed"))
    # The job master may be another one by now.
    scale_of(cast(KubernetesApi, objects)).follow()
    assert objects.servers == replicas
    assert OwnedJob.find(cast(KubernetesApi, objects), "census").read().grown is None


def test_servers_that_came_for_a_plan_that_another_one_follows_unseen_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_scale, "ClusterResizing", Planning)
    objects = GrowingServers()
    servers = scale_of(cast(KubernetesApi, objects))
    servers.follow()
    # All five serve, and the resize was done; nobody saw it.
    asked = replace(plan(7, "waiting_for_nodes"), plan_id="q")
    monkeypatch.setattr(Planning, "now", asked)
    servers.follow()
    assert objects.servers == 7
    # The fifth is away for a moment when the next resize fails.
    objects.idle = {4, 5, 6}
    monkeypatch.setattr(Planning, "now", replace(asked, state="failed"))
    servers.follow()
    assert objects.servers == 5


@pytest.mark.parametrize("kind", ["drain", "rebalance"])
def test_a_growth_in_vain_is_undone_also_if_no_resize_follows(
    monkeypatch: pytest.MonkeyPatch, kind: PlanKind
) -> None:
    monkeypatch.setattr(server_scale, "ClusterResizing", Planning)
    objects = GrowingServers()
    servers = scale_of(cast(KubernetesApi, objects))
    servers.follow()
    objects.idle = {3, 4}
    monkeypatch.setattr(Planning, "now", replace(plan(3, "moving", kind=kind), plan_id="q"))
    servers.follow()
    assert objects.servers == 3


def test_a_growth_is_recorded_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_scale, "ClusterResizing", Planning)
    objects = GrowingServers()
    api = cast(KubernetesApi, objects)

    def fail() -> None:
        raise KubernetesError("no answer")

    servers = scale_of(api)
    objects.before_patch = fail
    with pytest.raises(KubernetesError, match="no answer"):
        servers.follow()
    assert objects.servers == 3
    servers.follow()
    assert objects.servers == 5
    assert OwnedJob.find(api, "census").read().grown == ("p", 3)
