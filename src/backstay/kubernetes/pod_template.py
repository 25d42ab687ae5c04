"""The container and the Pod of a role, out of the section ``kubernetes`` of a job file.

Values in, values out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from backstay.errors import ConfigError
from backstay.job_spec import JobSpec
from backstay.kubernetes.names import JOB_NAME, SCHEDULE
from backstay.kubernetes.spec import VOLUME_KINDS, KubernetesSpec, PodSpec, amount

__all__ = [
    "JOB_FOLDER",
    "PYTHON",
    "SCRATCH",
    "files_of",
    "merged",
    "pod_of",
    "pod_template",
    "section",
    "variable_of_field",
    "whole_cores",
]

# Where the job file and the model file lie, read-only; and the one folder that may be written.
JOB_FOLDER = "/backstay/job"
JOB_VOLUME = "job"
PYTHON = "python3"
SCRATCH = "/tmp"
# The image's own user may be root, and may have no number.
USER_ID = 10001
STOP_GRACE_S = 30
_USER = {
    "runAsNonRoot": True,
    "runAsUser": USER_ID,
    "runAsGroup": USER_ID,
    "fsGroup": USER_ID,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
# The end of a failed container's log comes with its status.
_LOG_WITH_STATUS = {"terminationMessagePolicy": "FallbackToLogsOnError"}
# How long a Pod stays bound to a node that does not answer.
NODE_LOST_S = 10
_LOST = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
# By which fields of their entries lists of a Pod are merged.
_KEYS = ("name", "mountPath")


def pod_template(
    kubernetes: KubernetesSpec,
    role: str,
    *,
    command: Sequence[str],
    env: Sequence[Mapping[str, Any]],
    files: str,
    of_role: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return ``metadata`` and ``spec`` of a role's Pods, with the user's template merged in.

    Args:
        kubernetes: The section of the job file.
        role: ``MASTER``, ``WORKER``, ``PSERVER`` or ``SCHEDULE``; also the container's name.
        command: What the container runs.
        env: Its variables, as Kubernetes writes them; those of the section come on top.
        files: Name of the ConfigMap with the job's files.
        of_role: What this role has besides, as a template; the user's is merged in after it.
    """
    pod = _settings(kubernetes, role)
    wanted = (*kubernetes.volumes, *pod.volumes)
    more = [{"name": name, "value": one} for name, one in {**kubernetes.env, **pod.env}.items()]
    container = {
        "name": role,
        "image": pod.image or kubernetes.image,
        "imagePullPolicy": kubernetes.pull_policy,
        "command": list(command),
        "workingDir": SCRATCH,
        "env": _by_name([{"name": "HOME", "value": SCRATCH}, *env, *more]),
        "envFrom": [{"secretRef": {"name": name}} for name in kubernetes.secrets],
        "resources": {"requests": dict(pod.requests), "limits": dict(pod.limits)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "scratch", "mountPath": SCRATCH},
            {"name": JOB_VOLUME, "mountPath": JOB_FOLDER, "readOnly": True},
            *(_mount(number, one) for number, one in enumerate(wanted)),
        ],
        **_LOG_WITH_STATUS,
    }
    spec = {
        "containers": [container],
        "volumes": [
            {"name": "scratch", "emptyDir": {}},
            {"name": JOB_VOLUME, "configMap": {"name": files}},
            *(_volume(number, one) for number, one in enumerate(wanted)),
        ],
        "imagePullSecrets": [{"name": name} for name in kubernetes.pull_secrets],
        "nodeSelector": dict(pod.node_selector),
        "tolerations": _tolerations(pod),
        "terminationGracePeriodSeconds": STOP_GRACE_S,
        "enableServiceLinks": False,
        # Process 1 ignores SIGTERM unless it handles it; here the pause container is process 1.
        "shareProcessNamespace": True,
        "securityContext": dict(_USER),
    }
    own = merged({"metadata": {}, "spec": spec}, of_role or {})
    template: dict[str, Any] = merged(own, pod.pod_template)
    first = template["spec"].get("initContainers")
    if first:
        told = [{**_LOG_WITH_STATUS, **one} for one in first]
        template = {**template, "spec": {**template["spec"], "initContainers": told}}
    return template


