"""What a job needs in a namespace of the cluster: the account of its job master, and an etcd.

Imports ``namespace``; knows nothing of pytest.
"""

from __future__ import annotations

from typing import Any

import yaml
from kubernetes.client import RbacAuthorizationV1Api

from tests.kubernetes.etcd_image import IMAGE as ETCD_IMAGE
from tests.kubernetes.namespace import Namespace, is_ready, pod
from tests.manifests import KUBERNETES

__all__ = ["ACCOUNT", "ETCD", "allow_job_master", "change_rights", "run_etcd"]

ACCOUNT = "backstay-job-master"
ETCD = "etcd"
# The objects of the account that users make.
ACCOUNT_FILE = KUBERNETES / "job-master" / "job-master.yaml"


def allow_job_master(namespace: Namespace) -> None:
    """Make the ServiceAccount of job masters, with the rights that users give it."""
    name = {"metadata": {"name": ACCOUNT}}
    rbac = RbacAuthorizationV1Api()
    rules = _rules()
    namespace.core.create_namespaced_service_account(namespace.name, name)
    rbac.create_namespaced_role(namespace.name, {**name, "rules": rules})
    rbac.create_namespaced_role_binding(
        namespace.name,
        {
            **name,
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "Role",
                "name": ACCOUNT,
            },
            "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT}],
        },
    )


def change_rights(namespace: Namespace, *, without: tuple[str, str] | None = None) -> None:
    """Give job masters the rights that users give it, or all of them but one.

    Args:
        namespace: Where.
        without: Resource and verb of that one.
    """
    rules = _rules()
    for rule in rules:
        if without is not None and without[0] in rule["resources"]:
            rule["verbs"] = [one for one in rule["verbs"] if one != without[1]]
    RbacAuthorizationV1Api().patch_namespaced_role(ACCOUNT, namespace.name, {"rules": rules})


def _rules() -> list[dict[str, Any]]:
    objects = yaml.safe_load_all(ACCOUNT_FILE.read_text(encoding="utf-8"))
    rules: list[dict[str, Any]] = next(one["rules"] for one in objects if one["kind"] == "Role")
    return rules


def run_etcd(namespace: Namespace, cpu: str = "") -> str:
    """Start an etcd for servers of jobs' own, wait until it is ready, and return its address.

    Args:
        namespace: Where.
        cpu: What it asks for; beside Pods that ask it gets little else. Empty: nothing.
    """
    address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    command = ["etcd", "--data-dir=/tmp/data", "--listen-client-urls=http://0.0.0.0:2379"]
    command += ["--advertise-client-urls=http://$(POD_IP):2379"]
    container = {
        "image": ETCD_IMAGE,
        "env": [address],
        "readinessProbe": {"tcpSocket": {"port": 2379}, "periodSeconds": 1},
        "volumeMounts": [{"name": "scratch", "mountPath": "/tmp"}],
        "resources": {"requests": {"cpu": cpu} if cpu else {}},
    }
    scratch = {"name": "scratch", "emptyDir": {}}
    namespace.run(pod(ETCD, command, container=container, volumes=[scratch]))
    return f"{namespace.wait(ETCD, is_ready).status.pod_ip}:2379"
