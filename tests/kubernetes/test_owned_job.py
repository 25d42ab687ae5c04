"""What the API refuses: a write over another version of an object, and a change of another one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kubernetes.client import AppsV1Api

from backstay.errors import KubernetesError
from backstay.kubernetes.api import KubernetesApi
from backstay.kubernetes.names import MASTER, labels_of, object_name, status_name
from backstay.kubernetes.objects import Owner
from backstay.kubernetes.owned_job import OwnedJob
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.namespace import Namespace, wait_for

pytestmark = pytest.mark.kubernetes

JOB = "census"
NAME = object_name(JOB)


@pytest.fixture
def api(
    cluster: Cluster, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> Iterator[KubernetesApi]:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    found = KubernetesApi.of_kubeconfig(namespace.name)
    yield found
    AppsV1Api().delete_collection_namespaced_deployment(namespace.name)
    found.close()


def make_job(api: KubernetesApi) -> Owner:
    """Make a Deployment that the controllers leave alone, and its status."""
    labels = labels_of(JOB, MASTER)
    container = {"name": MASTER, "image": "localhost/nothing:1"}
    spec = {
        "replicas": 1,
        "paused": True,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
    }
    made = api.create("deployments", {"metadata": {"name": NAME, "labels": labels}, "spec": spec})
    owner = Owner(NAME, made["metadata"]["uid"])
    metadata = {"name": status_name(JOB), "ownerReferences": [owner.reference()]}
    api.create("configmaps", {"metadata": metadata, "data": {}})
    return owner


def is_gone(api: KubernetesApi, namespace: Namespace) -> None:
    """Wait until what a Deployment owned is gone, too."""
    wait_for(
        "the status is gone",
        namespace.core.list_namespaced_config_map,
        lambda one: api.get("configmaps", status_name(JOB)) is None,
        namespace=namespace.name,
    )


def replicas(api: KubernetesApi) -> int:
    found = api.get("deployments", NAME)
    assert found is not None
    return int(found["spec"]["replicas"])


def test_a_job_master_changes_the_objects_of_its_own_job_only(
    api: KubernetesApi, namespace: Namespace
) -> None:
    make_job(api)
    old, other = OwnedJob.find(api, JOB), OwnedJob.find(api, JOB)
    assert old.publish({"workers": "1"})
    assert other.publish({"over": "done"})
    # Its version is old: it reads the end, and does not write.
    assert not old.publish({"workers": "2"})
    assert old.read().over == "done"
    api.delete("deployments", NAME, uid="00000000-0000-0000-0000-000000000000")
    assert replicas(api) == 1
    api.delete("deployments", NAME, uid=old.owner.uid)
    is_gone(api, namespace)
    make_job(api)
    with pytest.raises(KubernetesError, match="the job was deleted"):
        old.publish({"over": "done"})
    old.scale_to_zero()
    assert replicas(api) == 1
    new = OwnedJob.find(api, JOB)
    assert new.read().over == ""
    new.end_servers()
    new.scale_to_zero()
    assert replicas(api) == 0
