"""The overlays of deploy/kubernetes: Kubernetes' schemas, and the project's rules."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from backstay._version import __version__
from backstay.config import ServerConfig
from backstay.job_spec import JobSpec
from backstay.kubernetes.names import MASTER, PSERVER, SCHEDULE, WORKER, labels_of
from backstay.pserver.ctl.cli import main
from tests.manifests import KUBERNETES, Object, environment, named, pods_of, problems, rendered
from tests.manifests import require_kubectl as found_kubectl

# The oldest release that has all that we use, and the newest that the library knows.
VERSIONS = ("1.27", kubernetes_validate.latest_version())
# Made by the operator of the cluster: docs/guide/kubernetes.md says how.
MADE_BY_HAND = {
    "trial": {"backstay-token"},
    "production": {"backstay-token", "pserver-tls", "etcd-tls"},
}
BUDGETS = "poddisruptionbudgets"
OVERLAYS = sorted(MADE_BY_HAND)
GUIDE = KUBERNETES.parents[1] / "docs" / "guide" / "kubernetes.md"
JOBS_GUIDE = GUIDE.with_name("kubernetes-jobs.md")


@pytest.fixture(scope="module")
def overlays() -> dict[str, list[Object]]:
    kubectl = found_kubectl()
    return {name: rendered(kubectl, KUBERNETES / "overlays" / name) for name in OVERLAYS}


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    """The objects of production with monitoring on top."""
    return on_top_of("overlays/production", ["components/monitoring"], tmp_path_factory)


def on_top_of(
    resource: str,
    components: list[str],
    tmp_path_factory: pytest.TempPathFactory,
    namespace: str = "backstay",
) -> list[Object]:
    """Render an overlay that a user writes."""
    folder = tmp_path_factory.mktemp("overlay")

    def reached(name: str) -> str:
        return os.path.relpath(KUBERNETES / name, folder.resolve())

    text = {
        "namespace": namespace,
        "resources": [reached(resource)],
        "components": [reached(one) for one in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(text), encoding="utf-8")
    return rendered(found_kubectl(), folder)


def test_every_overlay_is_known_here() -> None:
    assert sorted(path.name for path in (KUBERNETES / "overlays").iterdir()) == OVERLAYS


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_fits_the_schemas_of_kubernetes(
    name: str, version: str, overlays: dict[str, list[Object]]
) -> None:
    kinds = {one["kind"] for one in overlays[name]}
    assert kinds >= {"StatefulSet", "Service", "PodDisruptionBudget"}
    for one in overlays[name]:
        kubernetes_validate.validate(one, version, strict=True)


# The hooks of a schedule may call the servers.
@pytest.mark.parametrize("role", [MASTER, WORKER, SCHEDULE])
@pytest.mark.parametrize("name", OVERLAYS)
def test_the_network_policy_lets_the_pods_of_a_job_in(
    name: str, role: str, overlays: dict[str, list[Object]]
) -> None:
    policy = named(overlays[name], "NetworkPolicy")["pserver"]
    labels = labels_of("census", role)
    (allowed,) = [
        one["podSelector"]["matchLabels"]
        for rule in policy["spec"]["ingress"]
        for one in rule["from"]
        if "namespaceSelector" not in one
    ]
    assert allowed.items() <= labels.items()


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_network_policy_of_etcd_lets_servers_in_and_no_other_pod_of_a_job(
    name: str, overlays: dict[str, list[Object]]
) -> None:
    found = named(overlays[name], "NetworkPolicy").get("etcd")
    if found is None:
        return
    allowed = [
        one["podSelector"]["matchLabels"]
        for rule in found["spec"]["ingress"]
        if {"port": "client"} in rule["ports"]
        for one in rule["from"]
    ]

    def may_call(labels: dict[str, str]) -> bool:
        return any(one.items() <= labels.items() for one in allowed)

    assert may_call({"app.kubernetes.io/name": "pserver"})
    assert may_call(labels_of("census", PSERVER))
    assert not any(may_call(labels_of("census", role)) for role in (MASTER, WORKER, SCHEDULE))


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_follows_the_rules(name: str, overlays: dict[str, list[Object]]) -> None:
    assert problems(overlays[name], MADE_BY_HAND[name]) == []


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_settings_of_the_pservers_are_settings(
    name: str, overlays: dict[str, list[Object]], recwarn: pytest.WarningsRecorder
) -> None:
    objects = overlays[name]
    pods = next(one for one in pods_of(objects) if one.name == "pserver")
    (container,) = pods.spec["containers"]
    given = environment(objects, container) | {"BACKSTAY_TOKEN": "of-the-operator"}
    config = ServerConfig.load(environment=given)
    assert not recwarn.list
    assert config.initial_nodes == pods.owner["spec"]["replicas"]
    assert config.advertise_host == "backstay-node-id.pserver-nodes.pod-namespace.svc"
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    listening = (config.listen_control, config.listen_data, config.metrics)
    assert listening == tuple(f"0.0.0.0:{ports[one]}" for one in ("control", "data", "metrics"))
    limit = int(container["resources"]["limits"]["memory"].removesuffix("Mi").replace("Gi", "000"))
    assert config.memory_limit_bytes is not None
    assert 0 < config.memory_limit_bytes <= 0.75 * limit * 2**20 * 1.024
    # One node may be away, and one copy of each slot must stay.
    budget = named(objects, "PodDisruptionBudget")["pserver"]
    assert config.replicas is not None
    assert budget["spec"]["maxUnavailable"] < config.replicas
    assert (config.tls_cert_file is not None) == (name == "production")


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_store_of_an_overlay_is_each_member_of_its_etcd(
    name: str, overlays: dict[str, list[Object]]
) -> None:
    objects = overlays[name]
    etcd = next(one for one in pods_of(objects) if one.name == "etcd")
    pserver = next(one for one in pods_of(objects) if one.name == "pserver")
    members = [f"etcd-{number}.etcd" for number in range(etcd.owner["spec"]["replicas"])]
    settings = environment(objects, pserver.spec["containers"][0])
    assert settings["BACKSTAY_STORE_ENDPOINTS"] == ",".join(f"{one}:2379" for one in members)
    variables = environment(objects, etcd.spec["containers"][0])
    scheme = "https" if name == "production" else "http"
    wanted = [f"{one.partition('.')[0]}={scheme}://{one}:2380" for one in members]
    assert variables["ETCD_INITIAL_CLUSTER"] == ",".join(wanted)
    assert variables["ETCD_LISTEN_CLIENT_URLS"] == f"{scheme}://0.0.0.0:2379"


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_images_have_the_version_of_the_package(
    name: str, overlays: dict[str, list[Object]]
) -> None:
    images = {one["image"] for pods in pods_of(overlays[name]) for one in pods.spec["containers"]}
    assert images == {f"backstay:{__version__}", f"backstay-etcd:{__version__}"}


def blocks(language: str, page: Path = GUIDE) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def test_the_job_that_the_guide_shows_finds_the_servers(
    overlays: dict[str, list[Object]],
) -> None:
    (text,) = (one for one in blocks("yaml", JOBS_GUIDE) if "model:" in one)
    spec = JobSpec.from_mapping(yaml.safe_load(text))
    ((host, _, port),) = (one.partition(":") for one in spec.servers.endpoints)
    service = named(overlays["trial"], "Service")[host]
    assert int(port) in {one["port"] for one in service["spec"]["ports"]}
    assert spec.kubernetes is not None
    assert spec.kubernetes.namespace == service["metadata"]["namespace"]
    assert set(spec.kubernetes.secrets) <= MADE_BY_HAND["trial"]
    (objects,) = (one for one in blocks("yaml", JOBS_GUIDE) if "PersistentVolumeClaim" in one)
    claims = named(list(yaml.safe_load_all(objects)), "PersistentVolumeClaim")
    assert {one["claim_name"] for one in spec.kubernetes.volumes} == set(claims)


@pytest.mark.parametrize("page", [GUIDE, JOBS_GUIDE], ids=lambda page: page.name)
def test_the_namespace_accepts_the_pods_that_a_guide_shows(page: Path) -> None:
    text = next(one for one in blocks("yaml", page) if "kind: Pod\n" in one)
    objects = list(yaml.safe_load_all(text))
    for one in objects:
        kubernetes_validate.validate(one, VERSIONS[0], strict=True)
    (pod,) = (one for one in objects if one["kind"] == "Pod")
    # What the standard `restricted` asks for.
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for one in pod["spec"]["containers"]:
        assert one["securityContext"]["allowPrivilegeEscalation"] is False
        assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_guide_tells_what_the_account_of_job_masters_may_do(
    overlays: dict[str, list[Object]],
) -> None:
    section = JOBS_GUIDE.read_text(encoding="utf-8").partition("It may:")[2].partition("4. **")[0]
    told = {
        resource: set(re.findall(r"`(\w+)`", verbs))
        for resource, verbs in re.findall(r"^ +\| `(\S+)` \| (.*?) \|", section, re.MULTILINE)
    }
    rules = named(overlays["trial"], "Role")["backstay-job-master"]["rules"]
    assert told == {
        resource: set(rule["verbs"]) for rule in rules for resource in rule["resources"]
    }


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_overlay_that_the_guide_shows(name: str, tmp_path: Path) -> None:
    kubectl = found_kubectl()
    first, more = (one for one in blocks("yaml") if "kustomize" in one or "Generator" in one)
    reached = os.path.relpath(KUBERNETES.parent, tmp_path.resolve())
    text = (
        (first + more).replace("../deploy", reached).replace("overlays/trial", f"overlays/{name}")
    )
    if name == "production":
        (monitoring,) = (one for one in blocks("yaml") if "components/monitoring" in one)
        text += monitoring.replace("../deploy", reached)
    (tmp_path / "kustomization.yaml").write_text(text, encoding="utf-8")
    objects = rendered(kubectl, tmp_path)
    assert ("ServiceMonitor" in {one["kind"] for one in objects}) == (name == "production")
    assert problems(objects, MADE_BY_HAND[name]) == []
    pods = next(one for one in pods_of(objects) if one.name == "pserver")
    (container,) = pods.spec["containers"]
    assert container["image"] == f"REGISTRY/backstay:{__version__}"
    given = environment(objects, container) | {"BACKSTAY_TOKEN": "of-the-operator"}
    config = ServerConfig.load(environment=given)
    assert (config.checkpoint_url, config.restore) == ("s3://bucket/path", "latest")
    assert set(yaml.safe_load(more)["configMapGenerator"][0]["literals"]) <= {
        f"{variable}={value}" for variable, value in given.items()
    }


def test_the_guide_names_files_that_are_there_and_commands_that_exist() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    root = KUBERNETES.parents[1]
    for path in set(re.findall(r"deploy/[\w./@-]+[\w]", text)):
        assert (root / path).exists(), path
    folders = r"`((?:overlays|components)/\w+|(?:base|job-master)(?:/[\w.-]+)?)`"
    for folder in set(re.findall(folders, text)):
        assert (KUBERNETES / folder).exists(), folder
    asked = set(re.findall(r"pserverctl (\w+)", " ".join(blocks("sh"))))
    assert asked == {"status", "resize"} <= main.commands.keys()


def in_pserver(change: Callable[[Any, Any], None]) -> Callable[[list[Object]], None]:
    def apply(objects: list[Object]) -> None:
        pods = next(one for one in pods_of(objects) if one.name == "pserver")
        change(pods.spec, pods.spec["containers"][0])

    return apply


def in_object(
    kind: str, name: str, change: Callable[[Any], None]
) -> Callable[[list[Object]], None]:
    return lambda objects: change(named(objects, kind)[name])


FAULTS: dict[str, Callable[[list[Object]], None]] = {
    "has no limits of memory": in_pserver(lambda _, one: one["resources"]["limits"].pop("memory")),
    "has no livenessProbe": in_pserver(lambda _, one: one.pop("livenessProbe")),
    "readinessProbe asks port web": in_pserver(
        lambda _, one: one["readinessProbe"]["httpGet"].update(port="web")
    ),
    "may write to its image": in_pserver(
        lambda _, one: one["securityContext"].update(readOnlyRootFilesystem=False)
    ),
    "may gain rights": in_pserver(
        lambda _, one: one["securityContext"].pop("allowPrivilegeEscalation")
    ),
    "has capabilities": in_pserver(lambda _, one: one["securityContext"].pop("capabilities")),
    "may run as root": in_pserver(lambda spec, _: spec["securityContext"].pop("runAsNonRoot")),
    "have no seccomp profile": in_pserver(
        lambda spec, _: spec["securityContext"].pop("seccompProfile")
    ),
    "leaves no time for the stop": in_pserver(
        lambda spec, _: spec.update(terminationGracePeriodSeconds=600)
    ),
    "become variables": in_pserver(lambda spec, _: spec.pop("enableServiceLinks")),
    "no ServiceAccount other": in_pserver(lambda spec, _: spec.update(serviceAccountName="other")),
    "has no tag": in_pserver(lambda _, one: one.update(image="backstay")),
    "there is no volume tmp": in_pserver(lambda spec, _: spec.pop("volumes")),
    "which is not set before it": in_pserver(lambda _, one: one["env"].reverse()),
    "there is no backstay-token": in_pserver(
        lambda _, one: one["envFrom"].append({"secretRef": {"name": "backstay-token-2"}})
    ),
    "does not match its Pods": in_object(
        "StatefulSet", "pserver", lambda one: one["spec"]["selector"]["matchLabels"].update(a="b")
    ),
    "it has no headless Service": in_object(
        "Service", "pserver-nodes", lambda one: one["spec"].pop("clusterIP")
    ),
    "Service pserver: no Pods": in_object(
        "Service", "pserver", lambda one: one["spec"]["ports"][0].update(targetPort="web")
    ),
    "it is about 0 kinds of Pods": in_object(
        "PodDisruptionBudget",
        "pserver",
        lambda one: one["spec"]["selector"]["matchLabels"].update(a="b"),
    ),
    "NetworkPolicy pserver: no Pods": in_object(
        "NetworkPolicy", "pserver", lambda one: one["spec"]["podSelector"]["matchLabels"].clear()
    ),
    "ServiceMonitor pserver: 0 Services": in_object(
        "ServiceMonitor", "pserver", lambda one: one["spec"]["endpoints"][0].update(port="web")
    ),
    "a rule gives everything": in_object(
        "Role", "backstay-job-master", lambda one: one["rules"][0].update(verbs=["*"])
    ),
    "it gives Secrets": in_object(
        "Role", "backstay-job-master", lambda one: one["rules"][1]["resources"].append("secrets")
    ),
    "more than one namespace": in_object(
        "Service", "pserver", lambda one: one["metadata"].update(namespace="default")
    ),
}


@pytest.mark.parametrize("says", FAULTS)
def test_a_planted_fault_is_found(says: str, monitored: list[Object]) -> None:
    objects = copy.deepcopy(monitored)
    FAULTS[says](objects)
    assert says in "\n".join(problems(objects, MADE_BY_HAND["production"]))


def test_monitoring_comes_on_top_of_production(monitored: list[Object]) -> None:
    assert problems(monitored, MADE_BY_HAND["production"]) == []
    assert set(named(monitored, "ServiceMonitor")) == {"pserver", "etcd"}
    kubernetes_validate.validate(
        named(monitored, "NetworkPolicy")["metrics"], VERSIONS[0], strict=True
    )


def test_the_schemas_refuse_a_field_that_does_not_exist(
    overlays: dict[str, list[Object]],
) -> None:
    changed = copy.deepcopy(named(overlays["trial"], "StatefulSet")["pserver"])
    changed["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(changed, VERSIONS[0], strict=True)


def rights_of(role: Object) -> set[tuple[str, str, str]]:
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_run_of_a_schedule_may_do_no_more_than_its_calls_need(
    name: str, overlays: dict[str, list[Object]]
) -> None:
    assert rights_of(named(overlays[name], "Role")["backstay-job-schedule"]) == {
        *(("apps", "deployments", verb) for verb in ("create", "delete", "get")),
        ("apps", "deployments/scale", "patch"),
        *(("", "configmaps", verb) for verb in ("create", "get", "patch")),
        *(
            (*kind, verb)
            for kind in (("apps", "statefulsets"), ("", "services"), ("policy", BUDGETS))
            for verb in ("create", "get")
        ),
        ("", "pods", "list"),
        ("batch", "cronjobs", "get"),
    }


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_job_master_may_do_no_more_than_its_calls_need(
    name: str, overlays: dict[str, list[Object]]
) -> None:
    assert rights_of(named(overlays[name], "Role")["backstay-job-master"]) == {
        *(("", "pods", verb) for verb in ("create", "delete", "list", "watch")),
        *(("", "configmaps", verb) for verb in ("get", "patch")),
        ("apps", "deployments", "get"),
        ("apps", "deployments/scale", "patch"),
        *(("apps", "statefulsets/scale", verb) for verb in ("get", "patch")),
        *(("", "events", verb) for verb in ("create", "patch")),
    }
    accounts = named(overlays[name], "ServiceAccount")
    assert accounts["pserver"]["automountServiceAccountToken"] is False


def test_the_accounts_of_jobs_can_be_made_in_another_namespace(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    objects = on_top_of("job-master", [], tmp_path_factory, "team")
    assert problems(objects, set()) == []
    bindings = named(objects, "RoleBinding")
    assert set(bindings) == {"backstay-job-master", "backstay-job-schedule"}
    for binding in bindings.values():
        assert [one["namespace"] for one in binding["subjects"]] == ["team"]
