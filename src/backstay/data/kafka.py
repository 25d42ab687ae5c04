"""Topics of Kafka as records, from a first to a last offset.

A shard is a partition from an offset on, ``clicks/3@1000``; its places are offsets. An offset
without a message, such as one that was compacted or aborted, is no record. Messages that
the topic drops before they are read count as damaged. No offset of a consumer group is read: what
is done is in the job's records.

What it costs: ``shards()`` asks for offsets only; reading a range fetches its messages, and some
more that the client fetches ahead.

Imports the readers' base; confluent-kafka when a reader is made.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from backstay.data.base import BadRecords, Metadata, Shard, check_range
from backstay.data.batch import Record
from backstay.data.kafka_client import BrokerTrouble, settings_of_file
from backstay.data.message_values import ValueFormat
from backstay.data.options import check_options, optional_import, text_tuple
from backstay.errors import (
    ConfigError,
    DataDamaged,
    DataUnavailable,
    InvalidRequest,
    TooManyBadRecords,
)

__all__ = ["KafkaReader"]

_OPTIONS: Mapping[str, type] = {
    "brokers": tuple,
    "start": object,
    "stop": object,
    "values": str,
    "columns": tuple,
    "types": Mapping,
    "delimiter": str,
    "settings": Mapping,
    "settings_file": str,
    "timeout_s": int,
    # Of data without an end only; ``KafkaSource`` has it.
    "group": str,
}
TIMEOUT_S = 60
FETCH_WAIT_MS = 10
# What a partition answers while another broker becomes its leader.
LEADER_CHANGES = (
    "FENCED_LEADER_EPOCH",
    "LEADER_NOT_AVAILABLE",
    "NOT_LEADER_FOR_PARTITION",
    "OFFSET_NOT_AVAILABLE",
    "UNKNOWN_LEADER_EPOCH",
)
ASK_AGAIN_S = 0.1
# Messages that are taken from the client at once, and consumers that wait for the next range.
MESSAGES_MAX = 1000
IDLE_MAX = 4
# Messages among which a first good one is looked for.
LOOKED_AT_MAX = 1000

_T = TypeVar("_T")


class _Part(NamedTuple):
    """What a shard's name says: a partition of a topic, from an offset on."""

    topic: str
    partition: int
    first: int

    @classmethod
    def parse(cls, shard: str) -> _Part:
        path, _, first = shard.rpartition("@")
        topic, _, partition = path.rpartition("/")
        if not (topic and partition.isdigit() and first.isdigit()):
            raise InvalidRequest(f"shard {shard!r}: expected TOPIC/PARTITION@OFFSET")
        return cls(topic, int(partition), int(first))

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}@{self.first}"

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return f"{self.topic}/{self.partition}"


