"""Kubernetes manifests as kustomize renders them, and the project's rules for them.

``problems`` is pure: objects in, sentences out.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.kubernetes.build import built_programs

ROOT = Path(__file__).resolve().parents[1]
KUBERNETES = ROOT / "deploy" / "kubernetes"
# Components and `labels` with templates.
KUBECTL_MIN = (1, 27)
CLUSTER_WIDE = {"Namespace"}
WORKLOADS = {"StatefulSet", "Deployment", "DaemonSet", "Job"}
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
REFERENCE = re.compile(r"\$\((\w+)\)")

Object = dict[str, Any]


class Pods(NamedTuple):
    """What makes Pods: its object, and the Pod that it makes."""

    owner: Object
    labels: Mapping[str, str]
    spec: Object

    @property
    def name(self) -> str:
        return str(self.owner["metadata"]["name"])

    @property
    def port_names(self) -> set[str]:
        return {port["name"] for one in self.spec["containers"] for port in one["ports"]}


def require_kubectl() -> str:
    """Return the path of a kubectl that renders our overlays, or skip."""
    programs = built_programs()
    path = shutil.which("kubectl") if programs is None else str(programs / "kubectl")
    if path is None:
        pytest.skip("there is no kubectl; `make kubernetes-cluster` builds one")
    text = subprocess.run([path, "version", "--client"], capture_output=True, text=True).stdout
    found = re.search(r"Client Version:\s*v(\d+)\.(\d+)", text)
    if found is None or (int(found[1]), int(found[2])) < KUBECTL_MIN:
        pytest.skip(f"{path} is older than {KUBECTL_MIN[0]}.{KUBECTL_MIN[1]}: {text.strip()}")
    return path


def rendered(kubectl: str, folder: Path) -> list[Object]:
    """Return the objects of an overlay."""
    done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one is not None]


def pods_of(objects: list[Object]) -> list[Pods]:
    return [
        Pods(one, one["spec"]["template"]["metadata"]["labels"], one["spec"]["template"]["spec"])
        for one in objects
        if one["kind"] in WORKLOADS
    ]


def named(objects: list[Object], kind: str) -> dict[str, Object]:
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


def environment(objects: list[Object], container: Object) -> dict[str, str]:
    """Return the variables of a container, with its own name where only the cluster knows one."""
    maps = named(objects, "ConfigMap")
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        if "configMapRef" in source:
            found |= maps[source["configMapRef"]["name"]]["data"]
    for one in container.get("env", ()):
        value = one.get("value", one["name"].lower().replace("_", "-"))
        found[one["name"]] = REFERENCE.sub(lambda match: found[match[1]], value)
    return found


def problems(objects: list[Object], made_by_hand: set[str]) -> list[str]:
    """Return what is wrong.

    Args:
        objects: What kustomize rendered.
        made_by_hand: Secrets that the operator of the cluster makes.
    """
    found = []
    for pods in pods_of(objects):
        troubles = [*_pod_troubles(pods), *_reference_troubles(objects, pods, made_by_hand)]
        for container in pods.spec["containers"]:
            troubles += _container_troubles(pods, container)
        found += [f"{pods.owner['kind']} {pods.name}: {trouble}" for trouble in troubles]
    found += _selector_troubles(objects)
    found += _right_troubles(objects)
    namespaces = {
        one["metadata"].get("namespace") for one in objects if one["kind"] not in CLUSTER_WIDE
    }
    if len(namespaces) != 1 or None in namespaces:
        found.append(f"objects of more than one namespace, or of none: {namespaces}")
    return found


def _pod_troubles(pods: Pods) -> Iterator[str]:
    spec, security = pods.spec, pods.spec.get("securityContext", {})
    wanted = pods.owner["spec"]["selector"]["matchLabels"]
    if not wanted.items() <= pods.labels.items():
        yield f"its selector {wanted} does not match its Pods {dict(pods.labels)}"
    if not security.get("runAsNonRoot") or not security.get("runAsUser"):
        yield "its Pods may run as root"
    if security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "its Pods have no seccomp profile"
    if spec.get("enableServiceLinks") is not False:
        yield "the names of Services become variables of its Pods"
    if "serviceAccountName" not in spec:
        yield "its Pods run under the default account"
    grace_s = spec.get("terminationGracePeriodSeconds", 30)
    for container in spec["containers"]:
        hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ())
        waits_s = max((int(word) for word in hook if word.isdigit()), default=0)
        # stop_grace_ms, twice: to hand over, and for the requests under way.
        if hook and grace_s < waits_s + 20:
            yield f"preStop may take {waits_s} s of {grace_s} s, which leaves no time for the stop"


def _container_troubles(pods: Pods, container: Object) -> Iterator[str]:
    name, security = container["name"], container.get("securityContext", {})
    for kind in ("requests", "limits"):
        for resource in ("cpu", "memory"):
            if resource not in container.get("resources", {}).get(kind, {}):
                yield f"{name} has no {kind} of {resource}"
    for probe in PROBES:
        if probe not in container:
            yield f"{name} has no {probe}"
            continue
        action = container[probe].get("httpGet") or container[probe]["tcpSocket"]
        if action["port"] not in pods.port_names:
            yield f"{name}: {probe} asks port {action['port']}, which has no such name"
    if security.get("allowPrivilegeEscalation") is not False:
        yield f"{name} may gain rights"
    if security.get("readOnlyRootFilesystem") is not True:
        yield f"{name} may write to its image"
    if security.get("capabilities", {}).get("drop") != ["ALL"]:
        yield f"{name} has capabilities"
    if not re.search(r":[\w.-]+$", container["image"]):
        yield f"{name}: its image {container['image']} has no tag"


def _reference_troubles(objects: list[Object], pods: Pods, made_by_hand: set[str]) -> Iterator[str]:
    maps, secrets = named(objects, "ConfigMap"), {*named(objects, "Secret"), *made_by_hand}
    volumes = {one["name"]: one for one in pods.spec.get("volumes", ())}
    claims = {one["metadata"]["name"] for one in pods.owner["spec"].get("volumeClaimTemplates", ())}
    for one in volumes.values():
        if "secret" in one and one["secret"]["secretName"] not in secrets:
            yield f"there is no Secret {one['secret']['secretName']}"
        if "configMap" in one and one["configMap"]["name"] not in maps:
            yield f"there is no ConfigMap {one['configMap']['name']}"
    for container in pods.spec["containers"]:
        known: set[str] = set()
        for source in container.get("envFrom", ()):
            wanted = source.get("configMapRef") or source["secretRef"]
            there = maps if "configMapRef" in source else secrets
            if wanted["name"] not in there and not wanted.get("optional"):
                yield f"there is no {wanted['name']} for the variables of {container['name']}"
            known |= maps.get(wanted["name"], {}).get("data", {}).keys()
        for variable in container.get("env", ()):
            for name in REFERENCE.findall(variable.get("value", "")):
                if name not in known:
                    yield f"{variable['name']} needs {name}, which is not set before it"
            known.add(variable["name"])
        for mount in container.get("volumeMounts", ()):
            if mount["name"] not in {*volumes, *claims}:
                yield f"there is no volume {mount['name']}"
    if pods.spec.get("serviceAccountName") not in named(objects, "ServiceAccount"):
        yield f"there is no ServiceAccount {pods.spec.get('serviceAccountName')}"
    service = named(objects, "Service").get(pods.owner["spec"].get("serviceName", ""))
    if pods.owner["kind"] == "StatefulSet" and (
        service is None or service["spec"].get("clusterIP") != "None"
    ):
        yield "it has no headless Service"


def _selector_troubles(objects: list[Object]) -> Iterator[str]:
    pods = pods_of(objects)
    services = named(objects, "Service").values()
    for one in objects:
        what, spec = f"{one['kind']} {one['metadata']['name']}", one.get("spec", {})
        if one["kind"] == "Service":
            chosen = [found for found in pods if _chooses(spec["selector"], found.labels)]
            wanted = {port["targetPort"] for port in spec["ports"]}
            if len(chosen) != 1 or not wanted <= chosen[0].port_names:
                yield f"{what}: no Pods, or not one kind of them, have its labels and ports"
        elif one["kind"] == "PodDisruptionBudget":
            chosen = [
                found for found in pods if _chooses(spec["selector"]["matchLabels"], found.labels)
            ]
            if len(chosen) != 1:
                yield f"{what}: it is about {len(chosen)} kinds of Pods"
        elif one["kind"] == "NetworkPolicy":
            chosen = [found for found in pods if _chooses_by(spec["podSelector"], found.labels)]
            wanted = {port["port"] for rule in spec["ingress"] for port in rule["ports"]}
            if not chosen or not all(wanted <= found.port_names for found in chosen):
                yield f"{what}: no Pods have its labels and ports"
        elif one["kind"] == "ServiceMonitor":
            wanted = {endpoint["port"] for endpoint in spec["endpoints"]}
            scraped = [
                service
                for service in services
                if _chooses(spec["selector"]["matchLabels"], service["metadata"]["labels"])
                and wanted <= {port["name"] for port in service["spec"]["ports"]}
            ]
            if len(scraped) != 1:
                yield f"{what}: {len(scraped)} Services have its labels and ports"


def _right_troubles(objects: list[Object]) -> Iterator[str]:
    for binding in named(objects, "RoleBinding").values():
        if binding["roleRef"]["name"] not in named(objects, "Role"):
            yield f"RoleBinding: there is no Role {binding['roleRef']['name']}"
        for subject in binding["subjects"]:
            if subject["name"] not in named(objects, "ServiceAccount"):
                yield f"RoleBinding: there is no ServiceAccount {subject['name']}"
    for name, role in named(objects, "Role").items():
        for rule in role["rules"]:
            if "*" in {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}:
                yield f"Role {name}: a rule gives everything"
            if "secrets" in rule["resources"]:
                yield f"Role {name}: it gives Secrets"


def _chooses(wanted: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return wanted.items() <= labels.items()


def _chooses_by(selector: Object, labels: Mapping[str, str]) -> bool:
    return _chooses(selector.get("matchLabels", {}), labels) and all(
        labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", ())
    )
