"""Starts and stops a real Kubernetes cluster on this machine, and kills parts of it.

There is one such cluster on a machine: its addresses, ports, bridge and folder are fixed.
``Cluster.down`` needs nothing but what is on disk and in the kernel, so it also clears away what
a killed test run left. Knows nothing of pytest; the objects in the cluster are for
``namespace.py`` and the tests.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import shutil
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trustme

from tests.kubernetes import network, processes
from tests.kubernetes.config import API_PORT, FIRST_SERVICE, GATEWAY, Layout, Node

__all__ = ["Cluster", "ClusterError", "the_only_one"]

STATE = Path("/var/lib/backstay-kubernetes")
LOCK = Path("/run/lock/backstay-kubernetes")
BY_HAND = "by-hand"
START_LIMIT_S = 90.0
STOP_LIMIT_S = 20.0
COMMAND_LIMIT_S = 60.0
DRAIN_LIMIT_S = 120.0
LOCK_PAUSE_S = 0.5
POLL_PAUSE_S = 0.1
LOG_TAIL_CHARS = 2_000
# Whose certificate names whom; the groups are Kubernetes'.
USERS = {
    "admin": ("backstay-tests", "system:masters"),
    "kubelet-client": ("kube-apiserver-kubelet-client", "system:masters"),
    "dns": ("kube-dns", "system:masters"),
    "controller-manager": ("system:kube-controller-manager", None),
    "scheduler": ("system:kube-scheduler", None),
    "proxy": ("system:kube-proxy", None),
}
API_SERVER_NAMES = (
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
)


class ClusterError(Exception):
    """The cluster did not start, or something of it is left; the message has the log's end."""


@contextmanager
def the_only_one(limit_s: float) -> Iterator[None]:
    """Hold the right to this machine's cluster; wait for it at most ``limit_s``."""
    with LOCK.open("w") as file:
        deadline = time.monotonic() + limit_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"Other tests have used the cluster for {limit_s:.0f} s ({LOCK} is locked)."
                        " Wait for their end and try again."
                    ) from None
                time.sleep(LOCK_PAUSE_S)
        yield


