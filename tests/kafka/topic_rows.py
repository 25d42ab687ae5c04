"""The rows that a topic has, read as docs/reference/checkpoint-format.md says, without backstay."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from confluent_kafka import Consumer, TopicPartition
from numpy.typing import NDArray

__all__ = ["TopicRows"]

CALL_S = 30.0

Tables = dict[str, dict[int, bytes]]


class TopicRows:
    """A consumer of what is committed that keeps the last value of each key. For one thread."""

    def __init__(self, address: str, topic: str) -> None:
        self._topic = topic
        self._consumer = Consumer(
            {
                "bootstrap.servers": address,
                "group.id": "reader",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
            }
        )
        known = self._consumer.list_topics(topic, timeout=CALL_S).topics[topic]
        self._consumer.assign(
            [TopicPartition(topic, number, 0) for number in sorted(known.partitions)]
        )
        self.partitions = len(known.partitions)
        self.tables: Tables = {}
        self.shapes: dict[str, Any] = {}
        self.progress: dict[int, dict[str, Any]] = {}
        # Keys that went, as they were told.
        self.gone: list[tuple[str, int]] = []
        self.messages = 0
        # Is called with table, last value and new value of each row.
        self.on_row: Callable[[str, bytes | None, bytes | None], None] | None = None

    def close(self) -> None:
        self._consumer.close()

    def read_to(
        self, element: str, each: Callable[[int, dict[str, Any]], None] | None = None
    ) -> None:
        """Take messages until each partition is at an element, or at a later one.

        ``each`` is called with each progress of a partition.
        """
        deadline_s = time.monotonic() + CALL_S
        while not all(self._is_at(part, element) for part in range(self.partitions)):
            assert time.monotonic() < deadline_s, f"{element}; {self.progress}"
            message = self._consumer.poll(1.0)
            if message is not None:
                assert message.error() is None, message.error()
                self._take(message, each)

    def read_some(self) -> None:
        """Take what comes within a moment."""
        while (message := self._consumer.poll(0.1)) is not None:
            assert message.error() is None, message.error()
            self._take(message, None)

    def _is_at(self, partition: int, element: str) -> bool:
        known = self.progress.get(partition)
        return known is not None and _number(known["element"]) >= _number(element)

    def _take(self, message: Any, each: Callable[[int, dict[str, Any]], None] | None) -> None:
        self.messages += 1
        key, value = message.key(), message.value()
        if key == b"progress":
            said = json.loads(value)
            self.progress[message.partition()] = said
            if each is not None:
                each(message.partition(), said)
        elif key == b"manifest":
            self.shapes = {one["name"]: one for one in json.loads(value)["tables"]}
        else:
            row, table = int.from_bytes(key[:8], "little"), key[8:].decode()
            rows = self.tables.setdefault(table, {})
            if self.on_row is not None:
                self.on_row(table, rows.get(row), value)
            if value is None:
                rows.pop(row, None)
                self.gone.append((table, row))
            else:
                rows[row] = value

    def rows(self, table: str) -> dict[int, bytes]:
        return self.tables.get(table, {})

    def dense(self, table: str) -> NDArray[np.float32]:
        shape = self.shapes[table]["shape"]
        rows = self.rows(table)
        content = b"".join(rows[number] for number in range(len(rows)))
        return np.frombuffer(content, "<f4")[: int(np.prod(shape))].reshape(shape)


def _number(element: str) -> int:
    return int(element.split("-")[1])
