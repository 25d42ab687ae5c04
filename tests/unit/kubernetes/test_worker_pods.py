"""Which worker Pods to make and to delete: decided from values, without a cluster."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from backstay.exit_codes import ExitCode
from backstay.job_engine.launch import ExitReason
from backstay.kubernetes.pod_memory import MoreMemory
from backstay.kubernetes.refusals import FORBIDDEN_MAX_S
from backstay.kubernetes.worker_pods import (
    CALLS_AT_ONCE,
    FAILED_KEPT,
    PULLING_MAX_S,
    RETRY,
    SETTLED_S,
    STARTING_MAX_S,
    TERMINATING_MAX_S,
    WISH_VALID_S,
    Forbidden,
    PodPlan,
    WorkerPods,
)
from tests.unit.kubernetes.kubernetes_pods import (
    condition,
    deleted,
    disrupted,
    first_ended,
    on_silent_node,
    pending,
    running,
    terminated,
)


def known(
    *pods: dict[str, Any],
    wish: tuple[str, ...] = (),
    priority: str = "",
    more: MoreMemory | None = None,
) -> WorkerPods:
    """A launcher's knowledge after its first list."""
    found = WorkerPods(priority, more)
    found.wish(wish, 0.0)
    found.list_begins()
    found.listed(pods, 0.0)
    return found


def made_by(pods: WorkerPods, now_s: float = 0.0) -> list[str]:
    return [worker_id for worker_id, _ in pods.plan(now_s).create]


def deleted_by(pods: WorkerPods, now_s: float = 0.0) -> list[str]:
    return [worker_id for worker_id, _ in pods.plan(now_s).delete]


def exits_of(pods: WorkerPods) -> dict[str, ExitReason]:
    return {one.worker_id: one.reason for one in pods.report().exits}


def test_nothing_is_made_before_the_first_list() -> None:
    pods = WorkerPods()
    pods.wish(("w-0",), 0.0)
    assert made_by(pods) == []
    pods.list_begins()
    pods.listed((), 0.0)
    assert made_by(pods) == ["w-0"]


def test_no_pod_is_deleted_before_the_first_wish() -> None:
    pods = WorkerPods()
    pods.list_begins()
    pods.listed([running("w-0"), running("w-1")], 0.0)
    assert pods.plan(0.0) == PodPlan()
    assert not pods.is_deleting_all()
    pods.wish(("w-1",), 0.0)
    assert deleted_by(pods) == ["w-0"]


def test_an_old_wish_makes_and_deletes_nothing() -> None:
    pods = known(running("w-0"), running("w-1"), wish=("w-1", "w-2"))
    # This process stood still, and another one is the job master now.
    assert pods.plan(WISH_VALID_S) == PodPlan()
    pods.wish(("w-1", "w-2"), WISH_VALID_S)
    assert deleted_by(pods, WISH_VALID_S) == ["w-0"]
    assert made_by(pods, WISH_VALID_S) == ["w-2"]


def test_the_end_of_a_job_waits_for_the_first_list() -> None:
    pods = WorkerPods()
    pods.wish((), 0.0)
    assert pods.is_deleting_all()
    pods.list_begins()
    pods.listed([running("w-0")], 0.0)
    assert pods.is_deleting_all()
    assert deleted_by(pods) == ["w-0"]
    pods.told_to_end("w-0")
    assert not pods.is_deleting_all()


def test_pods_that_cannot_be_made_do_not_keep_others_from_being_deleted() -> None:
    wanted = tuple(f"w-{number}" for number in range(1, 41))
    pods = known(running("w-0"), wish=wanted)
    plan = pods.plan(0.0)
    assert [worker_id for worker_id, _ in plan.delete] == ["w-0"]
    assert 1 < len(plan.create) < len(wanted)


def test_pods_of_an_earlier_job_master_are_adopted() -> None:
    pods = known(running("w-0"), pending("w-1"), wish=("w-0", "w-1", "w-2"))
    assert made_by(pods) == ["w-2"]
    assert pods.report().running == ("w-0", "w-1")


