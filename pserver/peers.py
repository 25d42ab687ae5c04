"""What a node learns from its peers: who they are, that they live, which tables there are.

One task per peer asks at a steady pace, and with growing pauses while the peer does not answer.
It writes what it learns into the cluster view and hands over the tables; it decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

from backstay import rpc
from backstay._proto.v1 import (
    node_pb2,
    node_pb2_grpc,
    tables_pb2,
    tables_pb2_grpc,
)
from backstay.config import Peer, ServerConfig
from backstay.consensus import NodeRecord, StaticCluster
from backstay.consensus.messages import node_from_message
from backstay.errors import BackstayError, ProtocolError

__all__ = ["Misfit", "PeerLink", "PeerWatch", "misfit"]

RETRY_PAUSE_MIN_S = 0.05
RETRY_PAUSE_MAX_S = 2.0

log = logging.getLogger(__name__)


class PeerLink:
    """Calls to one peer, each with a deadline; failures are errors of ``backstay.errors``."""

    def __init__(self, peer: Peer, config: ServerConfig) -> None:
        """Open a channel; it connects when it is first used."""
        self.peer = peer
        self._deadline_s = config.control_deadline_ms / 1000
        self._channel = rpc.open_aio_channel(peer.control_address, config)
        self._node: node_pb2_grpc.NodeServiceAsyncStub = node_pb2_grpc.NodeServiceStub(
            self._channel
        )
        self._tables: tables_pb2_grpc.TablesServiceAsyncStub = tables_pb2_grpc.TablesServiceStub(
            self._channel
        )

    async def describe(self) -> node_pb2.DescribeResponse:
        """Ask who it is."""
        with rpc.mapped_errors(self.peer.control_address):
            return await self._node.Describe(node_pb2.DescribeRequest(), timeout=self._deadline_s)

    async def tables(self) -> list[str]:
        """Return the descriptions of all tables that it knows."""
        with rpc.mapped_errors(self.peer.control_address):
            response = await self._tables.ListTables(
                tables_pb2.ListTablesRequest(), timeout=self._deadline_s
            )
        return [table.spec_json for table in response.tables]

    async def apply_table(self, spec_json: str) -> None:
        """Let it take over a table."""
        with rpc.mapped_errors(self.peer.control_address):
            await self._node.ApplyTable(
                node_pb2.ApplyTableRequest(spec_json=spec_json), timeout=self._deadline_s
            )

    async def create_table(self, spec_json: str) -> tables_pb2.Table:
        """Pass on a call to create a table; the peer asks all others in turn."""
        request = tables_pb2.CreateTableRequest(spec_json=spec_json, forwarded=True)
        with rpc.mapped_errors(self.peer.control_address):
            # The peer waits for others as long as this node would: leave it time to say so.
            response = await self._tables.CreateTable(request, timeout=2 * self._deadline_s)
        return response.table

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


class PeerWatch:
    """Keeps a ``StaticCluster`` up to date about the other nodes. An async context manager."""

    def __init__(
        self,
        links: Sequence[PeerLink],
        config: ServerConfig,
        cluster: StaticCluster,
        learn_table: Callable[[str], object],
    ) -> None:
        """Prepare; nothing runs before ``async with``.

        Args:
            links: The other nodes.
            config: This node's settings, which must fit with the peers'.
            cluster: Where to write what is learned.
            learn_table: Called with each table description that a peer has, once per peer and
                before the peer counts as met.
        """
        self._links = links
        self._config = config
        self._cluster = cluster
        self._learn_table = learn_table
        self._failures: dict[str, str] = {}
        self._met: set[str] = set()
        self._stopped = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> PeerWatch:
        self._tasks = [asyncio.create_task(self._watch(link)) for link in self._links]
        for task in self._tasks:
            task.add_done_callback(_report_bug)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopped.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def missing(self) -> str:
        """Return who was never met and why, for people; empty if all were."""
        return "; ".join(
            f"{node.node_id} ({node.control_address}): "
            f"{self._failures.get(node.node_id, 'not asked yet')}"
            for node in self._cluster.snapshot().missing
        )

    async def _watch(self, link: PeerLink) -> None:
        pause_s = RETRY_PAUSE_MIN_S
        while not self._stopped.is_set():
            try:
                settled = await self._ask(link)
            except BackstayError as error:
                self._note_failure(link.peer, error)
                settled = False
            if settled:
                wait_s, pause_s = self._config.peer_refresh_ms / 1000, RETRY_PAUSE_MIN_S
            else:
                wait_s, pause_s = pause_s, min(2 * pause_s, RETRY_PAUSE_MAX_S)
            try:
                await asyncio.wait_for(self._stopped.wait(), timeout=wait_s)
            except asyncio.TimeoutError:
                continue

    async def _ask(self, link: PeerLink) -> bool:
        """Take over what a peer says; return whether it is past its start."""
        answer = await link.describe()
        record = node_from_message(answer.node)
        check_fits(self._config, link.peer, answer)
        if link.peer.node_id not in self._met:
            for spec_json in await link.tables():
                self._learn_table(spec_json)
            self._met.add(link.peer.node_id)
        self._note_success(record)
        return record.status != "starting"

    def _note_success(self, record: NodeRecord) -> None:
        before = next(
            node for node in self._cluster.snapshot().nodes if node.node_id == record.node_id
        )
        if not before.is_known:
            log.info("met %s, data plane at %s", record.node_id, record.data_address)
        elif before.instance != record.instance:
            log.warning("%s was restarted: the rows it held are gone", record.node_id)
        elif self._failures.get(record.node_id):
            log.info("%s answers again", record.node_id)
        self._failures.pop(record.node_id, None)
        self._cluster.meet(record)

    def _note_failure(self, peer: Peer, error: BackstayError) -> None:
        reason = str(error)
        if self._failures.get(peer.node_id) != reason:
            log.warning("%s (%s): %s", peer.node_id, peer.control_address, reason)
        self._failures[peer.node_id] = reason
        self._cluster.lose(peer.node_id)


def _report_bug(task: asyncio.Task[None]) -> None:
    """Log what ended a task that should not end; without this nobody would hear of it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("a peer is no longer watched; this is a bug", exc_info=error)


def check_fits(config: ServerConfig, peer: Peer, answer: node_pb2.DescribeResponse) -> None:
    """Refuse a peer that is not the node we think, or was started with other settings.

    Raises:
        ProtocolError: It does not fit; the message says in what.
    """
    found = misfit(
        answer,
        node_id=peer.node_id,
        cluster=config.cluster,
        slot_count=config.slot_count,
        peers=[str(entry) for entry in config.peers],
    )
    if found is not None:
        raise ProtocolError(
            f"the node there has {found.what} {found.theirs}, here it is {found.ours}"
        )


class Misfit(NamedTuple):
    """A setting in which a node differs from its cluster, and both values, for people."""

    what: str
    theirs: str
    ours: str


def misfit(
    answer: node_pb2.DescribeResponse,
    *,
    node_id: str,
    cluster: str,
    slot_count: int,
    peers: Sequence[str],
) -> Misfit | None:
    """Return the first difference between what a node says and what it should say, or None."""
    pairs: tuple[tuple[str, object, object], ...] = (
        ("node_id", answer.node.node_id, node_id),
        ("cluster", answer.cluster_id, cluster),
        ("slot_count", answer.slot_count, slot_count),
        ("peers", list(answer.peers), list(peers)),
    )
    for what, theirs, ours in pairs:
        if theirs != ours:
            return Misfit(what, repr(theirs), repr(ours))
    return None
