"""Taking processes that are gone out of the cluster, without waiting for their lease.

``PeerProbe`` notices within milliseconds that a peer's process has ended, also in an idle cluster:
each node keeps a stream open to a few of the others. They are the next ones in the order of the
ids, in a ring, so that every node is watched by several, and the work of a node does not grow with
the cluster.

A node suspects a process (its stream broke, its port refused a master). ``Departures`` checks the
suspicion by connecting to it, and if the evidence is sure, one transaction removes its registration
and says that it is gone. Evidence is a refusal: it comes from the operating system of the machine
at that address and says that nothing listens there. A time-out says nothing, because a machine or a
network that hangs looks the same. A wrong suspicion costs two connections, which never carry a
byte.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import datetime, timezone
from types import TracebackType
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from backstay import rpc
from backstay.addresses import is_loopback, split_address
from backstay.backoff import Backoff
from backstay.config import SecurityConfig
from backstay.consensus import ClusterView
from backstay.consensus.cluster_mirror import DeathRecord
from backstay.consensus.records import MemberRecord
from backstay.consensus.records.keys import Keys
from backstay.consensus.store import CoordinationStore, Delete, Put, Txn, mod_revision_is
from backstay.errors import InvalidRequest, StoreError
from backstay.logs import fields
from backstay.tasks import end_tasks, spawn

__all__ = [
    "Departures",
    "PeerProbe",
    "Presence",
    "all_refuse",
    "can_judge",
    "now_s",
    "now_text",
    "peers_to_watch",
]

# A registration changes now and then (status, sync), so a comparison may fail without harm.
ATTEMPTS_MAX = 5
RETRY_PAUSE_S = 0.1
CONNECT_TIMEOUT_S = 1.0
PEERS_MAX = 8
PROBE = Backoff(first_s=0.05, longest_s=1.0)
LOOK_PAUSES_S = (0.0, 0.01, 0.03, 0.06, 0.1)

Suspect = Callable[[int, str], Awaitable[bool]]

log = logging.getLogger(__name__)


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
        probes = PROBE.begin()
        async with rpc.open_aio_channel(member.control_address, self._security) as channel:
            # The types of this package know only grpcio's older stubs.
            stub: Any = health_pb2_grpc.HealthStub(channel)
            while True:
                reason = "its control plane closed the connection"
                try:
                    async for _ in stub.Watch(health_pb2.HealthCheckRequest()):
                        probes.reset()
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
                await asyncio.sleep(probes.next_s())


class Presence:
    """What stands at an address, as far as one attempt to connect tells."""

    LISTENS = "listens"
    REFUSES = "refuses"
    UNKNOWN = "unknown"


async def presence_at(address: str) -> str:
    """Try once to connect and return one of ``Presence``."""
    host, port = split_address("address", address)
    try:
        _, writer = await asyncio.wait_for(
            asyncio.open_connection(host.strip("[]"), port), timeout=CONNECT_TIMEOUT_S
        )
    except ConnectionRefusedError:
        return Presence.REFUSES
    except (OSError, asyncio.TimeoutError):
        return Presence.UNKNOWN
    # An abort, not a close: the peer need not answer, and this side waits for nothing.
    writer.transport.abort()
    return Presence.LISTENS


async def all_refuse(addresses: Sequence[str]) -> bool:
    """Whether every one of the addresses refuses connections; False if there is none."""
    found = await asyncio.gather(*(presence_at(address) for address in addresses))
    return bool(found) and all(presence == Presence.REFUSES for presence in found)


def can_judge(own_host: str, their_host: str, addresses: Sequence[str]) -> bool:
    """Whether a refusal seen from here says anything about a process on another machine.

    A loopback address means this machine, also if another host announced it.
    """
    hosts = [split_address("address", address)[0] for address in addresses]
    return own_host == their_host or not any(is_loopback(host) for host in hosts)


def now_text() -> str:
    """Return the present time for people to read; nothing is decided by it."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def now_s() -> float:
    """Return the present time in seconds since the epoch, as records for people hold it."""
    return round(time.time(), 3)


class Departures:
    """Checks suspicions and declares processes gone."""

    def __init__(
        self, store: CoordinationStore, keys: Keys, view: ClusterView, node_id: str, host: str
    ) -> None:
        """Prepare.

        Args:
            store: The coordination store.
            keys: Where the records are.
            view: The records as this node sees them.
            node_id: This node.
            host: The machine it runs on.
        """
        self._store = store
        self._keys = keys
        self._view = view
        self._node_id = node_id
        self._host = host
        self._checks: dict[int, asyncio.Task[bool]] = {}

    async def suspect(self, instance: int, because: str) -> bool:
        """Check whether a process is gone, and say so to the cluster if that is sure.

        Returns:
            Whether it is known to be gone now.
        """
        snapshot = self._view.snapshot()
        member = snapshot.member_of(instance)
        if instance in snapshot.deaths or member is None:
            return True
        if instance not in self._checks:
            # A task of its own: the caller may be cancelled by the declaration that it caused.
            self._checks[instance] = spawn(
                self._check(member, because), f"the check of {member.node_id}"
            )
        return bool(await asyncio.shield(self._checks[instance]))

    async def _check(self, member: MemberRecord, because: str) -> bool:
        try:
            return await self.is_gone(member) and await self.declare(member, because)
        finally:
            del self._checks[member.instance]

    async def close(self) -> None:
        """End the checks that are under way."""
        await end_tasks(*self._checks.values())

    async def is_gone(self, member: MemberRecord) -> bool:
        """Whether both of its ports refuse connections, and that says something from here."""
        addresses = (member.control_address, member.data_address)
        return can_judge(self._host, member.host, addresses) and await all_refuse(addresses)

    async def declare(self, member: MemberRecord, because: str) -> bool:
        """Remove a registration and write down that its process is gone.

        Returns:
            Whether its registration is gone now.
        """
        key = self._keys.member(member.node_id)
        death = DeathRecord(member.instance, member.node_id, self._node_id, because, now_text())
        for _ in range(ATTEMPTS_MAX):
            try:
                found = await self._store.get(key)
                if found is None or MemberRecord.from_json(found.value).instance != member.instance:
                    return True
                result = await self._store.transaction(
                    Txn(
                        (mod_revision_is(key, found.mod_revision),),
                        success=(
                            Delete(key),
                            Put(self._keys.death(member.instance), death.to_json()),
                        ),
                    )
                )
                if result.succeeded:
                    log.warning(
                        "%s is gone: %s",
                        member.node_id,
                        because,
                        extra=fields(instance=member.instance),
                    )
                    # What else it held goes too: the leadership of the controller, its report.
                    await self._store.lease_revoke(found.lease)
                    return True
            except StoreError as error:
                log.warning("%s is gone, but the store does not know: %s", member.node_id, error)
                await asyncio.sleep(RETRY_PAUSE_S)
            except InvalidRequest as error:
                log.warning("%s: its registration cannot be read: %s", member.node_id, error)
                return False
        return False
