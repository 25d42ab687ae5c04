"""Asking a running cluster for its exports that go on: what job masters and commands share.

Each function makes one call on a channel to any node; the caller opens the channel and turns
failures into errors of ``backstay.errors`` (``rpc.mapped_errors``). Imports the generated messages;
it touches no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import grpc

from backstay._proto.v1 import export_pb2, export_pb2_grpc

__all__ = ["ExportTopic", "RunningExport", "list_exports", "start", "stop"]


@dataclass(frozen=True)
class ExportTopic:
    """A topic of Kafka to which an export goes besides its folder.

    Attributes:
        brokers: Addresses, ``host:port``.
        name: Of the topic.
        settings: Of the client, librdkafka; everyone sees them.
        settings_file: On each node, lines of ``name=value``: for secrets; empty: none.
    """

    brokers: tuple[str, ...]
    name: str
    settings: Mapping[str, str] = field(default_factory=dict)
    settings_file: str = ""


@dataclass(frozen=True)
class RunningExport:
    """An export that goes on.

    Attributes:
        name: Its name.
        url: The folder or URL of its elements.
        every_s: Seconds from one increment to the next.
        every_pushes: Of a server, after which an increment comes earlier; 0: by time alone.
        tables: Those that it has now.
        statistics: Whether the statistics of rows go with their weights.
        score_at_least: The lowest score of a row; None: any.
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
        topic: Where its rows go besides; None: nowhere.
        topic_element: The element whose rows the topic has; empty: none yet, or not known now.
        topic_age_s: Seconds since that was begun.
        topic_behind_s: How much earlier than the newest element.
        topic_trouble: Why the topic cannot be written; empty: all is well.
    """

    name: str
    url: str
    every_s: float
    every_pushes: int
    tables: tuple[str, ...]
    statistics: bool
    score_at_least: float | None
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
    topic: ExportTopic | None
    topic_element: str
    topic_age_s: float
    topic_behind_s: float
    topic_trouble: str


def start(
    channel: grpc.Channel,
    name: str,
    url: str,
    *,
    every_s: float,
    tables: Sequence[str],
    statistics: bool = False,
    score_at_least: float | None = None,
    topic: ExportTopic | None = None,
    every_pushes: int = 0,
    timeout_s: float,
) -> None:
    """Start an export; the same again changes nothing.

    Args:
        channel: To a node.
        name: Of the export.
        url: The folder or URL, the same for every node; each export has its own.
        every_s: Seconds from one increment to the next.
        tables: Names, in which * and ? stand for any characters.
        statistics: Whether the statistics of rows go with their weights.
        score_at_least: Leave out rows of a lower score, in tables whose lifetime uses one.
        topic: Where its rows go besides.
        every_pushes: Of a server, after which an increment comes earlier; 0: by time alone.
        timeout_s: How long it may take.

    Raises:
        InvalidRequest: A setting is wrong.
        ExportRefused: There is one of that name, folder, topic or table with other settings; or
            the topic is not compacted.
        ConfigError: The node lacks the client of Kafka, or a setting of it is wrong.
        CheckpointUnavailable: No broker answers.
    """
    request = export_pb2.StartExportRequest(
        name=name,
        url=url,
        every_s=every_s,
        tables=tables,
        statistics=statistics,
        score_at_least=score_at_least,
        topic=None if topic is None else _topic_message(topic),
        every_pushes=every_pushes,
    )
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
    return RunningExport(
        name=message.name,
        url=message.url,
        every_s=message.every_s,
        every_pushes=message.every_pushes,
        tables=tuple(message.tables),
        statistics=message.statistics,
        score_at_least=message.score_at_least if message.HasField("score_at_least") else None,
        started=message.started,
        stopping=message.stopping,
        trouble=message.trouble,
        element=message.element,
        age_s=message.age_s,
        chain=message.chain,
        reason=message.reason,
        rows=message.rows,
        bytes=message.bytes,
        left_out=message.left_out,
        topic=_topic(message.topic) if message.HasField("topic") else None,
        topic_element=message.topic_element,
        topic_age_s=message.topic_age_s,
        topic_behind_s=message.topic_behind_s,
        topic_trouble=message.topic_trouble,
    )


def _topic_message(topic: ExportTopic) -> export_pb2.ExportTopic:
    return export_pb2.ExportTopic(
        brokers=topic.brokers,
        name=topic.name,
        settings=topic.settings,
        settings_file=topic.settings_file,
    )


def _topic(message: export_pb2.ExportTopic) -> ExportTopic:
    return ExportTopic(
        tuple(message.brokers), message.name, dict(message.settings), message.settings_file
    )
