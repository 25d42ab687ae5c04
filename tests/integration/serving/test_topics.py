"""Topics of running exports, on a real broker: a consumer has the servers' rows, whatever fails."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("confluent_kafka")

from confluent_kafka import Producer

from backstay.checkpoint import remote
from backstay.checkpoint.manifest import number_of
from backstay.consensus.records.exports import ExportRecord
from backstay.errors import CheckpointUnavailable, ConfigError, ExportRefused, InvalidRequest
from backstay.job_spec import DataSpec, ExportsSpec, ExportTopicSpec, JobSpec
from backstay.pserver.exports.topic.link import TopicLink
from backstay.pserver.exports.topic.messages import Message, TopicProgress, row_messages
from backstay.pserver.exports.topic.publisher import TopicPublisher
from backstay.pserver.local_cluster import LocalCluster
from backstay.pserver.metrics.export_figures import ExportsFigures
from backstay.serving import Follower
from backstay.tables import SGD, Adagrad, Expiry, Lifetime, PullFunction, Score, TableSpec, Zeros
from backstay.trainer import Client
from tests.integration.exporting import (
    COUNTED,
    controller_of,
    counting,
    elements_in,
    exported,
    finished,
    is_whole,
    rows_of_checkpoint,
    start_export,
    stop_export,
)
from tests.integration.job_processes import JobProcesses
from tests.integration.tiny_jobs import write_clicks, write_model
from tests.kafka.broker import KafkaBroker
from tests.kafka.topic_rows import TopicRows
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

KEYS = np.arange(2000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
SLOTS = 32
GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guide" / "serving.md"
COMPACT = {"cleanup.policy": "compact"}

Command = Callable[..., Any]

_numbers = itertools.count()


@pytest.fixture
def topic(broker: KafkaBroker) -> ExportTopicSpec:
    return ExportTopicSpec(name=f"served-{next(_numbers)}", brokers=(broker.address,))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    chosen: dict[str, Any] = {"slot_count": SLOTS, "checkpoint_url": str(tmp_path / "ckpt")}
    with LocalCluster(1, settings=chosen) as running:
        yield running


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster.endpoints) as connected:
        yield connected


def fill(client: Client) -> None:
    wide = client.create_table(TableSpec.sparse("wide", dim=4, optimizer=Adagrad(0.1)))
    client.create_table(TableSpec.dense("w", shape=(10, 7), optimizer=SGD(0.5)))
    for step in range(3):
        client.push(wide, KEYS, np.sin(np.outer(np.arange(len(KEYS)), [1, 2, 3, 4]) + step))
    client.push_dense("w", np.ones((10, 7), np.float32))


def settled(cluster: LocalCluster) -> str:
    """Wait until the topic has what was acknowledged before this call; return its element."""
    now = time.time()

    def look() -> str:
        (one,) = exported(cluster)
        return one.topic_element if time.time() - one.topic_age_s > now else ""

    return wait_until(look, lambda: f"an element begun after the last push; {exported(cluster)}")


def test_the_topic_has_the_rows_of_the_servers(
    tmp_path: Path,
    broker: KafkaBroker,
    topic: ExportTopicSpec,
    cluster: LocalCluster,
    client: Client,
) -> None:
    broker.create_topic(topic.name, 3, COMPACT)
    fill(client)
    saved = client.checkpoints.save()
    lifetime = Lifetime(expiry=Expiry(score_below=0.001), score=Score())
    table = client.create_table(
        TableSpec.sparse("s", dim=2, optimizer=SGD(1.0), initializer=Zeros(), lifetime=lifetime)
    )
    shows = np.arange(1, 4, dtype=np.float32)
    client.push(table, KEYS[:3], -np.ones((3, 2), np.float32), shows=shows, clicks=shows)
    start_export(cluster, tmp_path / "served", topic=topic, statistics=True)
    settled(cluster)
    read = TopicRows(broker.address, topic.name)
    read.read_to(settled(cluster))
    assert read.rows("wide") == rows_of_checkpoint(client, "wide", tmp_path)
    assert np.array_equal(read.dense("w"), client.pull_dense("w"))
    assert read.shapes["wide"] == {
        "name": "wide",
        "kind": "sparse",
        "elements": 4,
        "statistics": [],
    }
    assert read.shapes["s"]["statistics"] == ["show", "click"]
    assert [struct.unpack("<4f", read.rows("s")[int(key)]) for key in KEYS[:3]] == [
        (1.0, 1.0, show, show) for show in shows.tolist()
    ]
    assert set(read.progress) == {0, 1, 2}
    # Rows that change, go and come.
    before = read.messages
    client.push("wide", KEYS[:50], np.ones((50, 4)))
    assert client.delete("wide", KEYS[40:90]) == 50
    client.push("wide", np.arange(1, 8), np.ones((7, 4)))
    client.push_dense("w", np.ones((10, 7), np.float32))
    read.read_to(settled(cluster))
    wanted = rows_of_checkpoint(client, "wide", tmp_path)
    assert len(wanted) == len(KEYS) - 50 + 7
    assert read.rows("wide") == wanted
    assert np.array_equal(read.dense("w"), client.pull_dense("w"))
    assert sorted(read.gone) == sorted(("wide", int(key)) for key in KEYS[40:90])
    assert read.messages - before < 1000
    # A restore: what came since goes, what went is there again.
    (running,) = exported(cluster)
    client._directory.call_to_its_end(lambda channel: remote.restore(channel, saved.id))
    wait_until(lambda: exported(cluster)[0].chain not in ("", running.chain), "a new chain")
    read.read_to(settled(cluster))
    wanted = rows_of_checkpoint(client, "wide", tmp_path)
    assert len(wanted) == len(KEYS)
    assert read.rows("wide") == wanted
    assert {one["reason"] for one in read.progress.values()} == {
        "rows were restored or lost: generation 1, before 0"
    }
    stop_export(cluster)
    read.close()


def scaled(weights: Any, *, factor: float = 1.0) -> Any:
    return weights * factor


def test_rows_are_told_anew_when_the_function_on_pull_changes(
    tmp_path: Path,
    broker: KafkaBroker,
    topic: ExportTopicSpec,
    cluster: LocalCluster,
    client: Client,
    command: Command,
) -> None:
    client.create_table(
        TableSpec.sparse("p", dim=2, optimizer=SGD(1.0), pull=PullFunction.of(scaled, factor=2.0))
    )
    client.push("p", KEYS[:9], np.ones((9, 2), np.float32))
    start_export(cluster, tmp_path / "served", topic=topic)
    settled(cluster)
    read = TopicRows(broker.address, topic.name)
    endpoint = ("--endpoint", cluster.endpoints[0])
    for factor in ("2", "3"):
        done = command("pserverctl", "tables", "set", "p", f"pull.factor={factor}", *endpoint)
        assert done.returncode == 0, done.stderr
        read.read_to(settled(cluster))
        pulled = zip(KEYS[:9].tolist(), client.pull("p", KEYS[:9]), strict=True)
        assert read.rows("p") == {key: row.tobytes() for key, row in pulled}
        assert read.rows("p")[0] != np.zeros(2, np.float32).tobytes()
    read.close()


def test_each_state_of_the_topic_is_that_of_an_element(
    tmp_path: Path,
    broker: KafkaBroker,
    topic: ExportTopicSpec,
    cluster: LocalCluster,
    client: Client,
) -> None:
    folder = tmp_path / "served"
    fill(client)
    # The topic is made, compacted, with as many partitions as the broker gives: one.
    start_export(cluster, folder, topic=topic)
    settled(cluster)
    assert broker.config_of(topic.name)["cleanup.policy"] == "compact"
    for step in range(4):
        some = KEYS[100 * step : 100 * step + 150]
        client.push("wide", some, np.ones((len(some), 4)))
        client.delete("wide", some[:20])
        settled(cluster)
    last = settled(cluster)
    stop_export(cluster)
    states: dict[str, dict[int, bytes]] = {}
    read = TopicRows(broker.address, topic.name)
    read.read_to(last, lambda _, said: states.update({said["element"]: dict(read.rows("wide"))}))
    read.close()
    assert read.partitions == 1
    wholly = {one.id: one.rows for one in elements_in(folder)}
    looked_at = [name for name in states if wholly[name]]
    assert len(looked_at) > 4
    for name in looked_at:
        copy = tmp_path / f"until-{name}"
        for element in wholly:
            if number_of(element) <= number_of(name):
                shutil.copytree(folder / element, copy / element)
        with Follower(copy) as follower:
            assert follower.status.element == name
            keys, weights = follower.table("wide").to_numpy()
        wanted = {int(key): row.tobytes() for key, row in zip(keys, weights, strict=True)}
        assert states[name] == wanted, name


def test_a_broker_that_stands_still_is_told_of_and_caught_up_with(
    tmp_path: Path,
    broker: KafkaBroker,
    topic: ExportTopicSpec,
    cluster: LocalCluster,
    client: Client,
) -> None:
    folder = tmp_path / "served"
    fill(client)
    start_export(cluster, folder, topic=topic, every_s=0.1)
    settled(cluster)
    (first,) = exported(cluster)
    client.push("wide", np.arange(1, 101), np.ones((100, 4)))
    settled(cluster)
    broker.pause()
    try:
        client.delete("wide", np.arange(1, 101))

        def is_thinned_out() -> bool:
            # All rows change, so the increments soon are as large as the base.
            client.push("wide", KEYS, np.ones((len(KEYS), 4)))
            return first.chain not in finished(folder)

        wait_until(is_thinned_out, lambda: f"a third base; {finished(folder)}")
        wait_until(lambda: exported(cluster)[0].topic_trouble, "a word about it")
        (running,) = exported(cluster)
        assert topic.name in running.topic_trouble
        assert broker.address in running.topic_trouble
        assert running.topic_behind_s > 1
        assert not running.trouble
        assert running.age_s < 60
    finally:
        broker.resume()
    read = TopicRows(broker.address, topic.name)
    read.read_to(settled(cluster))
    assert read.rows("wide") == rows_of_checkpoint(client, "wide", tmp_path)
    assert ("wide", 1) in read.gone
    assert not exported(cluster)[0].topic_trouble
    assert exported(cluster)[0].chain == first.chain
    stop_export(cluster)
    read.close()


def test_the_last_increment_goes_to_the_topic_too(
    tmp_path: Path,
    broker: KafkaBroker,
    topic: ExportTopicSpec,
    cluster: LocalCluster,
    client: Client,
    command: Command,
) -> None:
    fill(client)
    # So long that nothing but the stop can have it written.
    start_export(cluster, tmp_path / "served", topic=topic, every_s=3000.0)
    wait_until(lambda: exported(cluster)[0].topic_element, lambda: str(exported(cluster)))
    client.push("wide", KEYS[:5], np.ones((5, 4)))
    stop_export(cluster)
    read = TopicRows(broker.address, topic.name)
    read.read_to(finished(tmp_path / "served")[-1])
    assert read.rows("wide") == rows_of_checkpoint(client, "wide", tmp_path)
    # Another start, to another folder, with fewer tables and the same topic.
    endpoint = ("--endpoint", cluster.endpoints[0])
    options = ("--table", "w", "--topic", topic.name, "--brokers", broker.address)
    more = ("--kafka-setting", "linger.ms=1", *endpoint)
    started = command("pserverctl", "export", "start", "o", tmp_path / "other", *options, *more)
    assert started.returncode == 0, started.stderr
    wait_until(lambda: exported(cluster)[0].topic_element, lambda: str(exported(cluster)))
    run = read.progress[0]["run"]

    def is_of_another_run() -> bool:
        read.read_some()
        return bool(read.progress[0]["run"] != run)

    wait_until(is_of_another_run, "the other run")
    assert not read.rows("wide")
    assert np.array_equal(read.dense("w"), client.pull_dense("w"))
    told = command("pserverctl", "export", "status", *endpoint)
    assert told.returncode == 0, told.stderr
    assert f"o: the topic {topic.name} has " in told.stdout
    assert command("pserverctl", "export", "stop", "o", *endpoint).returncode == 0
    read.close()


def test_a_job_has_its_rows_in_a_topic(
    tmp_path: Path, broker: KafkaBroker, topic: ExportTopicSpec, cluster: LocalCluster
) -> None:
    pytest.importorskip("torch")
    spec = JobSpec(
        name="clicks",
        model=str(write_model(tmp_path, "torch")),
        training=DataSpec(paths=(str(write_clicks(tmp_path / "train.csv", 500)),)),
        records_per_task=250,
        exports=ExportsSpec(
            url=str(tmp_path / "served"),
            topic=topic,
        ),
    )
    with JobProcesses(cluster, spec, tmp_path) as running:
        running.start_worker("w1")
        status = running.over()
        assert status.state == "done", status.reason
        assert running.code("master") == 0
    with (
        Follower(tmp_path / "served") as follower,
        closing(TopicRows(broker.address, topic.name)) as read,
    ):
        read.read_to(follower.status.element)
        for table in follower.sparse:
            keys, weights = follower.table(table.name).to_numpy()
            wanted = {int(key): row.tobytes() for key, row in zip(keys, weights, strict=True)}
            assert wanted
            assert read.rows(table.name) == wanted
        for table in follower.dense_tables:
            assert np.array_equal(read.dense(table.name), follower.dense(table.name))


def test_what_kafka_compacts_is_gone_on_with(
    tmp_path: Path,
    broker: KafkaBroker,
    topic: ExportTopicSpec,
    cluster: LocalCluster,
    client: Client,
) -> None:
    often = {"segment.ms": "100", "min.cleanable.dirty.ratio": "0.001", "delete.retention.ms": "1"}
    broker.create_topic(topic.name, 1, {**COMPACT, **often})
    fill(client)
    start_export(cluster, tmp_path / "served", topic=topic)
    settled(cluster)
    client.delete("wide", KEYS[:100])

    def is_compacted() -> bool:
        client.push("wide", KEYS[100:], np.ones((len(KEYS) - 100, 4)))
        with closing(TopicRows(broker.address, topic.name)) as read:
            read.read_to(settled(cluster))
            assert read.rows("wide") == rows_of_checkpoint(client, "wide", tmp_path)
            # Tombstones go, too.
            return not read.gone

    wait_until(is_compacted, "a compacted topic", pause_s=0.5)
    # Another run reads keys and progress from it.
    stop_export(cluster)
    client.delete("wide", KEYS[:200])
    start_export(cluster, tmp_path / "served", topic=topic)
    with closing(TopicRows(broker.address, topic.name)) as read:
        read.read_to(settled(cluster))
        assert read.rows("wide") == rows_of_checkpoint(client, "wide", tmp_path)
        assert np.array_equal(read.dense("w"), client.pull_dense("w"))
    stop_export(cluster)


def test_the_example_of_the_guide_has_the_rows(
    tmp_path: Path,
    broker: KafkaBroker,
    topic: ExportTopicSpec,
    cluster: LocalCluster,
    client: Client,
) -> None:
    fill(client)
    start_export(cluster, tmp_path / "served", topic=topic)
    settled(cluster)
    client.delete("wide", KEYS[:100])
    last = settled(cluster)
    stop_export(cluster)
    text = GUIDE.read_text(encoding="utf-8").partition("### To a topic of Kafka")[2]
    example = text.partition("```python\n")[2].partition("```")[0]
    for known, here in (
        ("kafka-0:9092", broker.address),
        ('["clicks"]', f'["{topic.name}"]'),
        ("while True:", "while not is_at(locals()):"),
    ):
        assert example.count(known) == 1, known
        example = example.replace(known, here)

    def is_at(names: dict[str, Any]) -> bool:
        return names.get("key") == b"progress" and last in names["value"].decode()

    names: dict[str, Any] = {"is_at": is_at}
    exec(example, names)
    names["consumer"].close()
    wanted = rows_of_checkpoint(client, "wide", tmp_path)
    found = {key: row.tobytes() for (table, key), row in names["rows"].items() if table == "wide"}
    assert found == wanted
    assert 0 <= names["age_s"] < 300


def test_topics_that_do_not_fit_are_refused(
    tmp_path: Path,
    broker: KafkaBroker,
    topic: ExportTopicSpec,
    cluster: LocalCluster,
    client: Client,
) -> None:
    folder = tmp_path / "served"
    broker.create_topic("plain")
    plain = replace(topic, name="plain")
    with pytest.raises(ExportRefused, match=r"topic plain has cleanup\.policy=delete"):
        start_export(cluster, folder, topic=plain)
    for name in ("sasl.password", "transactional.id"):
        wrong = {**asdict(topic), "settings": {name: "x"}}
        with pytest.raises(InvalidRequest, match=name):
            start_export(cluster, folder, topic=wrong)
    with pytest.raises(ConfigError, match=r"no\.such"):
        start_export(cluster, folder, topic=replace(topic, settings={"no.such": "x"}))
    with pytest.raises(CheckpointUnavailable, match=rf"topic {topic.name}.*127.0.0.1:1"):
        start_export(cluster, folder, topic=replace(topic, brokers=("127.0.0.1:1",)))
    assert not exported(cluster)
    # What others wrote stays.
    broker.create_topic("others", 1, COMPACT)
    theirs = Producer({"bootstrap.servers": broker.address})
    theirs.produce("others", b"value", b"their key")
    assert theirs.flush(30) == 0
    fill(client)
    start_export(cluster, folder, topic=replace(topic, name="others"))
    wait_until(lambda: exported(cluster)[0].topic_trouble, "a word about it")
    assert "messages that no export wrote" in exported(cluster)[0].topic_trouble
    assert not exported(cluster)[0].trouble
    stop_export(cluster, now=True)


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_nothing_goes_back_while_the_controller_and_the_broker_are_killed(
    tmp_path: Path, broker: KafkaBroker, topic: ExportTopicSpec
) -> None:
    chosen: dict[str, Any] = {"slot_count": SLOTS, "checkpoint_url": str(tmp_path / "ckpt")}
    broker.create_topic(topic.name, 2, COMPACT)
    with (
        LocalCluster(3, settings=chosen) as cluster,
        counting(cluster) as acknowledged,
    ):
        wait_until(lambda: acknowledged[0] > 5, "pushes")
        start_export(cluster, tmp_path / "served", topic=topic, every_s=0.1)
        settled(cluster)
        for round_number in range(4):
            before = acknowledged[0]
            victim = controller_of(cluster)
            match round_number:
                case 0:
                    broker.kill()
                case 1:
                    broker.pause()
            cluster.kill(victim)
            wait_until(lambda: acknowledged[0] > before + 20, "pushes after the kill")  # noqa: B023
            match round_number:
                case 0:
                    broker.start()
                case 1:
                    broker.resume()
            settled(cluster)
            cluster.restart(victim)
            wait_until(lambda: is_whole(cluster, 3), "two copies of each slot")
        total = acknowledged[0]
        wait_until(lambda: acknowledged[0] > total, "one more push")
        last = settled(cluster)
    with closing(TopicRows(broker.address, topic.name)) as read:
        elements: dict[int, list[str]] = {0: [], 1: []}
        read.on_row = never_smaller
        read.read_to(last, lambda part, said: elements[part].append(said["element"]))
    for names in elements.values():
        assert names == sorted(set(names), key=number_of), "an element twice, or one that is older"
    rows = read.rows("n")
    assert set(rows) == set(COUNTED.tolist())
    assert min(struct.unpack("<f", row)[0] for row in rows.values()) >= total
    assert not read.gone


def never_smaller(table: str, before: bytes | None, now: bytes | None) -> None:
    assert table == "n"
    assert now is not None
    assert before is None or struct.unpack("<f", now) >= struct.unpack("<f", before)


def test_of_two_who_write_a_topic_one_is_fenced_off(broker: KafkaBroker) -> None:
    where = ExportTopicSpec(name=f"served-{next(_numbers)}", brokers=(broker.address,))
    with TopicLink(where, lambda: True) as first:
        first.publish(
            row_messages(b"t", KEYS[:3], np.ones((3, 2), np.float32), 1),
            progress("base-000001-aaaaaa"),
        )
        with TopicLink(where, lambda: True) as second:
            assert second.progress is not None
            assert second.progress.element == "base-000001-aaaaaa"
            second.publish(row_messages(b"t", KEYS[:1], None, 1), progress("inc-000002-bbbbbb"))
            with pytest.raises(CheckpointUnavailable, match="another process writes to it now"):
                first.publish(
                    row_messages(b"t", KEYS[:1], np.ones((1, 2), np.float32), 1),
                    progress("inc-000002-aaaaaa"),
                )
    with TopicLink(where, lambda: True) as third:
        assert third.progress is not None
        assert third.progress.element == "inc-000002-bbbbbb"
        # The end of a session gives up what is not committed.
        with pytest.raises(RuntimeError, match="half"), third as half:
            half.publish(broken(), progress("inc-000003-cccccc"))
    read = TopicRows(broker.address, where.name)
    read.read_to("inc-000002-bbbbbb")
    assert set(read.rows("t")) == set(KEYS[1:3].tolist())
    read.close()


def broken() -> Iterator[Message]:
    yield from row_messages(b"t", KEYS[1:3], None, 1)
    raise RuntimeError("half of it")


def progress(element: str) -> TopicProgress:
    return TopicProgress(
        format=1,
        element=element,
        begun=1.0,
        chain="base-000001-aaaaaa",
        reason="",
        generation=0,
        export="serve",
        run="1",
        started="2026",
        cluster="c",
        cluster_uid="ab",
        published=1.0,
        partitions=1,
    )


def test_the_export_that_was_started_later_has_the_topic(
    tmp_path: Path, broker: KafkaBroker, topic: ExportTopicSpec
) -> None:
    spec = ExportsSpec(url=str(tmp_path), tables=("*",), topic=topic)
    figures = ExportsFigures()
    earlier, later = (
        ExportRecord(name=name, run=name, spec=spec, started=started)
        for name, started in (("earlier", "2026-11-26T10:00"), ("later", "2026-11-26T11:00"))
    )
    with TopicLink(topic, lambda: True) as link:
        said = replace(progress("base-000001-aaaaaa"), run=later.run, started=later.started)
        link.publish([], said)
        publisher = TopicPublisher(earlier, figures.begin("earlier"))
        wait_until(lambda: figures.to_object()["earlier"]["trouble"], lambda: figures.to_object())
        assert "choose another topic" in figures.to_object()["earlier"]["trouble"]
        # It has not fenced off who has the topic.
        link.publish([], replace(said, element="inc-000002-aaaaaa"))
        asyncio.run(publisher.close())
    publisher = TopicPublisher(later, figures.begin("later"))
    wait_until(lambda: figures.to_object()["later"]["element"], lambda: figures.to_object())
    assert figures.to_object()["later"]["element"] == "inc-000002-aaaaaa"
    asyncio.run(publisher.close())
