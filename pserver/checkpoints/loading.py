"""A node loads the slots that the routing table lets it take from a checkpoint."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from backstay._native import DataServer
from backstay.checkpoint.chain import first_whole
from backstay.checkpoint.manifest import Manifest
from backstay.checkpoint.storage import CheckpointStorage
from backstay.consensus.records import RoutingTable
from backstay.errors import CheckpointDamaged, RequestRefused, text_of
from backstay.pserver.snapshots.disk import in_disk_thread

__all__ = ["LoadStep", "SlotLoader", "load_steps"]

# More than cores, up to four: some wait for the storage while others hash and put rows in.
LOADERS = min(4, (os.cpu_count() or 1) + 1)
RETRY_PAUSE_S = 1.0
# A load in which no file came for so long is told as trouble, so that another one may replace it.
STALL_S = 20.0
LOOK_S = 0.5
# Loads that hang and are not waited for any more; each keeps threads until its storage answers.
LEFT_MAX = 4

log = logging.getLogger(__name__)


class LoadStep(NamedTuple):
    """A file of a chain of checkpoints, with the slots that are wanted of it.

    Attributes:
        manifest: The checkpoint that it is of.
        part: Its index there.
        slots: The slots, ascending.
        whole: For each of them, whether the file has all its rows.
        last: Whether nothing comes behind.
    """

    manifest: Manifest
    part: int
    slots: tuple[int, ...]
    whole: tuple[bool, ...]
    last: bool


def load_steps(chain: Sequence[Manifest], slots: Sequence[int]) -> Iterator[list[LoadStep]]:
    """Yield what is to be read, checkpoint by checkpoint; those of one list in any order.

    For each slot it begins at the newest checkpoint of the chain that has it whole.
    """
    wanted = np.array(sorted(slots), dtype=np.int64)
    begins = first_whole(chain)[wanted]
    for at, manifest in enumerate(chain):
        parts: dict[int, list[int]] = defaultdict(list)
        for slot in wanted[begins <= at].tolist():
            parts[int(manifest.slots.part[slot])].append(slot)
        yield [
            LoadStep(
                manifest,
                part,
                tuple(some),
                tuple(bool(manifest.slots.whole[slot]) for slot in some),
                at == len(chain) - 1,
            )
            for part, some in sorted(parts.items())
        ]


class _Load:
    """One load: how far it is, and whether a call waits for it."""

    def __init__(self) -> None:
        self.files = 0
        self.is_left = False


class SlotLoader:
    """Loads what the newest routing table asks for, again and again until it is done."""

    def __init__(
        self,
        server: DataServer,
        apply_table: Callable[[str], object],
        tell_trouble: Callable[[str], None],
    ) -> None:
        """Prepare; call it while the event loop runs.

        Args:
            server: The data plane.
            apply_table: Takes a table in here, by its description.
            tell_trouble: Called with why slots cannot be loaded; with an empty string when they
                can.
        """
        self._server = server
        self._apply_table = apply_table
        self._tell_trouble = tell_trouble
        self._routing: RoutingTable | None = None
        self._news = asyncio.Event()
        # Loads that hang in a storage, and that a newer routing table does not want.
        self._left: set[asyncio.Future[None]] = set()

    def follow(self, routing: RoutingTable) -> None:
        """Go by a newer routing table; the data plane goes by it already."""
        self._routing = routing
        self._news.set()

    async def run(self) -> None:
        """Load whatever there is to load; never returns."""
        while True:
            await self._news.wait()
            self._news.clear()
            routing = self._routing
            wanted = self._wanted(routing) if routing is not None else {}
            if routing is None or not wanted:
                self._tell_trouble("")
                continue
            try:
                if not await self._load_or_leave(routing, wanted):
                    continue
                self._tell_trouble("")
                log.info("%d slots are loaded from a checkpoint", len(wanted))
            except RequestRefused as error:
                # A newer routing table may say otherwise by now; no room stays no room.
                log.warning("slots cannot be loaded now: %s", error)
                self._tell_trouble(text_of(error))
                await self._pause()
            except Exception as error:  # noqa: BLE001
                # Whatever a storage raises: it must not end the node.
                log.error("slots cannot be loaded from a checkpoint: %s", error)
                self._tell_trouble(text_of(error))
                await self._pause()

    async def _load_or_leave(self, routing: RoutingTable, wanted: dict[int, int]) -> bool:
        """Load in a thread; leave it alone if its storage hangs and another load is wanted.

        What a load that was left still brings is refused: its slots have other epochs by then.

        Returns:
            Whether it is done.
        """
        now_s = asyncio.get_running_loop().time
        load = _Load()
        work = asyncio.ensure_future(in_disk_thread(self._load, routing, wanted, load))
        files, since_s = 0, now_s()
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=LOOK_S)
                if load.files != files:
                    files, since_s = load.files, now_s()
                    self._tell_trouble("")
                if work.done() or now_s() - since_s < STALL_S:
                    continue
                self._tell_trouble(
                    f"{routing.restoring.url} has brought no file of checkpoint "
                    f"{routing.restoring.checkpoint} for {STALL_S:.0f} s; another restore may take "
                    "the place of this one"
                )
                newest = self._routing
                if newest is not None and self._wanted(newest) != wanted:
                    if len(self._left) < LEFT_MAX:
                        return False
                    self._tell_trouble(f"{LEFT_MAX} loads hang in their storage: restart this node")
        finally:
            if not work.done():
                load.is_left = True
                self._left.add(work)
                work.add_done_callback(self._forget)
                self._news.set()
        work.result()
        return True

    def _forget(self, work: asyncio.Future[None]) -> None:
        self._left.discard(work)
        if not work.cancelled() and (error := work.exception()) is not None:
            log.info("a load that was not waited for has ended: %s", error)

    async def _pause(self) -> None:
        await asyncio.sleep(RETRY_PAUSE_S)
        self._news.set()

    def _wanted(self, routing: RoutingTable) -> dict[int, int]:
        """Return the epochs of the slots that wait in the data plane to be loaded by this table.

        It may go by a newer table already, in which they come from another checkpoint: then their
        epochs differ.
        """
        restoring = set(routing.restoring.slots)
        return {
            slot: epoch
            for slot, epoch in self._server.to_load()
            if slot in restoring and epoch == int(routing.epoch_of_slot[slot])
        }

    def _load(self, routing: RoutingTable, epochs: Mapping[int, int], load: _Load) -> None:
        url, checkpoint, _ = routing.restoring
        storage = CheckpointStorage(url)
        chain = storage.chain(checkpoint)
        if chain[-1].slot_count != routing.slot_count:
            raise CheckpointDamaged(
                f"{checkpoint} has {chain[-1].slot_count} slots, this cluster {routing.slot_count}"
            )
        for spec in chain[-1].tables:
            self._apply_table(spec.to_json())
        with (
            tempfile.TemporaryDirectory(prefix="backstay-restore-") as folder,
            ThreadPoolExecutor(LOADERS, thread_name_prefix="restore") as threads,
        ):
            for steps in load_steps(chain, list(epochs)):
                # The first failure is raised here; the rest of the step is finished first.
                list(
                    threads.map(
                        lambda step: self._load_part(storage, step, epochs, Path(folder), load),
                        steps,
                    )
                )

    def _load_part(
        self,
        storage: CheckpointStorage,
        step: LoadStep,
        epochs: Mapping[int, int],
        folder: Path,
        load: _Load,
    ) -> None:
        if load.is_left:
            return
        part = step.manifest.parts[step.part]
        path = storage.fetch_part(step.manifest, step.part, folder)
        slots = [
            {"slot": slot, "epoch": epochs[slot], "whole": whole, "last": step.last}
            for slot, whole in zip(step.slots, step.whole, strict=True)
        ]
        request = {
            "path": str(path),
            "bytes": part.bytes,
            "sha256": part.sha256,
            "slots": slots,
        }
        self._server.load_part(json.dumps(request))
        load.files += 1
        if not storage.is_local:
            path.unlink()
