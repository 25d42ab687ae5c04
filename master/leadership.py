"""The leadership of a job master: a key bound to a lease; the process that created it leads.

A process that takes it waits for the process that has it, unless that one is known to be gone. This
module imports ``backstay.consensus`` and decides nothing about the job.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

from backstay.consensus.records.jobs import MasterRecord
from backstay.consensus.records.keys import JobKeys
from backstay.consensus.store import (
    CoordinationStore,
    Delete,
    Lease,
    Put,
    Txn,
    absent,
    create_revision_is,
)
from backstay.consensus.store.follow import Election, FencingToken, KeepAlive
from backstay.errors import LeaseLost, NotJobMaster
from backstay.tasks import end_tasks

__all__ = ["Leadership"]

log = logging.getLogger(__name__)


class Leadership:
    """One process's candidacy for job master; belongs to one event loop."""

    def __init__(
        self, store: CoordinationStore, keys: JobKeys, own: MasterRecord, *, lease_ttl_ms: int
    ) -> None:
        """Prepare.

        Args:
            store: The coordination store.
            keys: The job's keys.
            own: This process, as workers are to find it.
            lease_ttl_ms: How long a job master that has died is waited for.
        """
        self._store = store
        self._keys = keys
        self._own = own
        self._ttl_ms = lease_ttl_ms
        self._keep: KeepAlive | None = None
        self.token: FencingToken | None = None

    async def take(self, replaces: int = 0) -> FencingToken:
        """Wait until this process is the job master.

        Args:
            replaces: Instance of a job master that is surely gone: its key is removed at once.

        Raises:
            StoreUnavailable: The store does not answer, so no lease could be had.
            LeaseLost: The lease ended while waiting; call again.
        """
        lease = await self._new_lease()
        if replaces:
            await self._remove(replaces)
        election = Election(self._store, self._keys.master)
        self.token = await election.campaign(self._own.to_json(), lease.id)
        return self.token

    async def take_again(self) -> FencingToken:
        """Take the leadership again after the lease or the key was lost, if it is free.

        Raises:
            NotJobMaster: Another process has.
            StoreUnavailable: The store does not answer; call again.
        """
        lease = await self._new_lease()
        await self._remove(self._own.instance)
        result = await self._store.transaction(
            Txn(
                (absent(self._keys.master),),
                (Put(self._keys.master, self._own.to_json(), lease.id),),
            )
        )
        if not result.succeeded:
            raise NotJobMaster(f"another process has become the job master of {self._keys.job!r}")
        self.token = FencingToken(self._keys.master, result.revision)
        return self.token

    async def keep(self) -> None:
        """Renew the lease and look at the key until cancelled.

        Raises:
            LeaseLost: Lease or key are gone; ``take_again`` if no other process leads.
            StoreError: The store refuses this client, or has lost its data.
        """
        if self._keep is None:
            raise LeaseLost("take the leadership first")
        renewing = asyncio.create_task(self._keep.run())
        looking = asyncio.create_task(self._look())
        try:
            await asyncio.wait({renewing, looking}, return_when=asyncio.FIRST_COMPLETED)
            for task in (renewing, looking):
                if task.done():
                    task.result()
        finally:
            await end_tasks(renewing, looking)

    async def _look(self) -> None:
        """Notice that the key is gone with a live lease: another process took this one for dead."""
        assert self.token is not None
        async with aclosing(Election(self._store, self._keys.master).observe()) as holders:
            async for held in holders:
                if held is None or held.create_revision != self.token.create_revision:
                    raise LeaseLost(f"the key {self._keys.master} is not this process's any more")

    async def leave(self) -> None:
        """Give the leadership back: the lease ends, and the key goes."""
        if self._keep is not None:
            keep, self._keep = self._keep, None
            await keep.revoke()

    async def _new_lease(self) -> Lease:
        """Return a lease; ``keep`` renews it from now on."""
        self._keep = KeepAlive(self._store, self._ttl_ms, lambda _until: None)
        return await self._keep.grant()

    async def _remove(self, instance: int) -> None:
        """Remove the key of a job master that is gone; another one's stays."""
        found = await self._store.get(self._keys.master)
        if found is None or MasterRecord.from_json(found.value).instance != instance:
            return
        result = await self._store.transaction(
            Txn(
                (create_revision_is(self._keys.master, found.create_revision),),
                success=(Delete(self._keys.master),),
            )
        )
        if result.succeeded and instance != self._own.instance:
            log.info("took the leadership from the job master %d, which is gone", instance)
