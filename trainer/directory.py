"""The control plane as a trainer sees it: who is in the cluster, which tables exist.

Imports :mod:`backstay.rpc` and the records of :mod:`backstay.consensus`. Never moves rows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc

from backstay import rpc
from backstay._proto.v1 import cluster_pb2, cluster_pb2_grpc, tables_pb2, tables_pb2_grpc
from backstay.addresses import parse_endpoints
from backstay.config import ClientConfig
from backstay.consensus import NodeRecord, RoutingTable
from backstay.consensus.messages import routing_from_message
from backstay.errors import BackstayError, ServerUnavailable, Stopping
from backstay.tables import TableSpec

T = TypeVar("T")

_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0
# A call that may take longer than this says what it waits for.
_SILENCE_S = 5.0

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClusterInfo:
    """The cluster as a client knows it.

    Attributes:
        cluster_id: Its name.
        routing: Its nodes, and the master of each slot.
    """

    cluster_id: str
    routing: RoutingTable

    @property
    def nodes(self) -> tuple[NodeRecord, ...]:
        """The nodes, in the order that the routing table refers to."""
        return self.routing.nodes


class Directory:
    """Asks any one of the endpoints, the next one if it does not answer, until a deadline."""

    def __init__(self, endpoint: str | Sequence[str], config: ClientConfig) -> None:
        text = endpoint if isinstance(endpoint, str) else ",".join(endpoint)
        self._endpoints = list(parse_endpoints(text))
        self._config = config
        self._channels: dict[str, grpc.Channel] = {}
        self._lock = threading.Lock()
        self._preferred = 0

    def cluster(self) -> ClusterInfo:
        """Fetch nodes and routing, and remember the nodes as further endpoints."""
        response = self._call(
            lambda channel, timeout_s: cluster_pb2_grpc.ClusterServiceStub(channel).GetCluster(
                cluster_pb2.GetClusterRequest(), timeout=timeout_s
            )
        )
        routing = routing_from_message(response)
        for node in routing.nodes:
            if node.control_address not in self._endpoints:
                self._endpoints.append(node.control_address)
        return ClusterInfo(response.cluster_id, routing)

    def instance(self, node: NodeRecord, *, deadline_ms: int) -> int:
        """Ask one node itself, once, which instance it is."""
        with rpc.mapped_errors(node.control_address):
            response = cluster_pb2_grpc.ClusterServiceStub(
                self._channel(node.control_address)
            ).GetNodeStats(cluster_pb2.GetNodeStatsRequest(), timeout=deadline_ms / 1000)
        return response.node.instance

    def create_table(self, spec: TableSpec) -> TableSpec:
        """Create a table on all servers and return it as it is there."""
        request = tables_pb2.CreateTableRequest(spec_json=spec.to_json())
        response = self._call(
            lambda channel, timeout_s: tables_pb2_grpc.TablesServiceStub(channel).CreateTable(
                request, timeout=timeout_s
            ),
            # It reaches every node, each with a deadline of its own: an answer that names the
            # node that hangs is worth waiting for.
            attempt_ms=self._config.deadline_ms,
        )
        return TableSpec.from_json(response.table.spec_json)

    def table(self, name: str) -> TableSpec:
        """Fetch one table's description."""
        request = tables_pb2.GetTableRequest(name=name)
        response = self._call(
            lambda channel, timeout_s: tables_pb2_grpc.TablesServiceStub(channel).GetTable(
                request, timeout=timeout_s
            )
        )
        return TableSpec.from_json(response.table.spec_json)

    def tables(self) -> list[TableSpec]:
        """Fetch the descriptions of all tables."""
        response = self._call(
            lambda channel, timeout_s: tables_pb2_grpc.TablesServiceStub(channel).ListTables(
                tables_pb2.ListTablesRequest(), timeout=timeout_s
            )
        )
        return [TableSpec.from_json(table.spec_json) for table in response.tables]

    def close(self) -> None:
        """Close every channel."""
        with self._lock:
            for channel in self._channels.values():
                channel.close()
            self._channels.clear()

    def _call(
        self,
        call: Callable[[grpc.Channel, float], T],
        attempt_ms: int | None = None,
    ) -> T:
        """Make a call at one endpoint after the other until one answers or time is up."""
        started = time.monotonic()
        deadline = started + self._config.deadline_ms / 1000
        backoff = _FIRST_BACKOFF_S
        reasons: dict[str, str] = {}
        warned = False
        while True:
            for offset in range(len(self._endpoints)):
                at = (self._preferred + offset) % len(self._endpoints)
                endpoint = self._endpoints[at]
                timeout_s = min(
                    max(deadline - time.monotonic(), 0.001),
                    (attempt_ms or self._config.connect_timeout_ms) / 1000,
                )
                try:
                    with rpc.mapped_errors(endpoint):
                        answer = call(self._channel(endpoint), timeout_s)
                except BackstayError as error:
                    if not isinstance(error, (ServerUnavailable, Stopping, TimeoutError)):
                        raise
                    reasons[endpoint] = str(error)
                else:
                    self._preferred = at
                    return answer
            if not warned and deadline - started > _SILENCE_S:
                # Once, so that a wrong address does not look like a program that hangs.
                warned = True
                patience = deadline - time.monotonic()
                _LOG.warning("%s; trying for %.0f s more", "; ".join(reasons.values()), patience)
            if time.monotonic() + backoff >= deadline:
                tried = "; ".join(reasons.values())
                raise ServerUnavailable(
                    f"no pserver answered within {time.monotonic() - started:.1f} s: {tried}"
                )
            time.sleep(backoff)
            backoff = min(backoff * 2, _MAX_BACKOFF_S)

    def _channel(self, endpoint: str) -> grpc.Channel:
        with self._lock:
            if endpoint not in self._channels:
                self._channels[endpoint] = rpc.open_channel(endpoint, self._config.security)
            return self._channels[endpoint]