def test_an_end_that_no_job_master_saw_is_reported_by_the_next() -> None:
    pods = known(terminated("w-0", 1, "Error"), wish=("w-0",))
    assert exits_of(pods) == {"w-0": ExitReason.FAILED}
    assert made_by(pods) == []


def test_a_pod_that_was_made_is_not_made_again() -> None:
    pods = known(wish=("w-0",))
    pods.created("w-0", pending("w-0"), 0.0)
    assert made_by(pods) == []
    assert pods.report().running == ("w-0",)


def test_a_pod_that_an_earlier_call_made_is_not_made_again() -> None:
    pods = known(wish=("w-0",))
    pods.created("w-0", None, 0.0)
    assert made_by(pods) == []
    assert pods.report().running == ("w-0",)
    pods.changed(running("w-0"), 0.0)
    pods.deleted(running("w-0"))
    assert pods.report().running == ()


def test_a_list_that_began_before_a_pod_was_made_does_not_lose_it() -> None:
    pods = known(wish=("w-0",))
    pods.list_begins()
    pods.created("w-0", pending("w-0"), 0.0)
    pods.listed((), 0.0)
    assert exits_of(pods) == {}
    pods.list_begins()
    pods.listed((), 0.0)
    assert exits_of(pods) == {"w-0": ExitReason.NODE_LOST}


def test_a_watch_that_is_faster_than_the_answer_wins() -> None:
    pods = known(wish=("w-0",))
    pods.changed(running("w-0"), 0.0)
    pods.deleted(disrupted(running("w-0"), "PreemptionByScheduler"))
    pods.created("w-0", pending("w-0"), 0.0)
    assert pods.report().running == ()
    assert exits_of(pods) == {"w-0": ExitReason.PREEMPTED}
    assert made_by(pods) == []


def test_a_worker_that_ended_is_reported_until_it_is_acknowledged_and_never_made_again() -> None:
    pods = known(running("w-0"), wish=("w-0",))
    pods.changed(terminated("w-0", 1, "Error", "ValueError"), 0.0)
    assert [one.last_words for one in pods.report().exits] == ["ValueError"]
    pods.acknowledge(["w-0"])
    assert exits_of(pods) == {}
    pods.wish(("w-0",), 0.0)
    assert exits_of(pods) == {"w-0": ExitReason.FAILED}
    assert made_by(pods) == []
    pods.acknowledge(["w-0"])
    pods.wish(("w-1",), 0.0)
    assert made_by(pods) == ["w-1"]


def test_a_pod_is_deleted_once_when_its_worker_is_not_wanted() -> None:
    pods = known(running("w-0"), running("w-1"), wish=("w-0",))
    assert deleted_by(pods) == ["w-1"]
    pods.told_to_end("w-1")
    assert deleted_by(pods) == []
    assert pods.report().running == ("w-0", "w-1")
    pods.deleted(deleted(terminated("w-1", 0, "Completed")))
    assert pods.report().running == ("w-0",)


def test_the_pod_of_a_worker_that_finished_goes_once_its_end_is_known() -> None:
    pods = known(terminated("w-0", 0, "Completed"), wish=("w-0",))
    assert deleted_by(pods) == []
    pods.acknowledge(["w-0"])
    assert deleted_by(pods) == ["w-0"]


def test_the_newest_failed_pods_are_kept_for_their_logs() -> None:
    ids = [f"w-{number}" for number in range(FAILED_KEPT + 2)]
    pods = known(*(running(one) for one in ids), wish=tuple(ids))
    for one in ids:
        pods.changed(terminated(one, 1, "Error"), 0.0)
    pods.acknowledge(ids)
    pods.wish(("w-99",), 0.0)
    assert deleted_by(pods) == ids[:2]


def test_at_the_end_of_a_job_what_was_not_acknowledged_goes_too() -> None:
    pods = known(running("w-0"), terminated("w-1", 0), wish=("w-0", "w-1"))
    assert not pods.is_deleting_all()
    pods.wish((), 0.0)
    assert pods.is_deleting_all()
    assert sorted(deleted_by(pods)) == ["w-0", "w-1"]
    pods.told_to_end("w-0")
    pods.told_to_end("w-1")
    assert not pods.is_deleting_all()


