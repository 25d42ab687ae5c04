"""Fixtures of the tests on a real Kubernetes cluster: the cluster, and a namespace for each test.

Where the machine cannot run the cluster the tests fail and say why; KUBERNETES_TESTS=skip
skips them.
"""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from kubernetes import config
from kubernetes.client import CoreV1Api

from tests.kubernetes.backstay_image import backstay_image
from tests.kubernetes.build import SKIP_VARIABLE, built_programs, skips, what_is_missing
from tests.kubernetes.cluster import Cluster, ClusterError, the_only_one
from tests.kubernetes.etcd_image import etcd_image
from tests.kubernetes.namespace import Namespace, wait_for

NODES = 2
LOCK_LIMIT_S = 600.0

_numbers = itertools.count(1)


def require_programs() -> Path:
    """Return the cluster's programs; fail, or skip where the user says so, without them."""
    programs = built_programs()
    missing = what_is_missing()
    if programs is None:
        missing.append("The cluster's programs are not built: make kubernetes-cluster.")
    if missing or programs is None:
        leave_out(*missing)
    return programs


def leave_out(*why: str) -> NoReturn:
    """Fail because the cluster cannot run; skip where the user says so."""
    text = "\n".join([*why, f"{SKIP_VARIABLE}=skip leaves these tests out."])
    if skips():
        pytest.skip(text)
    pytest.fail(text, pytrace=False)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A cluster of two nodes that have our images."""
    programs = require_programs()
    images = [backstay_image(), etcd_image()]
    with the_only_one(LOCK_LIMIT_S):
        cluster = Cluster(programs)
        if cluster.made_by_hand:
            pytest.fail("A cluster that was made by hand runs: python -m tests.kubernetes down")
        try:
            # What a killed run left.
            cluster.down()
            cluster.up(NODES, images)
        except (ClusterError, OSError, subprocess.SubprocessError) as error:
            leave_out(f"The cluster does not start: {error}")
        try:
            config.load_kube_config(str(cluster.kubeconfig))
            yield cluster
        finally:
            cluster.down()


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[Namespace]:
    """A namespace that is removed after the test, with the processes of its Pods."""
    core = CoreV1Api()
    name = f"test-{next(_numbers)}"
    core.create_namespace({"metadata": {"name": name}})
    # A Pod that comes before it is refused.
    wait_for(
        "the namespace's ServiceAccount",
        core.list_namespaced_service_account,
        lambda account: account.metadata.name == "default",
        namespace=name,
    )
    yield Namespace(name)
    core.delete_collection_namespaced_pod(name, grace_period_seconds=0)
    core.delete_namespace(name)
