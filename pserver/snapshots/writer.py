"""Has a snapshot written: its slots by their masters, its manifest last; or nothing of it stays.

A checkpoint and a running export are written in the same way; what differs is in the order. Files
are touched in threads. Imports the gatherer, ``backstay.checkpoint`` and the calls to other nodes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from backstay._proto.v1 import checkpoint_pb2
from backstay.checkpoint.manifest import ExportChoice, Manifest, number_of
from backstay.checkpoint.storage import SnapshotFolder
from backstay.errors import BackstayError, CheckpointDamaged, CheckpointUnavailable
from backstay.pserver.snapshots.disk import in_disk_thread
from backstay.pserver.snapshots.gathering import Gathered, SlotGatherer

__all__ = ["SnapshotOrder", "SnapshotWriter", "next_number", "remove_unfinished"]

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SnapshotOrder:
    """What is to be written, and how.

    Attributes:
        before: A delta has what has changed since this snapshot; None: a full one.
        choice: Which rows and columns an export has; None: a checkpoint, which has all.
        bytes_per_s: Limit of each node; 0: none.
        give_up_s: Slots that no master writes in this time are left out; None: all are waited for.
        first: Slots that each master is asked for before its others.
    """

    before: Manifest | None = None
    choice: ExportChoice | None = None
    bytes_per_s: int = 0
    give_up_s: float | None = None
    first: frozenset[int] = frozenset()

    def request(
        self, url: str, snapshot: str, slots: Sequence[int]
    ) -> checkpoint_pb2.WriteSlotsRequest:
        """Return what to ask a master about some slots."""
        request = checkpoint_pb2.WriteSlotsRequest(
            url=url, id=snapshot, bytes_per_s=self.bytes_per_s
        )
        if self.before is None:
            request.slots.extend(checkpoint_pb2.SlotBase(slot=slot) for slot in slots)
        else:
            position, epoch = self.before.slots.position, self.before.slots.epoch
            request.slots.extend(
                checkpoint_pb2.SlotBase(
                    slot=slot, has_base=True, position=int(position[slot]), epoch=int(epoch[slot])
                )
                for slot in slots
            )
        if self.choice is not None:
            request.export.tables.extend(self.choice.tables)
            request.export.statistics = self.choice.statistics
            if self.choice.score_at_least is not None:
                request.export.score_at_least = self.choice.score_at_least
            if self.before is not None:
                request.completed.extend(self.before.slots.position.tolist())
        return request


class SnapshotWriter:
    """Writes snapshots to one folder.

    Args:
        gatherer: Asks the masters.
        folder: The folder.
        url: Its name, as each node opens it.
    """

    def __init__(self, gatherer: SlotGatherer, folder: SnapshotFolder, url: str) -> None:
        self._gatherer = gatherer
        self._folder = folder
        self._url = url

    async def write(
        self,
        snapshot: str,
        order: SnapshotOrder,
        manifest_of: Callable[[Gathered], Awaitable[Manifest]],
        tell: Callable[[int, int, int], None] = lambda _done, _total, _bytes: None,
    ) -> Manifest:
        """Write a snapshot.

        Args:
            snapshot: Its id.
            order: What it is to be.
            manifest_of: Puts the manifest together of what the masters wrote, or refuses it.
            tell: Called with slots written, slots in all, and bytes, as it goes.

        Raises:
            CheckpointUnavailable: The folder, or slots that are waited for, cannot be reached.
        """
        folder = self._folder
        try:
            await in_disk_thread(folder.create, snapshot)
            gathered = await self._gatherer.gather(
                lambda slots: order.request(self._url, snapshot, slots),
                tell,
                give_up_s=order.give_up_s,
                first=order.first,
            )
            manifest = await manifest_of(gathered)
            try:
                await _to_its_end(in_disk_thread(folder.write_manifest, manifest))
            except CheckpointDamaged as error:
                raise CheckpointUnavailable(
                    f"{error}: is {folder.url} the same folder on every node?"
                ) from error
        except BaseException:
            # What is there is of no use, and takes room; a later writer would remove it, too.
            await asyncio.shield(in_disk_thread(_remove_half, folder, snapshot))
            raise
        return manifest


def next_number(folder: SnapshotFolder) -> int:
    """Return a number above those of all snapshots, finished or not."""
    return 1 + max(map(number_of, folder.names()), default=0)


def remove_unfinished(folder: SnapshotFolder) -> None:
    """Remove what earlier writers left; call it when no other node writes."""
    for snapshot in folder.unfinished():
        log.info("%s was never finished and is removed", snapshot)
        folder.delete(snapshot)


def _remove_half(folder: SnapshotFolder, snapshot: str) -> None:
    """Remove a snapshot that was given up, unless it is whole after all."""
    try:
        if not folder.is_finished(snapshot):
            folder.delete(snapshot)
    except BackstayError as error:
        log.warning("the unfinished %s could not be removed: %s", snapshot, error)


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Wait for a thread even if its result is not wanted: its files must be known."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
