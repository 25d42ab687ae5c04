"""One at a time: who may write, delete or restore checkpoints, and which one is the newest.

The record of a turn is bound to its node's lease, so that nobody keeps the others out for ever.
Who stood still for so long that the turn went to another one finds its unfinished checkpoint
removed: whoever takes a turn removes what is unfinished before all else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from backstay.checkpoint.manifest import Manifest, number_of
from backstay.consensus import ClusterView, NodeRecord, RoutingTable
from backstay.consensus.checkpoint_records import CheckpointRecord, RestorePlan, SaveRecord
from backstay.consensus.keys import Keys
from backstay.consensus.packing import unpack
from backstay.consensus.store import (
    CoordinationStore,
    Delete,
    Get,
    Operation,
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
from backstay.pserver.checkpoints.jobs import jobs_cut_short, progress_of_jobs, with_forgotten
from backstay.pserver.departures import now_text

__all__ = ["Turns"]

# Others write the record of the newest checkpoint rarely; so often it is tried again.
ANNOUNCE_ATTEMPTS = 5
# A turn that ends shows in the view; if the view stands still, it is looked at so often.
LOOK_AGAIN_S = 1.0

log = logging.getLogger(__name__)


class Turns:
    """The records about checkpoints, as their writers change them."""

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
        # The revisions of this process's records: of the turns that somebody here has.
        self._taken: set[int] = set()

    async def take(self, checkpoint_id: str, *, wait_s: float = 0.0) -> int:
        """Make the record that keeps others from writing; returns its revision.

        Args:
            checkpoint_id: What it is taken for.
            wait_s: How long another one's turn is waited for.

        Raises:
            CheckpointRefused: It is another one's turn.
            CheckpointUnavailable: This node has no lease.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_s
        while True:
            snapshot = self._view.snapshot()
            # Whoever is cancelled while the store writes must not leave a turn to nobody.
            taking = asyncio.ensure_future(self._try(checkpoint_id))
            try:
                revision, other = await asyncio.shield(taking)
            except asyncio.CancelledError:
                await asyncio.shield(self._give_back(taking))
                raise
            if revision:
                self._taken.add(revision)
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
        for _ in range(2):
            result = await self._store.transaction(
                Txn((condition,), (put,), (Get(self._keys.save),))
            )
            if result.succeeded:
                return result.revision, None
            held = result.results[0]
            if held is None:
                return 0, None
            other = SaveRecord.from_json(held.value)
            if other.instance != own.instance or held.mod_revision in self._taken:
                return 0, other
            # Of this process, and nobody here knows of it: the store did not answer when it was
            # made, or when it was to go.
            condition = mod_revision_is(self._keys.save, held.mod_revision)
        return 0, other

    async def _give_back(self, taking: asyncio.Future[tuple[int, SaveRecord | None]]) -> None:
        try:
            revision, _ = await taking
        except (CheckpointError, StoreError):
            return
        if revision:
            await self.end(revision)

    async def end(self, revision: int) -> None:
        """Let others write."""
        self._taken.discard(revision)
        try:
            await self._store.transaction(
                Txn((mod_revision_is(self._keys.save, revision),), (Delete(self._keys.save),), ())
            )
        except StoreError as error:
            log.warning("the next checkpoint that this node is asked for ends this turn: %s", error)

    async def announce(self, url: str, manifest: Manifest) -> bool:
        """Note a checkpoint as the newest one, for slots that may come back from it.

        A newer one stays noted: this node may have stood still since it wrote the manifest.

        Returns:
            False if what is noted could not be found out or changed.
        """

        def change(noted: CheckpointRecord | None) -> Operation | None:
            if noted and noted.url == url and number_of(noted.id) > manifest.number:
                log.warning("checkpoint %s is whole; %s is newer", manifest.id, noted.id)
                return None
            return Put(self._keys.checkpoint, _record(url, manifest).to_json())

        try:
            await self._change_newest(change)
        except StoreError as error:
            log.warning(
                "checkpoint %s is whole, but not noted as the newest: %s", manifest.id, error
            )
            return False
        return True

    async def forget(self, url: str, checkpoint_id: str, newest: Manifest | None) -> None:
        """Let nothing come back from a checkpoint that is about to be deleted.

        Args:
            url: The folder.
            checkpoint_id: What is to be deleted.
            newest: The newest of the others; None if there is none.

        Raises:
            StoreError: The record could not be changed.
        """

        def change(noted: CheckpointRecord | None) -> Operation | None:
            if noted is None or (noted.url, noted.id) != (url, checkpoint_id):
                return None
            if newest is None:
                return Delete(self._keys.checkpoint)
            return Put(self._keys.checkpoint, _record(url, newest).to_json())

        await self._change_newest(change)

    async def jobs(self) -> dict[str, Any]:
        """Return how far the jobs are, to be kept with a checkpoint that is begun now.

        Raises:
            StoreUnavailable: The store does not answer.
        """
        found = await self._store.get(self._keys.restore)
        version = RestorePlan.from_json(found.value).version if found is not None else 0
        routing = self._view.snapshot().routing
        generation = routing.generation if routing is not None else 0
        return await progress_of_jobs(self._store, version, generation)

    async def jobs_since(
        self, progress: Mapping[str, Any], took_s: float
    ) -> tuple[dict[str, Any], list[str]]:
        """Return progress that was read before all slots were written, as it is to be kept.

        Args:
            progress: What ``jobs`` gave, and that of trainers.
            took_s: How long ago that was.

        Returns:
            The progress, and the jobs that were cut short since: slots and progress of these do
            not fit.

        Raises:
            StoreUnavailable: The store does not answer.
        """
        now = await self.jobs()
        return with_forgotten(progress, now, took_s), jobs_cut_short(progress, now)

    async def restoring(self) -> str:
        """Return the id of the checkpoint that is being restored, as the store has it; or none."""
        found = await self._store.get(self._keys.restore)
        plan = RestorePlan.from_json(found.value) if found is not None else None
        return plan.checkpoint if plan is not None and plan.state != "done" else ""

    async def needed(self) -> set[str]:
        """Return the ids of checkpoints that slots are to come from, as the store has it.

        Whoever asks after noting another one as the newest hears of all: that slots come back from
        the one before is written only while that one is noted.

        Raises:
            StoreError: The store does not answer.
        """
        needed = {await self.restoring()}
        found = await self._store.get(self._keys.routing)
        if found is not None:
            restoring = RoutingTable.from_json(unpack(found.value)).restoring
            needed.add(restoring.checkpoint if restoring.slots else "")
        return needed - {""}

    async def _change_newest(
        self, change: Callable[[CheckpointRecord | None], Operation | None]
    ) -> None:
        """Change the record of the newest checkpoint by what it says.

        Raises:
            StoreError: The store does not answer, or others change it all the time.
        """
        for _ in range(ANNOUNCE_ATTEMPTS):
            found = await self._store.get(self._keys.checkpoint)
            noted = CheckpointRecord.from_json(found.value) if found is not None else None
            operation = change(noted)
            if operation is None:
                return
            condition = absent(self._keys.checkpoint)
            if found is not None:
                condition = mod_revision_is(self._keys.checkpoint, found.mod_revision)
            if (await self._store.transaction(Txn((condition,), (operation,), ()))).succeeded:
                return
        raise StoreUnavailable("others change the record of the newest checkpoint all the time")


def _record(url: str, manifest: Manifest) -> CheckpointRecord:
    return CheckpointRecord(url, manifest.id, manifest.created)
