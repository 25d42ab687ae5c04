"""One node: the native data plane, the gRPC services, and the watch over its peers, put together.

Life of a node: bind both planes; answer peers (status ``starting``); meet every peer and learn
the tables it has; serve the slots it is master of (``serving``); on a signal say so
(``stopping``), finish what the data plane has taken on, close. This is the shell: decisions are
made by the modules it assembles.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace

from backstay import _native
from backstay._native import DataServer
from backstay._proto.v1 import cluster_pb2_grpc, node_pb2_grpc, tables_pb2_grpc
from backstay.addresses import split_address
from backstay.config import Peer, ServerConfig
from backstay.consensus import NodeRecord, NodeStatus, StaticCluster
from backstay.errors import ListenError
from backstay.pserver.control_server import ControlServer
from backstay.pserver.peers import PeerLink, PeerWatch
from backstay.pserver.placement import place_masters
from backstay.pserver.services.cluster import ClusterService
from backstay.pserver.services.node import NodeService
from backstay.pserver.services.tables import TablesService
from backstay.pserver.supervision import Ready
from backstay.pserver.table_creation import TableCreation
from backstay.pserver.table_registry import KnownTable, TableRegistry

__all__ = ["Node"]

SERVICE_NAMES = [
    "backstay.v1.ClusterService",
    "backstay.v1.TablesService",
    "backstay.v1.NodeService",
]
# Control calls are short; what is still under way after this is cut off.
CONTROL_GRACE_S = 1.0

log = logging.getLogger(__name__)


class Node:
    """A node that was made has bound its addresses; ``run`` serves until it is told to stop."""

    def __init__(self, config: ServerConfig) -> None:
        """Bind both planes; call it while the event loop runs.

        Raises:
            ListenError: An address cannot be listened on.
            ConfigError: A certificate file cannot be read or used.
        """
        self._config = config
        self._control = ControlServer(config)
        self._instance = secrets.randbelow(2**63 - 1) + 1
        self._data_server = _open_data_server(config, self._instance)
        self._registry = TableRegistry(
            canonical=_native.canonical_table,
            id_of=_native.table_id,
            max_tables=config.max_tables,
        )
        peers = config.peers or (Peer(config.node_id, self._own_control_address()),)
        self._cluster = StaticCluster(
            config.cluster,
            [NodeRecord(peer.node_id, peer.control_address) for peer in peers],
            place_masters(config.slot_count, len(peers)),
        )
        data_port = split_address("data address", self._data_server.address)[1]
        self._record = NodeRecord(
            config.node_id,
            self._own_control_address(),
            data_address=f"{config.data_host}:{data_port}",
            instance=self._instance,
            status="starting",
        )
        links = [PeerLink(peer, config) for peer in peers]
        self._links = [link for link in links if link.peer.node_id != config.node_id]
        self._watch = PeerWatch(self._links, config, self._cluster, self._apply_table)
        self._creation = TableCreation(
            others=self._links,
            first=None if peers[0].node_id == config.node_id else links[0],
            apply_here=self._apply_table,
            missing=self._watch.missing,
        )
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Begin a graceful stop; ``run`` returns when it is done."""
        self._stop.set()

    async def run(self, on_ready: Callable[[Ready], None]) -> bool:
        """Serve until ``stop``.

        Args:
            on_ready: Called once, when the node has met all peers and serves, and sees none of
                them as starting any more.

        Returns:
            Whether every request that was under way could finish.
        """
        self._cluster.meet(self._record)
        async with AsyncExitStack() as stack:
            for link in self._links:
                stack.push_async_callback(link.close)
            stack.push_async_callback(self._control.stop, CONTROL_GRACE_S)
            self._add_services()
            await self._control.start(SERVICE_NAMES)
            log.info(
                "%s of cluster %r: control plane at %s, data plane at %s",
                self._config.node_id,
                self._config.cluster,
                self._record.control_address,
                self._record.data_address,
            )
            async with self._watch:
                serving = asyncio.create_task(self._serve(on_ready))
                stopping = asyncio.create_task(self._stop.wait())
                await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if serving.done():
                    # A failure in there ends the node; otherwise wait for the stop.
                    serving.result()
                    await stopping
                serving.cancel()
            return await self._stop_serving()

    async def _serve(self, on_ready: Callable[[Ready], None]) -> None:
        snapshot = self._cluster.snapshot()
        while snapshot.routing is None:
            snapshot = await self._cluster.newer_than(snapshot.revision)
        # Only now, with the tables of all peers known, may a client find its slots here: a
        # pull before that would meet an unknown table.
        routing = snapshot.routing
        self._data_server.set_routing(routing.version, routing.owned_by(self._config.node_id))
        self._set_status("serving")
        await self._control.set_serving()
        log.info(
            "serving %d of %d slots, %d tables",
            routing.slots_per_node()[self._config.node_id],
            routing.slot_count,
            len(self._registry),
        )
        # Whoever waits for this node may ask it for the cluster next, and should not be shown
        # peers as starting that are about to serve.
        snapshot = self._cluster.snapshot()
        while any(node.status == "starting" for node in snapshot.nodes):
            snapshot = await self._cluster.newer_than(snapshot.revision)
        record = self._record
        on_ready(Ready(record.node_id, record.control_address, record.data_address))

    async def _stop_serving(self) -> bool:
        log.info("stopping")
        await self._control.set_not_serving()
        self._set_status("stopping")
        grace_ms = self._config.stop_grace_ms
        clean = await asyncio.to_thread(self._data_server.stop, grace_ms)
        if not clean:
            log.error("requests were still under way after %d ms and were cut off", grace_ms)
        return clean

    def _set_status(self, status: NodeStatus) -> None:
        self._record = replace(self._record, status=status)
        self._cluster.meet(self._record)

    def _apply_table(self, spec_json: str) -> KnownTable:
        """Take a table in on this node: in the data plane first, then in the registry."""
        table = self._registry.check(spec_json)
        self._data_server.create_table(table.spec_json)
        self._registry.add(table)
        return table

    def _own_control_address(self) -> str:
        """Return the address from the list, or the one that was bound."""
        host, port = split_address("listen_control", self._config.control_address)
        if port == 0:
            port = split_address("control address", self._control.address)[1]
        return f"{host}:{port}"

    def _add_services(self) -> None:
        server = self._control.server
        cluster_pb2_grpc.add_ClusterServiceServicer_to_server(
            ClusterService(
                node_id=self._config.node_id,
                view=self._cluster,
                missing=self._watch.missing,
                registry=self._registry,
                data_server=self._data_server,
            ),
            server,
        )
        tables_pb2_grpc.add_TablesServiceServicer_to_server(
            TablesService(
                registry=self._registry,
                creation=self._creation,
                data_server=self._data_server,
            ),
            server,
        )
        node_pb2_grpc.add_NodeServiceServicer_to_server(
            NodeService(config=self._config, view=self._cluster, apply_here=self._apply_table),
            server,
        )


def _open_data_server(config: ServerConfig, instance: int) -> DataServer:
    pems = config.read_pems()
    try:
        return DataServer(
            listen=config.listen_data,
            cluster_id=config.cluster,
            node_id=config.node_id,
            instance=instance,
            slot_count=config.slot_count,
            token=config.token,
            tls_cert_pem=pems.cert,
            tls_key_pem=pems.key,
            tls_client_ca_pem=pems.ca if config.tls_require_client_cert else None,
            io_threads=config.io_threads,
            max_frame_bytes=config.max_frame_bytes,
            max_keys_per_request=config.max_keys_per_request,
            max_connections=config.max_connections,
            handshake_timeout_ms=config.handshake_timeout_ms,
            stall_timeout_ms=config.stall_timeout_ms,
            memory_limit_bytes=config.memory_limit_bytes,
        )
    except OSError as error:
        raise ListenError(f"listen_data: {error.strerror or error}") from error