def pod_of(
    template: Mapping[str, Any],
    labels: Mapping[str, str],
    *,
    job: str,
    restart: str,
    priority_class: str = "",
    service_account: str = "",
) -> dict[str, Any]:
    """Return a template as a whole: with what its role says, which a user's template cannot change.

    Args:
        template: As ``pod_template`` returned it.
        labels: Of the Pod.
        job: Name of the job.
        restart: What Kubernetes does when a container ends.
        priority_class: A PriorityClass that a user's template may replace; empty: none.
        service_account: The account of its processes; empty: they get none.
    """
    metadata = template["metadata"]
    account: dict[str, Any] = {"automountServiceAccountToken": False}
    if service_account:
        account = {"serviceAccountName": service_account}
    return {
        "metadata": {
            **metadata,
            "labels": {**metadata.get("labels", {}), **labels},
            "annotations": {**metadata.get("annotations", {}), JOB_NAME: job},
        },
        "spec": {
            **account,
            **({"priorityClassName": priority_class} if priority_class else {}),
            **template["spec"],
            "restartPolicy": restart,
        },
    }


def variable_of_field(name: str, path: str) -> dict[str, Any]:
    """Return a variable that has the value of a field of its Pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def section(spec: JobSpec) -> KubernetesSpec:
    """Return the job's section ``kubernetes``.

    Raises:
        ConfigError: The job has none.
    """
    if spec.kubernetes is None:
        raise ConfigError(
            "kubernetes: is missing; a job on Kubernetes needs at least `kubernetes: {image: ...}`"
        )
    return spec.kubernetes


def files_of(template: Mapping[str, Any]) -> str:
    """Return the name of the ConfigMap that a template of ``pod_template`` has for the job's files.

    Empty: a user's template has put another volume in its place.
    """
    volumes = template["spec"].get("volumes", ())
    found = (one.get("configMap") for one in volumes if one["name"] == JOB_VOLUME)
    return str((next(found, None) or {}).get("name", ""))


def _settings(kubernetes: KubernetesSpec, role: str) -> PodSpec:
    """Return what the user says of a role; a run of a schedule has only where it may run."""
    if role != SCHEDULE:
        pod: PodSpec = getattr(kubernetes, role)
        return pod
    master = kubernetes.master
    return PodSpec(
        image=master.image, node_selector=master.node_selector, tolerations=master.tolerations
    )


def merged(below: Any, above: Any) -> Any:
    """Return ``below`` with what ``above`` says.

    Mappings are merged. Lists of mappings are merged by name, or by mount path; any other list is
    replaced. Neither argument changes.
    """
    if isinstance(below, Mapping) and isinstance(above, Mapping):
        return {
            **below,
            **{key: merged(below[key], one) if key in below else one for key, one in above.items()},
        }
    if isinstance(below, list) and isinstance(above, (list, tuple)):
        for key in _KEYS:
            if below and above and all(_has(one, key) for one in (*below, *above)):
                found = {one[key]: one for one in below}
                for one in above:
                    name = one[key]
                    found[name] = merged(found[name], one) if name in found else one
                return list(found.values())
        return list(above)
    return above


def whole_cores(pod: PodSpec) -> int | None:
    """Return how many threads fit into the CPU that a Pod may use; None: it does not say."""
    quantity = pod.limits.get("cpu") or pod.requests.get("cpu")
    if quantity is None:
        return None
    return max(1, math.floor(amount(quantity)))


def _has(one: object, key: str) -> bool:
    return isinstance(one, Mapping) and key in one


def _by_name(variables: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the variables without those that a later one replaces."""
    return list({one["name"]: one for one in variables}.values())


def _tolerations(pod: PodSpec) -> list[dict[str, Any]]:
    """Return the user's tolerations, and short ones of lost nodes where the user names none."""
    named = {one.get("key") for one in pod.tolerations}
    lost = [
        {
            "key": key,
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": NODE_LOST_S,
        }
        for key in _LOST
        if key not in named
    ]
    return [*(dict(one) for one in pod.tolerations), *lost]


def _volume(number: int, one: Mapping[str, Any]) -> dict[str, Any]:
    kind = next(kind for kind in VOLUME_KINDS if kind in one)
    source, field = VOLUME_KINDS[kind]
    return {"name": f"volume-{number}", source: {field: one[kind]}}


def _mount(number: int, one: Mapping[str, Any]) -> dict[str, Any]:
    mount = {"name": f"volume-{number}", "mountPath": one["mount_path"]}
    if "sub_path" in one:
        mount["subPath"] = one["sub_path"]
    if one.get("read_only", False):
        mount["readOnly"] = True
    return mount
