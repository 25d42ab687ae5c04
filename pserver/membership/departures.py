"""Taking processes that are gone out of the cluster, without waiting for their lease.

Somebody suspects a process (its connection broke, its port refused a master); here the suspicion
is checked by connecting to it, and if the evidence is sure, one transaction removes its
registration and says that it is gone. A wrong suspicion costs two connections.
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import datetime, timezone

from backstay.consensus import ClusterView
from backstay.consensus.keys import Keys
from backstay.consensus.membership import DeathRecord
from backstay.consensus.records import MemberRecord
from backstay.consensus.store import CoordinationStore, Delete, Put, Txn, mod_revision_is
from backstay.errors import InvalidRequest, StoreError
from backstay.logs import fields
from backstay.pserver.membership.evidence import all_refuse, can_judge
from backstay.tasks import end_tasks, spawn

__all__ = ["Departures", "now_s", "now_text"]

# A registration changes now and then (status, sync), so a comparison may fail without harm.
ATTEMPTS_MAX = 5
RETRY_PAUSE_S = 0.1

log = logging.getLogger(__name__)


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
