"""The job's own servers on Kubernetes, as plain mappings: a StatefulSet and what belongs to it.

docs/adr/0012-kubernetes.md says why they keep their records in etcd. Imports ``backstay.config``,
``backstay.job_spec`` and the modules beside it; does no I/O.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from backstay.config import ENDPOINT_VARIABLE, ServerConfig
from backstay.errors import ConfigError
from backstay.job_spec import JobSpec
from backstay.kubernetes.names import JOB_NAME, PSERVER, labels_of, object_name, pserver_name
from backstay.kubernetes.pod_template import (
    JOB_FOLDER,
    PYTHON,
    pod_of,
    pod_template,
    section,
    variable_of_field,
)
from backstay.kubernetes.spec import KubernetesSpec, amount
from backstay.settings import load, suggestion

__all__ = [
    "SETTINGS_FILE",
    "PserverObjects",
    "check_no_servers",
    "cluster_of",
    "cores_of_server",
    "pserver_endpoints",
    "pserver_objects",
    "replacing",
    "server_settings",
    "settings_text",
]

SETTINGS_FILE = "pserver.toml"
CONTROL_PORT = 7000
DATA_PORT = 7100
METRICS_PORT = 9464
CLUSTER_VARIABLE = "BACKSTAY_CLUSTER"
REPLACES_VARIABLE = "BACKSTAY_REPLACES_CLUSTER"
NODE_VARIABLE = "BACKSTAY_NODE_ID"
# They tell the servers' records from others; a job file cannot set them.
_OWN_VARIABLES = (CLUSTER_VARIABLE, REPLACES_VARIABLE, NODE_VARIABLE)
# How long a Pod that is to end waits until every slot has its copies.
COPIES_WAIT_S = 60
# The wait, then the two graces of a stop (stop_grace_ms).
STOP_GRACE_S = COPIES_WAIT_S + 30
# What a job file says of them is said by the Pods.
_OF_THE_POD = (
    "advertise_host",
    "cluster",
    "host",
    "initial_nodes",
    "listen_control",
    "listen_data",
    "metrics",
    "node_id",
    "numbered_nodes",
    "replaces_cluster",
)


class PserverObjects(NamedTuple):
    """What the command makes for the servers; the job's Deployment owns it."""

    service: dict[str, Any]
    budget: dict[str, Any]
    stateful_set: dict[str, Any]


def pserver_endpoints(job: str, count: int) -> tuple[str, ...]:
    """Return the control addresses of a job's own servers, as Pods of its namespace reach them."""
    name = pserver_name(job)
    return tuple(f"{name}-{number}.{name}:{CONTROL_PORT}" for number in range(count))


def check_no_servers(spec: JobSpec) -> None:
    """Refuse what a job file says of servers of its own, if a cluster runs instead.

    Raises:
        ConfigError: It says something.
    """
    if spec.servers.min:
        raise ConfigError(
            "servers.min: is for servers of the job's own; leave it out, or leave out the endpoints"
        )
    if spec.autoscale is not None and spec.autoscale.servers != "fixed":
        raise ConfigError(
            "autoscale.servers: changes servers of the job's own only; a cluster that runs is "
            "changed by `pserverctl resize`. Say fixed, or leave out the endpoints"
        )


def cores_of_server(spec: JobSpec) -> float:
    """Return how much CPU a server may use, or else asks for; 0: the job does not say."""
    pserver = section(spec).pserver
    quantity = pserver.limits.get("cpu") or pserver.requests.get("cpu")
    return 0.0 if quantity is None else amount(quantity)


