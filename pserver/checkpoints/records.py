"""The cluster's records about checkpoints, as the node that writes or deletes one needs them.

Which checkpoint is the newest, which one slots are to come from, and how far the jobs are. This
module reads and changes these records in the coordination store. Of checkpoints it reads the
progress that one keeps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from backstay.checkpoint.manifest import Manifest, number_of
from backstay.checkpoint.storage import CheckpointStorage
from backstay.consensus import ClusterView, RoutingTable
from backstay.consensus.records.checkpoints import CheckpointRecord, RestorePlan
from backstay.consensus.records.keys import Keys
from backstay.consensus.records.packing import unpack
from backstay.consensus.store import (
    CoordinationStore,
    Delete,
    Operation,
    Put,
    Txn,
    absent,
    mod_revision_is,
)
from backstay.errors import BackstayError, StoreError, StoreUnavailable
from backstay.pserver.checkpoints.jobs import (
    jobs_behind,
    jobs_cut_short,
    progress_of_jobs,
    with_forgotten,
    with_restored,
    with_taken,
)
from backstay.pserver.snapshots.disk import in_disk_thread

__all__ = ["CheckpointRecords"]

# Other nodes rarely change the record of the newest checkpoint; a change is tried this often.
ANNOUNCE_ATTEMPTS = 5

log = logging.getLogger(__name__)


class CheckpointRecords:
    """The records about checkpoints in the coordination store."""

    def __init__(self, store: CoordinationStore, keys: Keys, view: ClusterView) -> None:
        """Prepare; ``view`` says which routing table is in force."""
        self._store = store
        self._keys = keys
        self._view = view

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

        A job that has not gone on since all slots were restored is as far as that checkpoint says.

        Raises:
            StoreUnavailable: The store does not answer.
        """
        plan = await self._last_restore()
        routing = self._view.snapshot().routing
        generation = routing.generation if routing is not None else 0
        version = plan.version if plan is not None else 0
        progress = await progress_of_jobs(self._store, version, generation)
        behind = jobs_behind(progress)
        # If slots were lost since, no progress is that of the model.
        fits = plan is not None and plan.state == "done" and plan.generation == generation
        if plan is None or plan.slots or not fits or not behind:
            return progress
        try:
            storage = await in_disk_thread(CheckpointStorage, plan.url)
            manifest = await in_disk_thread(storage.read_manifest, plan.checkpoint)
        except BackstayError as error:
            names = ", ".join(behind)
            log.error("no progress of jobs %s goes with this checkpoint: %s", names, error)
            return progress
        return with_restored(progress, manifest.progress)

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
        kept = with_taken(with_forgotten(progress, now, took_s), now)
        return kept, jobs_cut_short(progress, now)

    async def restoring(self) -> str:
        """Return the id of the checkpoint that is being restored, as the store has it; or none."""
        plan = await self._last_restore()
        return plan.checkpoint if plan is not None and plan.state != "done" else ""

    async def needed(self) -> set[str]:
        """Return the ids of checkpoints that slots are to come from, as the store has it.

        A caller that has noted another one as the newest hears of all: that slots come back from
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

    async def kept(self) -> set[str]:
        """Return the ids of checkpoints that do not go, however old they are.

        These are what is needed, and what the cluster was restored from last: jobs and trainers
        that have not gone on since take their progress from it.

        Raises:
            StoreError: The store does not answer.
        """
        plan = await self._last_restore()
        return await self.needed() | ({plan.checkpoint} if plan is not None else set())

    async def _last_restore(self) -> RestorePlan | None:
        found = await self._store.get(self._keys.restore)
        return RestorePlan.from_json(found.value) if found is not None else None

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
