"""A job master under many workers: its gRPC calls, its journal, a real etcd.

The master is a process as ``backstay train`` starts it, beside one pserver and an etcd (from PATH,
and it syncs its disk). The workers are simulated by this process, on a few connections: each joins,
asks for a task, works on it for about ``--task-s`` (it sleeps), tells that it is done and then that
its stream is closed, and sends a sign of life each quarter of the time that a lease lasts. It does
so on a call stream, as a real worker does, one for ``--workers-per-stream`` workers. A call that
fails is repeated with the pauses of a real worker.

``master_busy`` is processor time over time: how much of one core the master takes. ``late`` are
renewals whose answer came when the lease was over by the worker's clock: at a master that keeps up
there are none. With ``--restart`` the master is killed at the end, all workers' calls fail until
there is another one, and all come to it at once.

Not simulated: that each worker has a connection of its own, and reads the new master's address at a
pserver (here one does for all). This process is slower than the master: look at ``load_busy``
before taking a rate for the most that the master can do. Linux only, for it reads /proc.

Usage: ``python -m bench.jobs.master [--workers N] [--task-s S] [--task-lease-ttl-ms MS]
    [--workers-per-stream N] [--restart]``
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from backstay import rpc
from backstay._proto.v1 import job_pb2, job_pb2_grpc
from backstay.config import ClientConfig, SecurityConfig
from backstay.errors import BackstayError
from backstay.job.calls import RETRY, JobCalls
from backstay.job_engine.leases import RENEWALS_PER_TTL
from backstay.job_spec import CheckpointSpec, DataSpec, JobSpec, WorkersSpec
from backstay.pserver.local_cluster import LocalCluster
from backstay.tasks import end_tasks
from backstay.trainer.worker.master_link import MARGIN_PART
from bench.jobs.local import print_result

JOB = "crowd"
BATCHES = 16
START_LIMIT_S = 60.0
POLL_S = 0.05
ATTEMPT_S = 6.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--tasks", type=int, default=1_000_000)
    parser.add_argument("--task-s", type=float, default=10.0)
    parser.add_argument("--task-lease-ttl-ms", type=int, default=2000)
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--workers-per-stream", type=int, default=1)
    parser.add_argument("--joins-per-s", type=float, default=500.0)
    parser.add_argument("--seconds", type=float, default=30.0, help="length of what is measured")
    parser.add_argument("--restart", action="store_true")
    return parser.parse_args()


def processor_s(pid: int) -> float:
    """Return the processor time of a process, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


@contextmanager
def running_etcd(folder: Path) -> Iterator[tuple[str, int]]:
    """Start an etcd; yields its address and its process id."""
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        client, peer = (f"127.0.0.1:{one.getsockname()[1]}" for one in (first, second))
    arguments = [
        *("etcd", f"--data-dir={folder / 'etcd'}", "--log-level=error", "--logger=zap"),
        *(f"--listen-client-urls=http://{client}", f"--advertise-client-urls=http://{client}"),
        *(f"--listen-peer-urls=http://{peer}", f"--initial-advertise-peer-urls=http://{peer}"),
        f"--initial-cluster=default=http://{peer}",
    ]
    with subprocess.Popen(arguments) as process:
        try:
            yield client, process.pid
        finally:
            process.kill()


class Masters:
    """Starts the job master, and another one in its place."""

    def __init__(self, endpoints: list[str], folder: Path, arguments: argparse.Namespace) -> None:
        data = folder / "data.csv"
        data.write_text("x\n" + "1\n" * arguments.tasks, encoding="utf-8")
        spec = JobSpec(
            name=JOB,
            model="model.py",
            training=DataSpec(paths=(str(data),)),
            records_per_task=1,
            epochs=1,
            checkpoint=CheckpointSpec(every="none"),
            task_lease_ttl_ms=arguments.task_lease_ttl_ms,
            workers=WorkersSpec(initial=arguments.workers, max=arguments.workers),
        )
        self.folder = folder
        self.endpoints = endpoints
        self.calls = JobCalls(endpoints, JOB, ClientConfig())
        (folder / "job.json").write_text(spec.to_json(), encoding="utf-8")
        self.instance = 0
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        before, self.instance = self.instance, self.instance + 1
        with (self.folder / "master.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "backstay.master.serve_cli"),
                    *(str(self.folder / "job.json"), "--endpoint", ",".join(self.endpoints)),
                    *("--instance", str(self.instance), "--replaces", str(before)),
                ],
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    async def address(self) -> str:
        """Wait for the newest master; returns where it listens."""
        deadline_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline_s:
            try:
                record = await asyncio.to_thread(self.calls.master)
            except BackstayError:
                record = None
            if record is not None and record.instance == self.instance:
                return record.address
            await asyncio.sleep(POLL_S)
        log = (self.folder / "master.log").read_text(encoding="utf-8")
        raise SystemExit(f"the job has no master:\n{log}")


