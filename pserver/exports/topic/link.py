"""One session of the writer of a topic, until something fails.

A session begins with ``init_transactions``, which aborts the transaction of the writer before, and
fences it. The ``progress`` messages that the topic has then say which element it has. Each
transaction ends with one in each partition. For one thread, which may end a session at any time: no
call waits longer than a second without asking whether the session is still wanted.

Imports confluent-kafka when a session begins.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from backstay.data.kafka_client import BrokerTrouble, settings_of_file
from backstay.data.options import optional_import
from backstay.errors import (
    BackstayError,
    CheckpointUnavailable,
    ConfigError,
    ExportRefused,
    InvalidRequest,
)
from backstay.job_spec import ExportTopicSpec
from backstay.pserver.exports.topic.messages import PROGRESS_KEY, Message, TopicProgress

__all__ = ["TopicLink", "Unwanted", "ensure_topic"]

# Nothing is waited for longer than this without a sign of the brokers.
SILENCE_S = 10.0
# Each single call.
CALL_S = 1.0
ABORT_S = 2.0
# As long as brokers allow unless told otherwise. A base is one transaction.
TRANSACTION_MS = 900_000
# Messages on their way, of both kinds of clients.
BUFFER_KIB = 16_384
MESSAGES_AT_ONCE = 1000
# Between two looks at the client; the threads of the control plane get their turn.
POLL_AFTER = 500
# Messages from a partition's end among which its last word is looked for, at first and at most.
TAIL = 64
TAIL_MAX = 1_000_000
TAIL_GROWTH = 8


class Unwanted(Exception):
    """The session is not wanted any more."""


def ensure_topic(topic: ExportTopicSpec, *, limit_s: float = SILENCE_S) -> int:
    """Have a topic that is compacted: make it, or look at the one that is there.

    Returns:
        Its number of partitions.

    Raises:
        ConfigError: confluent-kafka is not installed here, or a setting is wrong.
        ExportRefused: The topic is not compacted.
        CheckpointUnavailable: No broker answers, or they refuse.
    """
    kafka, admin_module, trouble = _client(topic)
    admin = _made(admin_module.AdminClient, _settings(topic, trouble))
    deadline_s = time.monotonic() + limit_s
    what = f"topic {topic.name}"
    with _errors(kafka, trouble, what):
        # A question about the topic itself might make one that is not compacted.
        policy = _policy(kafka, admin_module, admin, topic, limit_s)
        if policy is None:
            _create(kafka, admin_module, admin, topic, limit_s)
        elif policy != "compact":
            raise ExportRefused(
                f"{what} has cleanup.policy={policy}: it would lose rows; set it to compact alone, "
                "or choose another topic"
            )
        while True:
            known = admin.list_topics(topic.name, timeout=limit_s).topics[topic.name]
            if known.error is None and all(one.leader >= 0 for one in known.partitions.values()):
                return len(known.partitions)
            if time.monotonic() >= deadline_s:
                raise trouble.error(what, "a partition has no leader")
            admin.poll(0.1)


def _policy(
    kafka: Any, admin_module: Any, admin: Any, topic: ExportTopicSpec, limit_s: float
) -> str | None:
    """Return the cleanup.policy of a topic; None: there is no such topic."""
    resource = admin_module.ConfigResource(admin_module.ResourceType.TOPIC, topic.name)
    (asked,) = admin.describe_configs([resource], request_timeout=limit_s).values()
    try:
        return str(asked.result(limit_s)["cleanup.policy"].value)
    except kafka.KafkaException as error:
        if error.args[0].code() == kafka.KafkaError.UNKNOWN_TOPIC_OR_PART:
            return None
        raise


def _create(
    kafka: Any, admin_module: Any, admin: Any, topic: ExportTopicSpec, limit_s: float
) -> None:
    """Make a topic, with as many partitions and copies as the brokers choose."""
    new = admin_module.NewTopic(topic.name, -1, -1, config={"cleanup.policy": "compact"})
    try:
        admin.create_topics([new], request_timeout=limit_s)[topic.name].result(limit_s)
    except kafka.KafkaException as error:
        # Another node did.
        if error.args[0].code() != kafka.KafkaError.TOPIC_ALREADY_EXISTS:
            raise


class TopicLink:
    """See the module's text. A context manager: leaving it gives up what is not committed.

    Args:
        topic: The topic.
        is_wanted: Whether the session is still wanted.
        check: Looks at what the topic says of itself, before others are fenced off and after that;
            it may refuse.

    Raises:
        ConfigError: confluent-kafka is not installed here, or a setting is wrong.
        ExportRefused: The topic is not compacted, or others write to it.
        CheckpointUnavailable: No broker answers, or they refuse.
        Unwanted: It is not wanted any more; so do all methods.
    """

    def __init__(
        self,
        topic: ExportTopicSpec,
        is_wanted: Callable[[], bool],
        check: Callable[[TopicProgress | None], None] = lambda _: None,
    ) -> None:
        self._topic = topic
        self._is_wanted = is_wanted
        self._kafka, _, self._trouble = _client(topic)
        self._what = f"topic {topic.name}"
        self._settings = _settings(topic, self._trouble)
        count = ensure_topic(topic)
        check(self._last_word())
        own = {
            "transactional.id": f"backstay-export-{topic.name}",
            "queue.buffering.max.kbytes": BUFFER_KIB,
            "transaction.timeout.ms": TRANSACTION_MS,
            "linger.ms": 5,
        }
        self._producer: Any = _made(self._kafka.Producer, {**own, **self._settings})
        self._is_open = False
        self._since_poll = 0
        self.has_committed = False
        try:
            self._until_done("its writer is not made known", self._producer.init_transactions)
            self.progress = self._last_word()
            check(self.progress)
        except BaseException:
            self.close()
            raise
        self.partitions = count if self.progress is None else self.progress.partitions
        if self.partitions > count:
            raise ExportRefused(
                f"{self._what} has {count} partitions, and had {self.partitions} when its rows "
                "were written: delete it, or choose another one"
            )

    def __enter__(self) -> TopicLink:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def keys(self) -> Iterator[list[tuple[bytes, bool]]]:
        """Yield the keys of all that was committed, some at once, each with whether it has a value.

        The messages of one key are in their order.
        """
        with self._reading() as consumer:
            for partition in range(self.partitions):
                low, high = self._ends(consumer, partition)
                for some in self._messages(consumer, partition, low, high):
                    yield [(one.key() or b"", one.value() is not None) for one in some]

    def publish(self, messages: Iterable[Message], progress: TopicProgress) -> None:
        """Write messages in one transaction, which makes the progress that of the topic.

        Raises:
            CheckpointUnavailable: It was not written, or it is not known whether; the next session
                will know.
        """
        with _errors(self._kafka, self._trouble, self._what):
            self._producer.begin_transaction()
            self._is_open = True
            for message in messages:
                self._put(message)
            text = progress.to_json().encode()
            for partition in range(self.partitions):
                self._put(Message(PROGRESS_KEY, text, partition))
            self._until_done("no answer to a transaction", self._producer.commit_transaction)
            self._is_open = False
        self.has_committed = True

    def close(self) -> None:
        """End the session. What is not committed is given up."""
        if self._is_open:
            self._is_open = False
            # Otherwise who reads waits for the next session, or the transaction's end by time.
            with suppress(self._kafka.KafkaException):
                self._producer.abort_transaction(ABORT_S)
        if self._producer is not None:
            with suppress(self._kafka.KafkaException):
                self._producer.purge()
            # Its connections and threads end with it.
            self._producer = None

    def _put(self, message: Message) -> None:
        self._since_poll += 1
        if self._since_poll >= POLL_AFTER:
            self._since_poll = 0
            self._producer.poll(0)
            self._check_wanted()
        deadline_s, waiting = time.monotonic() + SILENCE_S, len(self._producer)
        while True:
            try:
                self._producer.produce(
                    self._topic.name,
                    message.value,
                    message.key,
                    partition=message.partition,
                )
                return
            except BufferError:
                self._producer.poll(CALL_S)
                self._check_wanted()
            now = len(self._producer)
            if now < waiting:
                deadline_s, waiting = time.monotonic() + SILENCE_S, now
            elif time.monotonic() >= deadline_s:
                raise self._trouble.error(
                    self._what, f"no message was taken for {SILENCE_S:g} s"
                ) from None

    def _until_done(self, what: str, call: Callable[[float], None]) -> None:
        """Make a call that goes on where it was when it ran out of time, as long as there is life.

        Raises:
            CheckpointUnavailable: It failed, or there was no sign of the brokers for too long.
        """
        with _errors(self._kafka, self._trouble, self._what):
            deadline_s, waiting = time.monotonic() + SILENCE_S, len(self._producer)
            while True:
                self._check_wanted()
                try:
                    call(CALL_S)
                    return
                except self._kafka.KafkaException as error:
                    if not error.args[0].retriable():
                        raise
                    self._producer.poll(0)
                    now = len(self._producer)
                    if now < waiting:
                        deadline_s, waiting = time.monotonic() + SILENCE_S, now
                    elif time.monotonic() >= deadline_s:
                        raise self._trouble.error(
                            self._what, f"{what} for {SILENCE_S:g} s"
                        ) from error

    def _last_word(self) -> TopicProgress | None:
        """Return what the topic says of itself; None: it is empty.

        Raises:
            ExportRefused: It has messages, and no such word: it is another one's.
        """
        with self._reading() as consumer:
            low, high = self._ends(consumer, 0)
            tail = TAIL
            while True:
                first = max(low, high - tail)
                found, others = None, 0
                for some in self._messages(consumer, 0, first, high):
                    for one in some:
                        if one.key() == PROGRESS_KEY:
                            found = one.value()
                        else:
                            others += 1
                if found is not None:
                    return self._parsed(found)
                if first == low or tail >= TAIL_MAX:
                    break
                tail *= TAIL_GROWTH
        if others:
            raise ExportRefused(
                f"{self._what} has messages that no export wrote: choose another topic, or an "
                "empty one"
            )
        return None

    def _parsed(self, text: bytes) -> TopicProgress:
        try:
            return TopicProgress.from_json(text.decode())
        except (InvalidRequest, UnicodeDecodeError) as error:
            raise ExportRefused(f"{self._what}: its progress cannot be read: {error}") from error

    @contextmanager
    def _reading(self) -> Iterator[Any]:
        """Lend a consumer of what is committed."""
        own = {
            # The client wants one. No offset is committed.
            "group.id": "backstay-export",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "isolation.level": "read_committed",
            "queued.max.messages.kbytes": BUFFER_KIB,
            "fetch.wait.max.ms": 10,
        }
        consumer = _made(self._kafka.Consumer, {**own, **self._settings})
        try:
            with _errors(self._kafka, self._trouble, self._what):
                yield consumer
        finally:
            consumer.close()

    def _ends(self, consumer: Any, partition: int) -> tuple[int, int]:
        place = self._kafka.TopicPartition(self._topic.name, partition)
        low, high = consumer.get_watermark_offsets(place, timeout=SILENCE_S)
        return low, high

    def _messages(self, consumer: Any, partition: int, first: int, end: int) -> Iterator[list[Any]]:
        """Yield the committed messages of a partition from an offset to its end, some at once."""
        if first >= end:
            return
        consumer.assign([self._kafka.TopicPartition(self._topic.name, partition, first)])
        deadline_s = time.monotonic() + SILENCE_S
        while True:
            self._check_wanted()
            got = consumer.consume(MESSAGES_AT_ONCE, timeout=CALL_S)
            if got:
                deadline_s = time.monotonic() + SILENCE_S
            elif time.monotonic() >= deadline_s:
                raise self._trouble.error(self._what, f"no message came for {SILENCE_S:g} s")
            good = [one for one in got if one.error() is None]
            if good:
                yield good
            for one in got:
                error = one.error()
                if error is None:
                    continue
                if error.code() == self._kafka.KafkaError._PARTITION_EOF:
                    consumer.unassign()
                    return
                if not error.retriable():
                    raise self._trouble.error(self._what, error.str())

    def _check_wanted(self) -> None:
        if not self._is_wanted():
            raise Unwanted


def _client(topic: ExportTopicSpec) -> tuple[Any, Any, BrokerTrouble]:
    kafka = optional_import("confluent_kafka", "kafka", f"the topic {topic.name} on this node")
    admin = optional_import("confluent_kafka.admin", "kafka", "a topic of Kafka")
    return kafka, admin, BrokerTrouble(", ".join(topic.brokers), CheckpointUnavailable)


def _settings(topic: ExportTopicSpec, trouble: BrokerTrouble) -> dict[str, Any]:
    """Return the settings of every client.

    Raises:
        ConfigError: The file cannot be read, or names what cannot be set.
    """
    given = dict(topic.settings)
    if topic.settings_file:
        more = settings_of_file(Path(topic.settings_file), "settings_file of the topic")
        try:
            topic.check_ours(more)
        except InvalidRequest as error:
            raise ConfigError(f"{topic.settings_file}: {error}") from error
        given = {**more, **given}
    return {**given, "bootstrap.servers": ",".join(topic.brokers), "logger": trouble}


def _made(kind: Callable[[dict[str, Any]], Any], settings: dict[str, Any]) -> Any:
    try:
        return kind(settings)
    # The package's own error is no class that could be named before it is imported.
    except Exception as error:
        if isinstance(error, BackstayError):
            raise
        why = error.args[0] if error.args else error
        text = why.str() if hasattr(why, "str") else str(why)
        raise ConfigError(f"settings of the topic: {text}") from error


@contextmanager
def _errors(kafka: Any, trouble: BrokerTrouble, what: str) -> Iterator[None]:
    """Have the client's errors be ours."""
    try:
        yield
    except kafka.KafkaException as error:
        why = error.args[0]
        fenced = {kafka.KafkaError._FENCED, kafka.KafkaError.PRODUCER_FENCED}
        fenced |= {kafka.KafkaError.INVALID_PRODUCER_EPOCH}
        if why.code() in fenced:
            raise CheckpointUnavailable(f"{what}: another process writes to it now") from error
        raise trouble.error(what, why.str()) from error
    except (TimeoutError, concurrent.futures.TimeoutError) as error:
        raise trouble.error(what, "no answer in time") from error
