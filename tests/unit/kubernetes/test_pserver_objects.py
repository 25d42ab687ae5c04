"""A job's own servers on Kubernetes: what the command would make for them."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from backstay.config import ServerConfig
from backstay.errors import ConfigError
from backstay.job_spec import JobSpec
from backstay.kubernetes.names import pserver_name
from backstay.kubernetes.objects import JobObjects, OwnServers, job_objects, spec_in_pods
from backstay.kubernetes.pserver_objects import (
    check_no_servers,
    cores_of_server,
    pserver_endpoints,
    server_settings,
)
from backstay.settings import read_section

VERSIONS = ("1.27", kubernetes_validate.latest_version())
ETCD = {"store_endpoints": ["etcd-0.etcd:2379"]}


def job(
    settings: dict[str, Any] | None = None, more: dict[str, Any] | None = None, **kubernetes: Any
) -> JobSpec:
    document = {
        "name": "census",
        "model": "/home/me/zoo/model.py",
        "training": "/data/a.csv",
        "checkpoint": {"url": "s3://bucket/census"},
        "servers": {"local": 3, "settings": ETCD if settings is None else settings},
        "kubernetes": {"image": "registry/backstay:1", **kubernetes},
        **(more or {}),
    }
    return JobSpec.from_mapping(document)


def made(spec: JobSpec, count: int = 3) -> JobObjects:
    own = OwnServers(server_settings(spec, count), "1a2b3c4d")
    endpoints = pserver_endpoints(spec.name, count)
    return job_objects(spec_in_pods(spec, endpoints), {"model.py": "# a model"}, own)


def stateful_set(spec: JobSpec) -> dict[str, Any]:
    objects = made(spec)
    assert objects.servers is not None
    return objects.servers.stateful_set


def container_of(spec: JobSpec) -> dict[str, Any]:
    (container,) = stateful_set(spec)["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = container
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_the_objects_fit_the_schemas_of_kubernetes(version: str) -> None:
    spec = job(
        pserver={
            "requests": {"cpu": "1", "memory": "4Gi"},
            "limits": {"memory": "4Gi"},
            "priority_class": "servers",
            "node_selector": {"disk": "ssd"},
            "tolerations": [{"key": "spot", "operator": "Exists"}],
            "volumes": [{"claim_name": "checkpoints", "mount_path": "/checkpoints"}],
        }
    )
    objects = made(spec)
    kinds = [one["kind"] for one in objects.owned]
    assert kinds == ["ConfigMap", "ConfigMap", "Service", "PodDisruptionBudget", "StatefulSet"]
    for one in (objects.deployment, *objects.owned):
        kubernetes_validate.validate(json.loads(json.dumps(one)), version, strict=True)


def test_all_find_the_servers_by_the_names_of_their_pods() -> None:
    objects = made(job())
    assert objects.servers is not None
    service, budget, servers = objects.servers
    name = pserver_name("census")
    assert name == service["metadata"]["name"] == servers["spec"]["serviceName"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    labels = servers["spec"]["template"]["metadata"]["labels"]
    for selector in (
        service["spec"]["selector"],
        budget["spec"]["selector"]["matchLabels"],
        servers["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    # The selector of the job master's Deployment must not find them.
    assert not objects.deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    carried = JobSpec.from_json(objects.files["data"]["job.json"])
    assert carried.servers.endpoints == tuple(
        f"backstay-census-pserver-{number}.backstay-census-pserver:7000" for number in range(3)
    )
    (master,) = objects.deployment["spec"]["template"]["spec"]["containers"]
    assert "--servers-end" in master["command"]


def test_a_job_on_a_cluster_that_runs_makes_no_servers() -> None:
    spec = spec_in_pods(job(), ["ps-0:7000"])
    objects = job_objects(spec, {"model.py": ""})
    assert [one["kind"] for one in objects.owned] == ["ConfigMap", "ConfigMap"]
    (master,) = objects.deployment["spec"]["template"]["spec"]["containers"]
    assert "--servers-end" not in master["command"]


def test_the_settings_are_in_a_file_that_a_server_reads(tmp_path: Path) -> None:
    text = made(job({**ETCD, "slot_count": 64, "log_format": "json"})).files["data"]["pserver.toml"]
    path = tmp_path / "pserver.toml"
    path.write_text(text, encoding="utf-8")
    names = {"server": {item.name for item in fields(ServerConfig)}}
    assert read_section(path, "server", names) == {
        "store": "etcd",
        "store_endpoints": ["etcd-0.etcd:2379"],
        "listen_control": "0.0.0.0:7000",
        "listen_data": "0.0.0.0:7100",
        "metrics": "0.0.0.0:9464",
        "initial_nodes": 3,
        "replicas": 2,
        "numbered_nodes": True,
        "checkpoint_every_s": 0,
        "checkpoint_url": "s3://bucket/census",
        "restore": "latest",
        "insecure": False,
        "slot_count": 64,
        "log_format": "json",
    }


def test_another_run_has_records_of_its_own_and_is_the_same_job() -> None:
    spec = job()
    settings = server_settings(spec, 3)
    in_pods = spec_in_pods(spec, pserver_endpoints(spec.name, 3))
    first, second = (
        job_objects(in_pods, {"model.py": ""}, OwnServers(settings, run)) for run in ("a", "b")
    )
    assert first.content == second.content
    assert first.servers != second.servers
    more = job_objects(in_pods, {"model.py": ""}, OwnServers(server_settings(spec, 4), "a"))
    assert more.content != first.content


def test_each_server_is_a_node_under_the_name_of_its_pod() -> None:
    variables = {one["name"]: one for one in container_of(job(env={"A": "b"}))["env"]}
    assert variables["BACKSTAY_NODE_ID"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
    assert variables["BACKSTAY_HOST"]["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"
    assert variables["BACKSTAY_CLUSTER"]["value"] == "backstay-census-1a2b3c4d"
    assert variables["BACKSTAY_ADVERTISE_HOST"]["value"] == (
        "$(BACKSTAY_NODE_ID).backstay-census-pserver.$(POD_NAMESPACE).svc"
    )
    assert variables["A"]["value"] == "b"


def test_a_server_is_looked_after_and_leaves_in_good_order() -> None:
    container = container_of(job())
    assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "metrics"}
    assert container["livenessProbe"]["httpGet"] == {"path": "/live", "port": "metrics"}
    wait = container["lifecycle"]["preStop"]["exec"]["command"]
    assert wait[-3:-1] == ["backstay.kubernetes.server_stop", "census"]
    pod = stateful_set(job())["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > int(wait[-1])
    assert pod["automountServiceAccountToken"] is False
    assert pod["topologySpreadConstraints"]
    assert pod["affinity"]["podAntiAffinity"]


@pytest.mark.parametrize(("replicas", "away"), [(1, 0), (2, 1), (3, 1)])
def test_one_copy_of_each_slot_is_never_evicted(replicas: int, away: int) -> None:
    servers = {"local": 3, "replicas": replicas, "settings": ETCD}
    objects = made(job(more={"servers": servers}))
    assert objects.servers is not None
    assert objects.servers.budget["spec"]["maxUnavailable"] == away


def test_servers_find_out_the_memory_of_their_container_unless_the_job_says_it() -> None:
    limits = {"limits": {"memory": "4Gi"}}
    assert "memory_limit_bytes" not in server_settings(job(pserver=limits), 3)
    given = job({**ETCD, "memory_limit_bytes": 2**28}, pserver=limits)
    assert server_settings(given, 3)["memory_limit_bytes"] == 2**28
    too_little = job({**ETCD, "memory_limit_bytes": 7}, pserver=limits)
    with pytest.raises(ConfigError, match="memory_limit_bytes: 7 leaves no room"):
        server_settings(too_little, 3)


def test_what_the_job_file_says_of_servers_is_in_their_pods() -> None:
    spec = job(
        pserver={
            "image": "registry/pserver:1",
            "requests": {"memory": "1Gi"},
            "priority_class": "servers",
            "pod_template": {
                "spec": {
                    "hostNetwork": True,
                    "containers": [{"name": "pserver", "readinessProbe": {"periodSeconds": 1}}],
                }
            },
        }
    )
    container = container_of(spec)
    assert container["image"] == "registry/pserver:1"
    assert container["resources"]["requests"] == {"memory": "1Gi"}
    # The user's template wins over what all servers have.
    assert container["readinessProbe"]["periodSeconds"] == 1
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    pod = stateful_set(spec)["spec"]["template"]["spec"]
    assert (pod["priorityClassName"], pod["hostNetwork"]) == ("servers", True)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (job({}), r"servers\.settings\.store_endpoints: is missing.*in etcd.*--endpoint HOST:PORT"),
        (job({"store": "embedded"}), r"servers\.settings\.store_endpoints: is missing"),
        (job({"nodeid": 1}), r"servers\.settings\.nodeid: no such setting; did you mean 'node_id'"),
        (job({**ETCD, "node_id": "a"}), r"servers\.settings\.node_id: is set for each Pod"),
        (job({**ETCD, "store_password": "a"}), r"a Secret as BACKSTAY_STORE_PASSWORD"),
        (job({**ETCD, "slot_count": 3}), r"servers\.settings: slot_count: 3 is not a power of two"),
        (job(more={"checkpoint": "pass"}), r"checkpoint\.url: is missing.*`checkpoint: none`"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_do(spec: JobSpec, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        server_settings(spec, 3)


def test_a_job_without_checkpoints_needs_no_place_for_them() -> None:
    settings = server_settings(job(more={"checkpoint": "none"}), 3)
    assert not settings.keys() & {"checkpoint_url", "restore"}


def test_a_share_is_no_class_for_servers() -> None:
    with pytest.raises(ConfigError, match=r"pserver\.priority_class: '0\.3' is a share"):
        job(pserver={"priority_class": "0.3"})


def test_the_job_begins_with_its_least_servers_and_all_are_started() -> None:
    servers = {"local": 4, "min": 2, "settings": ETCD}
    spec = job(more={"servers": servers})
    assert server_settings(spec, 4)["initial_nodes"] == 2
    objects = made(spec, 4)
    assert objects.servers is not None
    assert objects.servers.stateful_set["spec"]["replicas"] == 4
    with pytest.raises(ConfigError, match=r"^local: 3 is not between min \(4\) and max"):
        server_settings(job(more={"servers": {"min": 4, "settings": ETCD}}), 3)


def test_servers_that_follow_their_load_must_say_what_they_may_use() -> None:
    rules = {"autoscale": {"servers": "load"}}
    with pytest.raises(ConfigError, match=r"^autoscale\.servers: load needs .*pserver\.limits"):
        server_settings(job(more=rules), 3)
    cpu = job(more=rules, pserver={"requests": {"cpu": "1500m"}})
    assert cores_of_server(cpu) == 1.5
    assert server_settings(cpu, 3)
    memory = job(more=rules, pserver={"limits": {"memory": "1Gi"}})
    assert cores_of_server(memory) == 0
    assert server_settings(memory, 3)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"servers": {"endpoints": ["ps:7000"], "min": 2}}, "servers.min: is for servers of the"),
        (
            {"servers": {"endpoints": ["ps:7000"]}, "autoscale": {"servers": "load"}},
            "autoscale.servers: changes servers of the job's own only",
        ),
    ],
)
def test_a_job_on_a_cluster_that_runs_says_nothing_of_its_servers_numbers(
    more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_no_servers(job(more=more))
    assert str(caught.value).startswith(message)
    check_no_servers(job(more={"servers": {"endpoints": ["ps:7000"]}, "autoscale": "fill"}))


@pytest.mark.parametrize(
    "name", ["BACKSTAY_CLUSTER", "BACKSTAY_REPLACES_CLUSTER", "BACKSTAY_NODE_ID"]
)
def test_variables_that_tell_whose_the_records_are_cannot_be_set(name: str) -> None:
    env = [{"name": name, "value": "a"}]
    template = {"spec": {"containers": [{"name": "pserver", "env": env}]}}
    for where, kubernetes in (
        ("kubernetes.env", {"env": {name: "a"}}),
        ("kubernetes.pserver.env", {"pserver": {"env": {name: "a"}}}),
        ("kubernetes.pserver.pod_template", {"pserver": {"pod_template": template}}),
    ):
        with pytest.raises(ConfigError, match=f"{where}: {name} is set for each Pod .*leave it"):
            made(job(**kubernetes))
