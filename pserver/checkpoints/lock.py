"""The lock that lets one node at a time write, delete or restore checkpoints.

The lock is a record in the coordination store that is bound to its node's lease. So a node that is
gone does not keep the lock. A node may stand still for so long that it loses the lock; the next
node that acquires it removes that node's unfinished checkpoint first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from backstay.consensus import ClusterView, NodeRecord
from backstay.consensus.records.checkpoints import SaveRecord
from backstay.consensus.records.keys import Keys
from backstay.consensus.store import (
    CoordinationStore,
    Delete,
    Get,
    Put,
    Txn,
    absent,
    mod_revision_is,
)
from backstay.errors import (
    CheckpointError,
    CheckpointRefused,
    CheckpointUnavailable,
    StoreError,
    StoreUnavailable,
)
from backstay.pserver.membership.departures import now_text

__all__ = ["CheckpointLock"]

# The view shows that another node releases the lock. If the view stands still, this node looks at
# the lock this often.
LOOK_AGAIN_S = 1.0
# Transactions that try to acquire the lock: one whose outcome is unknown, one that finds this
# process's own record, and one that takes it over.
TRIES = 3

log = logging.getLogger(__name__)


class CheckpointLock:
    """The lock, as one node acquires and releases it."""

    def __init__(
        self,
        store: CoordinationStore,
        keys: Keys,
        view: ClusterView,
        own: Callable[[], NodeRecord],
    ) -> None:
        """Prepare; ``own`` says who this node is."""
        self._store = store
        self._keys = keys
        self._view = view
        self._own = own
        # The revisions at which this process acquired the lock and did not release it yet.
        self._held: set[int] = set()
        # Two tries at once could each take the other's new record for a lost one of this process.
        self._trying = asyncio.Lock()

    async def acquire(self, checkpoint_id: str, *, wait_s: float = 0.0) -> int:
        """Acquire the lock; returns the revision of its record.

        Args:
            checkpoint_id: The checkpoint that it is acquired for.
            wait_s: How long to wait while another writer holds it.

        Raises:
            CheckpointRefused: Another writer holds it.
            CheckpointUnavailable: This node has no lease.
            StoreUnavailable: The store does not answer.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_s
        while True:
            snapshot = self._view.snapshot()
            # A caller that is cancelled while the store writes must not leave the lock held.
            taking = asyncio.ensure_future(self._take_turn(checkpoint_id))
            try:
                revision, other = await asyncio.shield(taking)
            except asyncio.CancelledError:
                await asyncio.shield(self._give_back(taking))
                raise
            if revision:
                return revision
            left_s = deadline_s - loop.time()
            if left_s <= 0:
                raise CheckpointRefused(
                    "another checkpoint is being written"
                    + (f": {other.id}, by {other.node} since {other.started}" if other else "")
                )
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(
                    self._view.newer_than(snapshot.revision), min(left_s, LOOK_AGAIN_S)
                )

    async def _take_turn(self, checkpoint_id: str) -> tuple[int, SaveRecord | None]:
        """Try, one caller at a time."""
        async with self._trying:
            revision, other = await self._try(checkpoint_id)
            if revision:
                self._held.add(revision)
            return revision, other

    async def _try(self, checkpoint_id: str) -> tuple[int, SaveRecord | None]:
        """Return the revision of the record if it could be made, else whose it is."""
        own = self._own()
        member = self._view.snapshot().member_of(own.instance)
        if member is None:
            raise CheckpointUnavailable(
                "this node is not registered at the moment; repeat the call"
            )
        record = SaveRecord(checkpoint_id, own.node_id, own.instance, now_text())
        put = Put(self._keys.save, record.to_json(), member.lease)
        condition = absent(self._keys.save)
        other: SaveRecord | None = None
        for tries_left in reversed(range(TRIES)):
            try:
                result = await self._store.transaction(
                    Txn((condition,), (put,), (Get(self._keys.save),))
                )
            except StoreUnavailable as error:
                # The store may have written the record all the same. The next try reads it then.
                if not tries_left:
                    raise
                log.warning("the lock may be acquired; asking the store again: %s", error)
                continue
            if result.succeeded:
                return result.revision, None
            held = result.results[0]
            if held is None:
                return 0, None
            other = SaveRecord.from_json(held.value)
            if other.instance != own.instance or held.mod_revision in self._held:
                return 0, other
            # Of this process, but unknown to it: the store did not answer when it was
            # made, or when it was to go.
            condition = mod_revision_is(self._keys.save, held.mod_revision)
        return 0, other

    async def _give_back(self, taking: asyncio.Future[tuple[int, SaveRecord | None]]) -> None:
        try:
            revision, _ = await taking
        except (CheckpointError, StoreError):
            return
        if revision:
            await self.release(revision)

    async def release(self, revision: int) -> None:
        """Release the lock that ``acquire`` returned this revision for."""
        self._held.discard(revision)
        try:
            await self._store.transaction(
                Txn((mod_revision_is(self._keys.save, revision),), (Delete(self._keys.save),), ())
            )
        except StoreError as error:
            log.warning(
                "the next checkpoint that this node is asked for releases the lock: %s", error
            )