def test_a_pod_on_a_lost_node_is_given_up() -> None:
    pods = known(running("w-0"), wish=("w-0",))
    pods.changed(deleted(running("w-0")), 10.0)
    assert pods.next_change_s() == 10.0 + TERMINATING_MAX_S
    assert exits_of(pods) == {}
    pods.plan(10.0 + TERMINATING_MAX_S)
    assert exits_of(pods) == {"w-0": ExitReason.NODE_LOST}
    assert pods.report().running == ()
    assert pods.next_change_s() is None


def test_after_a_failed_call_all_calls_pause_longer_each_time_up_to_a_limit() -> None:
    pods = known(running("w-9"), wish=("w-0",))
    now_s, pauses = 0.0, []
    for _ in range(10):
        pods.call_failed("exceeded quota", now_s)
        next_s = pods.next_change_s()
        assert next_s is not None
        pods.wish(("w-0",), next_s)
        assert pods.plan(next_s - 0.01) == PodPlan()
        pauses.append(next_s - now_s)
        now_s = next_s
    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0]
    assert pauses[-1] == RETRY.longest_s
    assert pods.trouble(0.0) == "exceeded quota"
    assert made_by(pods, now_s) == ["w-0"]
    pods.created("w-0", pending("w-0"), now_s)
    assert pods.trouble(0.0) == ""
    assert deleted_by(pods, now_s) == ["w-9"]


def test_a_pause_that_is_over_is_not_waited_for() -> None:
    pods = known(wish=("w-0",))
    pods.call_failed("exceeded quota", 0.0)
    pods.wish((), 0.1)
    assert pods.plan(RETRY.first_s) == PodPlan()
    assert pods.next_change_s() is None


RIGHT = 'User "a" cannot create resource "pods"'


def refuse(pods: WorkerPods, until_s: float, wish: tuple[str, ...]) -> tuple[float, int]:
    """Forbid each Pod until then; return the time of the last call, and how many there were."""
    now_s, last_s, calls = 0.0, 0.0, 0
    while now_s < until_s:
        pods.wish(wish, now_s)
        for worker_id in deleted_by(pods, now_s):
            pods.told_to_end(worker_id)
        if made_by(pods, now_s):
            pods.forbidden(Forbidden.MAKE, RIGHT, now_s)
            last_s, calls = now_s, calls + 1
        now_s += 0.5
    return last_s, calls


def test_a_right_that_is_missing_is_told_at_once_and_costs_workers_after_a_limit() -> None:
    pods = known(running("w-0"), running("w-9"), wish=("w-0", "w-1", "w-2"))
    pods.forbidden(Forbidden.MAKE, RIGHT, 0.0)
    assert pods.trouble(0.0) == (
        f"no Pod can be made: {RIGHT}; if that lasts 10 minutes and no worker works, the job fails"
    )
    last_s, calls = refuse(pods, FORBIDDEN_MAX_S, ("w-0", "w-1", "w-2"))
    # It is tried again all the time, less and less often.
    assert calls <= 7 + FORBIDDEN_MAX_S / RETRY.longest_s
    assert last_s >= FORBIDDEN_MAX_S - RETRY.longest_s
    assert exits_of(pods) == {}
    pods.plan(FORBIDDEN_MAX_S)
    told = {one.worker_id: one for one in pods.report().exits}
    assert set(told) == {"w-1", "w-2"}
    for end in told.values():
        assert (end.reason, end.code) == (ExitReason.NOT_ALLOWED, ExitCode.WRONG_SETTING)
        assert end.last_words == RIGHT
    assert "w-0" in pods.report().running
    pods.acknowledge(["w-1", "w-2"])
    # The next ones have one try each, and nothing is waited for meanwhile.
    now_s = FORBIDDEN_MAX_S + RETRY.longest_s
    pods.wish(("w-0", "w-3"), now_s)
    assert made_by(pods, now_s) == ["w-3"]
    assert exits_of(pods) == {}
    pods.forbidden(Forbidden.MAKE, RIGHT, now_s)
    assert exits_of(pods) == {"w-3": ExitReason.NOT_ALLOWED}
    pods.acknowledge(["w-3"])
    now_s += RETRY.longest_s
    pods.wish(("w-0", "w-4"), now_s)
    assert made_by(pods, now_s) == ["w-4"]
    assert pods.next_change_s() is None
    # Somebody has given the right.
    pods.created("w-4", pending("w-4"), now_s)
    assert exits_of(pods) == {}
    assert pods.trouble(now_s).startswith("worker w-3 was not allowed to start")
    pods.changed(running("w-4"), now_s)
    assert pods.trouble(now_s) == ""