class Stream:
    """One call stream."""

    def __init__(self, stub: Any) -> None:
        self.call = stub.CallStream()
        self.waiting: dict[int, asyncio.Future[Any]] = {}
        self.unsent: list[job_pb2.WorkerCall] = []
        self.writing = asyncio.Lock()
        self.last_id = 0
        self.is_over = False
        self.reading = asyncio.create_task(self.read())

    async def ask(self, field: str, request: Any, timeout_s: float) -> Any:
        """Return the answer; raises the name of what went wrong as ConnectionError."""
        self.last_id += 1
        call = job_pb2.WorkerCall(id=self.last_id)
        getattr(call, field).CopyFrom(request)
        answer = self.waiting[call.id] = asyncio.get_running_loop().create_future()
        self.unsent.append(call)
        try:
            async with self.writing:
                if self.unsent:
                    calls, self.unsent = self.unsent, []
                    await self.call.write(job_pb2.WorkerCalls(calls=calls))
            said = await asyncio.wait_for(answer, timeout_s)
        except asyncio.TimeoutError:
            raise ConnectionError("DEADLINE_EXCEEDED") from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            self.end()
            raise ConnectionError("UNAVAILABLE") from None
        finally:
            self.waiting.pop(call.id, None)
        if said.HasField("error"):
            raise ConnectionError(said.error.error)
        return getattr(said, field)

    async def read(self) -> None:
        try:
            async for message in self.call:
                for answer in message.answers:
                    if (waits := self.waiting.get(answer.id)) is not None and not waits.done():
                        waits.set_result(answer)
        except grpc.aio.AioRpcError:
            pass
        finally:
            self.end()

    def end(self) -> None:
        # Cancelled, grpcio would end whoever writes as if its task were cancelled.
        self.is_over = True
        for waits in self.waiting.values():
            if not waits.done():
                waits.set_exception(ConnectionError("UNAVAILABLE"))
                waits.exception()  # who asked may be gone


FIELD_OF_CALL = {"RenewLeases": "renew_leases", "GetTask": "get_task", "Complete": "complete"}


