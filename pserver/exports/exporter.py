"""Writes one export: the controller has the masters write full snapshots and deltas.

The newest snapshot says all that the next one needs, so another node can go on from it. Pushes wait
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

from backstay.checkpoint.chain import EXPORT_RULE, full_is_due
from backstay.checkpoint.manifest import ExportChoice, Manifest, Prefix, new_id, number_of
from backstay.checkpoint.retention import surplus_of_export
from backstay.checkpoint.storage import ExportFolder
from backstay.consensus import ClusterView, RoutingTable
from backstay.consensus.records.exports import ExportRecord, tables_of_exports
from backstay.errors import BackstayError, CheckpointDamaged, CheckpointUnavailable, text_of
from backstay.pserver.metrics.export_figures import ExportCounter
from backstay.pserver.snapshots.disk import in_disk_thread
from backstay.pserver.snapshots.gathering import Gathered, SlotGatherer, refuse_anew
from backstay.pserver.snapshots.writer import (
    SnapshotOrder,
    SnapshotWriter,
    next_number,
    remove_unfinished,
)
from backstay.tables import TableSpec
from backstay.tasks import end_tasks

__all__ = ["Exporter", "why_a_new_chain"]

# The least time that a delta waits for slots without a master.
GIVE_UP_S = 1.0

log = logging.getLogger(__name__)


def why_a_new_chain(
    newest: Manifest | None,
    record: ExportRecord,
    specs: Mapping[str, TableSpec],
    cluster_uid: str,
    generation: int,
) -> str:
    """Return why the next snapshot must be a full one that begins a chain; empty: it need not.

    Pure.

    Args:
        newest: What the deltas so far end with; None: there is nothing to build on.
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
    if record.spec.topic is not None:
        # It has what the function makes of rows, of those that did not change too.
        pulled = [one.name for one in newest.tables if one.pull != specs[one.name].pull]
        if pulled:
            return f"a pull of table {pulled[0]} goes through another function"
    if record.spec.score_at_least is None:
        return ""
    # Rows that did not change may come or go by it.
    scored = [one.name for one in newest.tables if _score_of(one) != _score_of(specs[one.name])]
    return f"the rows of table {scored[0]} have another score" if scored else ""


def _score_of(spec: TableSpec) -> object:
    return None if spec.lifetime is None else spec.lifetime.score


class _RowsBeganAnew(Exception):
    """Slots of a delta have a newer epoch than those that it builds on."""


@dataclass(frozen=True)
class _Full:
    """The newest whole full snapshot, and the bytes of the deltas after it, by number."""

    id: str
    bytes: int
    since: Mapping[int, int]

    def with_delta(self, delta: Manifest) -> _Full:
        return _Full(self.id, self.bytes, {**self.since, delta.number: delta.total_bytes})

    def is_next_due(self, newest: int) -> bool:
        """Return whether another one is due; ``newest`` is the number of the newest delta."""
        deltas = newest - number_of(self.id)
        return full_is_due(EXPORT_RULE, deltas, sum(self.since.values()), self.bytes)


