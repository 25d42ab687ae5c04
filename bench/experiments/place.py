"""The cluster of the experiments: started with their images, and gone again whatever happens.

A namespace for each part, with the account of job masters, an etcd and the priorities. Imports the
cluster of ``tests/kubernetes``.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from kubernetes import config
from kubernetes.client import AppsV1Api, CoreV1Api, SchedulingV1Api

from bench.experiments.plan import Shares, shares_of
from bench.experiments.waiting import wait_until
from tests.kubernetes.backstay_image import backstay_image
from tests.kubernetes.build import CannotRun, build
from tests.kubernetes.cluster import Cluster, the_only_one
from tests.kubernetes.etcd_image import etcd_image
from tests.kubernetes.job_parts import allow_job_master, run_etcd
from tests.kubernetes.namespace import Namespace, wait_for

__all__ = ["PRIORITIES", "Place", "Room", "a_place", "stops_as_interrupts", "thousandths"]

NODES = 2
# Of each node, in thousandths of a CPU: an etcd that asks for nothing starves beside workers.
KEPT_M = 100
LOCK_LIMIT_S = 600.0
GONE_LIMIT_S = 120.0
# Higher ones take the place of lower ones.
PRIORITIES = {"training": 1, "steady": 500, "serving": 1000}

_numbers = itertools.count(1)


class Room:
    """A namespace in which a job can run, with an etcd for its servers."""

    def __init__(self, namespace: Namespace, endpoint: str) -> None:
        self.namespace = namespace
        self.etcd = endpoint


class Place:
    """The running cluster."""

    def __init__(self, cluster: Cluster, tell: Callable[[str], None]) -> None:
        self.cluster = cluster
        self.tell = tell
        self._core = CoreV1Api()

    @property
    def shares(self) -> Shares:
        """The CPU of the nodes that jobs can have, divided."""
        return shares_of([one - KEPT_M for one in self.nodes().values()])

    def nodes(self) -> dict[str, int]:
        """What each node can give, in thousandths of a CPU."""
        return {
            one.metadata.name: thousandths(one.status.allocatable["cpu"])
            for one in self._core.list_node().items
        }

    @contextmanager
    def room(self) -> Iterator[Room]:
        """A namespace; what is in it is deleted at the end.

        Raises:
            Failed: Pods of an earlier one do not go.
        """
        # What an earlier one has left would take its CPU.
        wait_until(
            "no Pod is left",
            lambda: not self._core.list_pod_for_all_namespaces().items,
            GONE_LIMIT_S,
        )
        name = f"experiment-{next(_numbers)}"
        self._core.create_namespace({"metadata": {"name": name}})
        try:
            wait_for(
                "the namespace's ServiceAccount",
                self._core.list_namespaced_service_account,
                lambda account: account.metadata.name == "default",
                namespace=name,
            )
            namespace = Namespace(name)
            allow_job_master(namespace)
            yield Room(namespace, run_etcd(namespace, f"{KEPT_M}m"))
        finally:
            AppsV1Api().delete_collection_namespaced_deployment(name)
            self._core.delete_collection_namespaced_pod(name, grace_period_seconds=0)
            self._core.delete_namespace(name)


@contextmanager
def a_place(tell: Callable[[str], None], more_images: Callable[[], list[Path]]) -> Iterator[Place]:
    """Start the cluster, and take it down at the end.

    Args:
        tell: Takes lines for people.
        more_images: Returns further images that the nodes shall have.

    Raises:
        CannotRun: This machine cannot run the cluster, or somebody uses it by hand.
        ClusterError: It does not start, or other tests use it too long.
    """
    if shutil.which("etcd") is None:
        raise CannotRun("No etcd found: apt-get install etcd-server.")
    tell("building what the cluster needs")
    images = [backstay_image(), etcd_image(), *more_images()]
    with the_only_one(LOCK_LIMIT_S):
        cluster = Cluster(build())
        if cluster.made_by_hand:
            raise CannotRun("A cluster that was made by hand runs: python -m tests.kubernetes down")
        # What a killed run left.
        cluster.down()
        try:
            tell(f"starting a cluster of {NODES} nodes")
            cluster.up(NODES, images)
            config.load_kube_config(str(cluster.kubeconfig))
            for name, value in PRIORITIES.items():
                SchedulingV1Api().create_priority_class(
                    {"metadata": {"name": name}, "value": value}
                )
            with _kubeconfig(cluster.kubeconfig):
                yield Place(cluster, tell)
        finally:
            tell("taking the cluster down")
            cluster.down()


@contextmanager
def _kubeconfig(path: Path) -> Iterator[None]:
    before = os.environ.get("KUBECONFIG")
    os.environ["KUBECONFIG"] = str(path)
    try:
        yield
    finally:
        if before is None:
            del os.environ["KUBECONFIG"]
        else:
            os.environ["KUBECONFIG"] = before


@contextmanager
def stops_as_interrupts() -> Iterator[None]:
    """Have SIGTERM do what Ctrl-C does, so that everything is taken down."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def thousandths(quantity: str) -> int:
    """Return an amount of CPU, as Kubernetes writes it, in thousandths."""
    return int(quantity[:-1]) if quantity.endswith("m") else int(1000 * float(quantity))
