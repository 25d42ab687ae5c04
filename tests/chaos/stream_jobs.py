"""A job over a topic that is filled while it exports: its parts, and its judge.

The judge goes by the audit of the job, by what the broker acknowledged, by rows that count records,
and by the rows of two followers: of one that was there all the time, and of a new one.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

from backstay.checkpoint.manifest import kind_of, number_of
from backstay.checkpoint.storage import ExportFolder
from backstay.config import ClientConfig
from backstay.errors import BackstayError
from backstay.runner.audit import audit_job
from backstay.serving import Follower
from backstay.trainer import Client
from tests.chaos.cluster import ChaosCluster, NotYet
from tests.chaos.jobs import END_LIMIT_S, MODEL, ChaosJob, JobShape, JobVerdict, judge_told
from tests.chaos.kafka_hosts import Brokers
from tests.chaos.network import Host
from tests.chaos.processes import Process, environment
from tests.chaos.run import say
from tests.integration.exporting import same_rows

__all__ = ["Filling", "FollowerProcess", "StreamParts", "StreamShape", "judge_stream", "stop_job"]

STREAM_MODEL = Path(__file__).with_name("stream_model.py")
PARTITIONS = 2
# Rows that count, as in the model file.
COUNTED = 64
RECORDS_PER_S = 60
# Not more than so many wait for the job: all must be done in the end.
AHEAD_MAX = 1200
LOOK_S = 1.0
CALL_S = 30.0
# In so long a job master has asked the source again.
ASKED_S = 3.0
# Without a record that is done.
CAUGHT_UP_LIMIT_S = 60.0
FOLLOWED_LIMIT_S = 60.0
PAUSE_S = 0.05


@dataclass(frozen=True)
class StreamShape(JobShape):
    """What a job over a topic is."""

    brokers: Sequence[str] = ()
    sink: str = ""
    records_per_task: int = 16
    batch_size: int = 4

    @property
    def topic(self) -> str:
        """The topic, which no other job has."""
        return f"of-{self.name}"

    @property
    def group(self) -> str:
        """The consumer group that offsets are committed to."""
        return f"lag-of-{self.name}"

    def settings(self) -> dict[str, Any]:
        """Return the job file's content."""
        wanted = super().settings()
        for name in ("validation", "epochs"):
            del wanted[name]
        options = {"brokers": list(self.brokers), "timeout_s": 5, "group": self.group}
        period = {"records": 400, "ahead_records": 200, "linger_s": 0.5}
        return wanted | {
            "training": {"kind": "kafka", "paths": [self.topic], "options": options},
            "period": period,
            "exports": {"url": self.sink, "every_s": 0.2},
        }

    def write(self, folder: Path) -> None:
        """Write what the job file names."""
        shutil.copy(STREAM_MODEL, folder / "model.py")
        shutil.copy(MODEL, folder / MODEL.name)


class Filling:
    """A producer that goes on writing numbers until it is told to stop, whatever a broker does.

    Attributes:
        acknowledged: How many the brokers have acknowledged.
        failed: What went wrong with those that they have not.
    """

    def __init__(self, brokers: Brokers, topic: str, done: Callable[[], int]) -> None:
        """Prepare; ``start`` starts it.

        Args:
            brokers: Where to.
            topic: What for.
            done: Says about how many records the job has done.
        """
        self._done = done
        # Otherwise what is sent again after an outage may be there twice.
        config = {**brokers.config, "enable.idempotence": True, "linger.ms": 5}
        self._producer = Producer(config)
        self._topic = topic
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.acknowledged: list[int] = []
        self.failed: list[str] = []

    def start(self) -> None:
        """Start it."""
        self._thread.start()

    def stop(self) -> None:
        """Write no more, and wait for the brokers' answers."""
        self._stop.set()
        self._thread.join()
        left = self._producer.flush(CALL_S)
        if left:
            self.failed.append(f"{left} messages are not acknowledged")

    def _run(self) -> None:
        number, due, most = 0, 0.0, AHEAD_MAX
        looked_s = asked_s = time.monotonic()
        while not self._stop.wait(0.02):
            now_s = time.monotonic()
            due, looked_s = due + (now_s - looked_s) * RECORDS_PER_S, now_s
            if now_s - asked_s > LOOK_S:
                most, asked_s = self._done() + AHEAD_MAX, now_s
            due = min(due, most)
            while number < due:
                self._produce(number)
                number += 1
            self._producer.poll(0)

    def _produce(self, number: int) -> None:
        self._producer.produce(
            self._topic,
            json.dumps({"n": number}).encode(),
            partition=number // 8 % PARTITIONS,
            on_delivery=lambda error, message: self._told(number, error, message),
        )

    def _told(self, number: int, error: KafkaError | None, message: Message) -> None:
        del message
        if error is None:
            self.acknowledged.append(number)
        else:
            self.failed.append(f"{number}: {error}")