class KafkaReader:
    """Records of topics. From any thread.

    Args:
        topics: Their names.
        options: ``brokers``: addresses, ``host:port``. ``start`` and ``stop``: ``earliest``,
            ``latest``, a time (ISO 8601 with its zone), or a mapping of ``topic/partition`` to an
            offset; by default all that is there. ``values``: ``json``, ``csv`` or ``bytes``, with
            ``columns``, ``types`` and ``delimiter`` as of files. ``settings`` and
            ``settings_file`` (lines of ``name=value``; for secrets): of the client, librdkafka.
            ``timeout_s``: how long brokers may be away.

    Raises:
        ConfigError: An option is unknown, wrong or missing, or confluent-kafka is not installed.
            The client looks at its settings when something is read.
    """

    def __init__(self, topics: Sequence[str], options: Mapping[str, Any]) -> None:
        check_options("kafka", options, _OPTIONS)
        self._kafka = optional_import("confluent_kafka", "kafka", "a topic of Kafka")
        if "brokers" not in options:
            raise ConfigError("options.brokers: is missing; name addresses, such as [kafka-0:9092]")
        brokers = text_tuple("brokers", options["brokers"])
        self._topics = tuple(topics)
        self._start = _Bound.of("start", options.get("start", "earliest"))
        self._stop = _Bound.of("stop", options.get("stop", "latest"))
        self._values = ValueFormat.of(options)
        self._timeout_s = float(options.get("timeout_s", TIMEOUT_S))
        if self._timeout_s < 1:
            raise ConfigError(f"options.timeout_s: is {self._timeout_s:g}; must be at least 1")
        self._trouble = BrokerTrouble(", ".join(brokers), DataUnavailable)
        self._config = _client_config(brokers, options, self._trouble)
        # Consumers between two ranges. A thread takes one, or makes one.
        self._idle: queue.LifoQueue[Any] = queue.LifoQueue(IDLE_MAX)
        self._metadata: Metadata | None = None

    @property
    def metadata(self) -> Metadata:
        """See ``Reader``; reads a first message unless columns are named, or values are bytes."""
        if self._metadata is None:
            known = self._values.columns
            self._metadata = Metadata(self._first_columns() if known is None else known)
        return self._metadata

    def shards(self) -> Iterator[Shard]:
        """See ``Reader``; asks for the offsets of each partition."""
        yield from self._shards(self._start, self._stop)

    def _shards(self, start: _Bound, stop: _Bound) -> Iterator[Shard]:
        with self._consumer() as consumer:
            for topic in self._topics:
                partitions = self._partitions(consumer, topic)
                first = self._offsets(consumer, partitions, start)
                last = self._offsets(consumer, partitions, stop)
                for part in partitions:
                    begin, end = first[part], last[part]
                    yield Shard(str(_Part(*part, begin)), max(0, end - begin))

    def read(self, shard: str, start: int, count: int, bad: BadRecords) -> Iterator[Record]:
        """See ``Reader``; the places are offsets, from the shard's first one on."""
        check_range(shard, start, count)
        part = _Part.parse(shard)
        first = part.first + start
        with self._consumer() as consumer:
            yield from self._range(consumer, part, first, first + count, bad)

    def read_columns(
        self, shard: str, start: int, count: int, bad: BadRecords | None = None
    ) -> None:
        """See ``Reader``: messages have no columns."""
        del shard, start, count, bad

    def _range(
        self, consumer: Any, part: _Part, first: int, end: int, bad: BadRecords
    ) -> Iterator[Record]:
        """Yield the good records of the offsets ``first`` to ``end`` - 1."""
        low = self._lowest(consumer, part)
        if low > first:
            lost = min(low, end) - first
            reason = f"the topic has dropped its messages up to offset {low}"
            bad.add(part.place, first, reason, unit="offset", records=lost)
            first += lost
        if first >= end:
            return
        partition = self._kafka.TopicPartition(part.topic, part.partition, first)
        with self._errors(part.place, consumer):
            consumer.assign([partition])
        for message in self._messages(consumer, part, first, end):
            record, reason = self._values.decode(message.value())
            if reason:
                bad.add(part.place, message.offset(), reason, unit="offset")
            else:
                yield record

    def _messages(self, consumer: Any, part: _Part, first: int, end: int) -> Iterator[Any]:
        """Yield the messages of a range, until its end.

        Where the partition ends before that, more is waited for: a new leader may not know yet how
        far its messages are committed, and what the range lacks would count nowhere.
        """
        next_offset, deadline_s = first, time.monotonic() + self._timeout_s
        while next_offset < end:
            with self._errors(part.place, consumer):
                got = consumer.consume(min(MESSAGES_MAX, end - next_offset), timeout=1.0)
            if got:
                deadline_s = time.monotonic() + self._timeout_s
            elif time.monotonic() >= deadline_s:
                raise self._trouble.error(part.place, f"no message for {self._timeout_s:g} s")
            for message in got:
                error = message.error()
                if error is not None:
                    at_end = error.code() == self._kafka.KafkaError._PARTITION_EOF
                    if at_end and message.offset() >= end:
                        # The offsets that are left have no message.
                        return
                    if at_end or error.retriable():
                        continue
                    raise self._trouble.error(part.place, error.str())
                if message.offset() >= end:
                    return
                next_offset = message.offset() + 1
                yield message

    def _lowest(self, consumer: Any, part: _Part) -> int:
        """Return the first offset that a partition still has."""
        return self._ends(consumer, part.topic, part.partition)[0]

    def _ends(self, consumer: Any, topic: str, partition: int) -> tuple[int, int]:
        """Return the first offset that a partition has, and the one after its last.

        Messages of a transaction that is under way, and what follows them, do not count yet.
        """
        wanted = self._kafka.TopicPartition(topic, partition)
        low, high = self._answer(
            f"{topic}/{partition}",
            consumer,
            lambda: consumer.get_watermark_offsets(wanted, timeout=self._timeout_s),
        )
        return int(low), int(high)

    def _at_time(self, consumer: Any, topic: str, partition: int, time_ms: int) -> int:
        """Return the first offset whose message is not older; below 0: none is as new."""
        wanted = self._kafka.TopicPartition(topic, partition, time_ms)

        def ask() -> int:
            (found,) = consumer.offsets_for_times([wanted], timeout=self._timeout_s)
            if found.error is not None:
                raise self._kafka.KafkaException(found.error)
            return int(found.offset)

        return self._answer(f"{topic}/{partition}", consumer, ask)

    def _answer(self, what: str, consumer: Any, ask: Callable[[], _T]) -> _T:
        """Return what a partition's leader answers; while the leader changes, it is asked again."""
        deadline_s = time.monotonic() + self._timeout_s
        codes = {getattr(self._kafka.KafkaError, name) for name in LEADER_CHANGES}
        with self._errors(what, consumer):
            while True:
                try:
                    return ask()
                except self._kafka.KafkaException as error:
                    if error.args[0].code() not in codes or time.monotonic() >= deadline_s:
                        raise
                time.sleep(ASK_AGAIN_S)

    def _topic(self, consumer: Any, topic: str) -> Any:
        """Return what the brokers tell of a topic."""
        with self._errors(topic, consumer):
            known = consumer.list_topics(topic, timeout=self._timeout_s).topics[topic]
        if known.error is not None:
            raise self._trouble.error(f"topic {topic}", known.error.str())
        return known

    def _partitions(self, consumer: Any, topic: str) -> list[tuple[str, int]]:
        return [(topic, number) for number in sorted(self._topic(consumer, topic).partitions)]

    def _offsets(
        self, consumer: Any, partitions: Sequence[tuple[str, int]], bound: _Bound
    ) -> dict[tuple[str, int], int]:
        """Return where a bound lies in each partition."""
        found = {}
        for part in partitions:
            place = f"{part[0]}/{part[1]}"
            low, high = self._ends(consumer, *part)
            found[part] = bound.within(place, low, high)
            if bound.time_ms is not None:
                at = self._at_time(consumer, *part, bound.time_ms)
                found[part] = at if at >= 0 else high
        return found

    def _first_columns(self) -> tuple[str, ...]:
        looked_at = BadRecords(LOOKED_AT_MAX, kept=1)
        starts = [self._start]
        if self._start.word != "earliest":
            # Where a job begins at the end, the messages before tell, too.
            starts.append(_Bound(word="earliest"))
        with suppress(TooManyBadRecords):
            for start in starts:
                for shard in self._shards(start, self._stop):
                    for record in self.read(shard.name, 0, shard.records, looked_at):
                        return tuple(record)
        why = "".join(f"; the first one: {one}" for one in looked_at.reports)
        raise DataDamaged(
            f"none of {looked_at.count:,} messages of {', '.join(self._topics)} is a record{why}"
        )

    @contextmanager
    def _consumer(self) -> Iterator[Any]:
        """Lend a consumer that no other thread has."""
        try:
            consumer = self._idle.get_nowait()
        except queue.Empty:
            consumer = self._made(self._config)
        try:
            yield consumer
            consumer.unassign()
            self._idle.put_nowait(consumer)
        except queue.Full:
            consumer.close()
        except BaseException:
            # Messages of an abandoned range may be on their way into it.
            consumer.close()
            raise

    def _made(self, config: Mapping[str, Any]) -> Any:
        """Return a new consumer."""
        try:
            return self._kafka.Consumer(dict(config))
        except (self._kafka.KafkaException, TypeError, ValueError) as error:
            why = error.args[0]
            raise ConfigError(
                f"options.settings: {why.str() if hasattr(why, 'str') else why}"
            ) from error

    @contextmanager
    def _errors(self, what: str, consumer: Any) -> Iterator[None]:
        """Have the client's errors be ours."""
        try:
            yield
        except self._kafka.KafkaException as error:
            with suppress(self._kafka.KafkaException):
                # Only now does it tell what it has logged.
                consumer.poll(0)
            raise self._trouble.error(what, error.args[0].str()) from error


