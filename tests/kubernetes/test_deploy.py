"""deploy/kubernetes on a real cluster: the trial overlay, with and without TLS, and failures."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kubernetes.backstay_image import IMAGE as BACKSTAY_IMAGE
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.etcd_image import IMAGE as ETCD_IMAGE
from tests.manifests import KUBERNETES, rendered

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(400)]

PUSHER = Path(__file__).with_name("pusher.py")
COMMAND_LIMIT_S = 60.0
# Of a cluster that starts or heals on a busy machine.
HEAL_LIMIT_S = 120
POLL_PAUSE_S = 0.2
# Its kind is of the operator of Prometheus, which the test cluster has not.
FOREIGN = {"ServiceMonitor"}


class Deployment:
    """One overlay in one namespace."""

    def __init__(self, kubectl: list[str], namespace: str) -> None:
        self.namespace = namespace
        self.kubectl = kubectl

    def run(
        self, *words: str, given: str | None = None, limit_s: float = COMMAND_LIMIT_S
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl in the namespace."""
        return subprocess.run(
            [*self.kubectl, "--namespace", self.namespace, *words],
            input=given,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )

    def said(self, *words: str, given: str | None = None, limit_s: float = COMMAND_LIMIT_S) -> str:
        """Run kubectl, which must succeed, and return its output."""
        done = self.run(*words, given=given, limit_s=limit_s)
        assert done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}\n{self.shown()}"
        return done.stdout

    def shown(self) -> str:
        """Return what explains a failure."""
        parts = [self.run("get", "pods", "--output=wide").stdout]
        parts.append(self.run("get", "events", "--sort-by=.lastTimestamp").stdout[-4_000:])
        pods = ("etcd-0", "pserver-0", "pserver-1")
        parts += [self.run("logs", pod, "--tail=15").stdout for pod in pods]
        return "\n".join(parts)

    def settled(self) -> None:
        """Wait until every pserver is ready."""
        limit = f"--timeout={HEAL_LIMIT_S}s"
        self.said("rollout", "status", "statefulset/pserver", limit, limit_s=HEAL_LIMIT_S + 10)

    def status(self) -> dict[str, Any]:
        """Ask a node for the cluster's status, when it is healthy."""
        ask = ("pserverctl", "status", "--json", "--wait", "60")
        text = self.said("exec", "pserver-0", "--", *ask, limit_s=90)
        return dict(json.loads(text))

    def uid(self, pod: str) -> str:
        return self.run("get", "pod", pod, "--output=jsonpath={.metadata.uid}").stdout

    def replaced(self, pod: str, before: str) -> None:
        """Wait until another Pod of this name is ready."""

        def is_ready() -> bool:
            shown = self.run("get", "pod", pod, "--output=json")
            if shown.returncode != 0:
                return False
            found = json.loads(shown.stdout)
            conditions = found["status"].get("conditions", ())
            return found["metadata"]["uid"] != before and any(
                one["type"] == "Ready" and one["status"] == "True" for one in conditions
            )

        eventually(is_ready, self.shown)


def eventually(condition: Callable[[], bool], explain: Callable[[], str]) -> None:
    deadline = time.monotonic() + HEAL_LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"it did not come true in time\n{explain()}"
        time.sleep(POLL_PAUSE_S)


def own_overlay(folder: Path, namespace: str, components: list[str]) -> Path:
    """Write what a user writes: the trial overlay, with a namespace and images of one's own."""

    def reached(path: Path) -> str:
        return os.path.relpath(path, folder.resolve())

    text = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": namespace,
        "resources": [reached(KUBERNETES / "overlays" / "trial")],
        "components": [reached(KUBERNETES / "components" / name) for name in components],
        "images": [
            {"name": name, "newName": image.partition(":")[0], "newTag": image.partition(":")[2]}
            for name, image in (("backstay", BACKSTAY_IMAGE), ("backstay-etcd", ETCD_IMAGE))
        ],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(text), encoding="utf-8")
    return folder


def deployed(kubectl: list[str], folder: Path, name: str, components: list[str]) -> Iterator[Any]:
    """Apply an overlay as the guide says, and remove it at the end."""
    deployment = Deployment(kubectl, name)
    overlay = own_overlay(folder, name, components)
    objects = rendered(kubectl[0], overlay)
    deployment.said(
        "apply", "-f", "-", given=yaml.safe_dump_all(o for o in objects if o["kind"] == "Namespace")
    )
    try:
        token = f"--from-literal=BACKSTAY_TOKEN={secrets.token_hex(16)}"
        deployment.said("create", "secret", "generic", "backstay-token", token)
        if "tls" in components:
            make_certificates(kubectl, name, folder)
        deployment.said("apply", "-k", str(overlay))
        deployment.settled()
        yield deployment
    finally:
        # As the guide says. No Pod outlives it, however its cluster is.
        deployment.said("delete", "-k", str(overlay), "--timeout=100s", limit_s=120)