class FollowerProcess(Process):
    """``tests.chaos.follower``, and what it tells."""

    def __init__(self, cluster: ChaosCluster, folder: Path, url: str, table: str) -> None:
        """Prepare; ``start`` starts it."""
        self.state = folder / "follower"
        self.state.mkdir()
        self._endpoints = ",".join(cluster.endpoints)
        words = [sys.executable, "-m", "tests.chaos.follower", url, str(self.state)]
        # Where the run is, from which everybody can be reached.
        super().__init__(
            Host("here", "", ()), [*words, table, str(COUNTED)], folder / "follower.log"
        )

    def status(self) -> dict[str, Any]:
        """Return what it told last; empty: nothing since it was started."""
        try:
            told: dict[str, Any] = json.loads((self.state / "status").read_text())
        except FileNotFoundError:
            return {}
        return told if self.is_running and told["pid"] == self.pid else {}

    def wait_until(self, problem: str, holds: Any, limit_s: float = FOLLOWED_LIMIT_S) -> None:
        """Wait until something holds of its status.

        Raises:
            NotYet: It does not in time.
        """
        deadline_s = time.monotonic() + limit_s
        while not ((told := self.status()) and holds(told)):
            if time.monotonic() > deadline_s or not self.is_running:
                raise NotYet(f"{problem}: {told or 'no status'}; {self.log_tail(1000)}")
            time.sleep(PAUSE_S)

    def wait_fresh(self) -> None:
        """Wait until it has everything that was acknowledged before now.

        Raises:
            NotYet: It does not in time.
        """
        now = time.time()
        self.wait_until(
            "the follower is behind",
            lambda told: not told["trouble"] and time.time() - told["age_s"] > now,
        )

    def wait_fresh_end(self, sink: str) -> None:
        """Wait until it has the last element of an export that is over.

        Raises:
            NotYet: It does not in time.
        """
        folder = ExportFolder(sink)
        # A base beside increments has nothing that these do not have.
        there = [name for name in folder.names() if kind_of(name) == "delta"]
        last = max((number_of(name) for name in there if folder.is_finished(name)), default=0)
        self.wait_until(
            f"the follower has not element {last}",
            lambda told: number_of(told["element"]) >= last,
        )
        looked = self.status()["looked"]
        self.wait_until("the follower does not look", lambda told: told["looked"] > looked + 2)

    def compare(self) -> dict[str, Any]:
        """Have it compare its rows with those of the servers.

        Raises:
            NotYet: It does not answer.
        """
        path = self.state / "compared"
        path.unlink(missing_ok=True)
        stdin = self._running().stdin
        assert stdin is not None
        stdin.write(f"{self._endpoints} {path}\n".encode())
        stdin.flush()
        deadline_s = time.monotonic() + FOLLOWED_LIMIT_S
        while not path.exists():
            if time.monotonic() > deadline_s or not self.is_running:
                raise NotYet(f"the follower does not compare: {self.log_tail()}")
            time.sleep(PAUSE_S)
        answer: dict[str, Any] = json.loads(path.read_text())
        return answer

    def went_back(self) -> str:
        """Return what it saw go back; empty: nothing did."""
        path = self.state / "wrong"
        return path.read_text()[:1000] if path.exists() else ""


@dataclass
class StreamParts:
    """What a job over a topic has around it."""

    brokers: Brokers
    filling: Filling
    follower: FollowerProcess
    # Of faults that look at more than the verdict does.
    wrong: list[str] = field(default_factory=list)


def stop_job(cluster: ChaosCluster, job: ChaosJob) -> None:
    """``backstay jobs stop``, and wait for the end of the command.

    Raises:
        NotYet: It did not end.
    """
    said = subprocess.run(
        [
            *(sys.executable, "-m", "backstay.cli", "jobs", "stop", job.shape.name),
            *("--endpoint", ",".join(cluster.endpoints)),
        ],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=END_LIMIT_S,
        check=False,
    )
    if said.returncode != 0:
        raise NotYet(f"jobs stop: {said.stdout} {said.stderr}")
    job.wait(END_LIMIT_S)


