"""One node: the native data plane, the gRPC services and its part in the cluster, put together.

Life of a node: bind both planes; reach the store and join the cluster (or make it); register
(``starting``); take over the tables; serve (``serving``), by the routing table; on a signal say
so (``stopping``), let others take over, finish what the data plane has taken on, leave. This is
the shell: decisions are made by the modules it assembles.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import TypeVar

from backstay import _native
from backstay._native import DataServer
from backstay._proto.v1 import (
    checkpoint_pb2_grpc,
    cluster_pb2_grpc,
    export_pb2_grpc,
    node_pb2_grpc,
    resize_pb2_grpc,
    settings_pb2_grpc,
    store_pb2_grpc,
    tables_pb2_grpc,
    trainers_pb2_grpc,
)
from backstay.addresses import split_address
from backstay.backoff import Backoff
from backstay.config import ServerConfig
from backstay.consensus import ClusterMirror, NodeRecord, NodeStatus
from backstay.consensus.records.keys import JOBS, Keys
from backstay.consensus.store.opening import OpenedStore, open_store
from backstay.control_server import ControlServer
from backstay.errors import ListenError, StoreError, StoreUnavailable
from backstay.lifeline import Ready
from backstay.logs import fields
from backstay.metrics_endpoint import MetricsEndpoint
from backstay.pserver.cluster_member import ClusterMember, Identity
from backstay.pserver.leadership.controller_host import read_events
from backstay.pserver.membership.cluster_config import join_or_create
from backstay.pserver.membership.handover import slots_to_hand_over
from backstay.pserver.memory_limit import find_limit
from backstay.pserver.metrics.families import NodeCollector, NodeSources
from backstay.pserver.metrics.figures import ControlFigures
from backstay.pserver.replaced_cluster import remove_replaced
from backstay.pserver.requests.losses import accept_loss
from backstay.pserver.requests.settings import SettingsKeeper
from backstay.pserver.services.checkpoint import CheckpointService
from backstay.pserver.services.cluster import ClusterService
from backstay.pserver.services.export import ExportService
from backstay.pserver.services.node import NodeService
from backstay.pserver.services.resize import ResizeService
from backstay.pserver.services.settings import SettingsService
from backstay.pserver.services.store import StoreService
from backstay.pserver.services.tables import TablesService
from backstay.pserver.services.trainers import TrainersService
from backstay.pserver.tables.creation import TableKeeper
from backstay.pserver.tables.registry import TableRegistry
from backstay.tasks import end_tasks, turns, until_answered

__all__ = ["Node"]

ResultT = TypeVar("ResultT")

SERVICE_NAMES = [
    "backstay.v1.ClusterService",
    "backstay.v1.TablesService",
    "backstay.v1.NodeService",
    "backstay.v1.CheckpointService",
    "backstay.v1.ExportService",
    "backstay.v1.SettingsService",
    "backstay.v1.ResizeService",
    "backstay.v1.StoreService",
    "backstay.v1.TrainersService",
]
# Control calls are short; what is still under way after this is cut off.
CONTROL_GRACE_S = 1.0
# A probe asks every few seconds and takes a few failures in a row for the end.
LOOP_TURN_LIMIT_S = 3.0
# A store that does not answer must not hold up a stop.
FAREWELL_S = 1.0
RETRY = Backoff(first_s=0.05, longest_s=2.0)

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
        instance = secrets.randbelow(2**63 - 1) + 1
        limit = find_limit(config.memory_limit_bytes)
        log.log(
            logging.WARNING if limit.is_small else logging.INFO,
            "memory_limit_bytes is %d: %s",
            limit.limit_bytes,
            limit.reason,
        )
        self._memory_limit_bytes = limit.limit_bytes
        self._server = _open_data_server(config, instance, limit.limit_bytes)
        self._registry = TableRegistry(
            canonical=_native.canonical_table,
            fits=lambda spec_json: _native.check_table(spec_json, config.slot_count),
            id_of=_native.table_id,
            with_settings=_native.table_with_settings,
            max_tables=config.max_tables,
        )
        self._keeper = TableKeeper(self._registry, self._server.create_table)
        self._keys = Keys(config.cluster)
        self._mirror = ClusterMirror(self._keys)
        self._figures = ControlFigures(limit.limit_bytes)
        control_port = split_address("control address", self._control.address)[1]
        data_port = split_address("data address", self._server.address)[1]
        self._identity = Identity(
            node_id=config.node_id,
            instance=instance,
            control_address=f"{config.control_host}:{control_port}",
            data_address=f"{config.data_host}:{data_port}",
            host=config.host or socket.gethostname(),
        )
        self._cluster_service = ClusterService(
            own=self._own,
            view=self._mirror,
            registry=self._registry,
            data_server=self._server,
            figures=self._figures,
            cluster_uid=self._cluster_uid,
        )
        self._settings_service = SettingsService()
        self._checkpoint_service = CheckpointService()
        self._export_service = ExportService()
        self._loop = asyncio.get_running_loop()
        self._metrics = self._open_metrics()
        self._member: ClusterMember | None = None
        self._has_left = False
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Begin a graceful stop; ``run`` returns when it is done."""
        self._stop.set()

    async def run(self, on_ready: Callable[[Ready], None]) -> bool:
        """Serve until ``stop``.

        Args:
            on_ready: Called once, when the node has joined, knows the routing and serves.

        Returns:
            Whether every request that was under way could finish.
        """
        async with AsyncExitStack() as stack:
            if self._metrics is not None:
                stack.enter_context(self._metrics)
            opened = await open_store(self._config)
            stack.push_async_callback(opened.store.close)
            stack.push_async_callback(self._control.stop, CONTROL_GRACE_S)
            await self._start_control(opened)
            living = asyncio.create_task(self._live(opened, on_ready))
            clearing = asyncio.create_task(remove_replaced(self._config))
            stopping = asyncio.create_task(self._stop.wait())
            try:
                await asyncio.wait({living, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if living.done():
                    # It ends by a failure only, which ends the node.
                    living.result()
                return await self._leave()
            finally:
                await end_tasks(living, stopping, clearing)

    async def _start_control(self, opened: OpenedStore) -> None:
        self._add_services()
        store_pb2_grpc.add_StoreServiceServicer_to_server(
            _store_service(opened), self._control.server
        )
        await self._control.start(SERVICE_NAMES)
        log.info(
            "%s of cluster %r: control plane at %s, data plane at %s, store: %s",
            self._identity.node_id,
            self._config.cluster,
            self._identity.control_address,
            self._identity.data_address,
            opened.description,
            extra=fields(instance=self._identity.instance),
        )

    async def _live(self, opened: OpenedStore, on_ready: Callable[[Ready], None]) -> None:
        """Join, and take part until cancelled or until it fails for good."""
        joined = await self._until_answered(
            lambda: join_or_create(opened.store, self._keys, self._config)
        )
        self._member = ClusterMember(
            config=self._config,
            store=opened.store,
            keys=self._keys,
            mirror=self._mirror,
            joined=joined,
            identity=self._identity,
            server=self._server,
            registry=self._registry,
            keeper=self._keeper,
            figures=self._figures,
            on_dismissed=self.stop,
        )
        self._cluster_service.read_events = lambda: read_events(opened.store, self._keys)
        self._cluster_service.accept_loss = partial(
            accept_loss, opened.store, self._keys, self._mirror
        )
        self._checkpoint_service.parts = self._member.checkpoints
        self._export_service.parts = self._member.exports
        self._settings_service.keeper = SettingsKeeper(opened.store, self._keys)

        async def ready() -> None:
            await self._control.set_serving()
            own = self._identity
            on_ready(
                Ready(own.node_id, own.control_address, own.data_address, self._metrics_address)
            )

        await self._member.run(ready)

    async def _until_answered(self, ask: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Ask the store until it answers; say each new reason why it does not."""

        def say(error: Exception) -> None:
            log.warning("waiting for the coordination store: %s", error)
            self._mirror.set_trouble(f"the coordination store does not answer: {error}")

        return await until_answered(ask, RETRY, StoreUnavailable, say)

    async def _leave(self) -> bool:
        log.info("stopping")
        member = self._member
        if member is not None and member.is_registered:
            await self._hand_over(member)
        self._has_left = True
        await self._control.set_not_serving()
        self._cluster_service.end_streams()
        grace_ms = self._config.stop_grace_ms
        clean = await asyncio.to_thread(self._server.stop, grace_ms)
        if not clean:
            log.error("requests were still under way after %d ms and were cut off", grace_ms)
        if member is not None and member.is_registered:
            try:
                await asyncio.wait_for(member.leave(), FAREWELL_S)
            except (StoreError, asyncio.TimeoutError) as error:
                log.warning("left without a word, the lease ends by itself: %s", error)
        return clean

    async def _hand_over(self, member: ClusterMember) -> None:
        """Announce the stop and wait until no slot here could be served by another node."""
        try:
            await asyncio.wait_for(member.set_status("stopping"), FAREWELL_S)
        except asyncio.TimeoutError:
            log.warning("the store does not hear that this node stops; its slots stay until then")
            return

        async def handed_over() -> None:
            snapshot = self._mirror.snapshot()
            while slots_to_hand_over(snapshot.routing, snapshot.members, self._identity.instance):
                snapshot = await self._mirror.newer_than(snapshot.revision)

        try:
            await asyncio.wait_for(handed_over(), self._config.stop_grace_ms / 1000)
        except asyncio.TimeoutError:
            log.warning("not all slots could be handed over in time")

    def _open_metrics(self) -> MetricsEndpoint | None:
        if self._config.metrics is None:
            return None
        sources = NodeSources(
            cluster=self._config.cluster,
            memory_limit_bytes=self._memory_limit_bytes,
            own=self._own,
            snapshot=self._mirror.snapshot,
            stats=self._server.stats_json,
            tables=self._server.tables_json,
            figures=self._figures,
        )
        checks = {"/live": self._why_not_alive, "/ready": self._why_not_ready}
        return MetricsEndpoint(self._config.metrics, NodeCollector(sources), checks)

    def _why_not_alive(self) -> str:
        """Return why this process should be ended; called on a thread of the endpoint."""
        if turns(self._loop, LOOP_TURN_LIMIT_S):
            return ""
        return f"the event loop has not turned for {LOOP_TURN_LIMIT_S:g} s"

    def _why_not_ready(self) -> str:
        """Return why this node is not ready; called on a thread of the endpoint."""
        if self._member is None:
            return self._mirror.snapshot().trouble or "the node is starting"
        return self._member.readiness.why_not(self._own().status, self._mirror.snapshot())

    @property
    def _metrics_address(self) -> str:
        if self._metrics is None or self._config.metrics is None:
            return ""
        return f"{split_address('metrics', self._config.metrics)[0]}:{self._metrics.port}"

    def _cluster_uid(self) -> str:
        """Which cluster this node has joined; empty before."""
        return self._member.cluster_uid if self._member is not None else ""

    def _own(self) -> NodeRecord:
        """Return what this node says about itself."""
        status: NodeStatus = "starting"
        if self._has_left:
            status = "stopping"
        elif self._member is not None:
            status = self._member.status
        own = self._identity
        return NodeRecord(
            node_id=own.node_id,
            control_address=own.control_address,
            data_address=own.data_address,
            instance=own.instance,
            status=status,
            host=own.host,
        )

    def _add_services(self) -> None:
        server = self._control.server
        cluster_pb2_grpc.add_ClusterServiceServicer_to_server(self._cluster_service, server)
        tables_pb2_grpc.add_TablesServiceServicer_to_server(
            TablesService(
                registry=self._registry,
                creation=lambda: self._member.creation if self._member is not None else None,
                data_server=self._server,
            ),
            server,
        )
        settings_pb2_grpc.add_SettingsServiceServicer_to_server(self._settings_service, server)
        checkpoint_pb2_grpc.add_CheckpointServiceServicer_to_server(
            self._checkpoint_service, server
        )
        export_pb2_grpc.add_ExportServiceServicer_to_server(self._export_service, server)
        resize_pb2_grpc.add_ResizeServiceServicer_to_server(
            ResizeService(lambda: self._member.plans if self._member is not None else None), server
        )
        trainers_pb2_grpc.add_TrainersServiceServicer_to_server(
            TrainersService(
                self._identity.node_id,
                lambda: self._member.trainers if self._member is not None else None,
            ),
            server,
        )
        node_pb2_grpc.add_NodeServiceServicer_to_server(
            NodeService(
                config=self._config,
                own=self._own,
                cluster_uid=self._cluster_uid,
                apply_here=self._keeper.apply,
                slot_bytes=self._server.slot_bytes,
            ),
            server,
        )


def _store_service(opened: OpenedStore) -> StoreService:
    """Return the store for job masters, and for nodes that are no members of it."""
    embedded = opened.embedded
    if embedded is not None:
        return StoreService(embedded, lambda: embedded.leader is not None)
    # The cluster's token must not give its owner the run of an etcd.
    return StoreService(opened.store, lambda: True, only_below=JOBS if opened.is_shared else "")


def _open_data_server(config: ServerConfig, instance: int, memory_limit_bytes: int) -> DataServer:
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
            memory_limit_bytes=memory_limit_bytes,
            tls_peer_ca_pem=pems.ca if pems.cert is not None else None,
            read_lease_ms=config.read_lease_ms,
            prepare_timeout_ms=config.prepare_timeout_ms,
            copy_bytes_per_s=config.copy_bytes_per_s,
            stream_grace_s=config.stream_grace_s,
            counts_process=True,
        )
    except OSError as error:
        raise ListenError(f"listen_data: {error.strerror or error}") from error
