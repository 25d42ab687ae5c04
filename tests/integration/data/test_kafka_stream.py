"""Topics of a real broker that never end: what is told of them, and a job that trains on one."""

from __future__ import annotations

import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("confluent_kafka")
from confluent_kafka import OFFSET_INVALID, Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions, NewTopic

from backstay.data.kafka_source import KafkaSource
from backstay.data.opening import open_source
from backstay.errors import ConfigError, DataUnavailable
from backstay.job_spec import DataSpec
from backstay.master.job_client import JobClient
from backstay.pserver.local_cluster import LocalCluster
from tests.integration.counting_worker import keep_all_checkpoints, restore
from tests.integration.stream_command import LIMIT_S, Command, caught_up, trained_here, until
from tests.integration.tiny_jobs import write_model
from tests.kafka.broker import KafkaBroker, is_led
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

_numbers = itertools.count()
CALL_S = 30.0


@pytest.fixture
def topic(broker: KafkaBroker) -> str:
    name = f"stream-{next(_numbers)}"
    broker.create_topic(name, 2)
    return name


def stream(broker: KafkaBroker, topic: str, **options: Any) -> KafkaSource:
    data = DataSpec(kind="kafka", paths=(topic,), options={"brokers": [broker.address], **options})
    found = open_source(data)
    assert isinstance(found, KafkaSource)
    return found


def clicks(count: int, first: int = 0) -> list[bytes | None]:
    return [
        json.dumps({"user": n % 1000, "ad": n % 50, "click": n % 2}).encode()
        for n in range(first, first + count)
    ]


def test_the_ends_of_partitions_follow_what_is_written_and_dropped(
    broker: KafkaBroker, topic: str
) -> None:
    found = stream(broker, topic)
    assert found.start() == {f"{topic}/0": 0, f"{topic}/1": 0}
    assert found.ends() == {f"{topic}/0": (0, 0), f"{topic}/1": (0, 0)}
    broker.produce(topic, clicks(5), 1)
    # What was acknowledged is seen a moment later.
    wait_until(lambda: found.ends()[f"{topic}/1"] == (0, 5), lambda: found.ends())
    broker.drop_before(topic, 1, 3)
    wait_until(lambda: found.ends()[f"{topic}/1"] == (3, 5), lambda: found.ends())
    assert stream(broker, topic, start="latest").start()[f"{topic}/1"] == 5
    assert stream(broker, topic).start()[f"{topic}/1"] == 3
    found.close()


def test_a_transaction_that_is_under_way_is_not_there_yet(broker: KafkaBroker, topic: str) -> None:
    producer = Producer({"bootstrap.servers": broker.address, "transactional.id": topic})
    producer.init_transactions(CALL_S)
    found = stream(broker, topic)
    producer.begin_transaction()
    producer.produce(topic, b"{}", partition=0)
    assert producer.flush(CALL_S) == 0
    assert found.ends()[f"{topic}/0"] == (0, 0)
    producer.commit_transaction(CALL_S)
    # The message and the mark of its transaction.
    wait_until(lambda: found.ends()[f"{topic}/0"] == (0, 2))


def test_a_topic_may_get_more_partitions(broker: KafkaBroker, topic: str) -> None:
    found = stream(broker, topic)
    found.ends()
    admin = AdminClient({"bootstrap.servers": broker.address})
    admin.create_partitions([NewPartitions(topic, 3)])[topic].result(CALL_S)
    wait_until(lambda: found.ends().get(f"{topic}/2") == (0, 0))


def test_a_partition_whose_leader_is_not_ready_yet_is_asked_again(broker: KafkaBroker) -> None:
    admin = AdminClient({"bootstrap.servers": broker.address})

    def create(name: str) -> None:
        admin.create_topics([NewTopic(name, 8, 1)])[name].result(CALL_S)
        wait_until(lambda: is_led(admin.list_topics(name, timeout=CALL_S).topics[name]))

    # About every second new topic is told of before its leader answers.
    for name in (f"new-{number}" for number in range(10)):
        create(name)
        found = stream(broker, name)
        assert set(found.ends().values()) == {(0, 0)}
        found.close()