def judge_stream(cluster: ChaosCluster, job: ChaosJob, parts: StreamParts) -> JobVerdict:
    """Let a job catch up, stop it, and judge it.

    Raises:
        NotYet: It does not catch up, or does not end.
    """
    shape, verdict = job.shape, JobVerdict(job.shape.name, restores=job.restores)
    assert isinstance(shape, StreamShape)
    parts.filling.stop()
    job.slow(False)
    _wait_caught_up(job)
    say("it has caught up")
    stop_job(cluster, job)
    say("it has stopped")
    produced, result = len(parts.filling.acknowledged), job.result()
    ends, committed = _offsets(parts.brokers, shape)
    verdict.master_starts = result.get("master_starts", 0)
    wanted: list[tuple[str, object, object]] = [
        ("state", result.get("state"), "stopped"),
        ("exit code", result.get("exit_code"), 130),
        ("dead_letters", result.get("dead_letters"), 0),
        ("bad_records", result.get("bad_records"), 0),
        ("not acknowledged", parts.filling.failed, []),
        ("records of the topic", sum(ends), produced),
        ("committed offsets", committed, ends),
    ]
    wanted += _audited(cluster, shape, verdict, produced)
    wanted += _counted(cluster, shape, parts)
    wanted += _followed(cluster, shape, parts)
    verdict.faults = [f"{name}: {seen!r}, not {right!r}" for name, seen, right in wanted
                      if seen != right]  # fmt: skip
    if verdict.faults:
        verdict.faults.append(f"{result or job.log_tail()}")
    verdict.faults += parts.wrong + judge_told(job, verdict)
    return verdict


def _wait_caught_up(job: ChaosJob) -> None:
    """Wait until nothing is left to do, however long that takes as long as it gets less.

    Raises:
        NotYet: It does not get less.
    """
    least, less_s, none_s, seen = 1 << 60, time.monotonic(), 0.0, ""
    while not none_s or time.monotonic() - none_s < ASKED_S:
        if job.is_over:
            raise NotYet(f"the command has ended: {job.log_tail()}")
        if time.monotonic() - less_s > CAUGHT_UP_LIMIT_S:
            raise NotYet(f"the job does not catch up: {seen}")
        time.sleep(PAUSE_S)
        left, seen = _left(job)
        if left < least:
            least, less_s = left, time.monotonic()
        none_s = 0.0 if left else none_s or time.monotonic()


def _left(job: ChaosJob) -> tuple[int, str]:
    """Return how many records are not done, or many if nobody knows; and what was seen."""
    try:
        status = job.status()
    except NotYet as error:
        return 1 << 60, str(error)
    seen = f"{status.state}, {status.stream.lag_records} records are left; {status.trouble}"
    is_known = status.state == "running" and status.stream.HasField("lag_records")
    return (status.stream.lag_records if is_known and not status.trouble else 1 << 60), seen


def _offsets(brokers: Brokers, shape: StreamShape) -> tuple[list[int], list[int]]:
    """Return where each partition ends, and what was committed to the consumer group."""
    consumer = Consumer({**brokers.config, "group.id": shape.group})
    parts = [TopicPartition(shape.topic, number) for number in range(PARTITIONS)]
    try:
        ends = [consumer.get_watermark_offsets(part, timeout=CALL_S)[1] for part in parts]
        return ends, [one.offset for one in consumer.committed(parts, timeout=CALL_S)]
    finally:
        consumer.close()


def _audited(
    cluster: ChaosCluster, shape: StreamShape, verdict: JobVerdict, produced: int
) -> list[tuple[str, object, object]]:
    try:
        found = audit_job(shape.name, cluster.endpoints, ClientConfig())
    except BackstayError as error:
        return [("audit", str(error), "an answer")]
    # Each record is in one period.
    verdict.records, verdict.passes = found.records, 1
    return [
        ("records_counted_once", found.records_counted_once, True),
        ("records", (found.records, found.right), (produced, produced)),
    ]


def _counted(
    cluster: ChaosCluster, shape: StreamShape, parts: StreamParts
) -> list[tuple[str, object, object]]:
    """What the rows that count have, on servers and in the follower."""
    numbers = np.array(parts.filling.acknowledged, np.int64)
    right = np.bincount(numbers % COUNTED, minlength=COUNTED)
    with Client(cluster.endpoints) as client:
        served = client.pull(f"{shape.name}/counts", np.arange(COUNTED, dtype=np.uint64))
    parts.follower.wait_fresh_end(shape.sink)
    watched = np.fromfile(parts.follower.state / "floor", np.float32)
    return [
        ("rows that count", served[:, 0].tolist(), right.tolist()),
        ("such rows in the follower", watched.tolist(), right.tolist()),
    ]


def _followed(
    cluster: ChaosCluster, shape: StreamShape, parts: StreamParts
) -> list[tuple[str, object, object]]:
    """Compare all rows of a new follower, and of the one that was there, with the servers'."""
    all_of_them = {"slots": cluster.plan.slots, "wrong": ""}
    with Follower(shape.sink, wait_s=FOLLOWED_LIMIT_S) as late, Client(cluster.endpoints) as client:
        try:
            slots, why = (
                same_rows(client, late, parts.follower.state, is_over=True),
                late.status.trouble,
            )
        except AssertionError as error:
            slots, why = 0, str(error)[:1000]
    return [
        ("rows of the follower", parts.follower.compare(), all_of_them),
        ("rows of a new follower", {"slots": slots, "wrong": why}, all_of_them),
        ("rows that went back", parts.follower.went_back(), ""),
    ]
