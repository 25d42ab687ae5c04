"""The control plane of real nodes: who is there, which tables, what when one is not."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from backstay import rpc
from backstay._proto.v1 import (
    cluster_pb2,
    cluster_pb2_grpc,
    node_pb2,
    node_pb2_grpc,
    tables_pb2,
    tables_pb2_grpc,
)
from backstay.config import SecurityConfig
from backstay.consensus import RoutingTable
from backstay.consensus.records.messages import routing_from_message
from backstay.errors import (
    ConfigError,
    LimitExceeded,
    ProtocolError,
    ServerUnavailable,
    TableConflict,
    UnknownTable,
)
from backstay.pserver.free_ports import free_ports
from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import TableSpec

Eventually = Callable[[Callable[[], bool]], None]
SETTINGS = {"control_deadline_ms": 1000}
CALL_TIMEOUT_S = 60.0


class Control:
    """The control plane at one address."""

    def __init__(self, address: str, channel: grpc.Channel) -> None:
        self.address = address
        self.channel = channel

    def routing(self) -> RoutingTable:
        stub = cluster_pb2_grpc.ClusterServiceStub(self.channel)
        with rpc.mapped_errors(self.address):
            return routing_from_message(
                stub.GetCluster(cluster_pb2.GetClusterRequest(), timeout=CALL_TIMEOUT_S)
            )

    def create(self, spec_json: str) -> tables_pb2.Table:
        stub = tables_pb2_grpc.TablesServiceStub(self.channel)
        request = tables_pb2.CreateTableRequest(spec_json=spec_json)
        with rpc.mapped_errors(self.address):
            return stub.CreateTable(request, timeout=CALL_TIMEOUT_S).table

    def table(self, name: str) -> tables_pb2.Table:
        stub = tables_pb2_grpc.TablesServiceStub(self.channel)
        with rpc.mapped_errors(self.address):
            return stub.GetTable(
                tables_pb2.GetTableRequest(name=name), timeout=CALL_TIMEOUT_S
            ).table

    def table_names(self) -> list[str]:
        stub = tables_pb2_grpc.TablesServiceStub(self.channel)
        with rpc.mapped_errors(self.address):
            # The channel may still be waiting before it connects again to a node that was away.
            answer = stub.ListTables(
                tables_pb2.ListTablesRequest(), timeout=CALL_TIMEOUT_S, wait_for_ready=True
            )
        return [table.name for table in answer.tables]

    def health(self) -> str:
        # The types of these two packages know only grpcio's older stubs.
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=CALL_TIMEOUT_S)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    def describe(self) -> node_pb2.DescribeResponse:
        stub = node_pb2_grpc.NodeServiceStub(self.channel)
        return stub.Describe(
            node_pb2.DescribeRequest(), timeout=CALL_TIMEOUT_S, wait_for_ready=True
        )


@contextmanager
def control(address: str) -> Iterator[Control]:
    with rpc.open_channel(address, SecurityConfig()) as channel:
        yield Control(address, channel)


@contextmanager
def controls(cluster: LocalCluster) -> Iterator[list[Control]]:
    with ExitStack() as stack:
        yield [stack.enter_context(control(address)) for address in cluster.endpoints]


@pytest.fixture
def nodes(three_servers: LocalCluster) -> Iterator[list[Control]]:
    with controls(three_servers) as found:
        yield found


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """Of this test, which hurts it."""
    with LocalCluster(servers=3, settings=SETTINGS) as running:
        yield running


@pytest.fixture
def own_nodes(cluster: LocalCluster) -> Iterator[list[Control]]:
    with controls(cluster) as found:
        yield found


def serving(node: Control) -> set[str]:
    return {one.node_id for one in node.routing().nodes if one.status == "serving"}


def sparse(name: str, dim: int = 4) -> str:
    return TableSpec.sparse(name, dim).to_json()


def test_every_node_tells_the_same_cluster(
    three_servers: LocalCluster, nodes: list[Control]
) -> None:
    tables = [node.routing() for node in nodes]
    assert len({table.version for table in tables}) == 1
    for table in tables:
        assert [node.node_id for node in table.nodes] == ["ps-0", "ps-1", "ps-2"]
        assert [node.data_address for node in table.nodes] == [
            server.data_address for server in three_servers.servers
        ]
        assert table.replicas == 2
        assert sorted(table.slots_per_node().values()) == [341, 341, 342]
        assert np.array_equal(table.master_of_slot, tables[0].master_of_slot)
        assert table.nodes[0].instance == tables[0].nodes[0].instance
    assert len({node.instance for node in tables[0].nodes}) == 3


def test_health_and_reflection_answer(nodes: list[Control]) -> None:
    assert [node.health() for node in nodes] == ["SERVING"] * 3
    make_stub: Any = reflection_pb2_grpc.ServerReflectionStub
    stub = make_stub(nodes[0].channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=CALL_TIMEOUT_S)
    names = {service.name for service in answer.list_services_response.service}
    assert {
        "backstay.v1.ClusterService",
        "backstay.v1.TablesService",
        "grpc.health.v1.Health",
    } <= names


def test_a_table_created_anywhere_is_everywhere(nodes: list[Control], own_name: str) -> None:
    names = [f"{own_name}/{index}" for index in range(3)]
    for name, node in zip(names, nodes, strict=True):
        created = node.create(sparse(name))
        # The answer is canonical: it has the defaults that the caller left out.
        assert json.loads(created.spec_json)["non_finite"] == "refuse"
        for other in nodes:
            assert other.table(name).id == created.id
    assert [name for name in nodes[2].table_names() if name.startswith(own_name)] == names
    assert nodes[1].create(sparse(names[0])).id == nodes[0].table(names[0]).id


def test_a_conflict_is_told_by_every_node(nodes: list[Control], own_name: str) -> None:
    nodes[1].create(sparse(own_name, 4))
    for node in nodes:
        with pytest.raises(TableConflict, match=r"kind\.sparse\.dim: 4 there, 8 asked for"):
            node.create(sparse(own_name, 8))
    with pytest.raises(ConfigError, match="dim"):
        nodes[2].create(json.dumps({**json.loads(sparse("x")), "kind": {"sparse": {"dim": 0}}}))
    with pytest.raises(UnknownTable, match="no table 'x'"):
        nodes[2].table("x")
    with pytest.raises(LimitExceeded, match="at most 65536"):
        nodes[2].create("x" * 100_000)


def test_concurrent_creations_of_one_name_agree(nodes: list[Control]) -> None:
    stubs = [tables_pb2_grpc.TablesServiceStub(node.channel) for node in nodes]
    calls = [
        stub.CreateTable.future(
            tables_pb2.CreateTableRequest(spec_json=sparse("race", dim)), timeout=CALL_TIMEOUT_S
        )
        for dim in (4, 8)
        for stub in stubs
    ]
    created = {
        json.loads(call.result().table.spec_json)["kind"]["sparse"]["dim"]
        for call in calls
        if call.exception() is None
    }
    refused = [call for call in calls if call.exception() is not None]
    assert len(created) == 1
    assert len(refused) == 3
    assert {call.code() for call in refused} == {grpc.StatusCode.ALREADY_EXISTS}
    assert {node.table("race").spec_json for node in nodes} == {nodes[0].table("race").spec_json}


def test_a_table_is_created_while_a_node_is_down_and_meets_it_there_later(
    cluster: LocalCluster, own_nodes: list[Control], eventually: Eventually
) -> None:
    cluster.kill(2)

    def is_created() -> bool:
        # For a moment after its end the node still counts as alive.
        try:
            return own_nodes[0].create(sparse("emb")).name == "emb"
        except ServerUnavailable:
            return False

    eventually(is_created)
    with pytest.raises(ServerUnavailable, match=cluster.endpoints[2]):
        own_nodes[2].create(sparse("emb"))
    cluster.restart(2)
    # The node has learned the table at its start.
    assert own_nodes[2].table_names() == ["emb"]
    assert own_nodes[1].create(sparse("emb")).id == own_nodes[0].table("emb").id


def test_a_node_that_comes_back_empty_refuses_what_the_cluster_knows_otherwise(
    cluster: LocalCluster, own_nodes: list[Control]
) -> None:
    own_nodes[0].create(sparse("emb", 4))
    cluster.kill(0)
    cluster.restart(0)
    assert own_nodes[0].table_names() == ["emb"]
    with pytest.raises(TableConflict, match="4 there, 8 asked for"):
        own_nodes[0].create(sparse("emb", 8))


def test_a_node_that_restarts_is_told_by_its_instance(
    cluster: LocalCluster, own_nodes: list[Control], eventually: Eventually
) -> None:
    own_nodes[0].create(sparse("emb"))
    before = own_nodes[0].routing()
    cluster.kill(1)
    cluster.restart(1)

    def is_back() -> bool:
        table = {node.node_id: node for node in own_nodes[0].routing().nodes}
        return table["ps-1"].status == "serving"

    eventually(is_back)
    after = own_nodes[0].routing()
    assert after.version > before.version
    table = {node.node_id: node for node in after.nodes}
    assert table["ps-1"].instance != before.nodes[1].instance
    assert table["ps-1"].data_address == cluster.servers[1].data_address
    assert own_nodes[1].table_names() == ["emb"]


def test_a_node_without_its_cluster_says_what_it_waits_for(
    start_server: Callable[..., object], eventually: Eventually
) -> None:
    own = free_ports(1)[0]
    start_server(
        *("--node-id", "ps-0", "--initial-nodes", "2"),
        *("--listen-control", f"127.0.0.1:{own}", "--listen-data", "127.0.0.1:0"),
    )
    with control(f"127.0.0.1:{own}") as node:
        assert node.describe().node.status in (
            cluster_pb2.NODE_STATUS_STARTING,
            cluster_pb2.NODE_STATUS_SERVING,
        )
        assert node.health() == "NOT_SERVING"

        def is_told() -> bool:
            with pytest.raises(ServerUnavailable) as refused:
                node.routing()
            return "waits for its first nodes: 1 of 2 serve (ps-0)" in str(refused.value)

        eventually(is_told)
        assert node.table_names() == []


def test_a_peer_that_hangs_does_not_hang_a_creation(
    cluster: LocalCluster, own_nodes: list[Control], eventually: Eventually
) -> None:
    cluster.pause(2)
    named = rf"not on every node yet.*ps-2 at {cluster.endpoints[2]}: .*(in time|says nothing)"
    # It may have led the store: then the write itself is what does not come back.
    named = rf"({named})|(coordination store does not answer)"
    try:
        with pytest.raises(ServerUnavailable, match=named):
            own_nodes[0].create(sparse("emb"))
        # Once its lease is over, it is no longer waited for.
        eventually(lambda: "ps-2" not in serving(own_nodes[0]))
        own_nodes[1].create(sparse("emb"))
    finally:
        cluster.resume(2)
    eventually(lambda: "ps-2" in serving(own_nodes[0]))
    eventually(lambda: own_nodes[2].table_names() == ["emb"])


def test_a_watch_tells_changes_and_ends_when_the_node_stops(
    cluster: LocalCluster, own_nodes: list[Control]
) -> None:
    stub = cluster_pb2_grpc.ClusterServiceStub(own_nodes[0].channel)
    first = own_nodes[0].routing()
    stream = stub.WatchCluster(
        cluster_pb2.WatchClusterRequest(known_routing_version=first.version - 1), timeout=30
    )
    answers = iter(stream)
    assert next(answers).routing_version == first.version
    cluster.kill(2)
    answer = next(answers)
    while answer.routing_version == first.version:
        answer = next(answers)
    routing = routing_from_message(answer)
    assert "ps-2" not in {node.node_id for node in routing.nodes}
    assert (routing.master_of_slot >= 0).all()
    cluster.servers[0].process.send_signal(signal.SIGTERM)
    with pytest.raises(grpc.RpcError) as ended:
        list(answers)
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "ps-0 stops" in str(ended.value.details())


def test_the_data_port_is_told_from_a_control_plane(three_servers: LocalCluster) -> None:
    with (
        control(three_servers.servers[0].data_address) as node,
        pytest.raises(ProtocolError, match="not as a control plane: is it the data port"),
    ):
        node.routing()
