"""Writing a whole checkpoint, by the node that was asked for it.

The masters write their slots; this node asks them, slot by slot again if one fails or loses its
slots meanwhile, puts the manifest together and writes it last. One node writes at a time, see
``lock``. Nothing here stops a push.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Literal

from backstay.checkpoint.chain import FullRule, full_is_due
from backstay.checkpoint.manifest import Manifest, new_id
from backstay.checkpoint.storage import CheckpointStorage
from backstay.consensus import ClusterSnapshot, ClusterView, RoutingTable
from backstay.consensus.records.checkpoints import loss_in_words
from backstay.consensus.records.settings import ClusterSettings
from backstay.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    CheckpointRefused,
    CheckpointUnavailable,
    NoCheckpointFolder,
    StoreError,
)
from backstay.pserver.checkpoints.jobs import with_cut_short
from backstay.pserver.checkpoints.lock import CheckpointLock
from backstay.pserver.checkpoints.records import CheckpointRecords
from backstay.pserver.checkpoints.upkeep import newest_without, thin_out
from backstay.pserver.membership.departures import now_s
from backstay.pserver.metrics.figures import ControlFigures
from backstay.pserver.peers import PeerCalls
from backstay.pserver.snapshots.disk import in_disk_thread
from backstay.pserver.snapshots.gathering import Gathered, SlotGatherer, refuse_anew
from backstay.pserver.snapshots.writer import (
    SnapshotOrder,
    SnapshotWriter,
    next_number,
    remove_unfinished,
)
from backstay.tables import TableSpec

__all__ = ["LOCK_WAIT_S", "SaveKind", "Saver"]

SaveKind = Literal["auto", "full", "incremental"]
# A writer waits this long for the lock: another checkpoint is being written, or its writer has just
# died and its lease is not over.
LOCK_WAIT_S = 60.0
# A job is cut short once: more of these are many jobs, and the last try says that it is inexact.
CUT_TRIES_MAX = 3

log = logging.getLogger(__name__)


class _JobsCutShort(Exception):
    """Slots have closed streams of tasks that the progress has still to do."""


class Saver:
    """Writes checkpoints of the cluster that this node is in."""

    def __init__(
        self,
        *,
        lock: CheckpointLock,
        records: CheckpointRecords,
        view: ClusterView,
        cluster_uid: str,
        calls: PeerCalls,
        specs: Callable[[], list[TableSpec]],
        figures: ControlFigures,
    ) -> None:
        """Prepare.

        Args:
            lock: Lets one node write at a time.
            records: The records about checkpoints.
            view: The cluster as this node sees it.
            cluster_uid: Which cluster this is.
            calls: Asks the masters.
            specs: Says which tables there are.
            figures: Where checkpoints are counted.
        """
        self.lock = lock
        self.records = records
        self._view = view
        self._cluster_uid = cluster_uid
        self._gatherer = SlotGatherer(view, calls)
        self._specs = specs
        self._figures = figures

    async def save(
        self,
        kind: SaveKind,
        *,
        tags: Mapping[str, Any],
        progress: Mapping[str, Any],
        tell: Callable[[int, int, int], None],
        url: str = "",
    ) -> Manifest:
        """Write a checkpoint.

        Args:
            kind: ``auto``: full every so often, as the settings say.
            tags: What the caller wants to note.
            progress: The trainers' present progress; that of jobs is added.
            tell: Called with slots written, slots in all, and bytes, as it goes.
            url: Where; empty: as the settings say.

        Raises:
            CheckpointRefused: No folder is set, a checkpoint is being restored, or others are
                written for longer than ``LOCK_WAIT_S``.
            CheckpointUnavailable: The folder or some slots cannot be reached. Nothing counts as
                written.
        """
        snapshot = self._view.snapshot()
        url = url or snapshot.settings.checkpoint_url
        if not url:
            raise NoCheckpointFolder(
                "no folder for checkpoints is set: pserverctl config set "
                "checkpoint_url=/shared/folder (or a URL)"
            )
        if snapshot.routing is None:
            raise CheckpointUnavailable("this node knows no routing yet; repeat the call")
        if snapshot.routing.lost:
            raise CheckpointRefused(loss_in_words(len(snapshot.routing.lost)))
        storage = await in_disk_thread(CheckpointStorage, url)
        for number in range(1, CUT_TRIES_MAX + 1):
            is_last = number == CUT_TRIES_MAX
            try:
                return await self._save_once(
                    storage, kind, tags=tags, progress=progress, tell=tell, is_last=is_last
                )
            except _JobsCutShort as cut:
                log.info("the checkpoint is written anew: %s", cut)
        raise AssertionError("the last try keeps what it has")

    async def _save_once(
        self,
        storage: CheckpointStorage,
        kind: SaveKind,
        *,
        tags: Mapping[str, Any],
        progress: Mapping[str, Any],
        tell: Callable[[int, int, int], None],
        is_last: bool,
    ) -> Manifest:
        """Write a checkpoint, under the lock.

        Raises:
            _JobsCutShort: Jobs were cut short meanwhile, and this is not the last try.
        """
        checkpoint_id, held = await self._begin(storage)
        begun_s = asyncio.get_running_loop().time()
        # The wait may have been long: what was lost before it is none of this one's business.
        snapshot = self._view.snapshot()
        try:
            progress = {**progress, **await self.records.jobs()}
            manifest = await self._save(
                storage, checkpoint_id, kind, snapshot, tags, progress, tell, is_last=is_last
            )
            took_s = asyncio.get_running_loop().time() - begun_s
            self._figures.checkpoint_written(took_s, manifest.total_bytes)
            return manifest
        except BaseException as error:
            if not isinstance(error, _JobsCutShort):
                self._figures.checkpoint_failed()
            raise
        finally:
            await asyncio.shield(self.lock.release(held))

    async def delete(self, storage: CheckpointStorage, checkpoint_id: str) -> None:
        """Remove a checkpoint that no other one needs; damaged and unfinished ones as well.

        Raises:
            CheckpointNotFound: There is none of that id.
            CheckpointRefused: Another one adds to it; it is being restored; or one is being
                written, which may add to it.
        """
        held = await self.lock.acquire(checkpoint_id)
        try:
            await self._refuse_needed(checkpoint_id)
            newest = await in_disk_thread(newest_without, storage, checkpoint_id)
            await self.records.forget(storage.url, checkpoint_id, newest)
            # Slots that were lost meanwhile may be to come back from it.
            await self._refuse_needed(checkpoint_id)
            await in_disk_thread(storage.delete, checkpoint_id)
        finally:
            await asyncio.shield(self.lock.release(held))

    async def _refuse_needed(self, checkpoint_id: str) -> None:
        if checkpoint_id in await self.records.needed():
            raise CheckpointRefused(f"checkpoint {checkpoint_id} is being restored")

    async def _begin(self, storage: CheckpointStorage) -> tuple[str, int]:
        """Acquire the lock; return the id of a new checkpoint and the revision of the lock."""
        while True:
            number = await in_disk_thread(next_number, storage)
            checkpoint_id = new_id(number, secrets.token_hex(3))
            held = await self.lock.acquire(checkpoint_id, wait_s=LOCK_WAIT_S)
            try:
                if restoring := await self.records.restoring():
                    # It would be newer than the restore, but have rows from before it.
                    raise CheckpointRefused(f"checkpoint {restoring} is being restored")
                if await in_disk_thread(next_number, storage) == number:
                    return checkpoint_id, held
            except BaseException:
                await asyncio.shield(self.lock.release(held))
                raise
            # Another one was finished just before this node got the lock: numbers tell their order.
            await self.lock.release(held)

    async def _save(
        self,
        storage: CheckpointStorage,
        checkpoint_id: str,
        kind: SaveKind,
        snapshot: ClusterSnapshot,
        tags: Mapping[str, Any],
        progress: Mapping[str, Any],
        tell: Callable[[int, int, int], None],
        *,
        is_last: bool,
    ) -> Manifest:
        routing = snapshot.routing
        assert routing is not None
        settings = snapshot.settings
        begun, begun_s = now_s(), asyncio.get_running_loop().time()
        full_every = 1 if kind == "full" else settings.checkpoint_full_every
        # They go before anything is written, because they may fill the disk.
        await in_disk_thread(remove_unfinished, storage)
        base = await in_disk_thread(self._base, storage, routing, full_every)
        if kind == "incremental" and base is None:
            raise CheckpointRefused(
                "there is no checkpoint of this cluster to add to: save a full one"
            )
        specs = tuple(self._specs())

        async def manifest_of(gathered: Gathered) -> Manifest:
            slots = gathered.of_checkpoint()
            refuse_anew(slots.epoch, routing)
            took_s = asyncio.get_running_loop().time() - begun_s
            kept, cut = await self.records.jobs_since(progress, took_s)
            if cut and not is_last:
                raise _JobsCutShort(f"jobs {', '.join(cut)} were cut short meanwhile")
            return Manifest(
                id=checkpoint_id,
                base=None if base is None else base.id,
                cluster=self._view.cluster_id,
                cluster_uid=self._cluster_uid,
                begun=begun,
                routing_version=routing.version,
                generation=routing.generation,
                # One that was created meanwhile may have rows in slots that were written late.
                tables=tuple({spec.name: spec for spec in (*specs, *self._specs())}.values()),
                parts=tuple(gathered.parts),
                slots=slots,
                tags=dict(tags),
                progress=with_cut_short(kept, cut),
            )

        order = SnapshotOrder(base, bytes_per_s=settings.checkpoint_bytes_per_s)
        writer = SnapshotWriter(self._gatherer, storage, storage.url)
        manifest = await writer.write(checkpoint_id, order, manifest_of, tell)
        # What is noted as the newest must not go before another one is noted.
        if await self.records.announce(storage.url, manifest):
            await self._thin_out(storage, settings)
        log.info(
            "checkpoint %s is written: %d rows, %d bytes in %d files",
            manifest.id,
            manifest.rows,
            manifest.total_bytes,
            len(manifest.parts),
        )
        return manifest

    async def _thin_out(self, storage: CheckpointStorage, settings: ClusterSettings) -> None:
        """Remove what is kept no longer, if it can be found out what is needed."""
        try:
            kept = await self.records.kept()
        except StoreError as error:
            log.warning("no old checkpoints are removed this time: %s", error)
            return
        keep = settings.checkpoint_keep_last, settings.checkpoint_keep_every
        await in_disk_thread(thin_out, storage, *keep, in_use=kept)

    def _base(
        self, storage: CheckpointStorage, routing: RoutingTable, full_every: int
    ) -> Manifest | None:
        """Return the checkpoint to add to; None if the next one is to be full."""
        rule = FullRule(full_every - 1)
        if full_is_due(rule, 0):
            return None
        for newest in reversed(storage.ids()):
            try:
                chain = storage.chain(newest)
            except (CheckpointDamaged, CheckpointNotFound) as error:
                log.error("the next checkpoint is full, because of the last one: %s", error)
                return None
            if chain[-1].cluster_uid != self._cluster_uid:
                # Another cluster's, or this one's before it was restored.
                continue
            fits = chain[-1].slot_count == routing.slot_count
            return chain[-1] if fits and not full_is_due(rule, len(chain) - 1) else None
        return None