class Crowd:
    """Simulated workers, and what their calls came to."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.draw = random.Random(7)
        self.stubs: list[job_pb2_grpc.JobServiceStub] = []
        self.streams: dict[int, Stream] = {}
        self.ttl_s = 0.0
        # Seconds of each call that was answered, of renewals, and of requests that got a task.
        self.took: defaultdict[str, list[float]] = defaultdict(list)
        self.counts: Counter[str] = Counter()
        self.answered: set[int] = set()
        # Attempts that are being told as done.
        self.ending: set[int] = set()

    @property
    def patience_s(self) -> float:
        """How long a sign of life waits for its answer, as a real worker's does."""
        return max(min(self.ttl_s, ATTEMPT_S), self.ttl_s / 2)

    def connect(self, address: str) -> None:
        """Send calls to this master from now on."""
        channels = [
            rpc.open_aio_channel(address, SecurityConfig()) for _ in range(self.arguments.channels)
        ]
        self.stubs = [job_pb2_grpc.JobServiceStub(channel) for channel in channels]
        self.streams = {}

    def stream_of(self, number: int) -> Stream:
        """Return the stream that a worker calls on, a new one if it has ended."""
        place = number // self.arguments.workers_per_stream
        stream = self.streams.get(place)
        if stream is None or stream.is_over:
            stream = self.streams[place] = Stream(self.stubs[place % len(self.stubs)])
        return stream

    def begin_counting(self) -> None:
        self.took.clear()
        self.counts.clear()
        self.answered.clear()

    async def call(self, number: int, name: str, request: Any) -> tuple[Any, float]:
        """Call until it succeeds; returns the answer and when that call was sent."""
        retries = RETRY.begin(draw=random.random)
        while True:
            sent_s = time.monotonic()
            timeout_s = ATTEMPT_S if name != "RenewLeases" else self.patience_s
            try:
                if name in FIELD_OF_CALL:
                    stream = self.stream_of(number)
                    answer = await stream.ask(FIELD_OF_CALL[name], request, timeout_s)
                else:
                    stub = self.stubs[number % len(self.stubs)]
                    answer = await getattr(stub, name)(request, timeout=timeout_s)
            except (grpc.aio.AioRpcError, ConnectionError) as error:
                why = str(error) if isinstance(error, ConnectionError) else error.code().name
                self.counts[f"failed {why}"] += 1
                await asyncio.sleep(retries.next_s())
                continue
            if name != "GetTask" or answer.HasField("task"):
                self.took[name].append(time.monotonic() - sent_s)
                self.answered.add(number)
            return answer, sent_s

    async def work(self, number: int) -> None:
        """Be one worker; never returns."""
        who = job_pb2.Worker(id=f"w-{number}", instance=number + 1, host="bench", pid=1)
        answer, _ = await self.call(number, "Join", job_pb2.JoinRequest(worker=who))
        self.ttl_s = answer.task_lease_ttl_ms / 1000
        leased: list[job_pb2.TaskLease] = []
        keeping = asyncio.create_task(self.keep(number, who, leased))
        try:
            request = job_pb2.GetTaskRequest(worker=who)
            part = self.draw.random()  # of its first task: not all are to end at once
            while True:
                request.request += 1
                answer, _ = await self.call(number, "GetTask", request)
                del request.closed_streams[:]
                if not answer.HasField("task"):
                    await asyncio.sleep(answer.wait_ms / 1000)
                    continue
                leased.append(answer.task.lease)
                await asyncio.sleep(part * self.arguments.task_s)
                part = self.draw.uniform(0.5, 1.5)
                done = job_pb2.CompleteRequest(
                    worker=who, lease=answer.task.lease, batches=BATCHES, examples=1
                )
                lease = answer.task.lease
                # What becomes of the lease does not matter any more; it is renewed until the end.
                self.ending.add(lease.attempt)
                answer, _ = await self.call(number, "Complete", done)
                self.ending.discard(lease.attempt)
                leased.clear()
                self.counts["tasks"] += answer.first
                self.counts["twice"] += not answer.first
                request.closed_streams.add(pass_number=lease.round, task=lease.number)
        finally:
            keeping.cancel()

    async def keep(self, number: int, who: job_pb2.Worker, leased: list[job_pb2.TaskLease]) -> None:
        """Send a worker's signs of life; never returns."""
        request = job_pb2.RenewLeasesRequest(worker=who, loss=0.5)
        ttl_s = self.ttl_s
        await asyncio.sleep(self.draw.random() * ttl_s / RENEWALS_PER_TTL)
        renewed_s, renewed = time.monotonic(), 0
        while True:
            begun_s = time.monotonic()
            del request.leases[:]
            request.leases.extend(leased)
            request.steps += 1
            answer, sent_s = await self.call(number, "RenewLeases", request)
            attempt = leased[0].attempt if leased else 0
            over_s = renewed_s + ttl_s * (1 - MARGIN_PART)
            self.counts["late"] += attempt == renewed != 0 and time.monotonic() > over_s
            # One that was completed meanwhile is none to be renewed, either.
            lost = [one for one in answer.revoked if one.attempt not in self.ending]
            self.counts["revoked"] += any(one in leased for one in lost)
            renewed_s, renewed, ttl_s = sent_s, attempt, answer.task_lease_ttl_ms / 1000
            self.ttl_s = ttl_s
            left_s = ttl_s / RENEWALS_PER_TTL - (time.monotonic() - begun_s)
            await asyncio.sleep(max(0.0, left_s))


