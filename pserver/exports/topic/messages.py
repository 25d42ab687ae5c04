"""The messages of a topic, as docs/reference/checkpoint-format.md has them. Pure.

A row's key is its uint64 key, little-endian, and behind it the name of its table. Messages of other
keys, of eight letters, say how far the topic is and which tables it has.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from backstay.checkpoint.manifest import Manifest
from backstay.checkpoint.parts import statistics_in
from backstay.json_record import Count, JsonRecord, Positive
from backstay.tables import Dense

__all__ = [
    "PROGRESS_KEY",
    "TABLES_KEY",
    "Message",
    "TopicProgress",
    "partitions_of",
    "row_key_of",
    "row_messages",
    "tables_text",
]

PROGRESS_KEY = b"progress"
TABLES_KEY = b"manifest"
# Rows whose bytes are made at once.
ROWS_AT_ONCE = 4096

_KEY = struct.Struct("<Q")
# Any odd number whose bits are well mixed: the upper half of the product tells the partition.
_MIX = np.uint64(0x9E37_79B9_7F4A_7C15)


class Message(NamedTuple):
    """What goes to a topic; ``value`` None: the key has no row any more."""

    key: bytes
    value: bytes | None
    partition: int


@dataclass(frozen=True)
class TopicProgress(JsonRecord, what="progress of a topic"):
    """How far a topic is: the last message of each transaction, in each partition.

    Attributes:
        format: Of all messages.
        element: The element of the export whose rows the topic has with this message.
        begun: Unix time: it has every push that was acknowledged before, but for slots whose master
            did not answer then.
        chain: The base that its chain began with.
        reason: Why that began.
        generation: Of the cluster's rows.
        export: The name of the export.
        run: Which start of it.
        started: When that was, ISO 8601.
        cluster: The name of the cluster.
        cluster_uid: What tells it from others of that name.
        published: Unix time at which the transaction was begun.
        partitions: Over how many partitions rows are spread; those that are added later stay empty.
    """

    format: Literal[1]
    element: str
    begun: float
    chain: str
    reason: str
    generation: Count
    export: str
    run: str
    started: str
    cluster: str
    cluster_uid: str
    published: float
    partitions: Positive


def tables_text(element: Manifest) -> str:
    """Return what the message of the tables says: what the bytes of each table's values are."""
    tables = []
    for spec in element.tables:
        told: dict[str, object] = {
            "name": spec.name,
            "kind": "dense" if isinstance(spec.kind, Dense) else "sparse",
            "elements": spec.row_elements,
            "statistics": list(statistics_in(element, spec)),
        }
        if isinstance(spec.kind, Dense):
            told["shape"] = list(spec.kind.shape)
        tables.append(told)
    return json.dumps({"format": 1, "element": element.id, "tables": tables})


def row_key_of(key: bytes) -> tuple[int, bytes] | None:
    """Return the row's key and the name of its table; None: it is another message."""
    if len(key) <= _KEY.size:
        return None
    return _KEY.unpack_from(key)[0], key[_KEY.size :]


def partitions_of(keys: NDArray[np.uint64], partitions: int) -> NDArray[np.uint64]:
    """Return the partition of each row."""
    return (keys * _MIX >> np.uint64(32)) % np.uint64(partitions)


def row_messages(
    table: bytes,
    keys: NDArray[np.uint64],
    values: NDArray[np.float32] | None,
    partitions: int,
) -> Iterator[Message]:
    """Yield the messages of rows.

    Args:
        table: The name of their table, UTF-8.
        keys: [n], as the topic has them: blocks of a dense table are counted from 0.
        values: [n, ...], weights and statistics; None: the rows are gone.
        partitions: Over which they are spread.
    """
    for first in range(0, len(keys), ROWS_AT_ONCE):
        some = keys[first : first + ROWS_AT_ONCE]
        parts = partitions_of(some, partitions).tolist()
        text = some.astype("<u8").tobytes()
        names = (text[at : at + 8] + table for at in range(0, len(text), 8))
        if values is None:
            for name, part in zip(names, parts, strict=True):
                yield Message(name, None, part)
            continue
        rows = np.ascontiguousarray(values[first : first + ROWS_AT_ONCE], "<f4")
        size = rows.shape[1] * rows.itemsize
        row_bytes = rows.tobytes()
        for number, (name, part) in enumerate(zip(names, parts, strict=True)):
            yield Message(name, row_bytes[number * size : (number + 1) * size], part)
