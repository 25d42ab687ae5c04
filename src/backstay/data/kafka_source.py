"""Topics without an end, for the job master: their offsets, and the age of messages that wait.

If the job names a consumer group, offsets are committed to it, for monitors of lag. They are never
read: a restore of the cluster takes the job back, and the group follows.

Imports the reader of topics.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from backstay.data.kafka import KafkaReader
from backstay.data.source import SourceLook
from backstay.errors import ConfigError

__all__ = ["KafkaSource"]

# The job master asks again and again, so a call need not wait for long.
STREAM_TIMEOUT_S = 5.0
# Partitions whose oldest message is looked for at once: those with most messages that wait.
AGED_MAX = 64


class KafkaSource(KafkaReader):
    """Topics that grow. See ``Source`` for its threads.

    A call takes no longer than some seconds for each partition, so that whoever asks again and
    again can end.

    Args:
        topics: Their names.
        options: As of ``KafkaReader``; ``group``: the consumer group that offsets are committed to.

    Raises:
        ConfigError: As ``KafkaReader`` does; ``group`` is empty.
    """

    def __init__(self, topics: Sequence[str], options: Mapping[str, Any]) -> None:
        super().__init__(topics, options)
        self._timeout_s = min(self._timeout_s, STREAM_TIMEOUT_S)
        self._group = options.get("group")
        if self._group == "":
            raise ConfigError("options.group: is empty; name a consumer group, or leave it out")
        # Held while one of the consumers below is at work.
        self._aside = threading.Lock()
        self._ages: Any = None
        self._commits: Any = None
        self._answers: list[Any] = []
        self._is_closed = False

    def start(self) -> dict[str, int]:
        """Return the offset of each partition where ``options.start`` lies.

        Raises:
            DataUnavailable: No broker answers, or there is no such topic.
            ConfigError: ``start`` names offsets, but not of all partitions.
        """
        found: dict[str, int] = {}
        with self._consumer() as consumer:
            for topic in self._topics:
                partitions = self._partitions(consumer, topic)
                offsets = self._offsets(consumer, partitions, self._start)
                found |= {f"{name}/{part}": at for (name, part), at in offsets.items()}
        return found

    def look(self, positions: Mapping[str, int]) -> SourceLook:
        """See ``Source``."""
        del positions
        return SourceLook(self.ends())

    def ends(self) -> dict[str, tuple[int, int] | None]:
        """Return of each partition the first offset and the one after the last.

        None: it is there, and no broker leads it now.

        Raises:
            DataUnavailable: No broker answers, or there is no such topic.
        """
        found: dict[str, tuple[int, int] | None] = {}
        with self._consumer() as consumer:
            for topic in self._topics:
                for number, part in sorted(self._topic(consumer, topic).partitions.items()):
                    is_led = part.leader >= 0
                    ends = self._ends(consumer, topic, number) if is_led else None
                    found[f"{topic}/{number}"] = ends
        return found

    def oldest_s(self, offsets: Mapping[str, int]) -> float | None:
        """See ``Source``: by the times that messages have, of some partitions at once."""
        with self._aside:
            if self._is_closed or not offsets:
                return None
            if self._ages is None:
                # One message is all that is wanted; the client fetches more ahead.
                small = {"queued.max.messages.kbytes": 64, "max.partition.fetch.bytes": 65_536}
                self._ages = self._made({**self._config, **small})
            return self._oldest(self._ages, dict(list(offsets.items())[:AGED_MAX]))

    def _oldest(self, consumer: Any, offsets: Mapping[str, int]) -> float | None:
        wanted = [self._place(part, offset) for part, offset in offsets.items()]
        waits = {(one.topic, one.partition) for one in wanted}
        found: list[float] = []
        deadline_s = time.monotonic() + self._timeout_s
        with self._errors("the oldest messages", consumer):
            consumer.assign(wanted)
            try:
                while waits and (left_s := deadline_s - time.monotonic()) > 0:
                    for message in consumer.consume(len(waits), timeout=left_s):
                        waits.discard((message.topic(), message.partition()))
                        kind, time_ms = message.timestamp()
                        if message.error() is None and kind != self._kafka.TIMESTAMP_NOT_AVAILABLE:
                            found.append(time_ms / 1000)
            finally:
                consumer.unassign()
        return min(found, default=None)

    def commit(self, offsets: Mapping[str, int]) -> None:
        """See ``Source``: to the consumer group, if the job names one."""
        if self._group is None or not offsets:
            return
        with self._aside:
            if self._is_closed:
                return
            if self._commits is None:
                own = {"group.id": self._group, "on_commit": self._committed}
                self._commits = self._made({**self._config, **own})
            places = [self._place(part, offset) for part, offset in offsets.items()]
            what, consumer = f"consumer group {self._group}", self._commits
            self._answers.clear()
            deadline_s = time.monotonic() + self._timeout_s
            with self._errors(what, consumer):
                consumer.commit(offsets=places, asynchronous=True)
                while not self._answers:
                    if time.monotonic() >= deadline_s:
                        raise self._trouble.error(what, f"no answer for {self._timeout_s:g} s")
                    consumer.poll(0.1)
            if self._answers[0] is not None:
                raise self._trouble.error(what, self._answers[0].str())

    def _committed(self, error: Any, offsets: Sequence[Any]) -> None:
        """Take the answer to a commit; it comes while the consumer is polled."""
        wrong = (one.error for one in offsets if one.error is not None)
        self._answers.append(error if error is not None else next(wrong, None))

    def _place(self, part: str, offset: int) -> Any:
        topic, _, partition = part.rpartition("/")
        return self._kafka.TopicPartition(topic, int(partition), offset)

    def close(self) -> None:
        """Close the connections."""
        with self._aside:
            self._is_closed = True
            for consumer in (self._ages, self._commits):
                if consumer is not None:
                    consumer.close()
        while not self._idle.empty():
            self._idle.get_nowait().close()