def test_a_deletion_that_succeeds_gives_no_more_time_to_a_missing_right() -> None:
    pods = known(*(running(f"w-{n}") for n in range(9)), wish=("w-0", "w-10"))
    pods.forbidden(Forbidden.MAKE, RIGHT, 0.0)
    for number in range(1, 9):
        pods.told_to_end(f"w-{number}")
    assert RIGHT in pods.trouble(1.0)
    pods.plan(FORBIDDEN_MAX_S)
    assert exits_of(pods) == {"w-10": ExitReason.NOT_ALLOWED}


def test_what_held_up_workers_that_nobody_wants_any_more_is_no_news() -> None:
    pods = known(running("w-0"), wish=("w-0", "w-1"))
    pods.plan(0.0)
    pods.forbidden(Forbidden.MAKE, RIGHT, 0.0)
    pods.wish(("w-0",), 1.0)
    pods.plan(1.0)
    assert RIGHT in pods.trouble(SETTLED_S)
    assert pods.trouble(1.0 + SETTLED_S) == ""
    # Later ones have all the time again.
    pods.wish(("w-0", "w-2"), 5 * FORBIDDEN_MAX_S)
    assert made_by(pods, 5 * FORBIDDEN_MAX_S) == ["w-2"]
    pods.forbidden(Forbidden.MAKE, RIGHT, 5 * FORBIDDEN_MAX_S)
    pods.plan(6 * FORBIDDEN_MAX_S - 1)
    assert exits_of(pods) == {}
    assert RIGHT in pods.trouble(6 * FORBIDDEN_MAX_S - 1)
    pods.plan(6 * FORBIDDEN_MAX_S)
    assert exits_of(pods) == {"w-2": ExitReason.NOT_ALLOWED}


def test_a_right_that_comes_in_time_costs_nothing() -> None:
    pods = known(wish=("w-0",))
    last_s, _ = refuse(pods, FORBIDDEN_MAX_S - RETRY.longest_s, ("w-0",))
    pods.wish(("w-0",), last_s + RETRY.longest_s)
    assert made_by(pods, last_s + RETRY.longest_s) == ["w-0"]
    pods.created("w-0", pending("w-0"), last_s + RETRY.longest_s)
    assert pods.trouble(FORBIDDEN_MAX_S) == ""
    pods.plan(2 * FORBIDDEN_MAX_S)
    assert exits_of(pods) == {}


def test_pods_that_may_not_be_seen_cost_workers_after_a_limit() -> None:
    pods = WorkerPods()
    pods.wish(("w-0",), 0.0)
    pods.forbidden(Forbidden.SEE, "cannot list", 5.0)
    pods.forbidden(Forbidden.SEE, "cannot list", 15.0)
    assert pods.trouble(15.0).startswith("the Pods of this job cannot be seen: cannot list; ")
    assert pods.next_change_s() == 5.0 + FORBIDDEN_MAX_S
    pods.plan(4.0 + FORBIDDEN_MAX_S)
    assert exits_of(pods) == {}
    pods.plan(5.0 + FORBIDDEN_MAX_S)
    assert exits_of(pods) == {"w-0": ExitReason.NOT_ALLOWED}
    # Somebody gives the right: its Pod was there, and is not wanted any more.
    pods.acknowledge(["w-0"])
    pods.wish(("w-1",), 5.0 + FORBIDDEN_MAX_S)
    pods.list_begins()
    pods.listed([running("w-0")], 6.0 + FORBIDDEN_MAX_S)
    assert pods.trouble(6.0 + FORBIDDEN_MAX_S) == ""
    assert deleted_by(pods, 6.0 + FORBIDDEN_MAX_S) == ["w-0"]
    assert made_by(pods, 6.0 + FORBIDDEN_MAX_S) == ["w-1"]