def test_how_long_the_oldest_message_has_been_there_is_told(
    broker: KafkaBroker, topic: str
) -> None:
    found = stream(broker, topic)
    assert found.oldest_s({}) is None
    producer = Producer({"bootstrap.servers": broker.address})
    first_s = int(time.time()) - 10_000
    for time_s in (first_s, first_s + 1000, first_s + 2000):
        producer.produce(topic, b"{}", partition=0, timestamp=time_s * 1000)
        producer.produce(topic, b"x" * 900_000, partition=1, timestamp=(time_s + 500) * 1000)
        assert producer.flush(CALL_S) == 0
    assert found.oldest_s({f"{topic}/0": 0, f"{topic}/1": 0}) == first_s
    assert found.oldest_s({f"{topic}/0": 1, f"{topic}/1": 0}) == first_s + 500
    assert found.oldest_s({f"{topic}/0": 2}) == first_s + 2000
    # Nothing is there.
    assert found.oldest_s({f"{topic}/0": 3}) is None
    found.close()
    assert found.oldest_s({f"{topic}/0": 0}) is None


def committed(broker: KafkaBroker, group: str, topic: str) -> dict[int, int]:
    consumer = Consumer({"bootstrap.servers": broker.address, "group.id": group})
    parts = [TopicPartition(topic, number) for number in range(2)]
    found = {one.partition: one.offset for one in consumer.committed(parts, timeout=CALL_S)}
    consumer.close()
    return found


def test_offsets_are_committed_to_the_consumer_group_that_the_job_names(
    broker: KafkaBroker, topic: str
) -> None:
    without = stream(broker, topic)
    without.commit({f"{topic}/0": 1})
    found = stream(broker, topic, group=f"lag-{topic}")
    for offset in (1, 7, 3):
        # A restore takes it back.
        found.commit({f"{topic}/0": offset, f"{topic}/1": 2})
        assert committed(broker, f"lag-{topic}", topic) == {0: offset, 1: 2}
    assert committed(broker, "backstay", topic) == {0: OFFSET_INVALID, 1: OFFSET_INVALID}
    assert found.start() == {f"{topic}/0": 0, f"{topic}/1": 0}, "it is not read back"
    found.close()


def test_a_group_that_others_are_in_is_refused_and_told(broker: KafkaBroker, topic: str) -> None:
    broker.produce(topic, clicks(1))
    group = f"taken-{topic}"
    member = Consumer(
        {
            "bootstrap.servers": broker.address,
            "group.id": group,
            "auto.offset.reset": "earliest",
        }
    )
    member.subscribe([topic])
    wait_until(lambda: member.poll(0.1))
    found = stream(broker, topic, group=group)
    with pytest.raises(DataUnavailable, match=f"consumer group {group}: "):
        found.commit({f"{topic}/0": 1})
    found.close()
    member.close()
    with pytest.raises(ConfigError, match=r"options\.group: is empty"):
        stream(broker, topic, group="")


def test_what_cannot_be_asked_is_an_error_that_names_it(broker: KafkaBroker, topic: str) -> None:
    with pytest.raises(DataUnavailable, match="topic nowhere"):
        stream(broker, "nowhere").ends()
    away = DataSpec(kind="kafka", paths=("t",), options={"brokers": ["127.0.0.1:1"]})
    with pytest.raises(DataUnavailable, match=r"127.0.0.1:1"):
        open_source(away).look({})
    with pytest.raises(ConfigError, match="name all partitions"):
        stream(broker, topic, start={f"{topic}/0": 1}).start()


class Filling:
    """A producer that goes on writing until it is told to stop, whatever the broker does."""

    def __init__(self, broker: KafkaBroker, topic: str, partitions: int) -> None:
        # Without that, what is sent again after an outage may be there twice.
        config = {"bootstrap.servers": broker.address, "enable.idempotence": True}
        self._producer = Producer({**config, "linger.ms": 5})
        self._topic, self._partitions = topic, partitions
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Filling:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        assert self._producer.flush(LIMIT_S) == 0

    def _run(self) -> None:
        for number in itertools.count():
            # A pause, so that the job is faster.
            if self._stop.wait(0.02):
                return
            for value in clicks(20, 20 * number):
                self._producer.produce(self._topic, value, partition=number % self._partitions)
            self._producer.poll(0)


JOB = """\
name: clicks
model: {model}
training:
  kind: kafka
  paths: [{topic}]
  options: {{brokers: ["{broker}"], timeout_s: 5, group: lag-of-{topic}}}
period: {{records: 2000, ahead_records: 1000, linger_s: 1.0}}
records_per_task: 50
batch_size: 25
audit: true
workers: 2
checkpoint: none
"""


