"""A node writes slots that it masters to files of a snapshot."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from backstay._native import Cancellation, CopiedSlots, DataServer
from backstay.checkpoint.manifest import ExportChoice
from backstay.checkpoint.storage import CheckpointStorage, ExportFolder, SnapshotFolder
from backstay.pserver.snapshots.disk import in_disk_thread

__all__ = ["Base", "PartWritten", "SlotWriter", "group_slots"]

# A part is copied and put together in memory: a checkpoint takes some four times this for each
# writer.
PART_BYTES = 16 * 2**20
# What has changed is a fraction of what there is; how small a one is not known before.
CHANGED_PART_BYTES = 4 * PART_BYTES
# More would take the cores from pushes; the disk or the network is the limit anyway.
WRITERS = min(4, max(1, (os.cpu_count() or 1) // 4))
WRITERS_NICE = 19
# Files written for one request: so often the one who asks hears how it goes.
PARTS_PER_REQUEST = 4


class Base(NamedTuple):
    """Where a slot was when it was written to the checkpoint that the new one adds to."""

    position: int
    epoch: int


class PartWritten(NamedTuple):
    """A file that was written, and its slots as the data plane tells of them.

    The name is empty if slots of an export have nothing to tell, and so no file.
    """

    file: str
    bytes: int
    sha256: str
    slots: list[dict[str, Any]]


def group_slots(
    slots: Sequence[int], sizes: NDArray[np.uint64], limit_bytes: int, groups_max: int
) -> list[list[int]]:
    """Cut slots, in their order, into groups of at most ``limit_bytes``, or of one slot.

    Args:
        slots: Which.
        sizes: uint64 [slot_count], bytes of each slot.
        limit_bytes: Of a group.
        groups_max: What comes behind so many groups is left out.
    """
    groups: list[list[int]] = []
    filled = 0
    for slot in slots:
        size = int(sizes[slot])
        if not groups or filled + size > limit_bytes:
            if len(groups) == groups_max:
                break
            groups.append([])
            filled = 0
        groups[-1].append(slot)
        filled += size
    return groups


class SlotWriter:
    """Writes slots with a few threads of its own."""

    def __init__(
        self,
        server: DataServer,
        instance: int,
        *,
        name: str = "checkpoint",
        nice: int = WRITERS_NICE,
    ) -> None:
        """Prepare; call it while the event loop runs.

        Args:
            server: The data plane.
            instance: Goes into the names of files, so that no two nodes' are equal.
            name: Of its threads.
            nice: How much its threads give way to others.
        """
        self._server = server
        self._prefix = f"part-{instance & 0xFFFFFFFF:08x}"
        self._numbers = itertools.count()
        give_way = partial(_yield_to_others, nice)
        self._copier = ThreadPoolExecutor(
            1, thread_name_prefix=f"{name}-copy", initializer=give_way
        )
        self._writers = ThreadPoolExecutor(
            WRITERS, thread_name_prefix=f"{name}-write", initializer=give_way
        )
        # What is copied and not written yet takes memory.
        self._room = asyncio.Semaphore(WRITERS)

    async def write(
        self,
        url: str,
        checkpoint_id: str,
        bases: Mapping[int, Base | None],
        bytes_per_s: int,
        export: ExportChoice | None = None,
    ) -> list[PartWritten]:
        """Write some of the slots, as many as fit into a few files.

        Args:
            url: The folder of checkpoints, or of an export.
            checkpoint_id: The checkpoint, or the element, begun already.
            bases: The slots; with a base only what has changed since is written.
            bytes_per_s: Limit of this node; 0: none.
            export: What an export is of; None: a checkpoint is written.

        Returns:
            The files. Slots that this node is not master of are in none.

        Raises:
            CheckpointUnavailable: A file cannot be written.
        """
        storage: SnapshotFolder = await in_disk_thread(
            CheckpointStorage if export is None else ExportFolder, url
        )
        sizes = await asyncio.to_thread(self._server.slot_bytes)
        changed = all(base is not None for base in bases.values())
        limit_bytes = CHANGED_PART_BYTES if changed else PART_BYTES
        groups = group_slots(sorted(bases), sizes, limit_bytes, PARTS_PER_REQUEST)
        if changed and export is not None:
            # What changed since a second ago is little, and a file more costs more than that.
            groups = [sorted(bases)]
        rate = -(-bytes_per_s // min(WRITERS, len(groups))) if groups else 0
        stop = Cancellation()
        jobs = [
            self._part(
                storage, checkpoint_id, {slot: bases[slot] for slot in group}, rate, stop, export
            )
            for group in groups
        ]
        try:
            written = await asyncio.gather(*jobs)
        finally:
            # Cancelling what waits for a thread does not stop the thread.
            stop.cancel()
        return [part for part in written if part is not None]

    async def export_completed(self, positions: Sequence[int], tables: Sequence[str]) -> None:
        """Let go of what an export that is complete up to these positions does not need again."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(
            self._copier, self._server.export_completed, positions, list(tables)
        )

    def close(self) -> None:
        """Write nothing more."""
        for threads in (self._copier, self._writers):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _part(
        self,
        storage: SnapshotFolder,
        checkpoint_id: str,
        bases: Mapping[int, Base | None],
        bytes_per_s: int,
        stop: Cancellation,
        export: ExportChoice | None,
    ) -> PartWritten | None:
        """Copy some slots and write them to one file; None if this node masters none of them."""
        loop = asyncio.get_running_loop()
        slots = json.dumps([{"slot": slot, "base": base} for slot, base in bases.items()])
        name = f"{self._prefix}-{next(self._numbers):04d}.safetensors"
        part = {"checkpoint": checkpoint_id, "bytes_per_s": bytes_per_s}
        choice = None if export is None else export.to_json()
        async with self._room:
            copied = await loop.run_in_executor(
                self._copier, self._server.copy_slots, slots, 2 * PART_BYTES, stop, choice
            )
            return await loop.run_in_executor(
                self._writers, partial(_write, copied, storage, name, part, stop)
            )


def _write(
    copied: CopiedSlots,
    storage: SnapshotFolder,
    name: str,
    part: dict[str, Any],
    stop: Cancellation,
) -> PartWritten | None:
    """Write slots to the storage: in place if it is local."""
    if storage.is_local:
        return _write_to(storage.part_path(part["checkpoint"], name), copied, part, stop)
    with tempfile.TemporaryDirectory(prefix="backstay-checkpoint-") as folder:
        path = Path(folder) / name
        written = _write_to(path, copied, part, stop)
        if written is not None and written.file:
            storage.publish(part["checkpoint"], path, name)
        return written


def _write_to(
    path: Path, copied: CopiedSlots, part: dict[str, Any], stop: Cancellation
) -> PartWritten | None:
    written = json.loads(copied.write(json.dumps({**part, "path": str(path)}), stop))
    if not written["slots"]:
        return None
    name = path.name if written["bytes"] else ""
    return PartWritten(name, written["bytes"], written["sha256"], written["slots"])


def _yield_to_others(nice: int) -> None:
    """Let this thread run only when no other one wants to: pushes come first.

    On Linux a thread has a priority of its own; elsewhere it would be the whole process's.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
