"""Asking a running cluster for its exports that go on: what job masters and commands share.

Each function makes one call on a channel to any node; the caller opens the channel and turns
failures into errors of ``backstay.errors`` (``rpc.mapped_errors``). Imports the generated messages
and ``backstay.job_spec``; it touches no file.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import grpc

from backstay._proto.v1 import export_pb2, export_pb2_grpc
from backstay.job_spec import ExportsSpec
from backstay.message_fields import fill, values_of
from backstay.settings import from_mapping, to_mapping

__all__ = ["RunningExport", "list_exports", "start", "stop"]


@dataclass(frozen=True, kw_only=True)
class RunningExport:
    """An export that goes on.

    Attributes:
        name: Its name.
        spec: What is exported, where and when; ``tables`` are those that it has now.
        started: ISO 8601.
        stopping: Whether it ends with the next increment.
        trouble: Why the last increment could not be written; empty: all is well.
        element: The newest whole element; empty: there is none.
        age_s: Seconds since that was begun.
        chain: The base of its chain.
        reason: Why that chain began.
        rows: In that element.
        bytes: Of its files.
        left_out: Slots whose master did not answer.
        topic_element: The element whose rows the topic has; empty: none yet, or not known now.
        topic_age_s: Seconds since that was begun.
        topic_behind_s: How much earlier than the newest element.
        topic_trouble: Why the topic cannot be written; empty: all is well.
    """

    name: str
    spec: ExportsSpec
    started: str
    stopping: bool
    trouble: str
    element: str
    age_s: float
    chain: str
    reason: str
    rows: int
    bytes: int
    left_out: int
    topic_element: str
    topic_age_s: float
    topic_behind_s: float
    topic_trouble: str

    def to_mapping(self) -> dict[str, Any]:
        """Return all as plain values, the fields of ``spec`` among the others."""
        mapping = to_mapping(self)
        return {**mapping.pop("spec"), **mapping}


def start(channel: grpc.Channel, name: str, spec: ExportsSpec, *, timeout_s: float) -> None:
    """Start an export; the same again changes nothing.

    Args:
        channel: To a node.
        name: Of the export.
        spec: What is exported, where and when. The folder or URL is the same for every node, and
            each export has its own; in names of tables, * and ? stand for any characters.
        timeout_s: How long it may take.

    Raises:
        InvalidRequest: A setting is wrong.
        ExportRefused: There is one of that name, folder, topic or table with other settings; or
            the topic is not compacted.
        ConfigError: The node lacks the client of Kafka, or a setting of it is wrong.
        CheckpointUnavailable: No broker answers.
    """
    request = export_pb2.StartExportRequest(name=name)
    fill(request, to_mapping(spec))
    _stub(channel).StartExport(request, timeout=timeout_s)


def stop(channel: grpc.Channel, name: str, *, now: bool = False, timeout_s: float) -> None:
    """Let an export end with one more increment, or at once; ``list_exports`` tells when it has.

    Raises:
        ExportRefused: There is none of that name.
    """
    request = export_pb2.StopExportRequest(name=name, now=now)
    _stub(channel).StopExport(request, timeout=timeout_s)


def list_exports(channel: grpc.Channel, *, timeout_s: float) -> tuple[RunningExport, ...]:
    """Return the exports that go on, by name."""
    answer = _stub(channel).ListExports(export_pb2.ListExportsRequest(), timeout=timeout_s)
    return tuple(_export(one) for one in answer.exports)


def _stub(channel: grpc.Channel) -> export_pb2_grpc.ExportServiceStub:
    return export_pb2_grpc.ExportServiceStub(channel)


def _export(message: export_pb2.Export) -> RunningExport:
    values = values_of(message)
    spec = {item.name: values.pop(item.name) for item in fields(ExportsSpec)}
    return RunningExport(spec=from_mapping(ExportsSpec, spec, short=False), **values)