class Usage:
    """Processor time of the processes concerned."""

    def __init__(self, **pids: int) -> None:
        self.pids = pids
        self.begun_s = time.monotonic()
        self.before = {name: processor_s(pid) for name, pid in pids.items()}

    def figures(self) -> dict[str, float]:
        passed_s = time.monotonic() - self.begun_s
        return {
            f"{name}_busy": round((processor_s(pid) - self.before[name]) / passed_s, 3)
            for name, pid in self.pids.items()
        }


def milliseconds(seconds: list[float]) -> dict[str, float]:
    """Return the median, the 99th of 100 and the longest."""
    if len(seconds) < 2:
        return {}
    cuts = statistics.quantiles(seconds, n=100)
    return {
        "p50_ms": round(cuts[49] * 1e3, 1),
        "p99_ms": round(cuts[98] * 1e3, 1),
        "max_ms": round(max(seconds) * 1e3, 1),
    }


async def steady(crowd: Crowd, usage: Usage, seconds: float) -> dict[str, Any]:
    """Let the workers work for so long; returns the figures."""
    crowd.begin_counting()
    begun_s = time.monotonic()
    await asyncio.sleep(seconds)
    passed_s = time.monotonic() - begun_s
    busy = usage.figures()
    calls = {
        name: {"per_s": round(len(took) / passed_s, 1), **milliseconds(took)}
        for name, took in sorted(crowd.took.items())
    }
    per_s = sum(len(took) for took in crowd.took.values()) / passed_s
    return {
        "tasks_per_s": round(crowd.counts["tasks"] / passed_s, 1),
        "calls_per_s": round(per_s),
        "call_us": round(busy["master_busy"] / per_s * 1e6),
        "lease_ttl_s": crowd.ttl_s,
        **busy,
        **calls,
        **{name: n for name, n in sorted(crowd.counts.items()) if n and name != "tasks"},
    }


async def restart(crowd: Crowd, masters: Masters) -> dict[str, Any]:
    """Kill the master, start another; returns how long everything took since."""
    everybody = len(crowd.answered)
    masters.kill()
    begun_s = time.monotonic()
    masters.start()
    address = await masters.address()
    serves_s = time.monotonic() - begun_s
    crowd.begin_counting()
    crowd.connect(address)
    marks: dict[str, float] = {}
    while len(marks) < 2 and time.monotonic() - begun_s < START_LIMIT_S:
        await asyncio.sleep(POLL_S / 10)
        if crowd.took["GetTask"] and crowd.counts["tasks"]:
            marks.setdefault("tasks_flow_s", round(time.monotonic() - begun_s, 2))
        if len(crowd.answered) >= everybody:
            marks.setdefault("everybody_s", round(time.monotonic() - begun_s, 2))
    return {"serves_s": round(serves_s, 2), **marks, "lost_leases": crowd.counts["revoked"]}


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run a job for a while and return the figures."""
    with (
        running_etcd(folder) as (etcd, etcd_pid),
        LocalCluster(settings={"store": "etcd", "store_endpoints": etcd}) as cluster,
    ):
        masters = Masters(cluster.endpoints, folder, arguments)
        crowd = Crowd(arguments)
        workers: list[asyncio.Task[None]] = []
        try:
            masters.start()
            crowd.connect(await masters.address())
            for number in range(arguments.workers):
                workers.append(asyncio.create_task(crowd.work(number)))
                await asyncio.sleep(1 / arguments.joins_per_s)
            # By then every worker has heard how long leases last.
            await asyncio.sleep(crowd.ttl_s / 2)
            usage = Usage(
                master=masters.pid, pserver=cluster.pids[0], etcd=etcd_pid, load=os.getpid()
            )
            figures = await steady(crowd, usage, arguments.seconds)
            if arguments.restart:
                figures["restart"] = await restart(crowd, masters)
            for worker in workers:
                if worker.done():  # it failed
                    worker.result()
            return {"workers": arguments.workers, **figures}
        finally:
            await end_tasks(*workers)
            for stream in crowd.streams.values():
                stream.reading.cancel()
            masters.kill()
            masters.calls.close()


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        print_result(asyncio.run(measure(parse_arguments(), Path(folder))))


if __name__ == "__main__":
    main()
