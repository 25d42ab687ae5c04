"""The cluster is a real one: its scheduler, kubelets and controllers do what they are for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kubernetes.client import ApiException, CoreV1Api, PolicyV1Api, SchedulingV1Api, V1Node, V1Pod

from tests.kubernetes.cluster import Cluster
from tests.kubernetes.namespace import Namespace, is_ready, pod, termination, wait_for

pytestmark = pytest.mark.kubernetes

IDLE = ["python3", "-c", "import signal; signal.pause()"]
EAT_MEMORY = ["python3", "-c", "kept = []\nwhile True: kept.append(bytearray(1 << 22))"]


def requests(**resources: str) -> dict[str, object]:
    return {"resources": {"requests": resources}}


def node_is_ready(node: V1Node) -> bool:
    return any(c.type == "Ready" and c.status == "True" for c in node.status.conditions)


def test_a_container_over_its_memory_limit_is_killed(namespace: Namespace) -> None:
    limits = {"limits": {"memory": "64Mi"}, "requests": {"memory": "64Mi"}}
    namespace.run(pod("eater", EAT_MEMORY, container={"resources": limits}))
    found = namespace.wait("eater", lambda p: termination(p) is not None)
    assert termination(found).reason == "OOMKilled"
    assert termination(found).exit_code == 137


@pytest.fixture
def priorities() -> Iterator[None]:
    api = SchedulingV1Api()
    for name, value in (("low", 10), ("high", 1000)):
        api.create_priority_class({"metadata": {"name": name}, "value": value})
    yield
    for name in ("low", "high"):
        api.delete_priority_class(name)


@pytest.mark.usefixtures("priorities")
def test_a_pod_of_high_priority_takes_the_place_of_a_low_one(
    cluster: Cluster, namespace: Namespace
) -> None:
    nodes = CoreV1Api().list_node().items
    # More than half of a node: there is room for one such Pod on each.
    half = f"{int(nodes[0].status.allocatable['cpu']) * 600}m"
    for number in range(len(nodes)):
        body = pod(f"low-{number}", IDLE, priorityClassName="low", container=requests(cpu=half))
        namespace.run(body)
        namespace.wait(f"low-{number}", is_ready)
    namespace.run(pod("high", IDLE, priorityClassName="high", container=requests(cpu=half)))
    namespace.wait("high", is_ready)
    left = [found.metadata.name for found in namespace.pods() if is_ready(found)]
    assert len(left) == len(nodes)
    assert "high" in left


def test_a_disruption_budget_refuses_an_eviction(namespace: Namespace) -> None:
    namespace.run(pod("guarded", IDLE))
    namespace.run(pod("free", IDLE))
    for name in ("guarded", "free"):
        namespace.wait(name, is_ready)
    policy = PolicyV1Api()
    spec = {"minAvailable": 1, "selector": {"matchLabels": {"app": "guarded"}}}
    policy.create_namespaced_pod_disruption_budget(
        namespace.name, {"metadata": {"name": "budget"}, "spec": spec}
    )
    wait_for(
        "the budget's status",
        policy.list_namespaced_pod_disruption_budget,
        lambda budget: budget.status is not None and budget.status.current_healthy == 1,
        namespace=namespace.name,
    )

    def evict(name: str) -> None:
        body = {"metadata": {"name": name, "namespace": namespace.name}}
        namespace.core.create_namespaced_pod_eviction(name, namespace.name, body)

    with pytest.raises(ApiException) as refused:
        evict("guarded")
    assert refused.value.status == 429
    evict("free")
    assert not namespace.pod("guarded").metadata.deletion_timestamp


def test_pods_go_on_while_the_api_server_is_away(cluster: Cluster, namespace: Namespace) -> None:
    namespace.run(pod("steady", IDLE))
    before = namespace.wait("steady", is_ready)
    cluster.kill_api_server()
    try:
        with pytest.raises(Exception, match=r"(?i)refused|reset|closed"):
            namespace.core.read_namespaced_pod("steady", namespace.name, _request_timeout=5)
    finally:
        cluster.start_api_server()
    after = namespace.wait("steady", is_ready)
    assert after.metadata.uid == before.metadata.uid
    assert after.status.container_statuses[0].restart_count == 0
    # Kubelets and scheduler have found it again.
    namespace.run(pod("later", IDLE))
    namespace.wait("later", is_ready)


def test_a_node_without_its_kubelet_is_lost_and_comes_back(
    cluster: Cluster, namespace: Namespace
) -> None:
    namespace.run(pod("resident", IDLE, nodeName="node2"))
    namespace.wait("resident", is_ready)
    core = CoreV1Api()
    cluster.kill_kubelet(2)

    def moving(found: V1Pod) -> bool:
        return found.metadata.deletion_timestamp is not None

    try:
        wait_for(
            "node2 not ready",
            core.list_node,
            lambda node: not node_is_ready(node),
            field_selector="metadata.name=node2",
        )
        namespace.wait("resident", moving)
    finally:
        cluster.start_kubelet(2)
    wait_for("node2 ready", core.list_node, node_is_ready, field_selector="metadata.name=node2")
