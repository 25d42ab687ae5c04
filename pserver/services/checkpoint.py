"""``CheckpointService``: writing, looking at and restoring checkpoints."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from grpc import aio

from backstay._proto.v1 import checkpoint_pb2, checkpoint_pb2_grpc
from backstay.checkpoint.catalogue import catalogue
from backstay.checkpoint.manifest import ExportChoice, Kind, Manifest
from backstay.checkpoint.storage import CheckpointStorage
from backstay.checkpoint.verification import verify
from backstay.consensus import ClusterView
from backstay.consensus.records.keys import Keys
from backstay.consensus.store import CoordinationStore
from backstay.errors import (
    CheckpointNotFound,
    CheckpointRefused,
    InvalidRequest,
    ServerUnavailable,
)
from backstay.pserver.checkpoints.jobs import refuse_while_jobs_go_on
from backstay.pserver.checkpoints.restoring import choose, request_restore
from backstay.pserver.checkpoints.saving import LOCK_WAIT_S, SaveKind, Saver
from backstay.pserver.snapshots.disk import in_disk_thread
from backstay.pserver.snapshots.writing import Base, SlotWriter

__all__ = ["CheckpointParts", "CheckpointService", "checkpoint_message"]

_KINDS: Mapping[checkpoint_pb2.CheckpointKind.ValueType, SaveKind] = {
    checkpoint_pb2.CHECKPOINT_KIND_UNSPECIFIED: "auto",
    checkpoint_pb2.CHECKPOINT_KIND_FULL: "full",
    checkpoint_pb2.CHECKPOINT_KIND_INCREMENTAL: "incremental",
}
# Between two words about how it goes.
LOOK_S = 0.2


@dataclass(frozen=True)
class CheckpointParts:
    """What the service works with."""

    store: CoordinationStore
    keys: Keys
    view: ClusterView
    saver: Saver
    writer: SlotWriter
    increments: SlotWriter
    create_table: Callable[[str], Awaitable[object]]


class CheckpointService(checkpoint_pb2_grpc.CheckpointServiceServicer):
    """Answers for the cluster's checkpoints; files are touched in threads."""

    def __init__(self, parts: CheckpointParts) -> None:
        """Prepare."""
        self._parts = parts

    async def Save(  # noqa: N802 (the name is the service's)
        self,
        request: checkpoint_pb2.SaveRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[checkpoint_pb2.SaveProgress]:
        """Write a checkpoint and tell how it goes."""
        parts = self._parts
        url = parts.view.snapshot().settings.checkpoint_url
        progress = checkpoint_pb2.SaveProgress(url=url)

        def tell(done: int, total: int, size: int) -> None:
            progress.slots_done, progress.slots_total, progress.bytes = done, total, size

        saving = asyncio.ensure_future(
            parts.saver.save(
                _KINDS[request.kind],
                tags=_object("tags", request.tags_json),
                progress=_object("progress", request.progress_json),
                tell=tell,
                url=url,
            )
        )
        async for _ in _until_done(saving):
            yield progress
        progress.saved.CopyFrom(checkpoint_message(saving.result()))
        yield progress

    async def WriteSlots(  # noqa: N802
        self,
        request: checkpoint_pb2.WriteSlotsRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> checkpoint_pb2.WriteSlotsResponse:
        """Write slots that this node masters."""
        bases = {
            one.slot: Base(one.position, one.epoch) if one.has_base else None
            for one in request.slots
        }
        parts, export = self._parts, None
        writer = parts.writer
        if request.HasField("export"):
            chosen = request.export
            least = chosen.score_at_least if chosen.HasField("score_at_least") else None
            export = ExportChoice(tuple(chosen.tables), chosen.statistics, least)
            # They must not wait for the files of a base or a checkpoint.
            writer = parts.increments if all(bases.values()) else writer
            if request.completed:
                await writer.export_completed(list(request.completed), export.tables)
        written = await writer.write(request.url, request.id, bases, request.bytes_per_s, export)
        return checkpoint_pb2.WriteSlotsResponse(
            parts=[
                checkpoint_pb2.WrittenPart(
                    file=part.file,
                    bytes=part.bytes,
                    sha256=part.sha256,
                    slots=[checkpoint_pb2.WrittenSlot(**slot) for slot in part.slots],
                )
                for part in written
            ]
        )

    async def List(  # noqa: N802
        self,
        request: checkpoint_pb2.ListCheckpointsRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> checkpoint_pb2.ListCheckpointsResponse:
        """Return the checkpoints of a folder."""
        url, save = self._url(request.url), self._parts.view.snapshot().save

        def read() -> checkpoint_pb2.ListCheckpointsResponse:
            storage = CheckpointStorage(url)
            # What is being written is no leftover.
            left = [one for one in storage.unfinished() if save is None or one != save.id]
            answer = checkpoint_pb2.ListCheckpointsResponse(url=storage.url, unfinished=left)
            for one in catalogue(storage):
                if one.manifest is not None and not one.problem:
                    answer.checkpoints.append(checkpoint_message(one.manifest))
                else:
                    answer.damaged.append(f"{one.id}: {one.problem}")
            return answer

        return await in_disk_thread(read)

    async def Show(  # noqa: N802
        self,
        request: checkpoint_pb2.ShowCheckpointRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> checkpoint_pb2.ShowCheckpointResponse:
        """Return one checkpoint."""
        url = self._url(request.url)

        def read() -> checkpoint_pb2.ShowCheckpointResponse:
            storage = CheckpointStorage(url)
            chain = storage.chain(_id_or_newest(storage, request.id))
            return checkpoint_pb2.ShowCheckpointResponse(
                checkpoint=checkpoint_message(chain[-1]),
                chain=[one.id for one in chain],
                progress_json=json.dumps(dict(chain[-1].progress)),
            )

        return await in_disk_thread(read)

    async def Verify(  # noqa: N802
        self,
        request: checkpoint_pb2.VerifyCheckpointRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[checkpoint_pb2.VerifyProgress]:
        """Read every file of a checkpoint and tell what is wrong."""
        storage = await in_disk_thread(CheckpointStorage, self._url(request.url))
        checkpoint_id = await in_disk_thread(_id_or_newest, storage, request.id)
        answer = checkpoint_pb2.VerifyProgress(id=checkpoint_id)

        def tell(done: int, total: int) -> None:
            answer.bytes_done, answer.bytes_total = done, total

        verifying = asyncio.ensure_future(
            in_disk_thread(verify, storage, checkpoint_id, progress=tell)
        )
        async for _ in _until_done(verifying):
            yield answer
        answer.done = True
        answer.problems.extend(verifying.result().complaints)
        yield answer

    async def Delete(  # noqa: N802
        self,
        request: checkpoint_pb2.DeleteCheckpointRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> checkpoint_pb2.DeleteCheckpointResponse:
        """Remove a checkpoint that no other one needs."""
        parts, url = self._parts, self._url(request.url)
        storage = await in_disk_thread(CheckpointStorage, url)
        await parts.saver.delete(storage, request.id)
        return checkpoint_pb2.DeleteCheckpointResponse()

    async def Restore(  # noqa: N802
        self,
        request: checkpoint_pb2.RestoreRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> checkpoint_pb2.RestoreResponse:
        """Let slots take their content from a checkpoint."""
        parts = self._parts
        routing = parts.view.snapshot().routing
        if routing is None:
            raise ServerUnavailable("this node knows no routing yet; repeat the call")
        wrong = [slot for slot in request.slots if slot >= routing.slot_count]
        if wrong:
            raise InvalidRequest(f"slot {wrong[0]} does not exist: there are {routing.slot_count}")
        if request.slots and not request.allow_inexact:
            await refuse_while_jobs_go_on(parts.store)
        storage = await in_disk_thread(CheckpointStorage, self._url(request.url))
        lock = parts.saver.lock
        # Nothing is removed, and nothing newer is written, between the choice and the plan.
        held = await lock.acquire(request.id or "the newest, to be restored", wait_s=LOCK_WAIT_S)
        try:
            chosen = await in_disk_thread(
                lambda: choose(
                    storage, request.id, slot_count=routing.slot_count, fallback=request.fallback
                )
            )
            plan = await request_restore(
                parts.store,
                parts.keys,
                chosen,
                url=storage.url,
                slots=request.slots,
                create_table=parts.create_table,
                is_stuck=any(one.load_trouble for one in parts.view.snapshot().reports.values()),
            )
        finally:
            await asyncio.shield(lock.release(held))
        return checkpoint_pb2.RestoreResponse(id=plan.checkpoint, passed_over=chosen.passed_over)

    async def GetRestore(  # noqa: N802
        self,
        request: checkpoint_pb2.GetRestoreRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> checkpoint_pb2.GetRestoreResponse:
        """Tell how the last restore goes."""
        snapshot = self._parts.view.snapshot()
        plan, routing = snapshot.restore, snapshot.routing
        generation = routing.generation if routing is not None else 0
        if plan is None:
            return checkpoint_pb2.GetRestoreResponse(generation=generation)
        left = len(routing.restoring.slots) if routing is not None else 0
        trouble = sorted({one.load_trouble for one in snapshot.reports.values()} - {""})
        return checkpoint_pb2.GetRestoreResponse(
            id=plan.checkpoint,
            url=plan.url,
            state=plan.state,
            slots_left=left,
            trouble="; ".join(trouble),
            version=plan.version,
            generation=generation,
            done_generation=plan.generation,
            slots=len(plan.slots),
            created=plan.created,
            lost_slots=plan.lost,
        )

    def _url(self, asked: str) -> str:
        """Return the folder that a request is about."""
        url = asked or self._parts.view.snapshot().settings.checkpoint_url
        if not url:
            raise CheckpointRefused(
                "no folder for checkpoints is set: pserverctl config set "
                "checkpoint_url=/shared/folder (or a URL)"
            )
        return url


def checkpoint_message(manifest: Manifest) -> checkpoint_pb2.Checkpoint:
    """Return what callers are told of a checkpoint."""
    kinds: dict[Kind, checkpoint_pb2.CheckpointKind.ValueType] = {
        "full": checkpoint_pb2.CHECKPOINT_KIND_FULL,
        "delta": checkpoint_pb2.CHECKPOINT_KIND_INCREMENTAL,
    }
    return checkpoint_pb2.Checkpoint(
        id=manifest.id,
        kind=kinds[manifest.kind],
        base=manifest.base or "",
        created=manifest.created,
        cluster=manifest.cluster,
        slot_count=manifest.slot_count,
        rows=manifest.rows,
        bytes=manifest.total_bytes,
        files=len(manifest.parts),
        tables=[spec.name for spec in manifest.tables],
        tags_json=json.dumps(dict(manifest.tags)),
    )


async def _until_done(work: asyncio.Future[Any]) -> AsyncIterator[None]:
    """Yield every now and then until the work is done; end it if the caller has gone."""
    try:
        while not work.done():
            await asyncio.wait({work}, timeout=LOOK_S)
            if not work.done():
                yield
    finally:
        if not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


def _id_or_newest(storage: CheckpointStorage, checkpoint_id: str) -> str:
    ids = storage.ids()
    if checkpoint_id or ids:
        return checkpoint_id or ids[-1]
    raise CheckpointNotFound(f"{storage.url} has no finished checkpoint")


def _object(name: str, text: str) -> dict[str, Any]:
    """Return a JSON object of a request.

    Raises:
        InvalidRequest: It is none.
    """
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise InvalidRequest(f"{name}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name}: not a JSON object")
    return value
