"""What a Pod's status says: whether its worker has ended and why, or what it waits for.

Values in, values out: a Pod is a mapping as the API gives it. Imports ``job_engine.launch``,
``names`` and ``pod_memory``; does no I/O.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from backstay.job_engine.launch import ExitReason, WorkerExit
from backstay.kubernetes.names import WORKER, WORKER_ID
from backstay.kubernetes.pod_memory import memory_limit, memory_quantity

__all__ = [
    "PodSeen",
    "Pull",
    "end_of_deleted",
    "has_no_room",
    "is_on_lost_node",
    "seen",
    "unfinished",
    "why_not_running",
]

# Of the condition DisruptionTarget, for all that a kubelet does: the Pod's reason says what it was.
_BY_KUBELET = "TerminationByKubelet"
# Of the condition DisruptionTarget: something took the Pod away.
_DISRUPTIONS = {
    "PreemptionByScheduler": ExitReason.PREEMPTED,
    "EvictionByEvictionAPI": ExitReason.EVICTED,
    "DeletionByTaintManager": ExitReason.NODE_LOST,
    "DeletionByPodGC": ExitReason.NODE_LOST,
}
# Of a Pod that failed as a whole; those of admission (OutOfcpu and the like) are told by prefix.
_POD_REASONS = {
    "Evicted": ExitReason.EVICTED,
    "Preempting": ExitReason.PREEMPTED,
    "NodeLost": ExitReason.NODE_LOST,
    "NodeShutdown": ExitReason.NODE_LOST,
    "Shutdown": ExitReason.NODE_LOST,
    "Terminated": ExitReason.NODE_LOST,
    "NodeAffinity": ExitReason.EVICTED,
    "UnexpectedAdmissionError": ExitReason.EVICTED,
}
# Of a container that ended.
_CONTAINER_REASONS = {
    "OOMKilled": ExitReason.OUT_OF_MEMORY,
    "ContainerCannotRun": ExitReason.CANNOT_START,
    "StartError": ExitReason.CANNOT_START,
    "ContainerStatusUnknown": ExitReason.NODE_LOST,
}
# Of a container that waits for what does not come by itself.
_CANNOT_START = {
    "ErrImageNeverPull",
    "InvalidImageName",
    "ImageInspectError",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
}
# Its node tries again: the registry may be away for a while.
_PULLS = {
    "ErrImagePull",
    "ImagePullBackOff",
    "RegistryUnavailable",
    "SignatureValidationFailed",
}
# Words of nodes (containerd, CRI-O) about a registry; names of images are quoted.
_QUOTED = re.compile(r'"[^"]*"')
# The name server says so; one that does not answer, or does not know, says something else.
_NO_HOST = re.compile(r"no such host", re.IGNORECASE)
_AWAY = re.compile(
    r"dial tcp|connection re(?:fused|set)|i/o timeout|timed out|handshake timeout|timeout exceeded"
    r"|deadline exceeded|server misbehaving|no route to host|network is unreachable"
    r"|\beof$|too ?many ?requests|service unavailable|bad gateway|gateway time-?out"
    r"|internal server error",
    re.IGNORECASE,
)
_NOT_THERE = re.compile(
    r"not found|unknown manifest|manifest unknown|name unknown|not known to registry"
    r"|does not exist|denied|unauthorized|forbidden",
    re.IGNORECASE,
)
# Words of the scheduler.
_NO_ROOM = ("Insufficient ", "Too many pods")
_STARTS = {"ContainerCreating", "PodInitializing"}
_USUAL_WAITS = {"", *_STARTS}


class Pull(enum.Enum):
    """Why a node did not get an image."""

    # The registry does not answer, or asks for patience.
    AWAY = enum.auto()
    # There is no such registry, or it says that it has no such image, or none for this Pod.
    NOT_THERE = enum.auto()
    OTHER = enum.auto()


class PodSeen(NamedTuple):
    """A worker's Pod, as far as the launcher looks at it.

    Attributes:
        name: Of the Pod.
        worker_id: Of its worker.
        priority_class: That it was made with; empty: none.
        is_terminating: Whether it was told to end.
        end: How its worker ended; None: it has not.
        waits: What it waits for; empty: for nothing, or for what comes soon.
        has_begun: Whether its container runs, or has run.
        is_starting: Whether it has a node, and the node prepares its container.
        is_pulling: Whether its node did not get the image, and tries again.
        pull: Why it did not get it; None: it did, or does not say.
        has_no_room: Whether no node has room for it now.
        memory_limit: Bytes that its container may use; 0: it has no limit.
    """

    name: str
    worker_id: str
    priority_class: str = ""
    is_terminating: bool = False
    end: WorkerExit | None = None
    waits: str = ""
    has_begun: bool = False
    is_starting: bool = False
    is_pulling: bool = False
    pull: Pull | None = None
    has_no_room: bool = False
    memory_limit: int = 0


def seen(pod: Mapping[str, Any]) -> PodSeen:
    """Return what a Pod's status says."""
    metadata = pod.get("metadata", {})
    worker_id = metadata.get("labels", {}).get(WORKER_ID, "")
    return PodSeen(
        metadata.get("name", ""),
        worker_id,
        pod.get("spec", {}).get("priorityClassName", ""),
        "deletionTimestamp" in metadata,
        _end(pod, worker_id),
        _waits(pod),
        not _container_status(pod).get("state", {"waiting": {}}).keys() <= {"waiting"},
        _waiting(pod).get("reason", "") in _STARTS,
        _waiting(pod).get("reason", "") in _PULLS,
        _pull(_waiting(pod)),
        has_no_room(pod),
        memory_limit(pod),
    )


