"""Our image runs in Pods: servers find each other's names, the user is not root."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.kubernetes.backstay_image import FRAMEWORKS_FOLDER, USER_ID, frameworks
from tests.kubernetes.namespace import Namespace, is_ready, pod

pytestmark = pytest.mark.kubernetes

CONTROL_PORT = 7000
SERVE = (
    "exec pserver serve --insecure --initial-nodes 1 --advertise-host $POD_IP"
    " --listen-control 0.0.0.0:7000 --listen-data 0.0.0.0:7100"
)
STATUS = ["pserverctl", "--endpoint", f"servers:{CONTROL_PORT}", "--json", "status"]
WHO_AM_I = """
import json, os
try:
    open("/opt/backstay/probe", "w")
    writable = True
except OSError as error:
    writable = os.strerror(error.errno)
print(json.dumps({"user": os.getuid(), "group": os.getgid(), "root": writable}))
"""


def server(name: str) -> dict[str, Any]:
    return pod(
        name,
        ["sh", "-c", SERVE],
        container={
            "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
            "ports": [{"containerPort": CONTROL_PORT}],
            "readinessProbe": {"grpc": {"port": CONTROL_PORT}, "periodSeconds": 1},
        },
    )


def test_a_container_is_not_root_and_cannot_write_its_root(namespace: Namespace) -> None:
    namespace.run(pod("who", ["python3", "-c", WHO_AM_I]))
    found = json.loads(namespace.output("who"))
    assert found == {"user": USER_ID, "group": USER_ID, "root": "Read-only file system"}


def test_a_server_answers_another_pod_by_its_services_name(namespace: Namespace) -> None:
    ports = [{"port": CONTROL_PORT}]
    namespace.core.create_namespaced_service(
        namespace.name,
        {
            "metadata": {"name": "servers"},
            "spec": {"clusterIP": "None", "selector": {"app": "server"}, "ports": ports},
        },
    )
    namespace.run(server("server"))
    namespace.wait("server", is_ready)
    namespace.run(pod("status", STATUS))
    status = json.loads(namespace.output("status"))
    assert [node["node_id"] for node in status["nodes"]] == ["ps-0"]
    # The same through the API server's exec.
    assert "ps-0" in namespace.execute("server", *STATUS)


@pytest.mark.torch
def test_a_pod_that_mounts_the_frameworks_has_torch(namespace: Namespace) -> None:
    pytest.importorskip("torch")
    code = "import torch, backstay.trainer.torch; print(torch.ones(3).sum().item())"
    namespace.run(
        pod(
            "torch",
            ["python3", "-c", code],
            volumes=[
                {"name": "frameworks", "hostPath": {"path": str(frameworks())}},
                {"name": "scratch", "emptyDir": {}},
            ],
            container={
                "volumeMounts": [
                    {"name": "frameworks", "mountPath": FRAMEWORKS_FOLDER, "readOnly": True},
                    {"name": "scratch", "mountPath": "/tmp"},
                ]
            },
        )
    )
    assert namespace.output("torch", limit_s=120.0).strip() == "3.0"