class _Bound(NamedTuple):
    """Where reading begins or ends."""

    word: str = ""
    time_ms: int | None = None
    offsets: Mapping[str, int] = {}

    @classmethod
    def of(cls, name: str, value: Any) -> _Bound:
        """Read an option.

        Raises:
            ConfigError: It is none of what is allowed.
        """
        if value in ("earliest", "latest"):
            return cls(word=value)
        if isinstance(value, str):
            try:
                time_of = datetime.fromisoformat(value.replace("Z", "+00:00"))
            except ValueError:
                time_of = None
            if time_of is not None and time_of.tzinfo is not None:
                return cls(time_ms=int(time_of.timestamp() * 1000))
        if isinstance(value, Mapping) and all(map(_is_offset, value.values())) and value:
            return cls(offsets={str(part): offset for part, offset in value.items()})
        raise ConfigError(
            f"options.{name}: is {value!r}; allowed: earliest, latest, a time with its zone such "
            "as 2026-11-26T08:00:00Z, or offsets such as {clicks/0: 1000}"
        )

    def within(self, place: str, low: int, high: int) -> int:
        """Return the offset of a partition with messages from ``low`` to ``high`` - 1.

        Raises:
            ConfigError: No offset is given for it.
        """
        if self.offsets:
            if place not in self.offsets:
                raise ConfigError(f"options: no offset is given for {place}; name all partitions")
            return self.offsets[place]
        return low if self.word == "earliest" else high


def _is_offset(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _client_config(
    brokers: Sequence[str], options: Mapping[str, Any], trouble: BrokerTrouble
) -> dict[str, Any]:
    """Return the settings of a consumer.

    Raises:
        ConfigError: A setting is one that this reader decides, or the file cannot be read.
    """
    given = dict(options.get("settings", {}))
    if path := options.get("settings_file", ""):
        given = {**settings_of_file(Path(path), "options.settings_file"), **given}
    # Another value would lose records, or count them twice.
    ours = {
        "bootstrap.servers": ",".join(brokers),
        # The client wants one. This consumer commits no offset.
        "group.id": given.get("client.id", "backstay"),
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
        "enable.partition.eof": True,
        "logger": trouble,
    }
    for name in given:
        if name in ours:
            raise ConfigError(f"options.settings: {name} cannot be set; backstay decides it")
    # A question of the next range waits behind what is fetched ahead at the end of a partition.
    return {"fetch.wait.max.ms": FETCH_WAIT_MS, **given, **ours}