def end_of_deleted(pod: Mapping[str, Any]) -> WorkerExit:
    """Return how the worker of a Pod that is gone ended: something took the Pod away."""
    found = seen(pod)
    if found.end is not None:
        return found.end
    reason = _disruption(pod) or ExitReason.PREEMPTED
    return WorkerExit(found.worker_id, reason, last_words="its Pod was deleted")


def is_on_lost_node(pod: Mapping[str, Any]) -> bool:
    """Whether a Pod was told to end because its node is lost, which cannot say that it has."""
    condition = _condition(pod, "DisruptionTarget")
    # A node that shuts down in order says itself when the Pod has ended.
    by_others = condition.get("status") == "True" and condition.get("reason") != _BY_KUBELET
    is_deleted = "deletionTimestamp" in pod.get("metadata", {})
    return is_deleted and by_others and _disruption(pod) is ExitReason.NODE_LOST


def unfinished(pods: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of Pods that have not ended and were not told to."""
    return [
        one["metadata"]["name"]
        for one in pods
        if "deletionTimestamp" not in one["metadata"]
        and one.get("status", {}).get("phase") not in ("Succeeded", "Failed")
    ]


def has_no_room(pod: Mapping[str, Any]) -> bool:
    """Whether a Pod waits because nodes that suit it are full."""
    scheduled = _condition(pod, "PodScheduled")
    is_waiting = scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable"
    message: str = scheduled.get("message", "")
    return is_waiting and any(one in message for one in _NO_ROOM)


def why_not_running(pod: Mapping[str, Any], container: str) -> str:
    """Return what a container of a Pod waits for; empty: for nothing."""
    if waits := _waits(pod, container):
        return waits
    if "running" in _container_status(pod, container).get("state", {}):
        return ""
    return _waiting(pod, container).get("reason", "") or "its node"


def _end(pod: Mapping[str, Any], worker_id: str) -> WorkerExit | None:
    status = pod.get("status", {})
    terminated = _container_status(pod).get("state", {}).get("terminated")
    waiting = _waiting(pod)
    is_deleted = "deletionTimestamp" in pod.get("metadata", {})
    if is_on_lost_node(pod):
        # Its node cannot say that it has ended.
        return WorkerExit(worker_id, ExitReason.NODE_LOST, last_words=_disruption_text(pod))
    if is_deleted and _is_node_silent(pod):
        words = "its node does not answer"
        return WorkerExit(worker_id, ExitReason.NODE_LOST, last_words=words)
    if terminated is None and status.get("phase") not in ("Succeeded", "Failed"):
        if waiting.get("reason", "") not in _CANNOT_START:
            return None
        text = f"{waiting['reason']}: {waiting.get('message', '')}"
        return WorkerExit(worker_id, ExitReason.CANNOT_START, last_words=text)
    if terminated is None and not _disruption(pod) and not is_deleted:
        first = _failed_first(pod)
        if first is not None:
            return _end_of_first(first, worker_id)
    terminated = terminated or {}
    code = int(terminated.get("exitCode", 0))
    reason = _reason(pod, terminated, code, is_deleted=is_deleted)
    words = terminated.get("message") or status.get("message") or ""
    if reason is ExitReason.OUT_OF_MEMORY:
        # Last, as what is too long is cut off at its beginning.
        words = f"{words}\n{_memory_text(pod)}".strip()
    elif reason in (ExitReason.PREEMPTED, ExitReason.EVICTED, ExitReason.NODE_LOST):
        words = _disruption_text(pod) or words
    return WorkerExit(worker_id, reason, code, words)


def _end_of_first(status: Mapping[str, Any], worker_id: str) -> WorkerExit:
    """Return the end of a worker whose container was never begun: an earlier one has failed.

    Its exit code is not the worker's, and is told in words only.
    """
    terminated = status["state"]["terminated"]
    how = terminated.get("reason") or "Error"
    text = f"init container {status['name']}: {how}, exit code {terminated['exitCode']}"
    words = f"{text}\n{terminated.get('message', '')}".strip()
    found = _CONTAINER_REASONS.get(how, ExitReason.CANNOT_START)
    return WorkerExit(worker_id, found, last_words=words)


def _reason(
    pod: Mapping[str, Any], terminated: Mapping[str, Any], code: int, *, is_deleted: bool
) -> ExitReason:
    """Return why a worker ended; what took the Pod away explains what its process did then."""
    status = pod.get("status", {})
    found = _disruption(pod) or _POD_REASONS.get(status.get("reason", ""))
    if found is None and str(status.get("reason", "")).startswith("OutOf"):
        found = ExitReason.EVICTED
    if found is None:
        found = _CONTAINER_REASONS.get(terminated.get("reason", ""))
    if found is not None:
        return found
    if not terminated:
        # The Pod failed before its container ran.
        return ExitReason.FINISHED if status.get("phase") == "Succeeded" else ExitReason.NODE_LOST
    # A worker that is told to end gives back its tasks and ends with 0.
    return ExitReason.PREEMPTED if is_deleted else ExitReason.of_code(code)


def _container_status(pod: Mapping[str, Any], name: str = WORKER) -> Mapping[str, Any]:
    statuses = pod.get("status", {}).get("containerStatuses") or ()
    found: Mapping[str, Any] = next((one for one in statuses if one.get("name") == name), {})
    return found


def _first_statuses(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the init containers, in their order."""
    return list(pod.get("status", {}).get("initContainerStatuses") or ())


def _failed_first(pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the init container that has failed, if there is one."""
    for one in _first_statuses(pod):
        terminated = one.get("state", {}).get("terminated")
        if terminated is not None and terminated.get("exitCode", 0):
            return one
    return None


def _held_up(pod: Mapping[str, Any], container: str) -> Mapping[str, Any]:
    """Return the status that says what a container waits for: that of an init container, or its."""
    own = _container_status(pod, container)
    if own.get("state", {}).keys() & {"running", "terminated"}:
        # A sidecar, which is an init container, may fail beside it.
        return own
    for one in _first_statuses(pod):
        waiting = one.get("state", {}).get("waiting") or {}
        if waiting.get("reason", "") not in _USUAL_WAITS:
            return one
    return own


def _waiting(pod: Mapping[str, Any], container: str = WORKER) -> Mapping[str, Any]:
    waiting: Mapping[str, Any] = _held_up(pod, container).get("state", {}).get("waiting") or {}
    return waiting


def _pull(waiting: Mapping[str, Any]) -> Pull | None:
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    if reason not in _PULLS:
        return None
    said = _QUOTED.sub("", message).strip()
    if _NO_HOST.search(said):
        # Asked again and again, the answer would be the same.
        return Pull.NOT_THERE
    if reason == "RegistryUnavailable" or _AWAY.search(said):
        return Pull.AWAY
    if _NOT_THERE.search(said):
        return Pull.NOT_THERE
    # Without a cause it only says that it waits before the next try.
    return None if said == "Back-off pulling image" else Pull.OTHER


def _is_node_silent(pod: Mapping[str, Any]) -> bool:
    """Whether Kubernetes has marked the Pod as not ready because its node does not answer.

    It changes this condition alone. A node that answers says of its containers, too, that they are
    not ready, or gives a reason.
    """
    ready, containers = _condition(pod, "Ready"), _condition(pod, "ContainersReady")
    says_no = ready.get("status") == "False" and not ready.get("reason")
    return says_no and containers.get("status") == "True"


def _condition(pod: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    conditions = pod.get("status", {}).get("conditions") or ()
    found: Mapping[str, Any] = next((one for one in conditions if one.get("type") == kind), {})
    return found


def _disruption(pod: Mapping[str, Any]) -> ExitReason | None:
    condition = _condition(pod, "DisruptionTarget")
    if condition.get("status") != "True":
        return None
    reason = condition.get("reason", "")
    if reason == _BY_KUBELET:
        own = pod.get("status", {}).get("reason", "")
        return _POD_REASONS.get(own, ExitReason.EVICTED)
    return _DISRUPTIONS.get(reason, ExitReason.EVICTED)


def _disruption_text(pod: Mapping[str, Any]) -> str:
    text: str = _condition(pod, "DisruptionTarget").get("message", "")
    return text


def _memory_text(pod: Mapping[str, Any]) -> str:
    limit = memory_limit(pod)
    return (
        f"its memory limit is {memory_quantity(limit)}; kubernetes.worker.limits sets another"
        if limit
        else "its node had no more memory; kubernetes.worker.requests reserves some"
    )


def _waits(pod: Mapping[str, Any], container: str = WORKER) -> str:
    scheduled = _condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return f"room on a node: {scheduled.get('message', '')}"
    status, waiting = _held_up(pod, container), _waiting(pod, container)
    reason = waiting.get("reason", "")
    if reason in _USUAL_WAITS:
        return ""
    # Of a container that ends again and again this is the end of its log.
    last = (status.get("lastState", {}).get("terminated") or {}).get("message", "")
    return f"{reason}: {last.strip() or waiting.get('message', '')}"