class Exporter:
    """Writes the snapshots of one export while this node is the controller."""

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
        # What the next delta builds on.
        self._newest: Manifest | None = None
        self._full: _Full | None = None
        self._compaction: asyncio.Task[None] | None = None

    async def write(self) -> Manifest | None:
        """Write the next snapshot: a delta, or the full one of a new chain.

        Returns:
            The snapshot; None if the export has no table yet.

        Raises:
            BackstayError: It could not be written; the next call tries again.
        """
        snapshot = self._view.snapshot()
        routing = snapshot.routing
        if routing is None:
            raise CheckpointUnavailable("this node knows no routing yet")
        names = tables_of_exports(snapshot.exports, snapshot.tables).get(self._record.name, ())
        there = {spec.name: spec for spec in self._specs()}
        specs = {name: there[name] for name in names if name in there}
        if not specs:
            return None
        folder = self._folder or await self._resume()
        newest, record = self._newest, self._record
        reason = why_a_new_chain(newest, record, specs, self._cluster_uid, routing.generation)
        if not reason and newest is not None:
            try:
                return await self._write_delta(folder, newest, specs, routing)
            except _RowsBeganAnew:
                # This node's view was older than that of the masters.
                reason = "rows were restored or lost"
        await self._end_compaction()
        self._newest = await self._write_full(folder, specs, routing, reason)
        return self._newest

    async def close(self) -> None:
        """End what is under way."""
        await self._end_compaction()

    async def _resume(self) -> ExportFolder:
        """Find out what is there, and remove what earlier writers did not finish."""
        folder = await in_disk_thread(ExportFolder, self._record.spec.url)
        self._next_number = await in_disk_thread(next_number, folder)
        try:
            newest, full = await in_disk_thread(_newest_of, folder)
        except CheckpointDamaged as error:
            log.error("a new chain of export %s begins: %s", self._record.name, error)
            newest = full = None
        self._newest, self._full = newest, full
        if newest is not None and newest.run == self._record.run:
            self._counter.known(newest.number, newest.begun)
        await in_disk_thread(remove_unfinished, folder)
        self._folder = folder
        return folder

    async def _write_delta(
        self,
        folder: ExportFolder,
        newest: Manifest,
        specs: Mapping[str, TableSpec],
        routing: RoutingTable,
    ) -> Manifest:
        epoch = newest.slots.epoch
        order = SnapshotOrder(
            before=newest,
            choice=self._choice(specs),
            give_up_s=max(self._record.spec.every_s, GIVE_UP_S),
            first=frozenset(newest.left_out),
        )

        def check(gathered: Gathered) -> None:
            if not gathered.written:
                raise CheckpointUnavailable("no master answers")
            if any(one.epoch != epoch[slot] for slot, one in gathered.written.items()):
                raise _RowsBeganAnew

        delta = await self._write_one(folder, order, specs, check, newest.generation, of=newest)
        self._newest = delta
        # Another full snapshot may have been finished meanwhile.
        assert self._full is not None
        self._full = full = self._full.with_delta(delta)
        is_due = full.is_next_due(delta.number)
        if self._compaction is None and (is_due or await self._has_lost(folder, full.id)):
            self._compaction = asyncio.ensure_future(self._compact(folder, specs, routing))
        return delta

    async def _has_lost(self, folder: ExportFolder, full: str) -> bool:
        """Whether somebody has removed the full one: who begins to follow needs another one."""
        if await in_disk_thread(folder.is_finished, full):
            return False
        log.warning("export %s: base %s is there no more: another one", self._record.name, full)
        return True

    async def _compact(
        self, folder: ExportFolder, specs: Mapping[str, TableSpec], routing: RoutingTable
    ) -> None:
        """Write a full snapshot beside the deltas."""
        try:
            await self._write_full(folder, specs, routing, "")
        except Exception as error:  # noqa: BLE001
            # Whatever a storage raises: the deltas go on, and it is tried again after the next.
            self._counter.failed()
            log.warning(
                "export %s: no new base could be written: %s", self._record.name, text_of(error)
            )
        finally:
            self._compaction = None

    async def _end_compaction(self) -> None:
        if self._compaction is not None:
            await end_tasks(self._compaction)
            self._compaction = None

    async def _write_full(
        self,
        folder: ExportFolder,
        specs: Mapping[str, TableSpec],
        routing: RoutingTable,
        reason: str,
    ) -> Manifest:
        """Write a full snapshot; with a reason it begins a chain."""
        rate = self._view.snapshot().settings.checkpoint_bytes_per_s
        order = SnapshotOrder(choice=self._choice(specs), bytes_per_s=rate)

        def check(gathered: Gathered) -> None:
            refuse_anew(gathered.of_export(None).epoch, routing)

        full = await self._write_one(
            folder,
            order,
            specs,
            check,
            routing.generation,
            of=None if reason else self._newest,
            reason=reason,
        )
        since = {} if self._full is None or reason else self._full.since
        newer = {number: size for number, size in since.items() if number > full.number}
        self._full = _Full(full.id, full.total_bytes, newer)
        log.info(
            "export %s: base %s is written: %d rows, %d bytes%s",
            self._record.name,
            full.id,
            full.rows,
            full.total_bytes,
            f"; {reason}" if reason else "",
        )
        await in_disk_thread(_thin_out, folder)
        return full

    async def _write_one(
        self,
        folder: ExportFolder,
        order: SnapshotOrder,
        specs: Mapping[str, TableSpec],
        check: Callable[[Gathered], None],
        generation: int,
        *,
        of: Manifest | None,
        reason: str = "",
    ) -> Manifest:
        """Write a snapshot of the chain that another one is of, or of one that it begins."""
        begun = time.time()
        prefix: Prefix = "base" if order.before is None else "inc"
        snapshot = new_id(self._next_number, secrets.token_hex(3), prefix)
        # Whatever becomes of it: another writer may have seen the number.
        self._next_number += 1

        async def manifest_of(gathered: Gathered) -> Manifest:
            check(gathered)
            size = sum(part.bytes for part in gathered.parts)
            full = None if order.before is None else self._full
            return Manifest(
                id=snapshot,
                run=self._record.run,
                chain=snapshot if of is None else of.chain,
                base=None if full is None else full.id,
                reason=reason if of is None else of.reason,
                cluster=self._view.cluster_id,
                cluster_uid=self._cluster_uid,
                generation=generation,
                begun=begun,
                every_s=self._record.spec.every_s,
                choice=order.choice,
                tables=tuple(specs.values()),
                parts=tuple(gathered.parts),
                slots=gathered.of_export(order.before),
                left_out=tuple(sorted(gathered.todo)),
                base_bytes=size if full is None else full.bytes,
                bytes_since_base=0 if full is None else sum(full.since.values()) + size,
            )

        writer = SnapshotWriter(self._gatherer, folder, self._record.spec.url)
        written = await writer.write(snapshot, order, manifest_of)
        self._counter.written(
            "base" if written.kind == "full" else "increment",
            written.number,
            written.begun,
            written.rows,
            written.total_bytes,
        )
        return written

    def _choice(self, specs: Mapping[str, TableSpec]) -> ExportChoice:
        return ExportChoice(
            tuple(specs), self._record.spec.statistics, self._record.spec.score_at_least
        )


def _newest_of(folder: ExportFolder) -> tuple[Manifest | None, _Full | None]:
    """Return what deltas build on, and the newest whole full snapshot.

    Raises:
        CheckpointDamaged: A manifest that is needed is damaged.
    """
    newest = folder.newest()
    if newest is None:
        return None, None
    full = _Full(newest.newest_full, newest.base_bytes, {newest.number: newest.bytes_since_base})
    if newest.kind == "delta":
        return newest, full
    # A full snapshot that was written beside deltas may be newer than these, which go on all the
    # same.
    for name in reversed(folder.names()):
        if number_of(name) < number_of(newest.chain):
            break
        found = folder.read(name) if number_of(name) < newest.number else None
        if found is not None and found.chain == newest.chain:
            return found, full
    return newest, full


def _thin_out(folder: ExportFolder) -> None:
    """Remove what is kept no longer."""
    try:
        for old in surplus_of_export(folder.ids()):
            folder.delete(old)
    except BackstayError as error:
        log.warning("old snapshots could not be removed: %s", error)
