"""What ``pserverctl`` asks a cluster: the calls, and the answers put together.

It takes the cluster from any node that answers, then asks each node for its own figures, and
with which settings it runs: one that does not fit is left out by the others, who only log it. The
results are plain objects, ready for JSON; showing them is the command's work.
"""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any

import grpc

from backstay import rpc
from backstay._proto.v1 import (
    cluster_pb2,
    cluster_pb2_grpc,
    node_pb2,
    node_pb2_grpc,
    tables_pb2,
    tables_pb2_grpc,
)
from backstay.addresses import parse_endpoints
from backstay.config import ClientConfig
from backstay.consensus import NodeRecord, RoutingTable
from backstay.consensus.messages import routing_from_message
from backstay.errors import BackstayError, ServerUnavailable
from backstay.pserver.peers import misfit

__all__ = ["ClusterInspection"]


class ClusterInspection:
    """Questions to a cluster. A context manager; not thread-safe."""

    def __init__(self, endpoints: str, config: ClientConfig) -> None:
        """Prepare; nothing is sent yet.

        Args:
            endpoints: ``"host:port,host:port"``: nodes to try in turn.
            config: Deadlines, token and certificates.

        Raises:
            ConfigError: An endpoint is not of that form.
        """
        self._endpoints = parse_endpoints(endpoints)
        self._config = config
        self._timeout_s = config.connect_timeout_ms / 1000
        self._channels: dict[str, grpc.Channel] = {}

    def status(self) -> dict[str, Any]:
        """Return the cluster and its nodes; ``healthy`` if all of them serve and fit.

        Raises:
            ServerUnavailable: None of the endpoints answers.
            Unauthenticated: The token is wrong.
        """
        cluster_id, routing = self._cluster()
        slots = routing.slots_per_node()
        nodes = [
            self._node_status(node, slots[node.node_id], cluster_id, routing)
            for node in routing.nodes
        ]
        return {
            "cluster": cluster_id,
            "slot_count": routing.slot_count,
            "routing_version": routing.version,
            "healthy": all(
                node["status"] == "serving" and node["reason"] is None for node in nodes
            ),
            "nodes": nodes,
        }

    def tables(self) -> dict[str, Any]:
        """Return the tables, with rows and bytes summed over the nodes that answer."""
        _, routing = self._cluster()
        tables: dict[str, dict[str, Any]] = {}
        silent = []
        for node in routing.nodes:
            try:
                held = self._tables_of(node.control_address)
            except ServerUnavailable:
                silent.append(node.node_id)
                continue
            for table in held:
                entry = tables.setdefault(
                    table.name,
                    {
                        "name": table.name,
                        "id": table.id,
                        "rows": 0,
                        "bytes": 0,
                        "spec": json.loads(table.spec_json),
                    },
                )
                entry["rows"] += table.rows
                entry["bytes"] += table.bytes
        return {"tables": [tables[name] for name in sorted(tables)], "silent_nodes": silent}

    def close(self) -> None:
        """Close every channel."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    def __enter__(self) -> ClusterInspection:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _cluster(self) -> tuple[str, RoutingTable]:
        """Return cluster id and routing from the first endpoint that answers."""
        failures = []
        for endpoint in self._endpoints:
            stub = cluster_pb2_grpc.ClusterServiceStub(self._channel(endpoint))
            try:
                with rpc.mapped_errors(endpoint):
                    answer = stub.GetCluster(
                        cluster_pb2.GetClusterRequest(), timeout=self._timeout_s
                    )
            except BackstayError as error:
                if not error.retry_safe:
                    raise
                failures.append(str(error))
            else:
                return answer.cluster_id, routing_from_message(answer)
        raise ServerUnavailable("; ".join(failures))

    def _node_status(
        self, node: NodeRecord, master_slots: int, cluster_id: str, routing: RoutingTable
    ) -> dict[str, Any]:
        """Return what is known about a node and, if it answers, its own figures."""
        status: dict[str, Any] = {
            "node_id": node.node_id,
            "status": node.status,
            "control_address": node.control_address,
            "data_address": node.data_address,
            "instance": node.instance,
            "master_slots": master_slots,
            "tables": None,
            "rows": None,
            "bytes": None,
            "uptime_ms": None,
            "stats": None,
            "error": None,
            "reason": None,
        }
        stub = cluster_pb2_grpc.ClusterServiceStub(self._channel(node.control_address))
        try:
            with rpc.mapped_errors(node.control_address):
                answer = stub.GetNodeStats(
                    cluster_pb2.GetNodeStatsRequest(), timeout=self._timeout_s
                )
            held = self._tables_of(node.control_address)
            reason = self._misfit(node, cluster_id, routing)
        except BackstayError as error:
            # Whatever the node that was asked first believes: it does not answer us.
            return {**status, "status": "unreachable", "error": str(error), "reason": str(error)}
        return {
            **status,
            "reason": reason,
            "status": cluster_pb2.NodeStatus.Name(answer.node.status)
            .removeprefix("NODE_STATUS_")
            .lower(),
            "data_address": answer.node.data_address,
            "instance": answer.node.instance,
            "tables": answer.tables,
            "rows": sum(table.rows for table in held),
            "bytes": sum(table.bytes for table in held),
            "uptime_ms": answer.uptime_ms,
            "stats": json.loads(answer.data_plane_json),
        }

    def _misfit(self, node: NodeRecord, cluster_id: str, routing: RoutingTable) -> str | None:
        """Return in what a node differs from the cluster that lists it; None if in nothing."""
        stub = node_pb2_grpc.NodeServiceStub(self._channel(node.control_address))
        with rpc.mapped_errors(node.control_address):
            answer = stub.Describe(node_pb2.DescribeRequest(), timeout=self._timeout_s)
        listed = [f"{other.node_id}={other.control_address}" for other in routing.nodes]
        # A cluster of one needs no list.
        peers = listed if answer.peers or len(listed) > 1 else []
        found = misfit(
            answer,
            node_id=node.node_id,
            cluster=cluster_id,
            slot_count=routing.slot_count,
            peers=peers,
        )
        if found is None:
            return None
        return (
            f"it was started with {found.what} {found.theirs}, the cluster has {found.ours}; "
            "start it again with the settings of the others"
        )

    def _tables_of(self, address: str) -> list[tables_pb2.Table]:
        stub = tables_pb2_grpc.TablesServiceStub(self._channel(address))
        with rpc.mapped_errors(address):
            response = stub.ListTables(tables_pb2.ListTablesRequest(), timeout=self._timeout_s)
        return list(response.tables)

    def _channel(self, address: str) -> grpc.Channel:
        if address not in self._channels:
            self._channels[address] = rpc.open_channel(address, self._config)
        return self._channels[address]
