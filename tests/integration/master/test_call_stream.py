"""The calls of workers on one stream: batches, lost leases, broken streams, masters that change."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from grpc import aio

from backstay import rpc
from backstay._proto.v1 import job_pb2, job_pb2_grpc
from backstay.config import ClientConfig, Pems, SecurityConfig
from backstay.consensus.records.jobs import MasterRecord
from backstay.control_server import ControlServer
from backstay.errors import (
    ClosedError,
    DeadlineExceeded,
    InvalidRequest,
    JobRefused,
    NotJobMaster,
    ProtocolError,
    ServerUnavailable,
    Unauthenticated,
    WorkerReplaced,
)
from backstay.job.calls import CallStream, JobCalls
from backstay.master import call_stream, service
from backstay.master.job import Job
from backstay.master.service import JobService
from tests.integration.counting_jobs import Eventually
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.job_records_of import Master, counting_spec, master_of, service_of

T = TypeVar("T")
LIMIT_S = 120.0
TOKEN = "secret-of-this-job"


@dataclass(frozen=True)
class Listens:
    token: str | None = None
    listen_control: str = "127.0.0.1:0"
    tls_require_client_cert: bool = False

    def read_pems(self) -> Pems:
        return Pems(None, None, None)


class Serving:
    """A job master of a job in memory, in a thread of its own."""

    def __init__(self, folder: Path, records: int, instance: int, token: str | None) -> None:
        self._spec = counting_spec(folder, records=records)
        self._instance, self._token = instance, token
        self._ready, self._stop = threading.Event(), asyncio.Event()
        self.service: JobService
        self._services: Any
        self.job: Job
        self.master: Master
        self.address = ""
        self.loop: asyncio.AbstractEventLoop
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.thread.start()
        assert self._ready.wait(LIMIT_S)

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        store = MemoryStore(MemoryBackend())
        async with master_of(store, self._spec, self._instance) as (self.master, self.job):
            control = ControlServer(Listens(self._token))
            self.address = control.address
            self._services = control.services
            self._add_service()
            await control.start([])
            self._ready.set()
            await self._stop.wait()
            self.service.end_streams()
            await control.stop(LIMIT_S)

    def _add_service(self) -> None:
        own = MasterRecord(self.address, self._instance, "here", 1)
        self.service = service_of(self.job, own)
        job_pb2_grpc.add_JobServiceServicer_to_server(self.service, self._services)

    def begin_anew(self) -> None:
        """End all streams, and take new ones."""
        self.service.end_streams()
        self._add_service()

    def knows(self, worker: str) -> bool:
        """Whether the job master has heard of a worker."""
        return self.do(lambda: self.job.known.get(worker)) is not None

    def do(self, work: Callable[[], T]) -> T:
        """Do something in the master's thread."""

        async def inside() -> T:
            return work()

        return self.run(inside())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(LIMIT_S)

    def end_waits(self) -> None:
        """Have those who wait for a task hear that there is none."""
        self.master.now_s += 1.0
        self.do(self.job.notify)

    def stop(self) -> None:
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self._stop.set)
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()


Start = Callable[..., Serving]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    # A busy machine records 500 leases in more than the usual time.
    monkeypatch.setattr(service, "DURABLE_S", LIMIT_S)
    with ExitStack() as stack:

        def one(records: int = 40, instance: int = 1, token: str | None = None) -> Serving:
            serving = Serving(tmp_path, records, instance, token)
            stack.callback(serving.stop)
            return serving

        yield one


@contextmanager
def stream_to(serving: Serving, token: str | None = None) -> Iterator[CallStream]:
    with rpc.open_channel(serving.address, SecurityConfig(token=token)) as channel:
        stream = CallStream(job_pb2_grpc.JobServiceStub(channel), serving.address)
        try:
            yield stream
        finally:
            stream.close()


@contextmanager
def calls_to(masters: list[Serving]) -> Iterator[JobCalls]:
    """Calls to a job whose record names the first of these masters."""

    class Known(JobCalls):
        def master(self) -> MasterRecord | None:
            return MasterRecord(masters[0].address, 1, "here", 1)

    calls = Known("127.0.0.1:1", "counting", ClientConfig())
    try:
        yield calls
    finally:
        calls.close()


def worker(name: str, instance: int = 5) -> job_pb2.Worker:
    return job_pb2.Worker(id=name, instance=instance)


def asks(name: str, number: int = 1) -> job_pb2.GetTaskRequest:
    return job_pb2.GetTaskRequest(worker=worker(name), request=number)


def sign(name: str, *leases: job_pb2.TaskLease, instance: int = 5) -> job_pb2.RenewLeasesRequest:
    return job_pb2.RenewLeasesRequest(worker=worker(name, instance), leases=leases)


