"""Topics of a real broker: what is a record, what is damaged, and what a job counts."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest

pytest.importorskip("confluent_kafka")
from confluent_kafka import Producer

from backstay.data import BadRecords, Reader
from backstay.errors import ConfigError, DataDamaged, DataUnavailable, TooManyBadRecords
from tests.integration.readers_data import read_all, reader_of, shard_sizes
from tests.integration.tiny_jobs import write_model
from tests.kafka.broker import KafkaBroker
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

_numbers = itertools.count()
LIMIT_S = 200.0
RECORDS = 1800


@pytest.fixture
def topic(broker: KafkaBroker) -> str:
    name = f"topic-{next(_numbers)}"
    broker.create_topic(name, 3)
    return name


def objects(*numbers: int) -> list[bytes | None]:
    return [json.dumps({"n": number}).encode() for number in numbers]


def reader(broker: KafkaBroker, topic: str, **options: Any) -> Reader:
    return reader_of(topic, kind="kafka", brokers=[broker.address], **options)


def test_each_message_is_a_record_of_its_partition(broker: KafkaBroker, topic: str) -> None:
    for partition in range(3):
        broker.produce(topic, objects(*range(100 * partition, 100 * partition + 5)), partition)
    found = reader(broker, topic)
    assert found.metadata.column_names == ("n",)
    assert shard_sizes(found) == {f"{topic}/{partition}@0": 5 for partition in range(3)}
    records, _ = read_all(found)
    assert [one["n"] for one in records] == [*range(5), *range(100, 105), *range(200, 205)]
    part = list(found.read(f"{topic}/1@0", 2, 2, BadRecords()))
    assert [one["n"] for one in part] == [102, 103]


def test_a_range_stays_as_it_was_when_more_comes(broker: KafkaBroker, topic: str) -> None:
    broker.produce(topic, objects(1, 2))
    found = reader(broker, topic)
    sizes = shard_sizes(found)
    broker.produce(topic, objects(3))
    records = [list(found.read(name, 0, size, BadRecords())) for name, size in sizes.items()]
    assert records == [[{"n": 1}, {"n": 2}], [], []]


def test_a_range_is_not_over_where_the_partition_ends_too_early(
    broker: KafkaBroker, topic: str
) -> None:
    # As when a new leader does not know yet that messages of the old one are committed.
    broker.produce(topic, objects(0, 1))
    found = reader(broker, topic, timeout_s=30)
    records = found.read(f"{topic}/0@0", 0, 4, BadRecords())
    assert [next(records)["n"], next(records)["n"]] == [0, 1]
    late = threading.Timer(1.0, broker.produce, (topic, objects(2, 3)))
    late.start()
    assert [one["n"] for one in records] == [2, 3]
    late.join()
    short = reader(broker, topic, timeout_s=1).read(f"{topic}/0@0", 3, 2, BadRecords())
    with pytest.raises(DataUnavailable, match="no message for 1 s"):
        list(short)


def test_what_a_transaction_took_back_is_no_record(broker: KafkaBroker, topic: str) -> None:
    producer = Producer({"bootstrap.servers": broker.address, "transactional.id": topic})
    producer.init_transactions(30)
    for keeps, numbers in ((False, (1, 2)), (True, (3, 4)), (False, (5,))):
        producer.begin_transaction()
        for value in objects(*numbers):
            producer.produce(topic, value, partition=0)
        producer.flush(30)
        if keeps:
            producer.commit_transaction(30)
        else:
            producer.abort_transaction(30)
    records, bad = read_all(reader(broker, topic))
    assert [one["n"] for one in records] == [3, 4]
    assert bad.count == 0


def test_a_topic_without_a_record_says_why(broker: KafkaBroker, topic: str) -> None:
    broker.produce(topic, [b"{bad"] * 2, 1)
    with pytest.raises(DataDamaged, match=rf"none of 2 messages of {topic} .* first one: .*JSON"):
        reader(broker, topic).metadata  # noqa: B018
    broker.produce(topic, [b"[]"] * 2000, 0)
    with pytest.raises(DataDamaged, match=r"none of 1,001 messages .* a JSON list, not an object"):
        reader(broker, topic).metadata  # noqa: B018


def test_messages_that_the_topic_dropped_count_as_damaged(broker: KafkaBroker, topic: str) -> None:
    broker.produce(topic, objects(*range(10)))
    found = reader(broker, topic)
    ((name, size), *_) = shard_sizes(found).items()
    broker.drop_before(topic, 0, 4)
    bad = BadRecords(4)
    assert [one["n"] for one in found.read(name, 0, size, bad)] == [4, 5, 6, 7, 8, 9]
    (report,) = bad.reports
    assert str(report) == (
        f"{topic}/0, offset 0 (4 records): the topic has dropped its messages up to offset 4"
    )
    with pytest.raises(TooManyBadRecords, match="dropped"):
        list(found.read(name, 0, 3, BadRecords(2)))


def test_a_message_that_is_no_record_is_skipped_and_told(broker: KafkaBroker, topic: str) -> None:
    broker.produce(topic, [*objects(1), b"{", None, b"\xff", b"[1]", *objects(2)])
    records, bad = read_all(reader(broker, topic), limit=4)
    assert [one["n"] for one in records] == [1, 2]
    assert [(one.offset, one.reason.split(":")[0]) for one in bad.reports] == [
        (1, "not JSON"),
        (2, "the message has no value"),
        (3, "not UTF-8"),
        (4, "a JSON list, not an object"),
    ]


def test_values_are_csv_or_bytes_if_the_job_says_so(broker: KafkaBroker, topic: str) -> None:
    broker.produce(topic, [b"7,red", b'8,"a,b"', b"x,y", b"9"])
    options = {"columns": ["n", "name"], "types": {"n": "int64"}}
    records, bad = read_all(reader(broker, topic, values="csv", **options), limit=2)
    assert records == [{"n": 7, "name": "red"}, {"n": 8, "name": "a,b"}]
    assert [one.reason for one in bad.reports] == [
        "n: 'x' is not int64",
        "1 fields; 2 are expected",
    ]
    plain, _ = read_all(reader(broker, topic, values="bytes"))
    assert plain == [b"7,red", b'8,"a,b"', b"x,y", b"9"]


def test_values_may_be_rows_of_arrow(broker: KafkaBroker, topic: str) -> None:
    def packed(rows: list[dict[str, Any]], new: Any = pa.ipc.new_stream) -> bytes:
        table, sink = pa.Table.from_pylist(rows), pa.BufferOutputStream()
        with new(sink, table.schema) as writer:
            writer.write_table(table)
        content: bytes = sink.getvalue().to_pybytes()
        return content

    row = {"n": 1, "tags": ["a", "b"]}
    values = [packed([row]), packed([{"n": 2}], pa.ipc.new_file), packed([row, row]), b"{}"]
    broker.produce(topic, [*values, packed([row])[:-40], packed([{"m": 3}]), packed([row])])
    found = reader(broker, topic, values="arrow", columns=["n"])
    records, bad = read_all(found, limit=4)
    assert records == [row, {"n": 2}, row]
    assert [(one.offset, one.reason.split(":")[0]) for one in bad.reports] == [
        (2, "2 rows; a message has one"),
        (3, "not Arrow IPC"),
        (4, "not Arrow IPC"),
        (5, "no 'n'"),
    ]
    first = reader(broker, topic, values="arrow")
    assert first.metadata.column_names == ("n", "tags")


def test_a_message_that_a_producer_writes_twice_is_two_messages(
    broker: KafkaBroker, topic: str
) -> None:
    # As one does that is not idempotent, and heard no answer.
    producer = Producer({"bootstrap.servers": broker.address})
    for _ in range(2):
        producer.produce(topic, objects(7)[0], partition=0)
    assert producer.flush(30) == 0
    assert [one["n"] for one in read_all(reader(broker, topic))[0]] == [7, 7]


def test_reading_begins_and_ends_where_the_job_says(broker: KafkaBroker) -> None:
    topic = f"topic-{next(_numbers)}"
    broker.create_topic(topic)
    producer = Producer({"bootstrap.servers": broker.address, "enable.idempotence": True})
    for second in range(5):
        producer.produce(
            topic, objects(second)[0], partition=0, timestamp=1_700_000_000_000 + 1000 * second
        )
    producer.flush(30)
    some = reader(broker, topic, start={f"{topic}/0": 1}, stop={f"{topic}/0": 3})
    assert shard_sizes(some) == {f"{topic}/0@1": 2}
    assert [one["n"] for one in read_all(some)[0]] == [1, 2]
    # 1,700,000,000 is 22:13:20.
    timed = reader(broker, topic, start="2023-11-14T22:13:21.5Z", stop="2023-11-14T23:13:24+01:00")
    assert [one["n"] for one in read_all(timed)[0]] == [2, 3]
    assert shard_sizes(reader(broker, topic, start="latest")) == {f"{topic}/0@5": 0}


def test_what_is_not_there_is_told_with_the_brokers(broker: KafkaBroker) -> None:
    with pytest.raises(DataUnavailable, match=rf"topic nowhere: .* \(brokers {broker.address}\)"):
        list(reader(broker, "nowhere").shards())
    away = reader_of("t", kind="kafka", brokers=["127.0.0.1:1"], timeout_s=2)
    with pytest.raises(DataUnavailable, match=r"t: .* \(brokers 127.0.0.1:1; .* refused\)$"):
        list(away.shards())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"brokers": "one"}, "options.brokers: is 'one'; a list"),
        ({"offset": 1}, "options: kafka has no option 'offset'"),
        ({"start": "yesterday"}, "options.start: is 'yesterday'; allowed: earliest, latest"),
        ({"stop": "2026-11-26 08:00"}, "a time with its zone"),
        ({"stop": {"t/0": -1}}, "options.stop"),
        ({"values": "xml"}, "options.values: is 'xml'; allowed: json, csv, arrow, bytes"),
        ({"values": "csv"}, "options.columns: is missing"),
        ({"types": {"n": "int64"}}, "types and delimiter are for values: csv"),
        ({"settings": {"group.id": "mine"}}, "group.id cannot be set"),
        ({"settings_file": "/nowhere"}, "options.settings_file: /nowhere"),
        ({"timeout_s": 0}, "must be at least 1"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        reader_of("t", kind="kafka", **{"brokers": ["127.0.0.1:1"], **options})
    assert says in str(refused.value)
    with pytest.raises(ConfigError, match=r"options.brokers: is missing"):
        reader_of("t", kind="kafka")


@pytest.mark.parametrize("settings", [{"sasl.usernme": "a"}, {"fetch.min.bytes": "many"}])
def test_a_setting_that_the_client_does_not_take_is_named(settings: dict[str, str]) -> None:
    found = reader_of("t", kind="kafka", brokers=["127.0.0.1:1"], settings=settings)
    with pytest.raises(ConfigError, match=rf"options.settings: .*{next(iter(settings))}"):
        list(found.shards())


def test_settings_of_the_client_come_from_a_file_too(broker: KafkaBroker, tmp_path: Path) -> None:
    secrets = tmp_path / "client.properties"
    secrets.write_text("# of the tests\nsecurity.protocol=SASL_PLAINTEXT\nsasl.mechanisms=PLAIN\n")
    found = reader(
        broker,
        "t",
        settings_file=str(secrets),
        settings={"sasl.username": "a", "sasl.password": "b"},
        timeout_s=2,
    )
    # The broker speaks no SASL, so the settings arrived.
    with pytest.raises(DataUnavailable, match="SASL"):
        list(found.shards())


def test_a_broker_that_is_killed_is_waited_for(tmp_path: Path) -> None:
    with KafkaBroker(tmp_path) as broker:
        broker.create_topic("t")
        broker.produce("t", objects(*range(20_000)))
        found = reader(broker, "t", settings={"fetch.message.max.bytes": 4096})
        ((name, size),) = shard_sizes(found).items()
        records = found.read(name, 0, size, BadRecords())
        first = [next(records)["n"] for _ in range(100)]
        broker.kill()
        broker.start()
        assert [*first, *(one["n"] for one in records)] == list(range(20_000))


def test_a_job_counts_each_message_once_though_a_worker_is_killed(
    broker: KafkaBroker, topic: str, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    model = write_model(tmp_path, "torch").name
    for partition in range(3):
        values = [
            json.dumps({"user": n % 1000, "ad": n % 50, "click": n % 2}).encode()
            for n in range(partition, RECORDS, 3)
        ]
        broker.produce(topic, [*values, b"poison"], partition)
    (tmp_path / "job.yaml").write_text(
        f"""\
name: clicks
model: {model}
training: {{kind: kafka, paths: [{topic}], options: {{brokers: ["{broker.address}"]}}}}
max_bad_records: 3
batch_size: 30
records_per_task: 60
epochs: 2
audit: true
workers: 2
"""
    )
    given = {name: text for name, text in os.environ.items() if not name.startswith("BACKSTAY_")}
    with (tmp_path / "said").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "backstay.cli", "train", "job.yaml", "--json"],
            cwd=tmp_path,
            env=given,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
    try:
        killed = wait_until(
            lambda: _worker_of(process), (tmp_path / "said").read_text, limit_s=LIMIT_S
        )
        killed.kill()
        output, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    said = (tmp_path / "said").read_text()
    assert process.returncode == 0, said
    result = json.loads(output)
    assert result["records_counted_once"] is True, (result, said)
    assert (result["examples"], result["bad_records"]) == (2 * RECORDS, 3)


def _worker_of(process: subprocess.Popen[bytes]) -> psutil.Process | None:
    for one in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.Error):
            # It has read its model file, and asks for tasks.
            if "backstay.trainer.worker" in " ".join(one.cmdline()) and one.num_threads() > 8:
                return one
    return None
