"""The clock of the API may differ from the job master's: no decision compares the two."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any, NamedTuple, cast

import pytest

from backstay.job_engine.launch import ExitReason
from backstay.kubernetes.api import KubernetesApi, ObjectList
from backstay.kubernetes.master_pod import master_pod
from backstay.kubernetes.names import MASTER
from backstay.kubernetes.server_scale import lost_pods
from backstay.kubernetes.worker_pods import (
    PULLING_MAX_S,
    STARTING_MAX_S,
    TERMINATING_MAX_S,
    PodPlan,
    WorkerPods,
)
from tests.unit.kubernetes.kubernetes_pods import (
    condition,
    deleted,
    disrupted,
    on_silent_node,
    pending,
    running,
    terminated,
)

HOUR_S = 3600.0
OFFSETS = pytest.mark.parametrize("offset_s", [-HOUR_S, 0.0, HOUR_S])
AWAY = "dial tcp 10.0.0.1:443: connect: connection refused"
Pod = dict[str, Any]


def stamped(pod: Pod, offset_s: float, ago_s: float = 0.0) -> Pod:
    """The Pod with all times that an API has whose clock differs; what happened is so long ago."""
    unix_s = time.time() + offset_s - ago_s
    when = datetime.fromtimestamp(unix_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    metadata = {**pod["metadata"], "creationTimestamp": when}
    if "deletionTimestamp" in metadata:
        metadata["deletionTimestamp"] = when
    status = {**pod["status"], "startTime": when}
    status["conditions"] = [
        {**one, "lastTransitionTime": when, "lastProbeTime": when}
        for one in status.get("conditions", ())
    ]
    status["containerStatuses"] = [
        {
            **one,
            "state": {
                kind: {**state, "startedAt": when, "finishedAt": when}
                for kind, state in one["state"].items()
            },
        }
        for one in status.get("containerStatuses", ())
    ]
    return {**pod, "metadata": metadata, "status": status}


class Seen(NamedTuple):
    """What a launcher decides and tells at one moment."""

    now_s: float
    plan: PodPlan
    running: tuple[str, ...]
    exits: tuple[tuple[str, ExitReason], ...]
    trouble: str
    next_s: float | None


def history(offset_s: float) -> list[Seen]:
    """Play one history of a job, and return what its launcher decides."""
    pods = WorkerPods()
    seen: list[Seen] = []

    def shown(pod: Pod) -> Pod:
        return stamped(pod, offset_s)

    def look(now_s: float, *wish: str) -> None:
        pods.wish(wish, now_s)
        plan = pods.plan(now_s)
        report = pods.report()
        exits = tuple((one.worker_id, one.reason) for one in report.exits)
        trouble, next_s = pods.trouble(now_s), pods.next_change_s()
        seen.append(Seen(now_s, plan, report.running, exits, trouble, next_s))

    wish = ("w-0", "w-1", "w-2", "w-3", "w-4")
    pods.list_begins()
    pods.listed([shown(running("w-0")), shown(pending("w-1", "ContainerCreating"))], 0.0)
    look(0.0, *wish)
    pods.call_failed("exceeded quota", 1.0)
    look(1.4, *wish)
    look(1.5, *wish)
    pods.created("w-2", shown(pending("w-2", "ErrImagePull", AWAY)), 2.0)
    pods.created("w-3", shown(running("w-3")), 2.0)
    pods.created("w-4", shown(running("w-4")), 2.0)
    pods.changed(shown(deleted(running("w-0"))), 10.0)
    pods.changed(shown(terminated("w-3", 1, "Error")), 11.0)
    pods.changed(shown(deleted(on_silent_node(running("w-4")))), 12.0)
    for now_s in (
        12.0,
        STARTING_MAX_S - 1,
        STARTING_MAX_S,
        10.0 + TERMINATING_MAX_S - 1,
        10.0 + TERMINATING_MAX_S,
        2.0 + PULLING_MAX_S - 1,
        2.0 + PULLING_MAX_S,
    ):
        look(now_s, *wish)
    pods.deleted(shown(disrupted(running("w-1"), "PreemptionByScheduler")))
    look(200.0, *wish)
    return seen


@OFFSETS
def test_what_becomes_of_workers_does_not_depend_on_the_clock_of_the_api(offset_s: float) -> None:
    seen = history(offset_s)
    assert seen == history(0.0)
    by_time = {one.now_s: dict(one.exits) for one in seen}
    # A Pod that is told to end has its time from when that was seen.
    assert "w-0" not in by_time[10.0 + TERMINATING_MAX_S - 1]
    assert by_time[10.0 + TERMINATING_MAX_S]["w-0"] is ExitReason.NODE_LOST
    assert "w-2" not in by_time[2.0 + PULLING_MAX_S - 1]
    assert by_time[2.0 + PULLING_MAX_S]["w-2"] is ExitReason.NO_IMAGE
    assert by_time[12.0] == {"w-3": ExitReason.FAILED, "w-4": ExitReason.NODE_LOST}
    assert by_time[200.0]["w-1"] is ExitReason.PREEMPTED
    told = {one.now_s: "for volumes, network or image" in one.trouble for one in seen}
    assert (told[STARTING_MAX_S - 1], told[STARTING_MAX_S]) == (False, True)


@OFFSETS
def test_a_server_on_a_lost_node_is_one_whatever_the_clock_of_the_api_says(
    offset_s: float,
) -> None:
    lost = deleted(disrupted(running("w-0"), "DeletionByTaintManager"))
    evicted = deleted(disrupted(running("w-1"), "EvictionByEvictionAPI"))
    silent = on_silent_node(running("w-2"))
    pods = [stamped(one, offset_s) for one in (lost, evicted, silent)]
    assert lost_pods(pods, ()) == [lost["metadata"]["name"]]


@OFFSETS
def test_the_newest_job_master_is_the_one_that_was_made_last(offset_s: float) -> None:
    def named(name: str, make: Callable[[str], Pod], ago_s: float) -> Pod:
        pod = make("w-0")
        pod["metadata"]["name"] = name
        for one in pod["status"]["containerStatuses"]:
            one["name"] = MASTER
        return stamped(pod, offset_s, ago_s)

    class Api:
        def list_objects(self, kind: str, selector: str) -> ObjectList:
            ready = condition(named("first", running, 20.0), "Ready", "True")
            return ObjectList((named("second", running, 5.0), ready), "1")

    found = master_pod(cast(KubernetesApi, Api()), "census")
    assert (found.name, found.trouble) == ("second", "")