def test_a_pod_that_the_api_does_not_take_is_an_exit() -> None:
    pods = known(wish=("w-0",))
    pods.refused("w-0", "spec.containers[0].image: Required value")
    assert exits_of(pods) == {"w-0": ExitReason.CANNOT_START}
    assert "Required value" in pods.trouble(0.0)
    assert made_by(pods) == []


def test_what_holds_workers_up_is_told_until_it_is_over() -> None:
    room = "0/2 nodes are available: 2 Insufficient cpu."
    waits = [condition(pending(one), "PodScheduled", "False", "", room) for one in ("w-0", "w-1")]
    pods = known(*waits, wish=("w-0", "w-1"))
    assert pods.trouble(0.0) == f"2 workers wait for room on a node: {room}"
    assert exits_of(pods) == {}
    pods.changed(running("w-0"), 0.0)
    assert pods.trouble(0.0) == f"1 worker waits for room on a node: {room}"
    pods.changed(pending("w-1", "InvalidImageName", "a b"), 0.0)
    assert pods.trouble(0.0) == "worker w-1 could not be started: InvalidImageName: a b"
    pods.changed(running("w-2"), 0.0)
    assert pods.trouble(0.0) == ""


def test_an_image_that_does_not_come_is_told_at_once_and_counts_after_a_limit() -> None:
    pods = known(running("w-0"), wish=("w-0", "w-1"))
    pods.changed(pending("w-1", "ErrImagePull", "timeout"), 5.0)
    pods.changed(pending("w-1", "ImagePullBackOff", "timeout"), 15.0)
    assert pods.trouble(15.0) == "1 worker waits for ImagePullBackOff: timeout"
    limit_s = pods.next_change_s()
    assert limit_s == 5.0 + PULLING_MAX_S
    pods.plan(limit_s - 1)
    assert exits_of(pods) == {}
    pods.plan(limit_s)
    assert exits_of(pods) == {"w-1": ExitReason.CANNOT_START}
    assert pods.next_change_s() is None
    told = "worker w-1 could not be started: ImagePullBackOff: timeout"
    assert pods.trouble(limit_s) == told
    assert pods.report().running == ("w-0",)


AWAY = 'failed to do request: Head "https://r/v2/b/1": dial tcp 10.0.0.1:443: connect: refused'
NO_HOST = 'failed to do request: Head "https://r/v2/b/1": dial tcp: lookup r on dns: no such host'
MISSING = 'failed to resolve reference "r/b:1": r/b:1: not found'


@pytest.mark.parametrize(
    ("words", "reason", "code"),
    [
        (AWAY, ExitReason.NO_IMAGE, 0),
        (MISSING, ExitReason.CANNOT_START, ExitCode.WRONG_SETTING),
        # A registry that does not exist is told in the same words, and never comes.
        (NO_HOST, ExitReason.CANNOT_START, ExitCode.WRONG_SETTING),
        ("x509: certificate signed by unknown authority", ExitReason.CANNOT_START, 0),
    ],
)
def test_an_outage_of_the_registry_is_no_failure_and_a_missing_image_is_one(
    words: str, reason: ExitReason, code: int
) -> None:
    pods = known(pending("w-0", "ErrImagePull", words), wish=("w-0",))
    assert pods.trouble(0.0) == f"1 worker waits for ErrImagePull: {words}"
    # Older nodes do not repeat what the registry said.
    pods.changed(pending("w-0", "ImagePullBackOff", 'Back-off pulling image "r/b:1"'), 10.0)
    pods.plan(PULLING_MAX_S - 1)
    assert exits_of(pods) == {}
    pods.plan(PULLING_MAX_S)
    (end,) = pods.report().exits
    assert (end.reason, end.code) == (reason, code)
    assert pods.trouble(PULLING_MAX_S).startswith(f"worker w-0 {reason.value}: ")
    # What the registry said last counts.
    pods = known(pending("w-0", "ErrImagePull", AWAY), wish=("w-0",))
    pods.changed(pending("w-0", "ImagePullBackOff", f"Back-off pulling image: {words}"), 10.0)
    pods.plan(PULLING_MAX_S)
    (end,) = pods.report().exits
    assert (end.reason, end.code) == (reason, code)


