"""Notices within milliseconds that a peer's process has ended, also in an idle cluster.

Each node keeps a stream open to a few of the others. When one breaks, the peer is suspected, and
``departures`` looks for sure evidence. The peers are the next ones in the order of the ids, in a
ring, so that every node is watched by several, and the work of a node does not grow with the
cluster.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from backstay import rpc
from backstay.config import SecurityConfig
from backstay.consensus import ClusterView
from backstay.consensus.records import MemberRecord
from backstay.tasks import end_tasks, spawn

__all__ = ["PeerProbe", "peers_to_watch"]

PEERS_MAX = 8
RETRY_PAUSE_MIN_S = 0.05
RETRY_PAUSE_MAX_S = 1.0
LOOK_PAUSES_S = (0.0, 0.01, 0.03, 0.06, 0.1)

log = logging.getLogger(__name__)

Suspect = Callable[[int, str], Awaitable[bool]]


def peers_to_watch(own_id: str, ids: Iterable[str], count: int = PEERS_MAX) -> list[str]:
    """Return the ids that come after ``own_id`` in the ring of all ids."""
    others = sorted(set(ids) - {own_id})
    later = [node_id for node_id in others if node_id > own_id]
    return [*later, *others[: len(others) - len(later)]][:count]


class PeerProbe:
    """Watches the next few peers. An async context manager."""

    def __init__(
        self, view: ClusterView, own_id: str, security: SecurityConfig, suspect: Suspect
    ) -> None:
        """Prepare.

        Args:
            view: Who is in the cluster.
            own_id: This node.
            security: Token and certificates.
            suspect: Called with a process whose stream broke, and the reason.
        """
        self._view = view
        self._own_id = own_id
        self._security = security
        self._suspect = suspect
        self._watched: dict[int, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> PeerProbe:
        self._task = spawn(self._follow_members(), "the choice of peers to watch")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        tasks = [*self._watched.values(), *([self._task] if self._task else [])]
        await end_tasks(*tasks)

    async def _follow_members(self) -> None:
        revision = -1
        while True:
            snapshot = await self._view.newer_than(revision)
            revision = snapshot.revision
            chosen = peers_to_watch(self._own_id, snapshot.members)
            wanted = {
                snapshot.members[node_id].instance: snapshot.members[node_id] for node_id in chosen
            }
            for instance in [one for one in self._watched if one not in wanted]:
                self._watched.pop(instance).cancel()
            for instance, member in wanted.items():
                if instance not in self._watched:
                    self._watched[instance] = spawn(
                        self._watch(member), f"the watch over {member.node_id}"
                    )

    async def _watch(self, member: MemberRecord) -> None:
        pause_s = RETRY_PAUSE_MIN_S
        async with rpc.open_aio_channel(member.control_address, self._security) as channel:
            # The types of this package know only grpcio's older stubs.
            stub: Any = health_pb2_grpc.HealthStub(channel)
            while True:
                reason = "its control plane closed the connection"
                try:
                    async for _ in stub.Watch(health_pb2.HealthCheckRequest()):
                        pause_s = RETRY_PAUSE_MIN_S
                except grpc.RpcError as error:
                    reason = str(rpc.error_of(error, member.control_address))
                # A process that dies closes its ports one by one: look more than once.
                for look_pause_s in LOOK_PAUSES_S:
                    await asyncio.sleep(look_pause_s)
                    if await self._suspect(
                        member.instance, f"{self._own_id} found its ports refusing connections"
                    ):
                        return
                log.info("%s is still there after: %s", member.node_id, reason)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_PAUSE_MAX_S)