def lease_of(stream: CallStream, name: str) -> job_pb2.TaskLease:
    return stream.GetTask(asks(name), timeout=LIMIT_S).task.lease


def test_one_message_renews_the_leases_of_500_workers(start: Start) -> None:
    serving, names = start(records=2000), [f"w-{number}" for number in range(500)]

    async def play() -> list[job_pb2.WorkerAnswers]:
        async with rpc.open_aio_channel(serving.address, SecurityConfig()) as channel:
            call: Any = job_pb2_grpc.JobServiceStub(channel).CallStream()
            asked = [job_pb2.WorkerCall(id=n, get_task=asks(name)) for n, name in enumerate(names)]
            await call.write(job_pb2.WorkerCalls(calls=asked))
            given: dict[int, job_pb2.TaskLease] = {}
            while len(given) < len(names):
                given |= {one.id: one.get_task.task.lease for one in (await call.read()).answers}
            serving.master.now_s += 1.0
            signs = [
                job_pb2.WorkerCall(id=n, renew_leases=sign(names[n], lease))
                for n, lease in given.items()
            ]
            await call.write(job_pb2.WorkerCalls(calls=signs))
            message = await call.read()
            await call.done_writing()
            return [message] if await call.read() is aio.EOF else []

    (message,) = asyncio.run(play())
    assert len(message.answers) == 500
    assert not any(one.HasField("error") for one in message.answers)
    assert not any(one.renew_leases.revoked for one in message.answers)
    ttl_s = serving.job.task_lease_ttl_ms / 1000
    # None is left of those that were given a second earlier.
    assert serving.do(serving.job.rounds.next_expiry) == serving.master.now_s + ttl_s


def test_a_lost_lease_is_told_on_the_stream(start: Start) -> None:
    serving = start(records=4)
    with stream_to(serving) as stream:
        lease = lease_of(stream, "a")
        serving.master.now_s += serving.job.task_lease_ttl_ms / 1000
        serving.do(serving.job.expire)
        other = lease_of(stream, "b")
        assert (other.number, lease.number) == (0, 0)
        assert list(stream.RenewLeases(sign("a", lease), timeout=LIMIT_S).revoked) == [lease]
        assert not stream.RenewLeases(sign("b", other), timeout=LIMIT_S).revoked


def test_a_stream_that_ends_neither_ends_leases_nor_keeps_them(start: Start) -> None:
    serving = start(records=4)
    with stream_to(serving) as stream:
        lease = lease_of(stream, "a")
        over_s = serving.do(serving.job.rounds.next_expiry)
    assert serving.do(serving.job.rounds.next_expiry) == over_s
    with stream_to(serving) as stream:
        assert not stream.RenewLeases(sign("a", lease), timeout=LIMIT_S).revoked
    serving.master.now_s += serving.job.task_lease_ttl_ms / 1000
    serving.do(serving.job.expire)
    assert serving.do(lambda: serving.job.assign("b")) is not None


def test_errors_come_as_those_of_unary_calls(start: Start) -> None:
    serving = start()
    with stream_to(serving) as stream:
        stream.RenewLeases(sign("a"), timeout=LIMIT_S)
        serving.do(lambda: serving.job.join("a", 6, "here", 1))
        with pytest.raises(WorkerReplaced, match="another process has joined"):
            stream.RenewLeases(sign("a"), timeout=LIMIT_S)
        # The others on the stream go on.
        assert lease_of(stream, "b").attempt
        nothing = job_pb2.CompleteRequest(worker=worker("b"))
        with pytest.raises(InvalidRequest):
            stream.Complete(nothing, timeout=LIMIT_S)