def test_a_registry_that_is_back_in_time_costs_no_worker() -> None:
    pods = known(pending("w-0", "ErrImagePull", "timeout"), wish=("w-0",))
    pods.changed(pending("w-0", "ContainerCreating"), PULLING_MAX_S - 1)
    pods.changed(running("w-0"), PULLING_MAX_S + 1)
    pods.plan(PULLING_MAX_S + 1)
    assert exits_of(pods) == {}
    assert pods.trouble(PULLING_MAX_S + 1) == ""


def test_a_worker_that_is_not_wanted_on_a_node_that_falls_silent_is_lost_at_once() -> None:
    pods = known(running("w-0"), wish=())
    pods.told_to_end("w-0")
    pods.changed(deleted(running("w-0")), 1.0)
    assert exits_of(pods) == {}
    pods.changed(deleted(on_silent_node(running("w-0"))), 20.0)
    assert exits_of(pods) == {"w-0": ExitReason.NODE_LOST}


def test_a_container_that_does_not_come_is_told_with_where_to_look() -> None:
    pods = known(pending("w-0", "ContainerCreating"), wish=("w-0", "w-1"))
    pods.changed(pending("w-1", "ContainerCreating"), 5.0)
    assert pods.trouble(STARTING_MAX_S - 1) == ""
    told = "1 worker waits for volumes, network or image: `kubectl describe pod backstay-census-0f8"
    assert pods.trouble(STARTING_MAX_S).startswith(told)
    assert pods.trouble(STARTING_MAX_S + 5).startswith("2 workers wait for volumes")
    pods.changed(running("w-0"), STARTING_MAX_S + 5)
    pods.deleted(deleted(pending("w-1")))
    assert pods.trouble(STARTING_MAX_S + 5) == ""


@pytest.mark.parametrize(
    ("priority", "count", "classes"),
    [
        ("", 3, {"": 3}),
        ("batch", 3, {"batch": 3}),
        ("0.3", 10, {"high": 3, "low": 7}),
        ("0.3", 4, {"high": 2, "low": 2}),
        ("0", 2, {"low": 2}),
        ("1", 2, {"high": 2}),
    ],
)
def test_a_share_of_the_workers_gets_the_class_high(
    priority: str, count: int, classes: dict[str, int]
) -> None:
    pods = known(wish=tuple(f"w-{number}" for number in range(count)), priority=priority)
    assert Counter(kind for _, kind in pods.plan(0.0).create) == classes


def test_the_share_is_kept_when_a_worker_is_replaced() -> None:
    pods = known(priority="0.5", wish=("w-0", "w-1"))
    for worker_id, kind in pods.plan(0.0).create:
        pod = running(worker_id)
        pod["spec"]["priorityClassName"] = kind
        pods.created(worker_id, pod, 0.0)
    pods.deleted(running("w-0"))
    pods.wish(("w-1", "w-2"), 0.0)
    assert pods.plan(0.0).create == (("w-2", "high"),)


GIB = 1024**3


def limited(pod: dict[str, Any], memory: str) -> dict[str, Any]:
    container = {"name": "worker", "resources": {"limits": {"memory": memory}}}
    return {**pod, "spec": {"containers": [container]}}


def out_of_memory(worker_id: str, memory: str, words: str = "") -> dict[str, Any]:
    return limited(terminated(worker_id, 137, "OOMKilled", words), memory)


def test_without_a_word_of_the_job_a_worker_gets_as_much_memory_as_before() -> None:
    pods = known(limited(running("w-0"), "1Gi"), wish=("w-0", "w-1"))
    pods.changed(out_of_memory("w-0", "1Gi"), 0.0)
    assert exits_of(pods) == {"w-0": ExitReason.OUT_OF_MEMORY}
    assert pods.plan(0.0) == PodPlan((("w-1", ""),), (), 0)