def test_a_job_on_a_topic_that_is_filled_counts_each_message_once_whoever_dies(
    broker: KafkaBroker, topic: str, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    model = write_model(tmp_path, "torch").name
    (tmp_path / "job.yaml").write_text(JOB.format(model=model, topic=topic, broker=broker.address))
    with LocalCluster(2) as cluster:
        command = Command(tmp_path, cluster.endpoints)
        client = JobClient(cluster.endpoints, "clicks", config=cluster.client_config())
        command.start()
        try:
            with Filling(broker, topic, 2):
                begun = until(client, command, lambda one: one.examples >= 1000)
                command.child("backstay.trainer.worker.cli").kill()
                more = until(client, command, lambda one: one.examples >= begun.examples + 1000)
                command.child("master.serve_cli").kill()
                until(
                    client,
                    command,
                    lambda one: one.master_starts > 1 and one.examples >= more.examples + 1000,
                )
                broker.kill()
                until(client, command, lambda one: "training data are not there" in one.trouble)
                broker.start()
                again = until(client, command, lambda one: not one.trouble)
                until(client, command, lambda one: one.examples >= again.examples + 1000)
            caught_up(client, command)
            shown = command.jobs("show", "clicks")
            assert "period" in shown, shown
            assert "lag 0 records" in shown, shown
            assert "stopping" in command.jobs("stop", "clicks")
            code, result = command.ended()
            assert (code, result["state"]) == (130, "stopped"), command.said()
            assert_counted(command, broker, topic)
            told = stream(broker, topic).ends().items()
            ends = {int(part[-1]): one[1] for part, one in told if one is not None}
            assert committed(broker, f"lag-of-{topic}", topic) == ends

            # The same command goes on.
            broker.produce(topic, clicks(777), 1)
            command.start()
            caught_up(client, command)
            command.jobs("stop", "clicks")
            command.ended()
            assert_counted(command, broker, topic)
        finally:
            command.kill()
            client.close()
    lines = (tmp_path / "backstay-jobs" / "clicks" / "metrics.jsonl").read_text().splitlines()
    for name in ("lag_records", "lag_s"):
        lags = [figures[name] for figures in map(json.loads, lines) if "state" in figures]
        assert any(lag is not None for lag in lags), name


def test_a_restore_takes_the_job_back_to_the_offsets_of_the_checkpoint(
    broker: KafkaBroker, topic: str, tmp_path: Path, eventually: Any
) -> None:
    pytest.importorskip("torch")
    model = write_model(tmp_path, "torch").name
    text = JOB.format(model=model, topic=topic, broker=broker.address)
    text = text.replace("checkpoint: none", "checkpoint: {every: pass, every_tasks: 7}")
    (tmp_path / "job.yaml").write_text(text.replace("records: 2000", "records: 500"))
    settings = {"slot_count": 16, "checkpoint_url": str(tmp_path / "checkpoints")}
    with LocalCluster(2, settings=settings) as cluster:
        keep_all_checkpoints(cluster)
        command = Command(tmp_path, cluster.endpoints)
        client = JobClient(cluster.endpoints, "clicks", config=cluster.client_config())
        command.start()
        try:
            with Filling(broker, topic, 2):
                for times in range(1, 3):
                    # Between two of them the job goes on with what it takes.
                    begun = until(client, command, lambda one: bool(one.checkpoint))
                    newest = until(
                        client,
                        command,
                        lambda one, begun=begun: one.checkpoint != begun.checkpoint,
                    )
                    until(
                        client,
                        command,
                        lambda one, newest=newest: one.examples >= newest.examples + 1000,
                    )
                    restore(cluster, newest.checkpoint, eventually)
                    until(client, command, lambda one, times=times: one.went_back == times)
            caught_up(client, command)
            command.jobs("stop", "clicks")
            code, result = command.ended()
            assert (code, result["went_back"]) == (130, 2), command.said()
            assert_counted(command, broker, topic)
        finally:
            command.kill()
            client.close()


def assert_counted(command: Command, broker: KafkaBroker, topic: str) -> None:
    """Assert that each message of the topic counts once, and no other."""
    found = json.loads(command.jobs("audit", "clicks", "--json"))
    ends = stream(broker, topic).ends().values()
    assert found["records_counted_once"] is True, found
    assert found["records"] == found["right"] == sum(one[1] for one in ends if one), found
    assert found["passes"] >= 1


def test_a_job_in_one_process_trains_on_a_topic_to_its_last_step(
    broker: KafkaBroker, topic: str, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    model = write_model(tmp_path, "torch").name
    text = JOB.format(model=model, topic=topic, broker=broker.address)
    text = text.replace("audit: true", "max_steps: 100")
    (tmp_path / "job.yaml").write_text(text)
    with Filling(broker, topic, 2):
        result = trained_here(tmp_path)
    assert result["state"] == "done"
    assert result["reason"] == "max_steps: 100 steps are done"
    assert 100 * 20 <= result["examples"] <= 100 * 25
