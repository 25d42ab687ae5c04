"""Why a worker's Pod ended, as its status tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from backstay.job_engine.launch import ExitReason
from backstay.kubernetes.pod_exit import Pull, end_of_deleted, seen, why_not_running
from backstay.kubernetes.worker_pods import LAST_WORDS_MAX, WorkerPods
from tests.unit.kubernetes.kubernetes_pods import (
    condition,
    deleted,
    disrupted,
    ended,
    first_ended,
    first_waits,
    on_silent_node,
    pending,
    running,
    terminated,
)

IMAGE = 'Back-off pulling image "nothing:1"'
NO_HOST = 'Head "https://r/v2/": dial tcp: lookup r: no such host'
ROOM = "0/2 nodes are available: 2 Insufficient cpu."


@pytest.mark.parametrize(
    ("pod", "reason"),
    [
        (terminated("w-1", 0, "Completed"), ExitReason.FINISHED),
        (terminated("w-1", 1, "Error"), ExitReason.FAILED),
        (terminated("w-1", 137, "OOMKilled"), ExitReason.OUT_OF_MEMORY),
        (terminated("w-1", 137, "Error"), ExitReason.PREEMPTED),
        (terminated("w-1", 137, "ContainerStatusUnknown"), ExitReason.NODE_LOST),
        (terminated("w-1", 128, "StartError"), ExitReason.CANNOT_START),
        # A worker that is told to end gives back its tasks and ends with 0.
        (deleted(terminated("w-1", 0, "Completed")), ExitReason.PREEMPTED),
        (deleted(terminated("w-1", 1, "Error")), ExitReason.PREEMPTED),
        (disrupted(terminated("w-1", 0), "PreemptionByScheduler"), ExitReason.PREEMPTED),
        (disrupted(terminated("w-1", 143), "EvictionByEvictionAPI"), ExitReason.EVICTED),
        (disrupted(terminated("w-1", 137), "TerminationByKubelet"), ExitReason.EVICTED),
        # The kubelet says there which kind it was.
        (disrupted(ended("w-1", "Preempting"), "TerminationByKubelet"), ExitReason.PREEMPTED),
        (disrupted(ended("w-1", "Terminated"), "TerminationByKubelet"), ExitReason.NODE_LOST),
        (deleted(disrupted(running("w-1"), "DeletionByTaintManager")), ExitReason.NODE_LOST),
        (ended("w-1", "Evicted"), ExitReason.EVICTED),
        (ended("w-1", "OutOfcpu"), ExitReason.EVICTED),
        (ended("w-1", "NodeShutdown"), ExitReason.NODE_LOST),
        (ended("w-1", ""), ExitReason.NODE_LOST),
        # The registry may be back soon.
        (pending("w-1", "ErrImagePull", IMAGE), None),
        (pending("w-1", "ImagePullBackOff", IMAGE), None),
        (first_waits("w-1", "ErrImagePull", IMAGE), None),
        (pending("w-1", "SignatureValidationFailed", IMAGE), None),
        (pending("w-1", "InvalidImageName"), ExitReason.CANNOT_START),
        (first_waits("w-1", "CreateContainerConfigError"), ExitReason.CANNOT_START),
        (first_ended("w-1", 2), ExitReason.CANNOT_START),
        (first_ended("w-1", 137, "OOMKilled"), ExitReason.OUT_OF_MEMORY),
        (deleted(first_ended("w-1", 143)), ExitReason.NODE_LOST),
        (disrupted(first_ended("w-1", 143), "EvictionByEvictionAPI"), ExitReason.EVICTED),
        # It may be back before the Pod is taken away.
        (on_silent_node(running("w-1")), None),
        (deleted(on_silent_node(running("w-1"))), ExitReason.NODE_LOST),
        (deleted(condition(running("w-1"), "Ready", "False")), None),
        (
            deleted(
                condition(
                    condition(running("w-1"), "Ready", "False", "ReadinessGatesNotReady"),
                    "ContainersReady",
                    "True",
                )
            ),
            None,
        ),
        (pending("w-1", "CreateContainerConfigError", "no secret"), ExitReason.CANNOT_START),
        (pending("w-1"), None),
        (pending("w-1", "ContainerCreating"), None),
        (running("w-1"), None),
        # It is told to end, and has not yet.
        (deleted(running("w-1")), None),
        (disrupted(running("w-1"), "PreemptionByScheduler"), None),
    ],
)
def test_the_reason_of_an_end(pod: dict[str, Any], reason: ExitReason | None) -> None:
    end = seen(pod).end
    assert (None if end is None else end.reason) is reason


@pytest.mark.parametrize(
    ("pod", "reason"),
    [
        (running("w-1"), ExitReason.PREEMPTED),
        (pending("w-1"), ExitReason.PREEMPTED),
        (disrupted(running("w-1"), "DeletionByPodGC"), ExitReason.NODE_LOST),
        (disrupted(running("w-1"), "EvictionByEvictionAPI"), ExitReason.EVICTED),
        (deleted(terminated("w-1", 137, "OOMKilled")), ExitReason.OUT_OF_MEMORY),
    ],
)
def test_a_pod_that_is_gone_was_taken_away(pod: dict[str, Any], reason: ExitReason) -> None:
    end = end_of_deleted(pod)
    assert (end.worker_id, end.reason) == ("w-1", reason)


def test_a_failed_worker_tells_the_end_of_its_log() -> None:
    end = seen(terminated("w-1", 1, "Error", "Traceback\nValueError: no such column")).end
    assert end is not None
    assert (end.code, end.last_words) == (1, "Traceback\nValueError: no such column")


@pytest.mark.parametrize("pod", [pending, first_waits])
def test_a_missing_image_is_told_in_the_words_of_the_node(pod: Callable[..., Any]) -> None:
    found = seen(pod("w-1", "ErrImagePull", IMAGE))
    assert (found.waits, found.is_pulling) == (f"ErrImagePull: {IMAGE}", True)


def test_an_init_container_that_fails_says_why_and_does_not_speak_for_the_worker() -> None:
    end = seen(first_ended("w-1", 2, message="no such bucket")).end
    assert end is not None
    # As a worker's exit code, 2 would end the job.
    assert end.code == 0
    assert end.last_words == "init container fetch: Error, exit code 2\nno such bucket"


def test_a_worker_without_memory_tells_its_limit() -> None:
    pod = terminated("w-1", 137, "OOMKilled")
    pod["spec"]["containers"][0]["resources"] = {"limits": {"memory": "64Mi"}}
    end = seen(pod).end
    assert end is not None
    assert end.last_words.startswith("its memory limit is 64Mi")
    # Kubernetes gives up to 4 KiB of the log, which are cut off at their beginning.
    pod["status"]["containerStatuses"][0]["state"]["terminated"]["message"] = "log\n" * 1024
    pods = WorkerPods()
    pods.changed(pod, 0.0)
    (told,) = pods.report().exits
    assert len(told.last_words) == LAST_WORDS_MAX
    assert told.last_words.endswith(
        "its memory limit is 64Mi; kubernetes.worker.limits sets another"
    )


def test_a_sidecar_does_not_keep_a_worker_alive() -> None:
    pod = terminated("w-1", 1, "Error")
    pod["status"]["phase"] = "Running"
    pod["status"]["containerStatuses"].append({"name": "proxy", "state": {"running": {}}})
    end = seen(pod).end
    assert end is not None
    assert end.reason is ExitReason.FAILED


def test_a_pod_without_room_says_what_it_waits_for() -> None:
    pod = condition(pending("w-1"), "PodScheduled", "False", "Unschedulable", ROOM)
    assert seen(pod).waits == f"room on a node: {ROOM}"
    assert seen(pod).end is None
    assert not seen(pod).has_begun
    assert seen(running("w-1")).has_begun


@pytest.mark.parametrize(
    ("message", "has_none"),
    [
        (ROOM, True),
        ("0/2 nodes are available: 1 Insufficient memory, 1 node(s) had taints.", True),
        ("0/2 nodes are available: 2 Too many pods.", True),
        ("0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector.", False),
    ],
)
def test_a_full_node_is_told_from_one_that_does_not_suit(message: str, has_none: bool) -> None:
    pod = condition(pending("w-1"), "PodScheduled", "False", "Unschedulable", message)
    assert seen(pod).has_no_room is has_none
    assert not seen(condition(pending("w-1"), "PodScheduled", "True")).has_no_room
    assert not seen(running("w-1")).has_no_room


@pytest.mark.parametrize(
    ("reason", "message", "failure"),
    [
        ("ErrImagePull", NO_HOST, Pull.NOT_THERE),
        ("ImagePullBackOff", f"Back-off pulling image: ErrImagePull: {NO_HOST}", Pull.NOT_THERE),
        ("ErrImagePull", "dial tcp: lookup r on 10.0.0.2:53: server misbehaving", Pull.AWAY),
        ("ErrImagePull", "dial tcp: lookup r on 10.0.0.2:53: i/o timeout", Pull.AWAY),
        ("ErrImagePull", "dial tcp 127.0.0.1:1: connect: connection refused", Pull.AWAY),
        ("ErrImagePull", "unexpected status from HEAD request: 503 Service Unavailable", Pull.AWAY),
        ("ErrImagePull", "toomanyrequests: You have reached your pull rate limit", Pull.AWAY),
        ("ErrImagePull", 'failed to copy: httpReadSeeker: Get "https://r": EOF', Pull.AWAY),
        ("ErrImagePull", "net/http: TLS handshake timeout", Pull.AWAY),
        ("RegistryUnavailable", "", Pull.AWAY),
        ("ErrImagePull", 'failed to resolve reference "r/b:1": r/b:1: not found', Pull.NOT_THERE),
        ("ErrImagePull", "reading manifest 1 in r/b: manifest unknown", Pull.NOT_THERE),
        ("ErrImagePull", "pull access denied, repository does not exist", Pull.NOT_THERE),
        ("ErrImagePull", "reading manifest: unauthorized: authentication needed", Pull.NOT_THERE),
        ("ErrImagePull", "failed to extract layer: no space left on device", Pull.OTHER),
        ("SignatureValidationFailed", "", Pull.OTHER),
        # The image's own name says nothing.
        ("ErrImagePull", 'pulling "r/not found/timed out:503": x509: unknown', Pull.OTHER),
        # Older nodes say no more than this between two tries.
        ("ImagePullBackOff", 'Back-off pulling image "r/timed-out:503"', None),
        ("ContainerCreating", "", None),
    ],
)
def test_a_registry_that_is_away_is_told_from_an_image_that_is_not_there(
    reason: str, message: str, failure: Pull | None
) -> None:
    assert seen(pending("w-1", reason, message)).pull is failure


def test_an_image_of_a_wrong_signature_is_waited_for_as_one_that_is_not_there() -> None:
    assert seen(pending("w-1", "SignatureValidationFailed", IMAGE)).is_pulling


@pytest.mark.parametrize("reason", ["RunContainerError", "ErrImagePull", "CrashLoopBackOff"])
def test_a_sidecar_that_fails_ends_no_worker_that_runs(reason: str) -> None:
    # A sidecar is an init container that is begun again (restartPolicy: Always).
    pod = running("w-1")
    waiting = {"waiting": {"reason": reason, "message": "of the sidecar"}}
    pod["status"]["initContainerStatuses"] = [{"name": "proxy", "state": waiting}]
    found = seen(pod)
    assert (found.end, found.waits, found.is_pulling) == (None, "", False)
    assert found.has_begun
    assert why_not_running(pod, "worker") == ""
    # One that fails before the worker's container begins holds it up.
    pod["status"]["containerStatuses"][0]["state"] = {"waiting": {"reason": "PodInitializing"}}
    assert "of the sidecar" in why_not_running(pod, "worker")
