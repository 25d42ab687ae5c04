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
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

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
from backstay._version import __version__
from backstay.addresses import split_address
from backstay.backoff import Backoff
from backstay.config import ServerConfig
from backstay.consensus import ClusterMirror
from backstay.consensus.records import MemberRecord
from backstay.consensus.records.keys import JOBS, Keys
from backstay.consensus.store import CoordinationStore
from backstay.consensus.store.opening import OpenedStore, open_store
from backstay.control_server import ControlServer
from backstay.errors import ListenError, ServerUnavailable, StoreError, StoreUnavailable
from backstay.lifeline import Ready
from backstay.logs import fields
from backstay.metrics_endpoint import MetricsEndpoint
from backstay.pserver.cluster_member import ClusterMember, JoinedParts, NodeParts
from backstay.pserver.leadership.controller_host import read_events
from backstay.pserver.membership.cluster_config import join_or_create
from backstay.pserver.membership.departures import now_s
from backstay.pserver.membership.handover import slots_to_hand_over
from backstay.pserver.membership.own_node import OwnNode
from backstay.pserver.membership.registration import Registration
from backstay.pserver.memory_limit import find_limit
from backstay.pserver.metrics.families import NodeCollector, NodeSources
from backstay.pserver.metrics.figures import ControlFigures
from backstay.pserver.metrics.readiness import Readiness
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
NOT_JOINED = ServerUnavailable("this node has not joined its cluster yet; repeat the call")
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
        server = _open_data_server(config, instance, limit.limit_bytes)
        registry = TableRegistry(
            canonical=_native.canonical_table,
            fits=lambda spec_json: _native.check_table(spec_json, config.slot_count),
            id_of=_native.table_id,
            with_settings=_native.table_with_settings,
            max_tables=config.max_tables,
        )
        keys = Keys(config.cluster)
        self._parts = NodeParts(
            config=config,
            keys=keys,
            mirror=ClusterMirror(keys),
            own=OwnNode(_first_record(config, instance, self._control.address, server.address)),
            server=server,
            registry=registry,
            keeper=TableKeeper(registry, server.create_table),
            figures=ControlFigures(limit.limit_bytes),
            readiness=Readiness(),
        )
        self._loop = asyncio.get_running_loop()
        self._metrics = self._open_metrics(limit.limit_bytes)
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
            cluster = self._add_services(opened)
            await self._control.start(SERVICE_NAMES, NOT_JOINED)
            self._log_start(opened)
            return await self._live(opened.store, cluster, on_ready)

    async def _live(
        self, store: CoordinationStore, cluster: ClusterService, on_ready: Callable[[Ready], None]
    ) -> bool:
        """Join, and take part until ``stop``; returns as ``run`` does.

        Raises:
            BackstayError: The node cannot be in this cluster (any more).
        """
        stopping = asyncio.create_task(self._stop.wait(), name="the stop")
        joining = asyncio.create_task(self._join(store), name="joining")
        tasks: list[asyncio.Task[Any]] = [
            stopping,
            joining,
            asyncio.create_task(remove_replaced(self._config)),
        ]
        try:
            await asyncio.wait({joining, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not joining.done():
                return await self._stop_serving(cluster)
            member = joining.result()
            living = asyncio.create_task(member.run(partial(self._ready, on_ready)))
            tasks.append(living)
            await asyncio.wait({living, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if living.done():
                # It ends by a failure only, which ends the node.
                living.result()
            return await self._leave(member.registration, cluster)
        finally:
            await end_tasks(*tasks)

    async def _join(self, store: CoordinationStore) -> ClusterMember:
        """Join the cluster, or make it, and add the services that need one."""
        joined = await until_answered(
            lambda: join_or_create(store, self._parts.keys, self._config),
            RETRY,
            StoreUnavailable,
            self._note_store_away,
        )
        self._parts.own.cluster_uid = joined.cluster_uid
        member = ClusterMember(self._parts, store, joined, on_dismissed=self.stop)
        self._add_joined_services(store, member.parts)
        return member

    def _note_store_away(self, error: Exception) -> None:
        log.warning("waiting for the coordination store: %s", error)
        self._parts.mirror.set_trouble(f"the coordination store does not answer: {error}")

    async def _ready(self, on_ready: Callable[[Ready], None]) -> None:
        await self._control.set_serving()
        own = self._parts.own.record
        on_ready(Ready(own.node_id, own.control_address, own.data_address, self._metrics_address))

    async def _leave(self, registration: Registration, cluster: ClusterService) -> bool:
        """Let others take over, end the data plane, and say good-bye."""
        if registration.is_registered:
            await self._hand_over(registration)
        clean = await self._stop_serving(cluster)
        if registration.is_registered:
            try:
                # No node has to wait for a process that serves nothing any more.
                await asyncio.wait_for(registration.leave("it was stopped"), FAREWELL_S)
            except (StoreError, asyncio.TimeoutError) as error:
                log.warning("left without a word, the lease ends by itself: %s", error)
        return clean

    async def _stop_serving(self, cluster: ClusterService) -> bool:
        log.info("stopping")
        self._parts.own.record = replace(self._parts.own.record, status="stopping")
        await self._control.set_not_serving()
        cluster.end_streams()
        grace_ms = self._config.stop_grace_ms
        clean = await asyncio.to_thread(self._parts.server.stop, grace_ms)
        if not clean:
            log.error("requests were still under way after %d ms and were cut off", grace_ms)
        return clean

    async def _hand_over(self, registration: Registration) -> None:
        """Announce the stop and wait until no slot here could be served by another node."""
        try:
            await asyncio.wait_for(registration.set_status("stopping"), FAREWELL_S)
        except asyncio.TimeoutError:
            log.warning("the store does not hear that this node stops; its slots stay until then")
            return

        async def handed_over() -> None:
            snapshot = self._parts.mirror.snapshot()
            instance = self._parts.own.record.instance
            while slots_to_hand_over(snapshot.routing, snapshot.members, instance):
                snapshot = await self._parts.mirror.newer_than(snapshot.revision)

        try:
            await asyncio.wait_for(handed_over(), self._config.stop_grace_ms / 1000)
        except asyncio.TimeoutError:
            log.warning("not all slots could be handed over in time")

    def _open_metrics(self, memory_limit_bytes: int) -> MetricsEndpoint | None:
        if self._config.metrics is None:
            return None
        sources = NodeSources(
            cluster=self._config.cluster,
            memory_limit_bytes=memory_limit_bytes,
            own=self._parts.own.node,
            snapshot=self._parts.mirror.snapshot,
            stats=self._parts.server.stats_json,
            tables=self._parts.server.tables_json,
            figures=self._parts.figures,
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
        parts = self._parts
        return parts.readiness.why_not(parts.own.record.status, parts.mirror.snapshot())

    @property
    def _metrics_address(self) -> str:
        if self._metrics is None or self._config.metrics is None:
            return ""
        return f"{split_address('metrics', self._config.metrics)[0]}:{self._metrics.port}"

    def _log_start(self, opened: OpenedStore) -> None:
        own = self._parts.own.record
        log.info(
            "%s of cluster %r: control plane at %s, data plane at %s, store: %s",
            own.node_id,
            self._config.cluster,
            own.control_address,
            own.data_address,
            opened.description,
            extra=fields(instance=own.instance),
        )

    def _add_services(self, opened: OpenedStore) -> ClusterService:
        """Add what serves before the node has joined: other nodes may need it to join."""
        services = self._control.services
        cluster = ClusterService(
            own=self._parts.own,
            view=self._parts.mirror,
            registry=self._parts.registry,
            data_server=self._parts.server,
            figures=self._parts.figures,
            read_events=partial(read_events, opened.store, self._parts.keys),
            accept_loss=partial(accept_loss, opened.store, self._parts.keys, self._parts.mirror),
        )
        cluster_pb2_grpc.add_ClusterServiceServicer_to_server(cluster, services)
        node_pb2_grpc.add_NodeServiceServicer_to_server(
            NodeService(
                config=self._config,
                own=self._parts.own,
                apply_here=self._parts.keeper.apply,
                slot_bytes=self._parts.server.slot_bytes,
            ),
            services,
        )
        store_pb2_grpc.add_StoreServiceServicer_to_server(_store_service(opened), services)
        return cluster

    def _add_joined_services(self, store: CoordinationStore, parts: JoinedParts) -> None:
        node, services = self._parts, self._control.services
        tables_pb2_grpc.add_TablesServiceServicer_to_server(
            TablesService(
                registry=node.registry,
                creation=parts.creation,
                data_server=node.server,
            ),
            services,
        )
        settings_pb2_grpc.add_SettingsServiceServicer_to_server(
            SettingsService(SettingsKeeper(store, node.keys)), services
        )
        checkpoint_pb2_grpc.add_CheckpointServiceServicer_to_server(
            CheckpointService(parts.checkpoints), services
        )
        export_pb2_grpc.add_ExportServiceServicer_to_server(ExportService(parts.exports), services)
        resize_pb2_grpc.add_ResizeServiceServicer_to_server(ResizeService(parts.plans), services)
        trainers_pb2_grpc.add_TrainersServiceServicer_to_server(
            TrainersService(node.own.record.node_id, parts.trainers), services
        )


def _first_record(
    config: ServerConfig, instance: int, control_address: str, data_address: str
) -> MemberRecord:
    """Return what is known of a node that has bound its addresses."""
    control_port = split_address("control address", control_address)[1]
    data_port = split_address("data address", data_address)[1]
    return MemberRecord(
        node_id=config.node_id,
        instance=instance,
        incarnation=1,
        status="starting",
        start_time=now_s(),
        sync=True,
        data_address=f"{config.data_host}:{data_port}",
        control_address=f"{config.control_host}:{control_port}",
        host=config.host or socket.gethostname(),
        lease=0,
        version=__version__,
        keeps_store=config.is_store_member(config.node_id),
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