def make_certificates(kubectl: list[str], namespace: str, folder: Path) -> None:
    config = next(word.partition("=")[2] for word in kubectl if word.startswith("--kubeconfig="))
    environment = os.environ | {
        "KUBECONFIG": config,
        "PATH": f"{Path(kubectl[0]).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        [KUBERNETES / "certificates.sh", namespace],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=COMMAND_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def kubectl(cluster: Cluster) -> list[str]:
    return list(cluster.kubectl)


@pytest.fixture(scope="module")
def trial(kubectl: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    yield from deployed(kubectl, tmp_path_factory.mktemp("trial"), "deploy-trial", [])


def start_pusher(trial: Deployment) -> None:
    """Start a Pod that pushes, as a user's own loop would run."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "pusher", "labels": {"app.kubernetes.io/part-of": "backstay"}},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 10001,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "pusher",
                    "image": BACKSTAY_IMAGE,
                    "command": ["python3", "/pusher/pusher.py"],
                    "env": [{"name": "BACKSTAY_ENDPOINT", "value": "pserver:7000"}],
                    "envFrom": [{"secretRef": {"name": "backstay-token"}}],
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                    "volumeMounts": [
                        {"name": "pusher", "mountPath": "/pusher"},
                        {"name": "tmp", "mountPath": "/tmp"},
                    ],
                }
            ],
            "volumes": [
                {"name": "pusher", "configMap": {"name": "pusher"}},
                {"name": "tmp", "emptyDir": {}},
            ],
        },
    }
    trial.said("create", "configmap", "pusher", f"--from-file={PUSHER}")
    trial.said("apply", "-f", "-", given=yaml.safe_dump(pod))
    eventually(lambda: pushes_of(trial) > 0, trial.shown)


def pushes_of(trial: Deployment) -> int:
    lines = trial.run("logs", "pusher").stdout.splitlines()
    found = [json.loads(line)["pushes"] for line in lines if line.startswith('{"pushes"')]
    return max(found, default=0)


def stopped_pusher(trial: Deployment) -> dict[str, Any]:
    """End the pushes and return what the Pod says about them."""
    trial.said("exec", "pusher", "--", "python3", "-c", "open('/tmp/stop', 'w')")

    def has_ended() -> bool:
        phase = trial.run("get", "pod", "pusher", "--output=jsonpath={.status.phase}").stdout
        return phase in ("Succeeded", "Failed")

    eventually(has_ended, trial.shown)
    last = trial.said("logs", "pusher").splitlines()[-1]
    assert last.startswith('{"done"'), last
    return dict(json.loads(last)["done"])


@pytest.mark.parametrize("name", ["production", "trial"])
def test_the_api_server_accepts_an_overlay(name: str, trial: Deployment, tmp_path: Path) -> None:
    overlay = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": trial.namespace,
        "resources": [os.path.relpath(KUBERNETES / "overlays" / name, tmp_path.resolve())],
        "components": [os.path.relpath(KUBERNETES / "components/monitoring", tmp_path.resolve())],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay), encoding="utf-8")
    objects = rendered(trial.kubectl[0], tmp_path)
    checked = [one for one in objects if one["kind"] not in FOREIGN]
    # A StatefulSet that is there keeps its volumes and selectors, so production gets new names.
    for one in checked if name == "production" else ():
        if one["kind"] == "StatefulSet":
            one["metadata"]["name"] += "-production"
    done = trial.run(
        *("apply", "--dry-run=server", "--validate=strict", "-f", "-"),
        given=yaml.safe_dump_all(checked),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(server dry run)") == len(checked)
    # The namespace warns of Pods that it would refuse.
    assert "would violate PodSecurity" not in done.stderr


def test_the_trial_overlay_serves(trial: Deployment) -> None:
    status = trial.status()
    assert status["healthy"]
    assert [node["node_id"] for node in status["nodes"]] == ["pserver-0", "pserver-1"]
    assert status["nodes"][0]["control_address"] == (
        f"pserver-0.pserver-nodes.{trial.namespace}.svc:7000"
    )
    assert status["replicas"] == 2
    # One on each node of Kubernetes.
    hosts = trial.said("get", "pods", "-l", "app.kubernetes.io/name=pserver", "-o", "json")
    assert len({one["spec"]["nodeName"] for one in json.loads(hosts)["items"]}) == 2


def test_a_pserver_is_not_root_and_cannot_write_to_its_image(trial: Deployment) -> None:
    program = "import os; print(os.getuid()); open('/usr/planted', 'w')"
    done = trial.run("exec", "pserver-0", "--", "python3", "-c", program)
    assert done.stdout == "10001\n"
    assert "Read-only file system" in done.stderr


def test_without_the_token_nothing_is_told(trial: Deployment) -> None:
    ask = "BACKSTAY_TOKEN= pserverctl status"
    done = trial.run("exec", "pserver-0", "--", "sh", "-c", ask)
    assert done.returncode == 3
    assert "no token" in done.stderr


@pytest.mark.parametrize(
    ("verb", "resource", "allowed"),
    [
        ("create", "pods", True),
        ("delete", "pods", True),
        ("watch", "pods", True),
        ("patch", "configmaps", True),
        ("patch", "deployments.apps/scale", True),
        ("patch", "statefulsets.apps/scale", True),
        ("create", "events", True),
        ("patch", "events", True),
        ("list", "events", False),
        ("get", "secrets", False),
        ("create", "pods/exec", False),
        ("delete", "statefulsets.apps", False),
        ("create", "roles.rbac.authorization.k8s.io", False),
    ],
)
def test_what_a_job_master_may_do(
    verb: str, resource: str, allowed: bool, trial: Deployment
) -> None:
    account = f"--as=system:serviceaccount:{trial.namespace}:backstay-job-master"
    kind, _, part = resource.partition("/")
    words = ("auth", "can-i", verb, kind, account, *((f"--subresource={part}",) if part else ()))
    assert trial.run(*words).stdout.strip() == ("yes" if allowed else "no")


def evicted_is_refused(trial: Deployment, pod: str) -> None:
    """While one pserver is away, the budget keeps the other."""
    allowed = "--output=jsonpath={.status.disruptionsAllowed}"
    # Kubernetes counts some time after the Pod has gone.
    budget = ("get", "poddisruptionbudget", "pserver", allowed)
    eventually(lambda: trial.run(*budget).stdout == "0", trial.shown)
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": trial.namespace},
    }
    path = f"/api/v1/namespaces/{trial.namespace}/pods/{pod}/eviction"
    refused = trial.run("create", "--raw", path, "-f", "-", given=json.dumps(eviction))
    assert refused.returncode != 0
    assert "disruption budget" in refused.stderr, refused.stderr


def test_no_push_is_lost_while_pods_are_deleted_and_restarted(trial: Deployment) -> None:
    start_pusher(trial)
    # In good order: the Pod hands its masters over.
    before = trial.uid("pserver-1")
    trial.said("delete", "pod", "pserver-1", "--wait=false")
    trial.replaced("pserver-1", before)
    trial.status()
    # As a crash: the cluster has only the lease, or the name's new address, to tell it.
    before = trial.uid("pserver-0")
    nodes = trial.said("get", "nodes", "--output=jsonpath={.items[*].metadata.name}").split()
    # Its next Pod finds no node until the budget was tried.
    trial.said("cordon", *nodes)
    try:
        trial.said("delete", "pod", "pserver-0", "--grace-period=0", "--force")
        evicted_is_refused(trial, "pserver-1")
    finally:
        trial.said("uncordon", *nodes)
    trial.replaced("pserver-0", before)
    trial.status()
    # All of them, one after the other.
    trial.said("rollout", "restart", "statefulset/pserver")
    trial.settled()
    trial.status()
    counted = stopped_pusher(trial)
    assert counted["pushes"] > 0
    assert counted["least"] == counted["most"] == counted["pushes"], counted


def test_the_trial_overlay_with_tls(
    kubectl: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("tls")
    for deployment in deployed(kubectl, folder, "deploy-tls", ["tls"]):
        assert deployment.status()["healthy"]
        plain = "BACKSTAY_TLS_CA_FILE= pserverctl status"
        done = deployment.run("exec", "pserver-0", "--", "sh", "-c", plain)
        assert done.returncode == 3, done.stdout


def test_pods_are_added_and_removed_as_the_guide_says(trial: Deployment) -> None:
    def in_a_pod(*words: str) -> None:
        trial.said("exec", "pserver-0", "--", "pserverctl", *words, limit_s=HEAL_LIMIT_S)

    def nodes() -> dict[str, int]:
        found = trial.status()["nodes"]
        return {one["node_id"]: one["master_slots"] + one["in_sync_slots"] for one in found}

    trial.said("scale", "statefulset/pserver", "--replicas=3")
    in_a_pod("resize", "3")
    assert set(nodes()) == {"pserver-0", "pserver-1", "pserver-2"}
    assert min(nodes().values()) > 0
    in_a_pod("resize", "2")
    assert nodes()["pserver-2"] == 0
    trial.said("scale", "statefulset/pserver", "--replicas=2")
    eventually(lambda: trial.uid("pserver-2") == "", trial.shown)
    eventually(lambda: set(nodes()) == {"pserver-0", "pserver-1"}, trial.shown)
    assert trial.status()["slots_short_of_copies"] == 0