class Cluster:
    """The cluster of this machine; ``up`` starts it."""

    def __init__(self, programs: Path) -> None:
        """Prepare.

        Args:
            programs: What ``build.py`` made.
        """
        self._layout = Layout(programs, STATE)

    @property
    def kubeconfig(self) -> Path:
        """How an administrator reaches the API server."""
        return self._layout.kubeconfig("admin")

    @property
    def kubectl(self) -> list[str]:
        """The command kubectl, for this cluster."""
        return [str(self._layout.programs / "kubectl"), f"--kubeconfig={self.kubeconfig}"]

    @property
    def exists(self) -> bool:
        """Whether it runs, or something of it is left."""
        return STATE.exists()

    @property
    def made_by_hand(self) -> bool:
        """Whether somebody works with it, and tests must leave it alone."""
        return (STATE / BY_HAND).exists()

    def note_made_by_hand(self) -> None:
        """Keep it from tests."""
        (STATE / BY_HAND).touch()

    def up(self, nodes: int, images: Sequence[Path]) -> None:
        """Start everything, with so many nodes that have these images.

        Raises:
            ClusterError: A part did not start; what started is stopped.
        """
        for folder in ("pki", "log"):
            (STATE / folder).mkdir(parents=True)
        try:
            self._make_certificates()
            network.set_up(STATE)
            processes.start("etcd", self._layout.etcd_arguments(), self._layout.log("etcd"))
            self.start_api_server()
            for name, arguments in (
                ("proxy", self._layout.proxy_arguments()),
                ("dns", self._layout.dns_arguments()),
            ):
                processes.start(name, arguments, self._layout.log(name))
            with ThreadPoolExecutor(nodes) as pool:
                numbers = range(1, nodes + 1)
                list(pool.map(lambda number: self.start_node(number, images), numbers))
            account = "/api/v1/namespaces/default/serviceaccounts/default"
            self._wait("controller-manager", lambda: self._get(account) is not None)
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Stop everything, however much of it there is, and remove every trace.

        Raises:
            ClusterError: Something is left.
        """
        steps: list[Callable[[], None]] = [
            self._stop_kubelets,
            processes.kill_all,
            self._unmount,
            lambda: self._until(STOP_LIMIT_S, self._cgroups_removed),
            lambda: network.take_down(STATE, self._layout.programs / "kube-proxy"),
            self._remove_log_links,
            lambda: shutil.rmtree(STATE) if STATE.exists() else None,
        ]
        problems = []
        for step in steps:
            try:
                step()
            except (OSError, subprocess.SubprocessError, ClusterError) as error:
                problems.append(str(error))
        problems += network.remains()
        if problems:
            raise ClusterError("The cluster is not quite gone:\n" + "\n".join(problems))

    def start_api_server(self) -> None:
        """Start the API server and its controllers, also after a kill: etcd has the data."""
        log = self._layout.log("api-server")
        processes.start("api-server", self._layout.api_server_arguments(), log)
        self._wait("api-server", lambda: self._get("/readyz") is not None)
        for name, arguments in (
            ("controller-manager", self._layout.controller_manager_arguments()),
            ("scheduler", self._layout.scheduler_arguments()),
        ):
            processes.start(name, arguments, self._layout.log(name))

    def kill_api_server(self) -> None:
        """End it with SIGKILL, and its controllers.

        Elsewhere these end by themselves: they cannot renew their leadership. Here there is one of
        each, and it would go on. It looks for the API server again up to a minute after that is
        back. Until then it takes nodes for silent and evicts Pods.
        """
        for name in ("api-server", "controller-manager", "scheduler"):
            processes.kill(name)

    def start_node(self, number: int, images: Sequence[Path]) -> None:
        """Start a node, new or killed, and wait until it is Ready."""
        node = Node(number)
        self._make_client(node.name, f"system:node:{node.name}", "system:nodes")
        for name, text in self._layout.node_files(node).items():
            path = self._layout.node(node) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        network.add_address(node.address)
        for hierarchy in processes.hierarchies():
            (hierarchy / processes.NODE_CGROUP.format(node.name)).mkdir(exist_ok=True)
        containerd = f"containerd-{node.name}"
        if not processes.pids(containerd):
            arguments = self._layout.containerd_arguments(node)
            processes.start(containerd, arguments, self._layout.log(containerd))
        self._wait(containerd, lambda: self._containerd(node, "version"))
        for image in (self._layout.programs / "pause.tar", *images):
            if not self._containerd(node, "--namespace=k8s.io", "images", "import", str(image)):
                raise ClusterError(f"{node.name} cannot import {image}.")
        self.start_kubelet(number)

    def tag_image(self, number: int, image: str, name: str) -> None:
        """Give an image that a node has another name, too.

        Raises:
            ClusterError: The node has no such image.
        """
        words = ("--namespace=k8s.io", "images", "tag", "--force", image, name)
        if not self._containerd(Node(number), *words):
            raise ClusterError(f"{Node(number).name} cannot name {image} {name}.")

    def start_kubelet(self, number: int) -> None:
        """Start a node's kubelet, also after it was killed, and wait until the node is Ready."""
        node = Node(number)
        name = f"kubelet-{node.name}"
        processes.start(name, self._layout.kubelet_arguments(node), self._layout.log(name))
        self._wait(name, lambda: self._is_ready(node))

    def kill_kubelet(self, number: int) -> None:
        """End it with SIGKILL; the node's containers go on."""
        processes.kill(f"kubelet-{Node(number).name}")

    def kill_containers(self, uid: str) -> None:
        """Kill what runs in the containers of the Pod with this uid.

        Raises:
            ClusterError: Nothing runs there.
        """
        if not processes.kill_pod(uid):
            raise ClusterError(f"Nothing runs in the containers of the Pod with uid {uid}.")

    def drain(self, node: str, pods: str = "") -> None:
        """Evict the Pods of a node, as for its maintenance; ``uncordon`` gives it back.

        Args:
            node: Its name.
            pods: A selector of labels; empty: all of them.

        Raises:
            ClusterError: It does not end in time; the message has what kubectl said.
        """
        options = ("--force", "--ignore-daemonsets", "--delete-emptydir-data")
        chosen = (f"--pod-selector={pods}",) if pods else ()
        self._kubectl("drain", node, *options, *chosen, f"--timeout={DRAIN_LIMIT_S:.0f}s")

    def cordon(self, node: str) -> None:
        """Have the scheduler put no more Pods on a node."""
        self._kubectl("cordon", node)

    def uncordon(self, node: str) -> None:
        """Have the scheduler put Pods on a node again."""
        self._kubectl("uncordon", node)

    def _kubectl(self, *words: str) -> None:
        done = subprocess.run(
            [*self.kubectl, *words],
            capture_output=True,
            text=True,
            timeout=DRAIN_LIMIT_S + COMMAND_LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise ClusterError(f"kubectl {' '.join(words)}: {done.stderr}")

    def _make_certificates(self) -> None:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(self._layout.certificate("ca"))
        authority.private_key_pem.write_to_path(self._layout.key("ca"))
        names = (*API_SERVER_NAMES, GATEWAY, FIRST_SERVICE)
        self._write("api-server", authority.issue_cert(*names, common_name="kube-apiserver"))
        # Any key will do to sign the tokens of service accounts.
        self._write("service-account", authority.issue_cert("service-account"))
        for name, (user, group) in USERS.items():
            self._make_client(name, user, group)

    def _make_client(self, name: str, user: str, group: str | None) -> None:
        """Make a certificate and a kubeconfig, unless they are there."""
        path = self._layout.kubeconfig(name)
        if path.exists():
            return
        authority = trustme.CA.from_pem(
            self._layout.certificate("ca").read_bytes(), self._layout.key("ca").read_bytes()
        )
        # Kubernetes asks for the subject only; but trustme marks the list of other names as
        # critical, and Go refuses one that is empty.
        leaf = authority.issue_cert(name, common_name=user, organization_name=group)
        self._write(name, leaf)
        cluster = {
            "server": f"https://{GATEWAY}:{API_PORT}",
            "certificate-authority": str(self._layout.certificate("ca")),
        }
        user_files = {
            "client-certificate": str(self._layout.certificate(name)),
            "client-key": str(self._layout.key(name)),
        }
        # JSON is YAML.
        text = json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "backstay", "cluster": cluster}],
                "users": [{"name": name, "user": user_files}],
                "contexts": [{"name": "tests", "context": {"cluster": "backstay", "user": name}}],
                "current-context": "tests",
            }
        )
        path.write_text(text, encoding="utf-8")

    def _write(self, name: str, leaf: trustme.LeafCert) -> None:
        leaf.private_key_pem.write_to_path(self._layout.key(name))
        leaf.cert_chain_pems[0].write_to_path(self._layout.certificate(name))

    def _get(self, path: str) -> Any:
        """Ask the API server, and return what it answers with success, else None."""
        context = ssl.create_default_context(cafile=self._layout.certificate("ca"))
        context.load_cert_chain(self._layout.certificate("admin"), self._layout.key("admin"))
        connection = http.client.HTTPSConnection(GATEWAY, API_PORT, context=context, timeout=5)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        if answer.status != 200:
            return None
        return json.loads(body) if body.startswith(b"{") else body

    def _is_ready(self, node: Node) -> bool:
        found = self._get(f"/api/v1/nodes/{node.name}")
        conditions = found["status"].get("conditions", []) if found else []
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def _containerd(self, node: Node, *arguments: str) -> bool:
        """Run ctr, and say whether it succeeded."""
        done = subprocess.run(
            ["ctr", f"--address={self._layout.containerd_socket(node)}", *arguments],
            capture_output=True,
            timeout=COMMAND_LIMIT_S,
            check=False,
        )
        return done.returncode == 0

    def _wait(self, process: str, condition: Callable[[], bool]) -> None:
        """Wait until what the process must do holds; fail at once if it ends."""

        def holds() -> bool:
            if condition():
                return True
            if not processes.pids(process):
                raise ClusterError(f"{process} ended. {self._log_tail(process)}")
            return False

        try:
            self._until(START_LIMIT_S, holds)
        except TimeoutError:
            text = f"{process} is not ready after {START_LIMIT_S:.0f} s. {self._log_tail(process)}"
            raise ClusterError(text) from None

    def _log_tail(self, process: str) -> str:
        log = self._layout.log(process)
        text = log.read_text(errors="replace") if log.exists() else ""
        return f"The end of {log}:\n{text[-LOG_TAIL_CHARS:]}"

    @staticmethod
    def _until(limit_s: float, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {limit_s:.0f} s")
            time.sleep(POLL_PAUSE_S)

    def _stop_kubelets(self) -> None:
        """Before their containers: they would start them again."""
        for folder in STATE.glob("node*/"):
            processes.kill(f"kubelet-{folder.name}")

    @staticmethod
    def _cgroups_removed() -> bool:
        try:
            processes.remove_cgroups()
        except OSError:  # the kernel still clears one away
            return False
        return True

    @staticmethod
    def _unmount() -> None:
        """Volumes and root file systems of containers, the innermost first."""
        lines = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
        points = [line.split()[1] for line in lines]
        for point in sorted(points, reverse=True):
            if point.startswith(f"{STATE}/"):
                subprocess.run(["umount", "--lazy", point], timeout=COMMAND_LIMIT_S, check=True)

    @staticmethod
    def _remove_log_links() -> None:
        """The kubelet links the log of each container there, whatever it is told."""
        for link in Path("/var/log/containers").glob("*.log"):
            if link.is_symlink() and str(link.readlink()).startswith(f"{STATE}/"):
                link.unlink()
