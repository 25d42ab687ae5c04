"""``ExportService``: exports that go on are started, stopped and looked at."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

from grpc import aio

from backstay._proto.v1 import export_pb2, export_pb2_grpc
from backstay.checkpoint.manifest import Manifest
from backstay.checkpoint.storage import ExportFolder
from backstay.consensus import ClusterView
from backstay.consensus.records.exports import ExportRecord, export_spec, tables_of_exports
from backstay.errors import BackstayError, CheckpointUnavailable
from backstay.message_fields import fill, values_of
from backstay.pserver.exports.records import ExportRecords
from backstay.pserver.exports.topic.link import ensure_topic
from backstay.pserver.metrics.export_figures import ExportsFigures
from backstay.pserver.peers import PeerCalls
from backstay.pserver.snapshots.disk import in_disk_thread
from backstay.settings import to_mapping

__all__ = ["ExportParts", "ExportService"]

# What an answer waits for a folder that stands still.
LOOK_S = 3.0
# Brokers that do not answer are told of, before the caller gives up.
TOPIC_LIMIT_S = 4.0


@dataclass(frozen=True)
class ExportParts:
    """What the service works with."""

    records: ExportRecords
    view: ClusterView
    calls: PeerCalls
    figures: ExportsFigures
    node_id: str


class ExportService(export_pb2_grpc.ExportServiceServicer):
    """Answers by the records, and by what is in the folders."""

    def __init__(self, parts: ExportParts) -> None:
        """Prepare."""
        self._parts = parts
        # One look at each folder at a time: it has a thread until the folder answers.
        self._looks: dict[str, asyncio.Future[Manifest | None]] = {}

    async def StartExport(  # noqa: N802 (the name is the service's)
        self,
        request: export_pb2.StartExportRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> export_pb2.StartExportResponse:
        """Start an export."""
        values = values_of(request)
        name, spec = values.pop("name"), export_spec(values)
        topic = spec.topic
        # What is no place, or needs a package that is missing, is told now.
        await in_disk_thread(ExportFolder, spec.url)

        async def check() -> None:
            if topic is not None:
                await in_disk_thread(ensure_topic, topic, limit_s=TOPIC_LIMIT_S)

        await self._parts.records.start(name, spec, check=check)
        return export_pb2.StartExportResponse()

    async def StopExport(  # noqa: N802
        self,
        request: export_pb2.StopExportRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> export_pb2.StopExportResponse:
        """Let an export end."""
        await self._parts.records.stop(request.name, now=request.now)
        return export_pb2.StopExportResponse()

    async def ListExports(  # noqa: N802
        self,
        request: export_pb2.ListExportsRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> export_pb2.ListExportsResponse:
        """Return the exports that go on."""
        parts = self._parts
        records = await parts.records.all()
        tables = tables_of_exports(records, parts.view.snapshot().tables)
        topics = await _topics(parts) if any(one.spec.topic for one in records.values()) else {}
        answer = export_pb2.ListExportsResponse()
        for name, record in sorted(records.items()):
            told = _described(record, tables[name])
            try:
                newest = await self._newest_at(record.spec.url)
            except BackstayError as error:
                told.trouble = told.trouble or str(error)
            else:
                _add_element(told, newest if newest and newest.run == record.run else None)
            if record.spec.topic is not None:
                _add_topic(told, topics.get(name))
            answer.exports.append(told)
        return answer

    async def _newest_at(self, url: str) -> Manifest | None:
        look = self._looks.get(url)
        if look is None:
            look = self._looks[url] = asyncio.ensure_future(in_disk_thread(_newest_at, url))
            look.add_done_callback(lambda _: self._looks.pop(url))
        try:
            return await asyncio.wait_for(asyncio.shield(look), LOOK_S)
        except asyncio.TimeoutError as error:
            raise CheckpointUnavailable(f"{url} has not answered for {LOOK_S:g} s") from error


def _newest_at(url: str) -> Manifest | None:
    return ExportFolder(url).newest()


async def _topics(parts: ExportParts) -> dict[str, dict[str, Any]]:
    """Return how the topics do, by the export's name: the controller knows."""
    snapshot = parts.view.snapshot()
    controller = snapshot.controller
    if controller is None:
        return {}
    if controller.node_id == parts.node_id:
        return parts.figures.to_object()
    member = snapshot.members.get(controller.node_id)
    if member is None:
        return {}
    try:
        answer = await parts.calls.node_stats(member.control_address)
    except BackstayError:
        return {}
    topics: dict[str, dict[str, Any]] = json.loads(answer.control_plane_json).get("topics", {})
    return topics


def _add_topic(told: export_pb2.Export, figures: dict[str, Any] | None) -> None:
    if figures is None:
        return
    told.topic_trouble = figures["trouble"]
    if figures["element"]:
        told.topic_element, told.topic_behind_s = figures["element"], figures["behind_s"]
        told.topic_age_s = max(time.time() - figures["begun"], 0.0)


def _described(record: ExportRecord, tables: tuple[str, ...]) -> export_pb2.Export:
    message = export_pb2.Export(
        name=record.name, started=record.started, stopping=record.stopping, trouble=record.trouble
    )
    fill(message, {**to_mapping(record.spec), "tables": tables})
    return message


def _add_element(told: export_pb2.Export, newest: Manifest | None) -> None:
    if newest is None:
        return
    told.element, told.chain, told.reason = newest.id, newest.chain, newest.reason
    told.age_s = max(time.time() - newest.begun, 0.0)
    told.rows, told.bytes = newest.rows, newest.total_bytes
    told.left_out = len(newest.left_out)
