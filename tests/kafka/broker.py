"""A real Kafka broker for tests: one node on free loopback ports, to be killed and started again.

Its jars come from Maven, once for each state of ``pom.xml``, into a cache outside of this folder.
``require_kafka`` skips the test where Java or Maven is missing.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from confluent_kafka import KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._resource import ResourceType
from confluent_kafka.cimpl import NewTopic

from backstay.pserver.free_ports import free_ports
from tests.processes import takes_connections
from tests.waiting import wait_until

__all__ = [
    "JAVA",
    "KafkaBroker",
    "format_words",
    "is_led",
    "kafka_jars",
    "missing_programs",
    "require_kafka",
]

POM = Path(__file__).parent / "pom.xml"
CACHE_VARIABLE = "KAFKA_TESTS_CACHE"
FETCH_LIMIT_S = 600.0
CALL_S = 30.0
# Of Java on a machine that is busy.
START_LIMIT_S = 120.0
# A broker starts in a third of the time with these, and computes little.
JAVA = (
    *("java", "-Xmx384m", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"),
    *("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto"),
)
PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.bootstrap.servers=127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs={data}
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.num.partitions=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
log.cleaner.backoff.ms=500
log.cleaner.min.compaction.lag.ms=0
"""


def missing_programs() -> str:
    """Return what is missing here for a broker, in words; empty: nothing is."""
    missing = [name for name in ("java", "mvn") if shutil.which(name) is None]
    if not missing:
        return ""
    return (
        f"{' and '.join(missing)} not installed (Debian: apt-get install maven "
        "default-jre-headless)"
    )


def require_kafka() -> Path:
    """Return the folder of the broker's jars, or skip."""
    if missing := missing_programs():
        pytest.skip(missing)
    return kafka_jars()


def kafka_jars() -> Path:
    """Return the folder of the broker's jars; they are fetched first if they are not there."""
    home = os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "backstay-kafka"
    folder = Path(home) / hashlib.sha256(POM.read_bytes()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / "done"
        if not done.exists():
            subprocess.run(
                [
                    *("mvn", "-q", "-B", "-f", str(POM), "dependency:copy-dependencies"),
                    f"-DoutputDirectory={folder / 'lib'}",
                ],
                check=True,
                timeout=FETCH_LIMIT_S,
            )
            done.touch()
    return folder / "lib"


class KafkaBroker:
    """One broker as a process of this test. A context manager."""

    def __init__(self, folder: Path) -> None:
        """Prepare; ``with`` starts it.

        Args:
            folder: For its data and its log.
        """
        self._jars = require_kafka()
        self._folder = folder
        port, controller = free_ports(2)
        self.address = f"127.0.0.1:{port}"
        self._properties = folder / "server.properties"
        self._properties.write_text(
            PROPERTIES.format(port=port, controller=controller, data=folder / "data")
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._producer: Producer | None = None

    def __enter__(self) -> KafkaBroker:
        words = (*format_words(uuid.uuid4()), "--standalone", "-c")
        with (self._folder / "broker.log").open("ab") as log:
            subprocess.run(
                self._java(*words),
                check=True,
                stdout=log,
                stderr=log,
                timeout=START_LIMIT_S,
            )
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Start it with the data that it has, and wait until it answers."""
        with (self._folder / "broker.log").open("ab") as log:
            self._process = subprocess.Popen(self._java("kafka.Kafka"), stdout=log, stderr=log)
        wait_until(
            self._answers,
            lambda: (self._folder / "broker.log").read_text()[-2000:],
            limit_s=START_LIMIT_S,
        )

    def kill(self) -> None:
        """End it with SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Have it stand still, with its connections open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def create_topic(
        self, name: str, partitions: int = 1, config: Mapping[str, str] | None = None
    ) -> None:
        """Make a topic, and wait until it is there."""
        topic = NewTopic(name, partitions, 1, config=dict(config or {}))
        # The client must live until the answer is there.
        admin = self._admin()
        admin.create_topics([topic])[name].result(CALL_S)
        # The broker hears of it from its controller.
        wait_until(lambda: is_led(admin.list_topics(name, timeout=CALL_S).topics[name]))

    def config_of(self, topic: str) -> dict[str, str]:
        """Return the settings of a topic."""
        asked = ConfigResource(ResourceType.TOPIC, topic)
        admin = self._admin()
        found = admin.describe_configs([asked])[asked].result(CALL_S)
        return {name: one.value for name, one in found.items()}

    def produce(self, topic: str, values: Sequence[bytes | None], partition: int = 0) -> None:
        """Write messages, and wait until the broker has them all."""
        if self._producer is None:
            # Otherwise a batch that is sent again may come behind a later one.
            self._producer = Producer(
                {"bootstrap.servers": self.address, "linger.ms": 5, "enable.idempotence": True}
            )
        failed: list[object] = []
        for value in values:
            self._producer.produce(
                topic,
                value,
                partition=partition,
                on_delivery=lambda error, _: failed.append(error) if error else None,
            )
            self._producer.poll(0)
        assert self._producer.flush(CALL_S) == 0
        assert not failed, failed[0]

    def drop_before(self, topic: str, partition: int, offset: int) -> None:
        """Have a topic drop the messages below an offset, as retention does."""
        parts = [TopicPartition(topic, partition, offset)]
        admin = self._admin()
        for done in admin.delete_records(parts).values():
            done.result(CALL_S)

    def _admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.address})

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "broker.log").read_text()[-2000:]
        if not takes_connections(int(self.address.rpartition(":")[2])):
            return False
        try:
            return bool(self._admin().list_topics(timeout=1).brokers)
        except KafkaException:
            return False

    def _java(self, *words: str) -> list[str]:
        return [*JAVA, "-cp", f"{self._jars}/*", *words, str(self._properties)]


def format_words(cluster: uuid.UUID) -> tuple[str, ...]:
    """Return the program that formats the folder of a broker of this cluster, and its words."""
    text = urlsafe_b64encode(cluster.bytes).decode().rstrip("=")
    # In one word: one of 64 begins with a hyphen, and would be taken for an option.
    return "kafka.tools.StorageTool", "format", f"--cluster-id={text}"


def is_led(topic: Any) -> bool:
    """Return whether a broker leads each partition of a topic, as its metadata tell."""
    return topic.error is None and all(one.leader >= 0 for one in topic.partitions.values())
