"""A server for the trial of a model, in this process, and a session with it.

The data plane is the one that servers run: it makes the tables, and refuses what they refuse.
There is no control plane, no cluster and no other process; nothing is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from backstay._native import DataServer, canonical_table
from backstay._proto.v1 import cluster_pb2
from backstay.cluster.directory import (
    ClusterInfo,
    DeclaredTable,
    Directory,
    RoutingStream,
    TableTerms,
)
from backstay.config import ClientConfig
from backstay.consensus import NodeRecord, RoutingTable
from backstay.consensus.records.routing import SlotReplicas
from backstay.errors import BackstayError, TableConflict, UnknownTable
from backstay.tables import TableSpec
from backstay.trainer.adapter.session import Session, TrainerEnvironment, open_session
from backstay.trainer.client import Client

__all__ = ["TrialServers"]

CLUSTER = "trial"
NODE = "trial"
INSTANCE = 1
SLOTS = 1
# No server listens there: the directory below makes no call.
NOBODY = "127.0.0.1:1"
STOP_GRACE_MS = 1000


class TrialServers:
    """One data plane, started when a session is asked for.

    Args:
        job: Comes before the names of the tables, as with a worker.
        compensation: What the job's tables do about stale gradients.
    """

    def __init__(self, job: str, compensation: str = "ignore") -> None:
        self._job = job
        self._compensation = compensation
        self._undo = ExitStack()

    def close(self) -> None:
        """End it; harmless where no session was asked for."""
        self._undo.close()

    def session(self) -> Session:
        """Open a session with it, which is the current one until the end.

        Raises:
            ConfigError: A session is open already.
        """
        server = DataServer(
            listen="127.0.0.1:0",
            cluster_id=CLUSTER,
            node_id=NODE,
            instance=INSTANCE,
            slot_count=SLOTS,
        )
        self._undo.callback(server.stop, STOP_GRACE_MS)
        server.set_routing(1, np.ones(SLOTS, np.bool_))
        # The user's settings are left out: a token or certificate is for servers of a cluster.
        client = _TrialClient(server, ClientConfig(compensation=self._compensation))
        environment = TrainerEnvironment((NOBODY,))
        session = open_session(Session(client, environment, self._job))
        self._undo.callback(session.close)
        return session


class _TrialClient(Client):
    """A client that is told of the cluster by the server itself."""

    def __init__(self, server: DataServer, config: ClientConfig) -> None:
        self._server = server
        super().__init__(NOBODY, config=config, trainer=None)

    def _directory_of(self, endpoint: str | Sequence[str], config: ClientConfig) -> Directory:
        return _TrialDirectory(endpoint, config, self._server)


class _SilentStream:
    """A stream that lasts until it is cancelled."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()

    def __iter__(self) -> Iterator[cluster_pb2.GetClusterResponse]:
        self._cancelled.wait()
        return iter(())

    def cancel(self) -> None:
        """End it."""
        self._cancelled.set()


class _TrialDirectory(Directory):
    """Knows the one server, and keeps the tables in it."""

    def __init__(
        self, endpoint: str | Sequence[str], config: ClientConfig, server: DataServer
    ) -> None:
        super().__init__(endpoint, config)
        self._server = server
        self._tables: dict[str, TableSpec] = {}

    def cluster(self, *, deadline_ms: int | None = None) -> ClusterInfo:
        """Return the one server as master of every slot."""
        del deadline_ms  # it answers at once
        ones = np.ones(SLOTS, np.uint64)
        node = NodeRecord(NODE, NOBODY, self._server.address, INSTANCE, "serving")
        held = (SlotReplicas(0),) * SLOTS
        return ClusterInfo(CLUSTER, CLUSTER, RoutingTable(1, (node,), 1, held, ones, ones))

    def ask(self, endpoint: str, *, deadline_ms: int) -> ClusterInfo:
        """Return the same."""
        del endpoint, deadline_ms
        return self.cluster()

    def open_source(
        self, endpoint: str, known_routing_version: int, known_paused: str
    ) -> RoutingStream:
        """Return a stream that brings nothing: nothing ever changes here."""
        del endpoint, known_routing_version, known_paused
        return _SilentStream()

    def create_table(self, spec: TableSpec, terms: TableTerms) -> DeclaredTable:
        """Create a table as a server does, or refuse it as a server does."""
        del terms  # it began empty
        canonical = canonical_table(spec.to_json())
        try:
            self._server.create_table(canonical)
        except TableConflict as error:
            # It began empty, so both are this model's.
            raise TableConflict(f"two layers of the model share a name: {error}") from error
        table = self._tables[spec.name] = TableSpec.from_json(canonical)
        return DeclaredTable(table, (), ())

    def table(self, name: str) -> TableSpec:
        """Return a table's description."""
        if name not in self._tables:
            raise UnknownTable(f"no table {name!r}; create it first")
        return self._tables[name]

    def tables(self) -> list[TableSpec]:
        """Return the descriptions of all tables."""
        return [self._tables[name] for name in sorted(self._tables)]

    def call(self, call: Any) -> Any:
        """Raise: there is no control plane to call."""
        raise BackstayError("--dry-run has no servers to ask")

    call_to_its_end = call
