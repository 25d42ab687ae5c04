"""Which Pods servers of a job's own are to have: by the plan of a resize, and on lost nodes."""

from __future__ import annotations

from typing import Any

import pytest

from backstay.cli.server_scale import CpuUse, cpu_share, lost_pods, wanted_replicas
from backstay.consensus.records.plans import LeavingNode, PlanKind, PlanState, ResizePlan

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


def pod(number: int, *, reason: str = "", is_deleted: bool = True) -> dict[str, Any]:
    conditions = [{"type": "DisruptionTarget", "status": "True", "reason": reason}]
    deleted = {"deletionTimestamp": "2026-11-23T00:00:00Z"} if is_deleted else {}
    return {
        "metadata": {"name": f"{NAME}-{number}", **deleted},
        "status": {"conditions": conditions if reason else []},
    }


def test_a_pod_on_a_lost_node_makes_room_for_another_of_its_name() -> None:
    lost = "DeletionByTaintManager"
    pods = [
        pod(0, reason=lost),
        # It serves: only Kubernetes has lost sight of it.
        pod(1, reason=lost),
        pod(2, reason="EvictionByEvictionAPI"),
        pod(3),
        pod(4, reason=lost, is_deleted=False),
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
