"""The control plane as its callers see it: who is in the cluster, which tables exist.

Imports :mod:`backstay.rpc` and the records of :mod:`backstay.consensus`. Never moves rows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeVar, cast

import grpc

from backstay import rpc
from backstay._proto.v1 import (
    cluster_pb2,
    cluster_pb2_grpc,
    tables_pb2,
    tables_pb2_grpc,
    trainers_pb2,
    trainers_pb2_grpc,
)
from backstay.addresses import parse_endpoints
from backstay.backoff import Backoff
from backstay.config import ClientConfig
from backstay.consensus import NodeRecord, RoutingTable
from backstay.consensus.records.checkpoints import loss_in_words
from backstay.consensus.records.messages import routing_from_message
from backstay.errors import (
    BackstayError,
    ClosedError,
    NeverReached,
    ServerUnavailable,
    Stopping,
)
from backstay.tables import TableSpec

T = TypeVar("T")

_RETRY = Backoff(first_s=0.05, longest_s=1.0)
# A call that may take longer than this says what it waits for.
_SILENCE_S = 5.0

# One try of a call that reaches every node, each with a deadline of its own: an answer that
# names the node that hangs is worth waiting for, a node that hangs itself is not.
_THOROUGH_ATTEMPT_MS = 15_000

_LOG = logging.getLogger(__name__)


def reach(endpoints: str | Sequence[str], config: ClientConfig) -> None:
    """Return once one of the endpoints has answered; at once if that has no limit.

    For programs that wait for servers as long as it takes, once there are known to be any.

    Raises:
        NeverReached: None has within ``first_contact_timeout_ms``.
        BackstayError: One refuses this client.
    """
    if not config.first_contact_timeout_ms:
        return
    limit_ms = config.first_contact_timeout_ms
    directory = Directory(endpoints, replace(config, deadline_ms=limit_ms))
    try:
        directory.first_contact()
    finally:
        directory.close()


class RoutingStream(Protocol):
    """A stream of WatchCluster under way."""

    def __iter__(self) -> Iterator[cluster_pb2.GetClusterResponse]: ...

    def cancel(self) -> object:
        """End it."""


@dataclass(frozen=True)
class ClusterInfo:
    """The cluster as a client knows it.

    Attributes:
        cluster_id: Its name.
        cluster_uid: What tells it from others of that name.
        routing: Its nodes, and the master of each slot.
        paused: Why nothing new is to begin at present; empty while it may.
        restoring: Id of the checkpoint that slots are being loaded from; empty if there are none.
    """

    cluster_id: str
    cluster_uid: str
    routing: RoutingTable
    paused: str = ""
    restoring: str = ""

    @property
    def loss(self) -> str:
        """What becomes of slots that lost all their copies, in words; empty if there are none."""
        if self.routing.lost:
            return loss_in_words(len(self.routing.lost))
        return f"slots go back to checkpoint {self.restoring}" if self.restoring else ""

    @property
    def nodes(self) -> tuple[NodeRecord, ...]:
        """The nodes, in the order that the routing table refers to."""
        return self.routing.nodes


@dataclass(frozen=True)
class TableTerms:
    """What happens to a table that is there with other settings, but rows of the same layout.

    Attributes:
        other_settings: The call is refused; the table takes over those asked for; or it stays.
        job: With "update": number of the streams of the job that asks. Only the first worker of
            each start of it is heard, and only if its model asks for something new. 0: no job.
        job_start: Which start of the job it is.
    """

    other_settings: Literal["refuse", "update", "keep"] = "refuse"
    job: int = 0
    job_start: int = 0


@dataclass(frozen=True)
class DeclaredTable:
    """A table as it is on the servers, and what became of other settings that were asked for.

    Attributes:
        spec: Its description.
        changed: What was changed, "learning_rate: 0.1 -> 0.01" each.
        kept: What was asked for and not taken over, in the same form.
    """

    spec: TableSpec
    changed: tuple[str, ...]
    kept: tuple[str, ...]


_OTHER_SETTINGS = {
    "refuse": tables_pb2.OTHER_SETTINGS_REFUSE,
    "update": tables_pb2.OTHER_SETTINGS_UPDATE,
    "keep": tables_pb2.OTHER_SETTINGS_KEEP,
}


class Directory:
    """Asks any one of the endpoints, the next one if it does not answer, until a deadline."""

    def __init__(self, endpoint: str | Sequence[str], config: ClientConfig) -> None:
        self._given = parse_endpoints(endpoint)
        self._endpoints = list(self._given)
        self._config = config
        self._channels: dict[str, grpc.Channel] = {}
        self._lock = threading.Lock()
        self._preferred = self._endpoints[0]
        self._last_asked = ""
        self._closed = False

    def first_contact(self) -> ClusterInfo:
        """Fetch nodes and routing for the first time: perhaps no server ever answers here.

        Raises:
            NeverReached: None of the endpoints answered within ``first_contact_timeout_ms``, or
                ``deadline_ms`` if that is shorter.
        """
        config = self._config
        limit_ms = min(config.deadline_ms, config.first_contact_timeout_ms or config.deadline_ms)
        try:
            return self.cluster(deadline_ms=limit_ms)
        except ServerUnavailable as error:
            raise NeverReached(
                f"{error} (no server has ever answered here; to try for longer than "
                f"{limit_ms / 1000} s, raise first_contact_timeout_ms)"
            ) from error

    def cluster(self, *, deadline_ms: int | None = None) -> ClusterInfo:
        """Fetch nodes and routing, and remember the nodes as further endpoints."""
        response = self._call(
            lambda channel, timeout_s: cluster_pb2_grpc.ClusterServiceStub(channel).GetCluster(
                cluster_pb2.GetClusterRequest(), timeout=timeout_s
            ),
            deadline_ms=deadline_ms,
        )
        info = _info_of(response)
        self.learn(info)
        return info

    def learn(self, info: ClusterInfo) -> None:
        """Add the routing's nodes to the given endpoints."""
        known = [node.control_address for node in info.nodes if node.control_address]
        with self._lock:
            self._endpoints = list(dict.fromkeys([*self._given, *known]))

    def endpoints(self) -> list[str]:
        """Return the control addresses known now."""
        with self._lock:
            return list(self._endpoints)

    def next_endpoint(self, *, but: str) -> str:
        """Return another endpoint each time, in turn, and ``but`` only if there is no other."""
        with self._lock:
            others = [at for at in self._endpoints if at != but] or self._endpoints
            at = others.index(self._last_asked) + 1 if self._last_asked in others else 0
            self._last_asked = others[at % len(others)]
            return self._last_asked

    def ask(self, endpoint: str, *, deadline_ms: int) -> ClusterInfo:
        """Fetch nodes and routing from one node, once."""
        with rpc.mapped_errors(endpoint):
            response = cluster_pb2_grpc.ClusterServiceStub(self._channel(endpoint)).GetCluster(
                cluster_pb2.GetClusterRequest(), timeout=deadline_ms / 1000
            )
        return _info_of(response)

    def open_stream(
        self, endpoint: str, known_routing_version: int, known_paused: str
    ) -> RoutingStream:
        """Ask one node for what is newer than this; read it with :meth:`read_stream`."""
        stub = cluster_pb2_grpc.ClusterServiceStub(self._channel(endpoint))
        request = cluster_pb2.WatchClusterRequest(
            known_routing_version=known_routing_version, known_paused=known_paused
        )
        return cast(RoutingStream, stub.WatchCluster(request))

    def read_stream(self, endpoint: str, call: RoutingStream) -> Iterator[ClusterInfo]:
        """Yield what the stream brings, until it ends or is cancelled.

        Raises:
            BackstayError: The stream broke.
        """
        try:
            for response in call:
                yield _info_of(response)
        except grpc.RpcError as error:
            raise rpc.error_of(error, endpoint) from error

    def register_trainer(
        self, endpoint: str, request: trainers_pb2.RegisterTrainerRequest, *, timeout_s: float
    ) -> int:
        """Tell one node, once, that a trainer is alive; returns its time to live in ms."""
        with rpc.mapped_errors(endpoint):
            response = trainers_pb2_grpc.TrainersServiceStub(
                self._channel(endpoint)
            ).RegisterTrainer(request, timeout=timeout_s)
        return response.ttl_ms

    def deregister_trainer(self, endpoint: str, trainer_id: str, *, timeout_s: float) -> None:
        """Tell one node, once, that a trainer ends."""
        with rpc.mapped_errors(endpoint):
            trainers_pb2_grpc.TrainersServiceStub(self._channel(endpoint)).DeregisterTrainer(
                trainers_pb2.DeregisterTrainerRequest(id=trainer_id), timeout=timeout_s
            )

    def create_table(self, spec: TableSpec, terms: TableTerms) -> DeclaredTable:
        """Create a table on all servers and return it as it is there."""
        request = tables_pb2.CreateTableRequest(
            spec_json=spec.to_json(),
            other_settings=_OTHER_SETTINGS[terms.other_settings],
            job=terms.job,
            job_start=terms.job_start,
        )
        response = self._call(
            lambda channel, timeout_s: tables_pb2_grpc.TablesServiceStub(channel).CreateTable(
                request, timeout=timeout_s
            ),
            attempt_ms=_THOROUGH_ATTEMPT_MS,
        )
        return DeclaredTable(
            TableSpec.from_json(response.table.spec_json),
            tuple(response.changed),
            tuple(response.kept),
        )

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

    def call(self, call: Callable[[grpc.Channel, float], T]) -> T:
        """Make any other call; see :meth:`_call`."""
        return self._call(call)

    def call_to_its_end(self, call: Callable[[grpc.Channel], T]) -> T:
        """Make a call that may take as long as it takes, and tells how it goes.

        The deadline is for finding a node that takes it on.
        """
        return self._call(lambda channel, _: call(channel))

    def close(self) -> None:
        """Close every channel."""
        with self._lock:
            self._closed = True
            for channel in self._channels.values():
                channel.close()
            self._channels.clear()

    def _call(
        self,
        call: Callable[[grpc.Channel, float], T],
        attempt_ms: int | None = None,
        deadline_ms: int | None = None,
    ) -> T:
        """Make a call at one endpoint after the other until one answers or time is up."""
        started = time.monotonic()
        deadline = started + (deadline_ms or self._config.deadline_ms) / 1000
        retries = _RETRY.begin(until_s=deadline)
        reasons: dict[str, str] = {}
        warned = False
        while True:
            endpoints = self.endpoints()
            first = endpoints.index(self._preferred) if self._preferred in endpoints else 0
            for endpoint in [*endpoints[first:], *endpoints[:first]]:
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
                    self._preferred = endpoint
                    return answer
            if not warned and deadline - started > _SILENCE_S:
                # Once, so that a wrong address does not look like a program that hangs.
                warned = True
                patience = deadline - time.monotonic()
                _LOG.warning("%s; trying for %.0f s more", "; ".join(reasons.values()), patience)
            pause_s = retries.next_s()
            if retries.is_over(time.monotonic()):
                tried = "; ".join(reasons.values())
                raise ServerUnavailable(
                    f"no pserver answered within {time.monotonic() - started:.1f} s: {tried}"
                )
            time.sleep(pause_s)

    def _channel(self, endpoint: str) -> grpc.Channel:
        with self._lock:
            if self._closed:
                raise ClosedError("the client is closed")
            if endpoint not in self._channels:
                self._channels[endpoint] = rpc.open_channel(endpoint, self._config.security)
            return self._channels[endpoint]


def _info_of(response: cluster_pb2.GetClusterResponse) -> ClusterInfo:
    return ClusterInfo(
        response.cluster_id,
        response.cluster_uid,
        routing_from_message(response),
        response.paused,
        response.restoring,
    )