def test_after_one_ran_out_of_memory_the_next_workers_get_more_up_to_a_limit() -> None:
    more = MoreMemory(1.5, 2 * GIB)
    pods = known(more=more, wish=("w-0", "w-1"))
    assert pods.plan(0.0).memory == 0
    pods.changed(limited(running("w-0"), "1Gi"), 0.0)
    pods.changed(limited(running("w-1"), "1Gi"), 0.0)
    pods.changed(out_of_memory("w-0", "1Gi", "the log"), 0.0)
    # Two of the same size teach the same.
    pods.changed(out_of_memory("w-1", "1Gi"), 0.0)
    told = "its memory limit is 1024Mi; kubernetes.worker.limits sets another"
    more_told = "workers that begin from now on may use 1536Mi"
    assert pods.report().exits[0].last_words == f"the log\n{told}\n{more_told}"
    pods.acknowledge(["w-0", "w-1"])
    pods.wish(("w-2",), 0.0)
    assert pods.plan(0.0) == PodPlan((("w-2", ""),), (), 3 * GIB // 2)
    # The next job master learns it from the Pods.
    pods = known(limited(running("w-2"), "1536Mi"), more=more, wish=("w-2", "w-3"))
    assert pods.plan(0.0).memory == 3 * GIB // 2
    pods.changed(out_of_memory("w-2", "1536Mi"), 0.0)
    assert pods.plan(0.0).memory == 2 * GIB
    # One that is seen only when it is gone counts as well.
    pods.changed(limited(running("w-3"), "2Gi"), 0.0)
    pods.deleted(deleted(out_of_memory("w-3", "2Gi")))
    assert pods.plan(0.0).memory == 2 * GIB
    (_, last) = pods.report().exits
    assert last.last_words.endswith("\nkubernetes.more_memory.max allows no more")


def test_an_init_container_without_memory_and_other_ends_give_workers_no_more() -> None:
    pods = known(more=MoreMemory(2.0, 4 * GIB), wish=("w-0", "w-1", "w-2"))
    pods.changed(limited(first_ended("w-0", 137, "OOMKilled"), "1Gi"), 0.0)
    pods.changed(limited(terminated("w-1", 1, "Error"), "1Gi"), 0.0)
    # It had no limit: its node had no more.
    pods.changed(terminated("w-2", 137, "OOMKilled"), 0.0)
    assert set(exits_of(pods)) == {"w-0", "w-1", "w-2"}
    assert pods.plan(0.0).memory == GIB


def test_memory_that_the_api_refuses_goes_back_to_what_it_allows_and_is_told() -> None:
    pods = known(more=MoreMemory(4.0, 8 * GIB), wish=("w-0", "w-1"))
    pods.changed(out_of_memory("w-0", "1Gi"), 0.0)
    assert pods.plan(0.0).memory == 4 * GIB
    pods.memory_refused(4 * GIB, GIB, 2 * GIB, "maximum is 2Gi")
    # At once, without a pause.
    assert pods.plan(0.0) == PodPlan((("w-1", ""),), (), 2 * GIB)
    told = "workers get 2048Mi of memory where kubernetes.more_memory gives 4096Mi: maximum is 2Gi"
    assert told in pods.trouble(0.0)
    pods.created("w-1", limited(pending("w-1"), "2Gi"), 0.0)
    pods.changed(limited(running("w-1"), "2Gi"), 0.0)
    pods.changed(out_of_memory("w-1", "2Gi"), 1.0)
    (*_, last) = pods.report().exits
    assert last.last_words.endswith("\nthe cluster allows no more")
    assert pods.plan(1.0).memory == 2 * GIB


def test_memory_that_the_api_refuses_without_saying_how_much_it_allows_is_that_of_the_job() -> None:
    pods = known(more=MoreMemory(4.0, 8 * GIB), wish=("w-0", "w-1"))
    pods.changed(out_of_memory("w-0", "1Gi"), 0.0)
    for allowed in (0, GIB, 4 * GIB):
        pods.memory_refused(4 * GIB, GIB, allowed, "too much")
        assert pods.plan(0.0).memory == 0
        assert "workers get 1024Mi of memory where" in pods.trouble(0.0)
    assert exits_of(pods) == {"w-0": ExitReason.OUT_OF_MEMORY}


class Calls:
    """Carries out plans as the API would, and counts the calls."""

    def __init__(self, pods: WorkerPods) -> None:
        self.pods = pods
        self.counts: Counter[str] = Counter()
        self.plans = 0

    def settle(self) -> None:
        """Go on until nothing is left to do; the watch tells of each Pod what became of it."""
        while (plan := self.pods.plan(0.0)) != PodPlan():
            self.plans += 1
            assert len(plan.create) + len(plan.delete) <= CALLS_AT_ONCE
            for worker_id, _ in plan.create:
                self.counts["create"] += 1
                self.pods.created(worker_id, pending(worker_id), 0.0)
                self.pods.changed(running(worker_id), 0.0)
            for worker_id, _ in plan.delete:
                self.counts["delete"] += 1
                self.pods.told_to_end(worker_id)
                self.pods.changed(deleted(running(worker_id)), 0.0)
                self.pods.deleted(deleted(terminated(worker_id, 0)))


@pytest.mark.parametrize("workers", [50, 100, 500])
def test_calls_of_a_job_grow_with_its_workers_only(workers: int) -> None:
    preempted = workers // 10
    pods = known()
    calls = Calls(pods)
    pods.wish([f"w-{number}" for number in range(workers)], 0.0)
    calls.settle()
    assert calls.counts == {"create": workers}
    assert len(pods.report().running) == workers
    # A tenth of them is taken away one by one, and another comes in the place of each.
    for number in range(preempted):
        taken = disrupted(running(f"w-{number}"), "PreemptionByScheduler")
        pods.changed(deleted(taken), 0.0)
        pods.deleted(deleted(taken))
        assert exits_of(pods) == {f"w-{number}": ExitReason.PREEMPTED}
        pods.acknowledge([f"w-{number}"])
        pods.wish([f"w-{one}" for one in range(number + 1, workers + number + 1)], 0.0)
        calls.settle()
    assert calls.counts == {"create": workers + preempted}
    # A new list, as after a watch that broke, finds all as it is.
    pods.list_begins()
    pods.listed([running(f"w-{n}") for n in range(preempted, workers + preempted)], 0.0)
    calls.settle()
    assert calls.counts == {"create": workers + preempted}
    # The end of the job.
    pods.wish((), 0.0)
    calls.settle()
    assert calls.counts == {"create": workers + preempted, "delete": workers}
    assert calls.counts.total() * 10 == 21 * workers
    # Each plan has one call at least: a preemption, or 20 of the start or the end.
    assert calls.plans == preempted + 2 * math.ceil(workers / CALLS_AT_ONCE)
    assert pods.report().running == ()


def test_500_workers_that_fail_take_two_calls_each() -> None:
    workers = 500
    pods = known()
    calls = Calls(pods)
    for number in range(workers):
        pods.wish([f"w-{number}"], 0.0)
        calls.settle()
        pods.changed(terminated(f"w-{number}", 1, "Error"), 0.0)
        pods.acknowledge([f"w-{number}"])
    pods.wish((), 0.0)
    calls.settle()
    # The newest are kept for their logs.
    assert calls.counts == {"create": workers, "delete": workers - FAILED_KEPT}


def test_an_api_that_refuses_pods_is_asked_less_and_less_often() -> None:
    pods = known(wish=tuple(f"w-{number}" for number in range(500)))
    asked, now_s = 0, 0.0
    while now_s < 600.0:
        pods.wish([f"w-{number}" for number in range(500)], now_s)
        if pods.plan(now_s).create:
            # The launcher breaks off at the first call that fails.
            asked += 1
            pods.call_failed("exceeded quota", now_s)
        now_s += 0.5
    # 0.5, 1, 2, 4, 8, 16 s, and then one each half a minute.
    assert asked <= 6 + 600 / RETRY.longest_s
