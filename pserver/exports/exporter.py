"""Writes one export: the controller asks the masters for bases and increments.

The newest element says all that the next one needs, so another node can go on from it. Pushes wait
neither for the export nor for a folder that is away: masters mark the rows that change, and the
next increment has them all. See docs/internals/exports.md.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from backstay._proto.v1 import checkpoint_pb2
from backstay.checkpoint.chain import EXPORT_RULE, full_is_due
from backstay.checkpoint.manifest import (
    NO_PART,
    ExportChoice,
    Manifest,
    Prefix,
    SlotEntries,
    new_id,
    number_of,
)
from backstay.checkpoint.retention import surplus_of_export
from backstay.checkpoint.storage import ExportFolder
from backstay.consensus import ClusterView, RoutingTable
from backstay.consensus.records.exports import ExportRecord, tables_of_exports
from backstay.errors import BackstayError, CheckpointDamaged, CheckpointUnavailable
from backstay.pserver.metrics.export_figures import ExportCounter
from backstay.pserver.snapshots.disk import in_disk_thread
from backstay.pserver.snapshots.gathering import Gathered, SlotGatherer, refuse_anew
from backstay.tables import TableSpec
from backstay.tasks import end_tasks

__all__ = ["Exporter", "why_a_new_chain"]

# The least time that an increment waits for slots without a master.
GIVE_UP_S = 1.0

log = logging.getLogger(__name__)


def why_a_new_chain(
    newest: Manifest | None,
    record: ExportRecord,
    specs: Mapping[str, TableSpec],
    cluster_uid: str,
    generation: int,
) -> str:
    """Return why the next element must be a base that begins a chain; empty: it need not. Pure.

    Args:
        newest: What the increments so far end with; None: there is nothing to build on.
        record: The export as it is wanted.
        specs: Its tables as they are, by name, sorted.
        cluster_uid: Of this cluster.
        generation: Of its rows.
    """
    if newest is None or newest.cluster_uid != cluster_uid or newest.run != record.run:
        return "the export was started"
    if newest.generation != generation:
        return f"rows were restored or lost: generation {generation}, before {newest.generation}"
    if [one.name for one in newest.tables] != list(specs):
        return "there are other tables"
    changed = [one.name for one in newest.tables if one.kind != specs[one.name].kind]
    if changed:
        return f"table {changed[0]} is another one"
    if record.topic is not None:
        # It has what the function makes of rows, of those that did not change too.
        pulled = [one.name for one in newest.tables if one.pull != specs[one.name].pull]
        if pulled:
            return f"a pull of table {pulled[0]} goes through another function"
    if record.score_at_least is None:
        return ""
    # Rows that did not change may come or go by it.
    scored = [one.name for one in newest.tables if _score_of(one) != _score_of(specs[one.name])]
    return f"the rows of table {scored[0]} have another score" if scored else ""


def _score_of(spec: TableSpec) -> object:
    return None if spec.lifetime is None else spec.lifetime.score


class _RowsBeganAnew(Exception):
    """Slots of an increment have a newer epoch than those that it builds on."""


@dataclass(frozen=True)
class _Base:
    """The newest whole base, and what the increments after it have, in bytes by number."""

    id: str
    bytes: int
    since: Mapping[int, int]

    def with_increment(self, element: Manifest) -> _Base:
        return _Base(self.id, self.bytes, {**self.since, element.number: element.total_bytes})


class Exporter:
    """Writes the elements of one export while this node is the controller."""

    def __init__(
        self,
        record: ExportRecord,
        *,
        view: ClusterView,
        gatherer: SlotGatherer,
        specs: Callable[[], list[TableSpec]],
        cluster_uid: str,
        counter: ExportCounter,
    ) -> None:
        """Prepare.

        Args:
            record: The export.
            view: The cluster as this node sees it.
            gatherer: Asks the masters.
            specs: Says which tables there are.
            cluster_uid: Which cluster this is.
            counter: Counts what is written.
        """
        self._record = record
        self._counter = counter
        self._view = view
        self._gatherer = gatherer
        self._specs = specs
        self._cluster_uid = cluster_uid
        self._folder: ExportFolder | None = None
        self._next_number = 1
        # What the next increment builds on.
        self._newest: Manifest | None = None
        self._base: _Base | None = None
        self._compaction: asyncio.Task[None] | None = None

    async def write(self) -> Manifest | None:
        """Write the next element: an increment, or the base of a new chain.

        Returns:
            The element; None if the export has no table yet.

        Raises:
            BackstayError: It could not be written; the next call tries again.
        """
        snapshot = self._view.snapshot()
        routing = snapshot.routing
        if routing is None:
            raise CheckpointUnavailable("this node knows no routing yet")
        names = tables_of_exports(snapshot.exports, snapshot.tables).get(self._record.name, ())
        known = {spec.name: spec for spec in self._specs()}
        specs = {name: known[name] for name in names if name in known}
        if not specs:
            return None
        if self._folder is None:
            await self._resume()
        newest, record = self._newest, self._record
        reason = why_a_new_chain(newest, record, specs, self._cluster_uid, routing.generation)
        if not reason and newest is not None:
            try:
                return await self._increment(newest, specs, routing)
            except _RowsBeganAnew:
                # This node's view was older than that of the masters.
                reason = "rows were restored or lost"
        await self._end_compaction()
        base = await self._write_base(specs, routing, reason)
        self._newest = base
        return base

    async def close(self) -> None:
        """End what is under way."""
        await self._end_compaction()

    async def _resume(self) -> None:
        """Find out what is there, and remove what earlier writers did not finish."""
        folder = await in_disk_thread(ExportFolder, self._record.url)
        names = await in_disk_thread(folder.names)
        self._next_number = 1 + max(map(number_of, names), default=0)
        try:
            newest, base = await in_disk_thread(_newest_of, folder)
        except CheckpointDamaged as error:
            log.error("a new chain of export %s begins: %s", self._record.name, error)
            newest = base = None
        self._newest, self._base = newest, base
        if newest is not None and newest.run == self._record.run:
            self._counter.known(newest.number, newest.begun)
        await in_disk_thread(_remove_unfinished, folder, names)
        self._folder = folder

    async def _increment(
        self, newest: Manifest, specs: Mapping[str, TableSpec], routing: RoutingTable
    ) -> Manifest:
        assert self._base is not None
        begun = time.time()
        position = newest.slots.position.tolist()
        epoch = newest.slots.epoch.tolist()
        snapshot = await self._begin("inc")

        def request(slots: list[int]) -> checkpoint_pb2.WriteSlotsRequest:
            bases = [
                checkpoint_pb2.SlotBase(
                    slot=slot, has_base=True, position=position[slot], epoch=epoch[slot]
                )
                for slot in slots
            ]
            asked = self._request(snapshot, bases, specs)
            asked.completed.extend(position)
            return asked

        try:
            give_up_s = max(self._record.every_s, GIVE_UP_S)
            first = set(newest.left_out)
            gathered = await self._gatherer.gather(request, give_up_s=give_up_s, first=first)
            if not gathered.written:
                raise CheckpointUnavailable("no master answers")
            if any(one.epoch != epoch[slot] for slot, one in gathered.written.items()):
                raise _RowsBeganAnew
            base = self._base
            element = self._element(
                snapshot,
                gathered,
                specs,
                begun=begun,
                generation=newest.generation,
                before=newest,
                chain=newest.chain,
                reason=newest.reason,
                base=base,
            )
            await self._finish(element)
        except BaseException:
            await self._discard(snapshot)
            raise
        self._newest = element
        self._base = base = self._base.with_increment(element)
        if self._compaction is None and (_is_full_due(element) or await self._has_lost(base.id)):
            self._compaction = asyncio.ensure_future(self._compact(specs, routing))
        return element

    async def _has_lost(self, base: str) -> bool:
        """Whether somebody has removed the base: who begins to follow needs another one."""
        assert self._folder is not None
        if await in_disk_thread(self._folder.is_finished, base):
            return False
        log.warning("export %s: base %s is there no more: another one", self._record.name, base)
        return True

    async def _compact(self, specs: Mapping[str, TableSpec], routing: RoutingTable) -> None:
        """Write a base beside the increments."""
        try:
            await self._write_base(specs, routing, "")
        except Exception as error:  # noqa: BLE001
            # Whatever a storage raises: the increments go on, and it is tried again after the next.
            self._counter.failed()
            log.warning("export %s: no new base could be written: %s", self._record.name, error)
        finally:
            self._compaction = None

    async def _end_compaction(self) -> None:
        if self._compaction is not None:
            await end_tasks(self._compaction)
            self._compaction = None

    async def _write_base(
        self, specs: Mapping[str, TableSpec], routing: RoutingTable, reason: str
    ) -> Manifest:
        """Write a base; with a reason it begins a chain."""
        begun = time.time()
        snapshot = await self._begin("base")

        def request(slots: list[int]) -> checkpoint_pb2.WriteSlotsRequest:
            return self._request(
                snapshot, [checkpoint_pb2.SlotBase(slot=slot) for slot in slots], specs
            )

        try:
            gathered = await self._gatherer.gather(request)
            before = None if reason else self._newest
            element = self._element(
                snapshot,
                gathered,
                specs,
                begun=begun,
                generation=routing.generation,
                reason=reason if before is None else before.reason,
                chain=snapshot if before is None else before.chain,
            )
            refuse_anew(element.slots.epoch, routing)
            await self._finish(element)
        except BaseException:
            await self._discard(snapshot)
            raise
        since = {} if self._base is None or reason else self._base.since
        newer = {number: size for number, size in since.items() if number > element.number}
        self._base = _Base(snapshot, element.total_bytes, newer)
        log.info(
            "export %s: base %s is written: %d rows, %d bytes%s",
            self._record.name,
            snapshot,
            element.rows,
            element.total_bytes,
            f"; {reason}" if reason else "",
        )
        assert self._folder is not None
        await in_disk_thread(_thin_out, self._folder)
        return element

    def _element(
        self,
        snapshot: str,
        gathered: Gathered,
        specs: Mapping[str, TableSpec],
        *,
        begun: float,
        generation: int,
        chain: str,
        reason: str,
        before: Manifest | None = None,
        base: _Base | None = None,
    ) -> Manifest:
        """Put the manifest together; ``before`` is what an increment builds on."""
        size = sum(part.bytes for part in gathered.parts)
        return Manifest(
            id=snapshot,
            run=self._record.run,
            chain=chain,
            base=None if base is None else base.id,
            reason=reason,
            cluster=self._view.cluster_id,
            cluster_uid=self._cluster_uid,
            generation=generation,
            begun=begun,
            every_s=self._record.every_s,
            choice=self._choice(specs),
            tables=tuple(specs.values()),
            parts=tuple(gathered.parts),
            slots=_slot_entries(gathered, before),
            left_out=tuple(sorted(gathered.todo)),
            base_bytes=size if base is None else base.bytes,
            bytes_since_base=0 if base is None else sum(base.since.values()) + size,
        )

    def _choice(self, specs: Mapping[str, TableSpec]) -> ExportChoice:
        return ExportChoice(tuple(specs), self._record.statistics, self._record.score_at_least)

    def _request(
        self,
        element: str,
        slots: list[checkpoint_pb2.SlotBase],
        specs: Mapping[str, TableSpec],
    ) -> checkpoint_pb2.WriteSlotsRequest:
        rate = self._view.snapshot().settings.checkpoint_bytes_per_s
        return checkpoint_pb2.WriteSlotsRequest(
            url=self._record.url,
            id=element,
            slots=slots,
            bytes_per_s=0 if slots[0].has_base else rate,
            export=checkpoint_pb2.ExportChoice(
                tables=list(specs),
                statistics=self._record.statistics,
                score_at_least=self._record.score_at_least,
            ),
        )

    async def _begin(self, prefix: Prefix) -> str:
        assert self._folder is not None
        snapshot = new_id(self._next_number, secrets.token_hex(3), prefix)
        # Whatever becomes of it: another writer may have seen the number.
        self._next_number += 1
        await in_disk_thread(self._folder.create, snapshot)
        return snapshot

    async def _finish(self, element: Manifest) -> None:
        assert self._folder is not None
        # Its outcome must be known: what is half written would be removed.
        finishing = asyncio.ensure_future(in_disk_thread(self._folder.write_manifest, element))
        try:
            await asyncio.shield(finishing)
        except asyncio.CancelledError:
            await asyncio.wait({finishing})
            raise
        self._counter.written(
            "base" if element.kind == "full" else "increment",
            element.number,
            element.begun,
            element.rows,
            element.total_bytes,
        )

    async def _discard(self, element: str) -> None:
        assert self._folder is not None
        await asyncio.shield(in_disk_thread(_remove_half, self._folder, element))


def _is_full_due(newest: Manifest) -> bool:
    deltas = newest.number - number_of(newest.newest_full)
    return full_is_due(EXPORT_RULE, deltas, newest.bytes_since_base, newest.base_bytes)


def _slot_entries(gathered: Gathered, before: Manifest | None) -> SlotEntries:
    """Return what a snapshot has of each slot; of one that is left out, nothing since before."""
    count = len(gathered.written) + len(gathered.todo)
    none = np.zeros(count, np.uint64)
    position = none.copy() if before is None else before.slots.position.copy()
    epoch = none.copy() if before is None else before.slots.epoch.copy()
    part, whole = np.full(count, NO_PART), np.zeros(count, np.bool_)
    since, rows = position.copy(), none
    for slot, one in gathered.written.items():
        part[slot], position[slot], epoch[slot] = one.part, one.position, one.epoch
        whole[slot], rows[slot] = one.whole, one.rows
    since[whole] = 0
    return SlotEntries(part, position, epoch, whole, rows, since)


def _newest_of(folder: ExportFolder) -> tuple[Manifest | None, _Base | None]:
    """Return what increments build on, and the newest whole base.

    Raises:
        CheckpointDamaged: A manifest that is needed is damaged.
    """
    newest = folder.newest()
    if newest is None:
        return None, None
    base = _Base(newest.newest_full, newest.base_bytes, {newest.number: newest.bytes_since_base})
    if newest.kind == "delta":
        return newest, base
    # A base that was written beside increments may be newer than these, which go on all the same.
    for name in reversed(folder.names()):
        if number_of(name) < number_of(newest.chain):
            break
        found = folder.read(name) if number_of(name) < newest.number else None
        if found is not None and found.chain == newest.chain:
            return found, base
    return newest, base


def _remove_unfinished(folder: ExportFolder, names: list[str]) -> None:
    for name in names:
        if not folder.is_finished(name):
            log.info("element %s was never finished and is removed", name)
            folder.delete(name)


def _remove_half(folder: ExportFolder, element: str) -> None:
    """Remove an element that was given up, unless it is whole after all."""
    try:
        if not folder.is_finished(element):
            folder.delete(element)
    except BackstayError as error:
        log.warning("the unfinished element %s could not be removed: %s", element, error)


def _thin_out(folder: ExportFolder) -> None:
    """Remove what is kept no longer."""
    try:
        for old in surplus_of_export(folder.ids()):
            folder.delete(old)
    except BackstayError as error:
        log.warning("old elements could not be removed: %s", error)