def server_settings(spec: JobSpec, count: int) -> dict[str, Any]:
    """Return the settings of a job's own servers.

    Args:
        spec: The job.
        count: How many servers are started with it.

    Raises:
        ConfigError: One is wrong or missing.
    """
    kubernetes, given = section(spec), dict(spec.servers.settings)
    _check_given(given)
    _check_variables(kubernetes)
    follows_load = spec.autoscale is not None and spec.autoscale.servers == "load"
    has_limit = "memory" in kubernetes.pserver.limits or "memory_limit_bytes" in given
    if follows_load and not has_limit and not cores_of_server(spec):
        raise ConfigError(
            "autoscale.servers: load needs to know what a server may use; set "
            "kubernetes.pserver.limits, such as {cpu: 1, memory: 4Gi}"
        )
    url = spec.checkpoint.url
    if not url and (spec.checkpoint.is_wanted or spec.kind != "training"):
        raise ConfigError(
            "checkpoint.url: is missing; servers of a job on Kubernetes keep checkpoints in a URL, "
            "or in a folder of a volume that all of them have (kubernetes.pserver.volumes). "
            "`checkpoint: none` trains without them"
        )
    settings: dict[str, Any] = {
        "store": "etcd",
        "listen_control": f"0.0.0.0:{CONTROL_PORT}",
        "listen_data": f"0.0.0.0:{DATA_PORT}",
        "metrics": f"0.0.0.0:{METRICS_PORT}",
        # The job begins with so many; the others join.
        "initial_nodes": spec.servers.counts(count).least,
        "replicas": min(spec.servers.replicas, count),
        "numbered_nodes": True,
        # Saves of the job hold model and progress together; those by time would hold no progress.
        "checkpoint_every_s": 0,
        "insecure": kubernetes.insecure,
    }
    if url:
        settings |= {"checkpoint_url": url, "restore": "latest"}
    settings |= given
    if settings["store"] != "etcd" or not settings.get("store_endpoints"):
        raise ConfigError(
            "servers.settings.store_endpoints: is missing; servers of a job on Kubernetes keep "
            'their records in etcd, such as {store_endpoints: ["etcd-0.etcd:2379"]}. To train on a '
            "cluster that runs, give --endpoint HOST:PORT, as its Pods reach it"
        )
    _check(settings)
    return settings


def settings_text(settings: Mapping[str, Any]) -> str:
    """Return the settings as the file that ``pserver serve --config`` reads."""
    # A JSON string, number, boolean or list of strings is the same in TOML.
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    return "[server]\n" + "\n".join(lines) + "\n"


def pserver_objects(
    spec: JobSpec, settings: Mapping[str, Any], run: str, files: str
) -> PserverObjects:
    """Return what the command makes for the servers.

    Args:
        spec: The job, with the address of each server.
        settings: As ``server_settings`` returned them.
        run: Tells the records of these servers from those of an earlier run of the job.
        files: Name of the ConfigMap with the job's files.
    """
    name, labels = pserver_name(spec.name), labels_of(spec.name, PSERVER)
    metadata = {"name": name, "labels": labels, "annotations": {JOB_NAME: spec.name}}
    ports = {"control": CONTROL_PORT, "data": DATA_PORT, "metrics": METRICS_PORT}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "clusterIP": "None",
            # Nodes need each other before they are ready.
            "publishNotReadyAddresses": True,
            "selector": labels,
            "ports": [
                {"name": port, "port": number, "targetPort": port} for port, number in ports.items()
            ],
        },
    }
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata,
        "spec": {
            # A Pod that came back is not ready before every slot has its copies.
            "maxUnavailable": 1 if settings["replicas"] > 1 else 0,
            "selector": {"matchLabels": labels},
        },
    }
    servers = _stateful_set(spec, run, files, metadata, ports)
    return PserverObjects(service, budget, servers)


def cluster_of(stateful_set: Mapping[str, Any]) -> str:
    """Return the name of the cluster that a job's own servers make; empty: it is not said."""
    env = _container_of(stateful_set).get("env", ())
    names = (one.get("value", "") for one in env if one["name"] == CLUSTER_VARIABLE)
    return next(names, "")


def replacing(stateful_set: Mapping[str, Any], earlier: str) -> dict[str, Any]:
    """Return servers that also remove the records of the cluster of earlier ones."""
    changed: dict[str, Any] = json.loads(json.dumps(stateful_set))
    _container_of(changed)["env"].append({"name": REPLACES_VARIABLE, "value": earlier})
    return changed


def _container_of(stateful_set: Mapping[str, Any]) -> dict[str, Any]:
    containers = stateful_set["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = next((one for one in containers if one["name"] == PSERVER), {})
    return found


def _stateful_set(
    spec: JobSpec,
    run: str,
    files: str,
    metadata: Mapping[str, Any],
    ports: Mapping[str, int],
) -> dict[str, Any]:
    kubernetes, labels = section(spec), metadata["labels"]
    template = pod_template(
        kubernetes,
        PSERVER,
        command=[
            *(PYTHON, "-m", "backstay.pserver.serve_cli", "serve"),
            *("--config", f"{JOB_FOLDER}/{SETTINGS_FILE}"),
        ],
        env=_environment(spec.name, run),
        files=files,
        of_role=_of_role(spec.name, labels, ports),
    )
    priority = kubernetes.pserver.priority_class
    pod = pod_of(template, labels, job=spec.name, restart="Always", priority_class=priority)
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata,
        "spec": {
            "replicas": len(spec.servers.endpoints),
            "serviceName": metadata["name"],
            "selector": {"matchLabels": labels},
            # All at once: new servers serve only when the first of them have all come.
            "podManagementPolicy": "Parallel",
            "template": pod,
        },
    }


