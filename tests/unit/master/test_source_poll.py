"""The job master asks the source of data without an end, and has the job take what has come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from backstay._proto.v1 import job_pb2
from backstay.consensus.records.jobs import JobStateRecord, MasterRecord
from backstay.consensus.records.keys import JobKeys
from backstay.data.source import SourceLook
from backstay.errors import ConfigError, DataUnavailable
from backstay.job_engine.values import Failure
from backstay.job_spec import JobSpec
from backstay.master import source_poll
from backstay.master.job import Job
from backstay.master.lag_report import LagReport
from backstay.master.source_poll import SourcePoll
from backstay.master.status import job_status, recorded_dead_letters, recorded_status
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.job_engine.stream_jobs import stream_spec
from tests.unit.job_records_of import DURABLE_S, KEYS, do_one, master_of
from tests.unit.memory_nodes import run

OWN = MasterRecord("127.0.0.1:1", 1, "here", 1)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_poll, "ASK_S", 0.005)


def spec_of(**fields: Any) -> JobSpec:
    spec = stream_spec(**fields)
    return JobSpec.from_mapping({**spec.to_mapping(), "name": KEYS.job})


class Topic:
    """A source of one partition."""

    def __init__(self) -> None:
        self.begin, self.end = 0, 0
        self.error: Exception | None = None
        self.trouble = ""
        self.closed = False
        # When the record at an offset came.
        self.came_s: dict[int, float] = {}
        self.committed: list[dict[str, int]] = []
        self.refusal: Exception | None = None

    def start(self) -> dict[str, int]:
        if self.error is not None:
            raise self.error
        return {"t/0": self.end}

    def look(self, positions: Mapping[str, int]) -> SourceLook:
        if self.error is not None:
            raise self.error
        return SourceLook({"t/0": (self.begin, self.end)}, trouble=self.trouble)

    def oldest_s(self, offsets: Mapping[str, int]) -> float | None:
        return min((self.came_s[at] for at in offsets.values() if at in self.came_s), default=None)

    def commit(self, offsets: Mapping[str, int]) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.committed.append(dict(offsets))

    def close(self) -> None:
        self.closed = True


@asynccontextmanager
async def polled(job: Job, topic: Topic) -> AsyncIterator[None]:
    job.now = asyncio.get_running_loop().time
    polling = asyncio.create_task(SourcePoll(job, topic).run())
    try:
        yield
    finally:
        polling.cancel()
        with suppress(asyncio.CancelledError):
            await polling


async def until(holds: Callable[[], object]) -> None:
    while not holds():  # noqa: ASYNC110 (what is waited for has no event)
        await asyncio.sleep(0.001)


def status_of(job: Job) -> job_pb2.JobStatus:
    return job_status(job, OWN, 1000)


def test_what_comes_is_taken_and_the_lag_is_told() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store, topic = MemoryStore(backend), Topic()
        topic.end = 7
        async with master_of(store, spec_of(), 1) as (_, job), polled(job, topic):
            # It begins at the end, and that is recorded once and for all.
            await until(lambda: job.stream.lag is not None)
            assert status_of(job).stream.lag_records == 0
            topic.end += 8
            await until(lambda: job.rounds[next(iter(job.rounds))].ledger.counts.todo == 2)
            assert await do_one(job) == 0
            await until(lambda: status_of(job).stream.ahead_records == 4)
            status = status_of(job)
            assert (status.stream.lag_records, status.passes, status.round) == (4, 0, 1)
        assert topic.closed
        topic.end = 100
        async with master_of(store, spec_of(), 2, replaces=1) as (_, job), polled(job, topic):
            assert await do_one(job) == 1
            await until(lambda: job.stream.positions == {"t/0": 19})

    run(scenario)


def test_a_new_period_has_its_tasks_without_another_question() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        topic = Topic()
        async with master_of(MemoryStore(backend), spec_of(), 1) as (_, job), polled(job, topic):
            await until(lambda: job.stream.lag is not None)
            topic.end = 20
            await until(lambda: job.stream.positions == {"t/0": 12})
            for _ in range(3):
                await do_one(job)
                job.advance()
            await until(lambda: job.stream.positions == {"t/0": 20})
            assert job.schedule.passes_over == 1

    run(scenario)


def test_while_the_source_is_away_the_status_says_so_and_nothing_is_given_out() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        topic = Topic()
        async with master_of(MemoryStore(backend), spec_of(), 1) as (_, job), polled(job, topic):
            await until(lambda: job.stream.lag is not None)
            topic.end = 8
            await until(lambda: job.stream.positions == {"t/0": 8})
            topic.error = DataUnavailable("no broker answers")
            await until(lambda: status_of(job).trouble)
            assert status_of(job).trouble == "the training data are not there: no broker answers"
            assert job.assign("w1") is None
            topic.error = None
            await until(lambda: not status_of(job).trouble)
            assert job.assign("w1") is not None

    run(scenario)


def test_what_is_wrong_with_some_of_the_source_is_shown_and_the_job_goes_on() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        topic = Topic()
        async with master_of(MemoryStore(backend), spec_of(), 1) as (_, job), polled(job, topic):
            await until(lambda: job.stream.lag is not None)
            topic.trouble, topic.end = "d/1: 1 files came after it was taken", 8
            await until(lambda: status_of(job).trouble == topic.trouble)
            await until(lambda: job.assign("w1") is not None)
            topic.trouble = ""
            await until(lambda: not status_of(job).trouble)

    run(scenario)


def test_the_lag_is_told_in_seconds_too_and_offsets_are_shown_to_others() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        topic = Topic()
        async with master_of(MemoryStore(backend), spec_of(), 1) as (_, job), polled(job, topic):
            report = LagReport(job, topic, lambda: 1000.0)
            await report.report()
            assert not status_of(job).stream.HasField("lag_s")
            await until(lambda: job.stream.lag is not None)
            await report.report()
            assert status_of(job).stream.lag_s == 0.0
            assert topic.committed == [{"t/0": 0}]
            topic.end, topic.came_s = 8, {0: 940.0, 4: 980.0}
            await until(lambda: job.stream.positions == {"t/0": 8})
            await report.report()
            assert status_of(job).stream.lag_s == 60.0
            await do_one(job)
            await report.report()
            assert status_of(job).stream.lag_s == 20.0
            # The same is shown once.
            await report.report()
            assert topic.committed == [{"t/0": 0}, {"t/0": 4}]
            await do_one(job)
            await until(lambda: job.stream.lag == (0, 0, 0))
            assert status_of(job).stream.lag_s == 0.0, "before the source is asked again"
            await report.last()
            assert status_of(job).stream.lag_s == 0.0
            assert topic.committed[-1] == {"t/0": 8}

    run(scenario)


def test_a_commit_that_fails_is_a_warning_and_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        topic = Topic()
        async with master_of(MemoryStore(backend), spec_of(), 1) as (_, job), polled(job, topic):
            report = LagReport(job, topic)
            topic.refusal = DataUnavailable("consumer group g: not authorized")
            await until(lambda: job.stream.lag is not None)
            topic.end = 8
            await until(lambda: job.assign("w1") is not None)
            for _ in range(2):
                await report.report()
            assert status_of(job).trouble == str(topic.refusal)
            warned = [one for one in caplog.records if one.levelname == "WARNING"]
            assert [one.getMessage() for one in warned] == [
                "group: consumer group g: not authorized; the job goes on"
            ]
            topic.refusal = None
            await report.report()
            assert topic.committed == [{"t/0": 0}]
            assert not status_of(job).trouble

    run(scenario)


def test_an_option_that_is_wrong_ends_the_job() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        topic = Topic()
        topic.error = ConfigError("options: no offset is given for t/1; name all partitions")
        async with master_of(MemoryStore(backend), spec_of(), 1) as (_, job), polled(job, topic):
            await until(lambda: job.is_over)
            assert job.ended == ("failed", str(topic.error))

    run(scenario)


def test_records_tell_of_dropped_records_and_of_dead_letters_with_their_offsets() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store, topic = MemoryStore(backend), Topic()
        spec = spec_of(max_task_retries=0)
        async with master_of(store, spec, 1) as (_, job), polled(job, topic):
            await until(lambda: job.stream.lag is not None)
            topic.begin, topic.end = 3, 15
            await until(lambda: job.stream.positions == {"t/0": 15})
            assert status_of(job).stream.dropped_records == 3
            given = job.assign("w1")
            assert given is not None
            job.fail("w1", given.round.id, given.lease, Failure("wrong", "w1"))
            for _ in range(2):
                await do_one(job)
            job.advance()
            await job.journal.durable(DURABLE_S)
        found = {key: item.value for key, item in (await store.range(KEYS.root)).values().items()}
        record = JobStateRecord.from_json(found[KEYS.state])
        assert recorded_status(KEYS.job, record).stream.dropped_records == 3
        (dead,) = recorded_dead_letters(JobKeys(KEYS.job), found)
        assert (dead.shard, dead.start, dead.count, dead.round) == ("t/0@3", 0, 4, 1)

    run(scenario)
