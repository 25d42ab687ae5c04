"""The guides on Kubernetes, typed as they stand: their files and their commands on a real cluster.

Only the images are made in another way, and of the test's own are the volumes, which a storage
class would give, and small requests in place of those of the job file.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.client import ApiException, CoreV1Api, SchedulingV1Api

from tests.kubernetes.backstay_image import FRAMEWORKS_FOLDER, frameworks
from tests.kubernetes.backstay_image import IMAGE as BACKSTAY_IMAGE
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.conftest import NODES
from tests.kubernetes.etcd_image import IMAGE as ETCD_IMAGE

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.chaos,
    pytest.mark.torch,
    pytest.mark.timeout(600),
]
pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guide"
REGISTRY = "localhost"
COMMAND_LIMIT_S = 180.0
BLOCK = re.compile(r"^( *)```(\w+)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
# The machine has no docker; the cluster of the tests has these images already.
MAKES_IMAGES = re.compile(r"^(docker|backstay zoo (build|push)) ", re.MULTILINE)
# What the pages call the images, and what the tests do.
IMAGES = {
    f"{REGISTRY}/backstay:0.1.0": BACKSTAY_IMAGE,
    f"{REGISTRY}/backstay-etcd:0.1.0": ETCD_IMAGE,
    f"{REGISTRY}/backstay-torch:0.1.0": BACKSTAY_IMAGE,
}
LITTLE = {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}


class Section:
    """A section of a page of the guide: its blocks of code, in order."""

    def __init__(self, page: str, title: str) -> None:
        text = (GUIDE / page).read_text(encoding="utf-8").replace("REGISTRY", REGISTRY)
        found = re.search(rf"^(##+) {re.escape(title)}\n(.*?)(?=^##|\Z)", text, re.DOTALL | re.M)
        assert found is not None, f"{page} has no section {title!r}"
        self.blocks = [
            (kind, re.sub(f"^{indent}", "", block, flags=re.MULTILINE))
            for indent, kind, block in BLOCK.findall(found[2])
        ]

    def of(self, kind: str) -> list[str]:
        """Return the blocks of a language."""
        return [block for found, block in self.blocks if found == kind]

    def commands(self) -> str:
        """Return the lines of shell that make no images."""
        typed = [block for block in self.of("sh") if not MAKES_IMAGES.search(block)]
        assert typed
        return "\n".join(typed)


class Terminal:
    """A shell in a folder beside ``deploy``, as a reader of the pages has it."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.folder = folder
        programs = (Path(sys.executable).parent, Path(cluster.kubectl[0]).parent)
        self._environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("BACKSTAY_")},
            "KUBECONFIG": str(cluster.kubeconfig),
            "PATH": ":".join([*map(str, programs), os.environ["PATH"]]),
        }

    def type(self, lines: str) -> str:
        """Run lines of shell, each of which must succeed; return what they print."""
        done = subprocess.run(
            ["bash", "-euxo", "pipefail", "-c", lines],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{self._pods()}"
        return done.stdout

    def save(self, name: str, text: str) -> None:
        """Write a file that a page shows."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def _pods(self) -> str:
        look = "kubectl -n backstay get pods -o wide; kubectl -n backstay get events | tail -n 30"
        done = subprocess.run(
            ["bash", "-c", look],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT_S,
            check=False,
        )
        return done.stdout


@pytest.fixture
def terminal(cluster: Cluster, tmp_path: Path) -> Iterator[Terminal]:
    """A shell, and a cluster of pservers that was made as the page says."""
    with pservers(cluster, tmp_path) as terminal:
        yield terminal


@pytest.fixture
def guarded(cluster: Cluster, tmp_path: Path) -> Iterator[Terminal]:
    """The same with TLS."""
    with pservers(cluster, tmp_path, tls=True) as terminal:
        yield terminal


@contextmanager
def pservers(cluster: Cluster, tmp_path: Path, *, tls: bool = False) -> Iterator[Terminal]:
    for number in range(1, NODES + 1):
        for name, image in IMAGES.items():
            cluster.tag_image(number, image, name)
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    terminal = Terminal(cluster, tmp_path)
    section = Section("kubernetes.md", "A cluster to try")
    overlay, trainer = section.of("yaml")
    lines = section.commands()
    if tls:
        overlay += "components: [../deploy/kubernetes/components/tls]\n"
        certificates, _ = Section("kubernetes.md", "For real work").commands().split("\n", 1)
        lines = lines.replace("kubectl apply -k", f"{certificates}\nkubectl apply -k")
    terminal.save("my-cluster/kustomization.yaml", overlay)
    try:
        said = terminal.type(lines)
        assert "cluster backstay: healthy, 2 nodes, 1024 slots, 2 copies" in said
        terminal.save("trainer.yaml", trainer)
        # Whether the namespace takes it: there is no such image to run.
        terminal.type("kubectl apply --dry-run=server -f trainer.yaml")
        yield terminal
    finally:
        terminal.type("kubectl delete -k my-cluster --timeout=120s")


@pytest.fixture
def volumes(tmp_path: Path) -> Iterator[None]:
    """What a storage class would give: one volume for the claim ``data``, one for torch."""
    (tmp_path / "data").mkdir()
    # The Pods have users of their own, and this volume takes no fsGroup.
    (tmp_path / "data").chmod(0o777)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(folder.stat().st_mode | 0o011)
    core = CoreV1Api()
    paths = {"data": tmp_path / "data", "frameworks": frameworks()}
    for name, path in paths.items():
        spec = {
            "accessModes": ["ReadWriteMany"],
            "capacity": {"storage": "10Gi"},
            "hostPath": {"path": str(path)},
            "claimRef": {"namespace": "backstay", "name": name},
        }
        core.create_persistent_volume({"metadata": {"name": f"guide-{name}"}, "spec": spec})
    yield
    for name in paths:
        core.delete_persistent_volume(f"guide-{name}", grace_period_seconds=0)


def job_with(text: str, **more: Any) -> str:
    """Return the job file of a page with fields of the test's own."""
    job = yaml.safe_load(text)
    claim = {"claim_name": "frameworks", "mount_path": FRAMEWORKS_FOLDER, "read_only": True}
    section: Mapping[str, Any] = job["kubernetes"]
    job["kubernetes"] = {
        **section,
        "worker": LITTLE,
        "volumes": [*section["volumes"], claim],
    }
    return yaml.safe_dump({**job, **more})


def test_servers_grow_and_shrink_by_the_commands_of_the_page(terminal: Terminal) -> None:
    terminal.type(Section("kubernetes.md", "Change the number of pservers").commands())
    said = terminal.type(
        # Until then the cluster is healthy with three.
        "kubectl -n backstay wait --for=delete pod/pserver-2 --timeout=90s\n"
        "kubectl -n backstay exec pserver-0 -- pserverctl status --wait 60"
    )
    assert "healthy, 2 nodes" in said


def carry_data(terminal: Terminal) -> None:
    """Write model and data of a new zoo folder to the claims, as the page says."""
    claim = yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "frameworks", "namespace": "backstay"},
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "resources": {"requests": {"storage": "10Gi"}},
            },
        }
    )
    data = Section("kubernetes-jobs.md", "A claim with the data")
    terminal.save("frameworks.yaml", claim)
    terminal.save("data.yaml", data.of("yaml")[0])
    zoo = next(one for one in Section("kubernetes-jobs.md", "An image with your model").of("sh"))
    init, local, *_ = zoo.splitlines()
    terminal.type(f"kubectl apply -f frameworks.yaml\n{init}\n{local}")
    terminal.type("cp clicks/model.py clicks/data/train.csv clicks/data/test.csv .")
    terminal.type(data.commands())