def _environment(job: str, run: str) -> list[dict[str, Any]]:
    """Return what each Pod has of its own; its name is its node id."""
    host = f"$({NODE_VARIABLE}).{pserver_name(job)}.$(POD_NAMESPACE).svc"
    return [
        variable_of_field(NODE_VARIABLE, "metadata.name"),
        variable_of_field("POD_NAMESPACE", "metadata.namespace"),
        # Copies of a slot go to different machines.
        variable_of_field("BACKSTAY_HOST", "spec.nodeName"),
        {"name": CLUSTER_VARIABLE, "value": f"{object_name(job)}-{run}"},
        # A name and not the Pod's address, because certificates hold names.
        {"name": "BACKSTAY_ADVERTISE_HOST", "value": host},
        # For pserverctl in this Pod.
        {"name": ENDPOINT_VARIABLE, "value": f"$(BACKSTAY_ADVERTISE_HOST):{CONTROL_PORT}"},
    ]


def _of_role(job: str, labels: Mapping[str, str], ports: Mapping[str, int]) -> dict[str, Any]:
    """Return what Pods of servers have and others have not; deploy/kubernetes/base says why."""
    wait = [PYTHON, "-m", "backstay.kubernetes.server_stop", job, str(COPIES_WAIT_S)]
    container = {
        "name": PSERVER,
        "ports": [{"name": name, "containerPort": number} for name, number in ports.items()],
        "startupProbe": _probe("/live", period_s=2, failures=60),
        "livenessProbe": _probe("/live", period_s=10, failures=6),
        "readinessProbe": _probe("/ready", period_s=5, failures=2),
        "lifecycle": {"preStop": {"exec": {"command": wait}}},
    }
    selector = {"labelSelector": {"matchLabels": dict(labels)}}
    zones = {
        "maxSkew": 1,
        "topologyKey": "topology.kubernetes.io/zone",
        "whenUnsatisfiable": "ScheduleAnyway",
        **selector,
    }
    apart = {
        "weight": 100,
        "podAffinityTerm": {"topologyKey": "kubernetes.io/hostname", **selector},
    }
    return {
        "spec": {
            "containers": [container],
            "terminationGracePeriodSeconds": STOP_GRACE_S,
            "topologySpreadConstraints": [zones],
            "affinity": {
                "podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [apart]}
            },
        }
    }


def _probe(path: str, *, period_s: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": "metrics"},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _check_given(given: Mapping[str, Any]) -> None:
    """Refuse settings that a job file cannot set for servers on Kubernetes."""
    secret = {item.name for item in fields(ServerConfig) if not item.repr}
    names = [item.name for item in fields(ServerConfig)]
    for name in given:
        if name not in names:
            raise ConfigError(f"servers.settings.{name}: no such setting{suggestion(name, names)}")
        if name in _OF_THE_POD:
            raise ConfigError(f"servers.settings.{name}: is set for each Pod; leave it out")
        if name in secret:
            raise ConfigError(
                f"servers.settings.{name}: a ConfigMap is no place for it; put it into a Secret as "
                f"BACKSTAY_{name.upper()}, and name that in kubernetes.secrets"
            )


def _check_variables(kubernetes: KubernetesSpec) -> None:
    """Refuse variables that would have servers of the job's own take other records for theirs."""
    containers = kubernetes.pserver.pod_template.get("spec", {}).get("containers", ())
    templates = [one.get("env") or () for one in containers if one["name"] == PSERVER]
    given = [one for env in templates for one in env if isinstance(one, Mapping)]
    found: dict[str, set[Any]] = {
        "kubernetes.env": set(kubernetes.env),
        "kubernetes.pserver.env": set(kubernetes.pserver.env),
        "kubernetes.pserver.pod_template": {one.get("name") for one in given},
    }
    for where, names in found.items():
        for name in _OWN_VARIABLES:
            if name in names:
                raise ConfigError(
                    f"{where}: {name} is set for each Pod of the job's own servers; leave it out"
                )


def _check(settings: Mapping[str, Any]) -> None:
    """Refuse settings that a server would refuse."""
    # What Secrets hold is not known here.
    explicit = {"advertise_host": PSERVER, "token": "in-a-Secret"}
    if "store_username" in settings:
        explicit["store_password"] = "in-a-Secret"
    try:
        load(ServerConfig, settings, {}, explicit, file="servers.settings")
    except ConfigError as error:
        raise ConfigError(f"servers.settings: {error}") from error