def test_a_fault_of_the_master_fails_one_call(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = start()
    with stream_to(serving) as stream:
        with monkeypatch.context() as broken:
            broken.setattr(serving.job, "give", lambda *_, **__: 1 // 0)
            with pytest.raises(ProtocolError, match="ZeroDivisionError"):
                stream.GetTask(asks("a"), timeout=LIMIT_S)
        assert lease_of(stream, "a").attempt


def test_without_the_token_a_stream_is_refused(start: Start) -> None:
    serving = start(token=TOKEN)
    with stream_to(serving, token=TOKEN) as stream:
        assert lease_of(stream, "a").attempt
    with stream_to(serving) as stream, pytest.raises(Unauthenticated):
        stream.RenewLeases(sign("a"), timeout=LIMIT_S)


def test_a_late_answer_is_dropped_and_the_stream_goes_on(start: Start) -> None:
    serving = start(records=4)
    with stream_to(serving) as stream:
        lease = lease_of(stream, "a")
        # No task is left: the master answers when there may be one, and this caller has gone.
        with pytest.raises(DeadlineExceeded):
            stream.GetTask(asks("b"), timeout=0.05)
        assert not stream._waiting
        serving.end_waits()
        assert not stream.RenewLeases(sign("a", lease), timeout=LIMIT_S).revoked
        assert not stream.is_over


def test_leases_outlive_a_stream_that_breaks(start: Start) -> None:
    """It is opened again before they end, and the worker's own clock is that of the new call."""
    serving = start(records=4)
    with calls_to([serving]) as calls:
        lease = calls.call_on_stream(lambda stream, _: lease_of(stream, "a"))
        stream = calls._stream
        assert stream is not None
        serving.do(serving.begin_anew)
        answer = calls.call_on_stream(
            lambda stream, timeout: stream.RenewLeases(sign("a", lease), timeout=timeout),
            deadline_s=serving.job.task_lease_ttl_ms / 1000,
        )
        assert not answer.revoked
        assert calls._stream is not stream


def test_the_stream_follows_the_job_master(start: Start) -> None:
    former = start(instance=1)
    with calls_to([former]) as calls:
        calls.call_on_stream(lambda stream, _: lease_of(stream, "a"))

        former.do(lambda: former.job.journal.fail(NotJobMaster("another process is")))
        masters = [start(instance=2)]
        calls.master = lambda: MasterRecord(masters[0].address, 2, "here", 1)  # type: ignore[method-assign]
        # The former one still runs, and says that it is the master no more.
        lease = calls.call_on_stream(lambda stream, _: lease_of(stream, "a"))
        assert lease.attempt
        assert calls._stream is not None
        assert calls._stream.address == masters[0].address


def renew_until_refused(stream: CallStream, name: str) -> None:
    while True:
        stream.RenewLeases(sign(name), timeout=LIMIT_S)


def test_a_master_that_stops_answers_what_it_has_read(start: Start, eventually: Eventually) -> None:
    serving = start(records=4)
    with stream_to(serving) as stream, ThreadPoolExecutor() as threads:
        lease_of(stream, "a")
        answer = threads.submit(stream.GetTask, asks("b"), timeout=LIMIT_S)
        eventually(lambda: serving.knows("b"))
        serving.do(serving.service.end_streams)
        # The next job master may have begun. It knows of no lease that is renewed here.
        with pytest.raises(NotJobMaster, match="is stopping"):
            renew_until_refused(stream, "a")
        assert not answer.done()
        serving.end_waits()
        assert answer.result(LIMIT_S).wait_ms
        eventually(lambda: stream.is_over)
        with pytest.raises(ServerUnavailable):
            stream.RenewLeases(sign("a"), timeout=LIMIT_S)


def test_signs_of_life_pass_the_calls_that_wait(
    start: Start, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_stream, "WAITING_MAX", 2)
    serving = start(records=4)
    with stream_to(serving) as stream, ThreadPoolExecutor() as threads:
        lease = lease_of(stream, "a")
        # When this is answered, the call above waits no more.
        stream.RenewLeases(sign("a", lease), timeout=LIMIT_S)
        waiting = [threads.submit(stream.GetTask, asks(name), timeout=LIMIT_S) for name in "bc"]
        eventually(lambda: serving.knows("b") and serving.knows("c"))
        with pytest.raises(ServerUnavailable, match="2 calls of the stream wait"):
            stream.GetTask(asks("d"), timeout=LIMIT_S)
        assert not stream.RenewLeases(sign("a", lease), timeout=LIMIT_S).revoked
        serving.end_waits()
        assert all(one.result(LIMIT_S).wait_ms for one in waiting)


def test_a_closed_link_ends_its_calls(start: Start, eventually: Eventually) -> None:
    serving = start(records=4)
    with calls_to([serving]) as calls, ThreadPoolExecutor() as threads:
        calls.call_on_stream(lambda stream, _: lease_of(stream, "a"))
        waiting = threads.submit(
            calls.call_on_stream, lambda stream, limit: stream.GetTask(asks("b"), timeout=limit)
        )
        eventually(lambda: serving.knows("b"))
        calls.close()
        with pytest.raises(ClosedError):
            waiting.result(LIMIT_S)


def test_a_job_that_is_over_refuses_on_the_stream_too(start: Start) -> None:
    serving = start(records=4)
    serving.do(lambda: serving.job.end("stopped", "by hand"))
    with stream_to(serving) as stream:
        assert stream.GetTask(asks("a"), timeout=LIMIT_S).ended.state == "stopped"
        assert stream.RenewLeases(sign("a"), timeout=LIMIT_S).stop
    request = job_pb2.JoinRequest(worker=worker("a"))
    with calls_to([serving]) as calls, pytest.raises(JobRefused):
        calls.call(lambda stub, timeout: stub.Join(request, timeout=timeout))