def test_a_job_by_the_commands_of_the_page(terminal: Terminal, volumes: None) -> None:
    carry_data(terminal)
    job = Section("kubernetes-jobs.md", "What you need").of("yaml")[0]
    terminal.save("job.yaml", job_with(job, audit=True, framework="torch"))
    classes = Section("kubernetes-jobs.md", "Priorities").commands()
    try:
        terminal.type(classes)
        shown = "backstay train job.yaml --on kubernetes --dry-run"
        terminal.type(f"{shown} | kubectl apply --dry-run=server -f -")
        said = terminal.type(
            "backstay train job.yaml --on kubernetes "
            """--set kubernetes.worker.priority_class='"0.5"'"""
        )
        assert "done" in said
        jobs = "backstay jobs --on kubernetes --namespace backstay"
        said = terminal.type(f"{jobs} list; {jobs} show census; {jobs} audit census")
        assert "census: done" in said
        assert "records_counted_once true" in said
        terminal.type("kubectl -n backstay delete deployment backstay-census")
    finally:
        delete_priority_classes()


def test_a_job_on_servers_with_tls(guarded: Terminal, volumes: None) -> None:
    carry_data(guarded)
    job = yaml.safe_load(Section("kubernetes-jobs.md", "What you need").of("yaml")[0])
    tls = yaml.safe_load(Section("kubernetes-jobs.md", "Servers with TLS").of("yaml")[0])
    job["kubernetes"]["env"] = tls["kubernetes"]["env"]
    job["kubernetes"]["volumes"] += tls["kubernetes"]["volumes"]
    guarded.save("job.yaml", job_with(yaml.safe_dump(job), audit=True, framework="torch"))
    assert "done" in guarded.type("backstay train job.yaml --on kubernetes")
    jobs = "backstay jobs --on kubernetes --namespace backstay"
    assert "records_counted_once true" in guarded.type(f"{jobs} audit census")


def test_a_schedule_by_the_commands_of_the_page(terminal: Terminal, volumes: None) -> None:
    job = Section("kubernetes-jobs.md", "What you need").of("yaml")[0]
    part = yaml.safe_load(Section("kubernetes-jobs.md", "Run by a schedule").of("yaml")[0])
    terminal.type("backstay zoo init clicks --image localhost/clicks:1; cp clicks/model.py .")
    terminal.save("job.yaml", job_with(job, framework="torch", **part))
    said = terminal.type(
        "backstay train job.yaml --on kubernetes\n"
        "backstay jobs --on kubernetes --namespace backstay list"
    )
    assert re.search(r"census .*scheduled", said)
    page = (GUIDE / "kubernetes-jobs.md").read_text(encoding="utf-8")
    for command in re.findall(r"`(kubectl (?:patch|delete) cronjob [^`]*)`", page)[::-1]:
        terminal.type(command.replace("kubectl", "kubectl -n backstay", 1))


def delete_priority_classes() -> None:
    for name in ("high", "low"):
        try:
            SchedulingV1Api().delete_priority_class(name)
        except ApiException as error:
            if error.status != 404:
                raise
