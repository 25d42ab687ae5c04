"""The Kafka of a run: one broker, or three that vote, each on its own host.

The jars must be there before a run enters its namespaces: nothing outside is reached from these.
"""

from __future__ import annotations

import subprocess
import time
import uuid
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from backstay.pserver.free_ports import free_ports
from tests.chaos.network import Host, Network
from tests.chaos.processes import Process, environment
from tests.kafka.broker import JAVA, format_words, is_led, kafka_jars

__all__ = ["Brokers"]

BROKER_PORT, CONTROLLER_PORT = 9092, 9093
# Of Java on a machine that is busy.
START_LIMIT_S = 120.0
CALL_S = 30.0
POLL_PAUSE_S = 0.1
PROPERTIES = """\
process.roles=broker,controller
node.id={number}
controller.quorum.voters={voters}
listeners=PLAINTEXT://{address},CONTROLLER://{controller}
advertised.listeners=PLAINTEXT://{address}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs={data}
default.replication.factor={copies}
min.insync.replicas={least}
offsets.topic.replication.factor={copies}
offsets.topic.num.partitions=1
transaction.state.log.replication.factor={copies}
transaction.state.log.num.partitions=1
transaction.state.log.min.isr={least}
group.initial.rebalance.delay.ms=0
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500
controller.quorum.election.timeout.ms=1000
controller.quorum.fetch.timeout.ms=2000
"""


class Brokers:
    """Brokers, to be killed, paused and cut off; their data stay."""

    def __init__(self, network: Network, folder: Path, count: int) -> None:
        """Make hosts and settings; ``start`` starts the processes."""
        self._jars = kafka_jars()
        self.hosts: list[Host] = [network.add_host(f"kafka-{n}") for n in range(count)]
        ports = [BROKER_PORT] * count, [CONTROLLER_PORT] * count
        if not network.has_faults:
            free = free_ports(2 * count)
            ports = free[:count], free[count:]
        own = [f"{host.address}:{port}" for host, port in zip(self.hosts, ports[0], strict=True)]
        votes = [f"{host.address}:{port}" for host, port in zip(self.hosts, ports[1], strict=True)]
        self.addresses = own
        self._copies = count
        self.config: dict[str, str | int | float | bool] = {
            "bootstrap.servers": ",".join(own),
            # They say of themselves what is wrong, where that matters.
            "log_level": 0,
            "reconnect.backoff.max.ms": 500,
        }
        self._admin = AdminClient(self.config)
        self.data = [folder / f"kafka-{n}" for n in range(count)]
        self._properties = [folder / f"kafka-{n}.properties" for n in range(count)]
        for number, path in enumerate(self._properties):
            path.write_text(
                PROPERTIES.format(
                    number=number,
                    voters=",".join(f"{n}@{vote}" for n, vote in enumerate(votes)),
                    address=own[number],
                    controller=votes[number],
                    data=self.data[number],
                    copies=count,
                    least=max(1, count - 1),
                )
            )
        self.members = [
            Process(
                host,
                (
                    *("setpriv", "--pdeathsig", "KILL", *JAVA, "-cp", f"{self._jars}/*"),
                    "kafka.Kafka",
                    str(path),
                ),
                folder / f"kafka-{n}.log",
            )
            for n, (host, path) in enumerate(zip(self.hosts, self._properties, strict=True))
        ]

    def start(self) -> None:
        """Start all with empty data, and wait until they answer."""
        tool = [*JAVA, "-cp", f"{self._jars}/*", *format_words(uuid.uuid4())]
        for path in self._properties:
            subprocess.run(
                [*tool, "-c", str(path)],
                check=True,
                capture_output=True,
                timeout=START_LIMIT_S,
                env=environment(),
            )
        for member in self.members:
            member.start()
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until all brokers that run are in the cluster, and each partition has its copies.

        Raises:
            RuntimeError: They are not in time.
        """
        deadline_s = time.monotonic() + START_LIMIT_S
        while seen := self._problem():
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{seen}; {self.members[0].log_tail()}")
            time.sleep(POLL_PAUSE_S)

    def create_topic(self, name: str, partitions: int) -> None:
        """Make a topic, and wait until it is there."""
        self._admin.create_topics([NewTopic(name, partitions, self._copies)])[name].result(CALL_S)
        self.wait_ready()

    def leader(self, topic: str, partition: int) -> int:
        """Return which broker leads a partition."""
        found = self._admin.list_topics(topic, timeout=CALL_S).topics[topic]
        return int(found.partitions[partition].leader)

    def stop(self) -> None:
        """End all brokers at once."""
        for member in self.members:
            if member.is_running:
                member.kill()

    def _problem(self) -> str:
        running = [n for n, member in enumerate(self.members) if member.is_running]
        try:
            found = self._admin.list_topics(timeout=1)
        except KafkaException as error:
            return f"no broker answers: {error}"
        if not set(running) <= set(found.brokers):
            return f"brokers {running} run, and {list(found.brokers)} are known"
        for topic in found.topics.values():
            if not is_led(topic):
                return f"nobody leads a partition of {topic.topic}"
            if any(len(one.isrs) < len(running) for one in topic.partitions.values()):
                return f"copies of {topic.topic} are behind"
        return ""
