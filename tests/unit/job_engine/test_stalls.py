"""Workers whose code hangs while their signs of life go on, and when the others go on."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest

from backstay._proto.v1 import job_pb2
from backstay.job_engine.stalls import FIRST_STEP_FACTOR, StepWatch, clock_of_worker
from backstay.job_engine.values import Failure, LeasedTask
from backstay.job_spec import ModeSpec
from backstay.master.job import Job
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.job_records_of import Master, counting_spec, master_of, service_of
from tests.unit.memory_nodes import run

LIMIT_S = 10.0
SIGN_S = 0.5


def test_a_step_may_take_the_limit_or_longer_where_steps_do() -> None:
    watch = StepWatch(LIMIT_S, 3.0)
    watch.task_given("w", 0.0)
    assert watch.limit_s("w") == FIRST_STEP_FACTOR * LIMIT_S, "the first one has much to load"
    watch.heard("w", 0, 30.0, is_waiting=False)
    watch.heard("w", 1, 50.0, is_waiting=False)
    # It was given its task, and is heard of, 30 s before that.
    assert watch.stalled_for_s("w", 57.0) == 7.0
    assert watch.limit_s("w") == 150.0
    for step in range(2, 20):
        watch.heard("w", step, 50.0 + step, is_waiting=False)
    assert watch.limit_s("w") == LIMIT_S
    assert watch.limit_s("w", stalls=2) == 4 * LIMIT_S
    assert watch.limit_s("other") == FIRST_STEP_FACTOR * LIMIT_S


def test_waiting_is_no_time_of_its_own() -> None:
    watch = StepWatch(LIMIT_S, 3.0)
    watch.heard("w", 5, 0.0, is_waiting=False)
    watch.heard("w", 5, 100.0, is_waiting=True)
    assert watch.stalled_for_s("w", 200.0) == 0.0
    watch.heard("w", 6, 201.0, is_waiting=False)
    assert watch.limit_s("w") == FIRST_STEP_FACTOR * LIMIT_S, "a step with a wait is no measure"
    assert watch.stalled_for_s("w", 203.0) == 2.0
    # Another process has taken its name.
    watch.heard("w", 0, 210.0, is_waiting=False)
    assert watch.stalled_for_s("w", 211.0) == 1.0
    watch.keep_only(set())
    assert watch.stalled_for_s("w", 999.0) == 0.0


class Workers:
    """Send the calls of workers to a job master's service, as their links do."""

    def __init__(self, master: Master, job: Job) -> None:
        self.master, self.job = master, job
        self.service = service_of(job)
        self.leases: dict[str, job_pb2.TaskLease] = {}
        self.steps: dict[str, int] = {}

    def who(self, name: str) -> job_pb2.Worker:
        address = f"127.0.0.1:{name}" if self.job.spec.mode.kind == "sync" else ""
        return job_pb2.Worker(id=name, instance=sum(name.encode()) + 1, sync_address=address)

    async def ask(self, name: str) -> job_pb2.GetTaskResponse:
        request = job_pb2.GetTaskRequest(worker=self.who(name))
        answer = await self.service.GetTask(request, None)  # type: ignore[arg-type]
        if answer.HasField("task") and not answer.task.leader:
            self.leases[name] = answer.task.lease
        return answer

    async def sign(
        self, name: str, steps: int = 0, waits_for: list[str] | None = None
    ) -> job_pb2.RenewLeasesResponse:
        self.steps[name] = self.steps.get(name, 0) + steps
        request = job_pb2.RenewLeasesRequest(
            worker=self.who(name), steps=self.steps[name], waits_for=waits_for or []
        )
        if waits_for is not None:
            request.waiting_ms = 2000
        if name in self.leases:
            request.leases.append(self.leases[name])
        answer = await self.service.RenewLeases(request, None)  # type: ignore[arg-type]
        if answer.revoked:
            del self.leases[name]
        return answer

    async def pass_time(self, seconds: float, *getting_on: str, hanging: tuple[str, ...]) -> None:
        """Have all send their signs of life, and the job master look, for so long."""
        for _ in range(round(seconds / SIGN_S)):
            self.master.now_s += SIGN_S
            for name in getting_on:
                await self.sign(name, 1)
            for name in hanging:
                await self.sign(name)
            self.job.expire()

    def note(self, name: str) -> str:
        known = self.job.known.get(name)
        assert known is not None
        return known.note


def test_a_leader_that_hangs_loses_its_task_to_another_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        spec = counting_spec(tmp_path, mode=ModeSpec(kind="sync"), step_limit_s=LIMIT_S)
        async with master_of(MemoryStore(backend), spec, 1) as (master, job):
            workers = Workers(master, job)
            first = await workers.ask("1")
            assert (await workers.ask("2")).task.leader == "127.0.0.1:1"
            await workers.pass_time(20.0, "1", hanging=("2",))
            assert (await workers.sign("2")).led == first.task.lease
            assert workers.note("1") == ""
            # From here on its code hangs; its signs of life go on, and so does its lease.
            await workers.pass_time(LIMIT_S - SIGN_S, hanging=("1", "2"))
            assert "after 10 s its task goes to another worker" in workers.note("1")
            assert "1" in workers.leases
            await workers.pass_time(2 * SIGN_S, hanging=("1", "2"))
            assert "1" not in workers.leases
            assert not (await workers.sign("2")).HasField("led"), "it is no longer followed"
            # The lease is not given to others before its time is over everywhere.
            assert job.assign("2") is None
            await workers.pass_time(spec.task_lease_ttl_ms / 1000, hanging=("1", "2"))
            second = await workers.ask("2")
            assert second.task.leader == ""
            assert second.task.lease.number == first.task.lease.number
            assert second.task.lease.attempt > first.task.lease.attempt
            assert (await workers.ask("1")).task.leader == "127.0.0.1:2"
            # If it is the model that is slow, it has longer the next time.
            await workers.pass_time(15.0, hanging=("1", "2"))
            assert "2" in workers.leases

    with caplog.at_level(logging.WARNING, logger="backstay.job_engine.stalls"):
        run(scenario)
    assert "1 completed no step for 10 s: training-1 task" in caplog.text


def test_a_leader_that_waits_for_a_follower_does_not_hang(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        spec = counting_spec(tmp_path, mode=ModeSpec(kind="sync"), step_limit_s=LIMIT_S)
        async with master_of(MemoryStore(backend), spec, 1) as (master, job):
            workers = Workers(master, job)
            await workers.ask("1")
            await workers.pass_time(5.0, "1", hanging=("2",))
            for _ in range(round(5 * LIMIT_S / SIGN_S)):
                master.now_s += SIGN_S
                await workers.sign("1", waits_for=["2"])
                job.expire()
            assert "1" in workers.leases
            assert workers.note("1").startswith("waits for 2, 2 s so far")

    run(scenario)


def test_in_bounded_mode_nobody_waits_for_a_worker_that_hangs(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        spec = counting_spec(tmp_path, mode=ModeSpec(kind="bounded"), step_limit_s=LIMIT_S)
        clocks = {name: clock_of_worker(name) for name in ("1", "2", "3")}
        store = MemoryStore(backend)
        async with master_of(store, spec, 1) as (master, job):
            workers = Workers(master, job)
            for name in ("1", "2"):
                given = await workers.ask(name)
            assert set(given.task.training) == {clocks["1"], clocks["2"]}
            await workers.pass_time(5.0, "1", "2", hanging=())
            await workers.pass_time(LIMIT_S - SIGN_S, "2", hanging=("1",))
            assert set((await workers.sign("2")).training) == {clocks["1"], clocks["2"]}
            assert "after 10 s they stop waiting" in workers.note("1")
            await workers.pass_time(2 * SIGN_S, "2", hanging=("1",))
            assert set((await workers.sign("2")).training) == {clocks["2"]}
            assert "no longer wait for it" in workers.note("1")
            assert "1" in workers.leases, "its lease goes by the rule for stragglers"
            # Once it gets on it counts again.
            await workers.pass_time(2 * SIGN_S, "1", "2", hanging=())
            assert set((await workers.sign("2")).training) == {clocks["1"], clocks["2"]}
        # A job master that has heard of no worker yet knows the clocks all the same.
        async with master_of(store, spec, 2, replaces=1) as (master, job):
            given = await Workers(master, job).ask("3")
            assert set(given.task.training) == set(clocks.values())

    run(scenario)


def test_in_async_mode_nobody_workers_wait(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        spec = counting_spec(tmp_path, step_limit_s=LIMIT_S)
        async with master_of(MemoryStore(backend), spec, 1) as (master, job):
            workers = Workers(master, job)
            given = await workers.ask("1")
            await workers.pass_time(20 * LIMIT_S, hanging=("1",))
            assert "1" in workers.leases
            assert workers.note("1") == ""
            assert not given.task.training

    run(scenario)


def test_the_clocks_follow_each_lease_without_a_look_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(3)

    async def scenario(backend: MemoryBackend) -> None:
        spec = counting_spec(tmp_path, records=2000, mode=ModeSpec(kind="bounded"))
        async with master_of(MemoryStore(backend), spec, 1) as (master, job):
            job.stalls.clocks()
            monkeypatch.setattr(job.stalls, "_training_leases", lambda **_: pytest.fail("a scan"))
            for _ in range(400):
                master.now_s += draw.random()
                worker = f"w-{draw.randrange(12)}"
                lease = next(
                    (
                        (opened.id, LeasedTask(one.task.number, one.attempt, 0))
                        for opened in job.rounds.values()
                        for one in opened.ledger.leases
                        if one.worker == worker
                    ),
                    None,
                )
                event = draw.choice(["assign", "complete", "give back", "fail", "drop", "expire"])
                if event == "assign" or lease is None:
                    job.assign(worker)
                elif event == "complete":
                    job.complete(worker, *lease, batches=1, examples=1)
                elif event == "give back":
                    job.give_back(worker, *lease, "")
                elif event == "fail":
                    job.fail(worker, *lease, Failure("", worker))
                elif event == "drop":
                    job.drop_worker(worker, "")
                else:
                    for opened in job.rounds.values():
                        opened.ledger.expire(master.now_s)
                        job.rounds.stage(opened)
                leased = {
                    one.worker for opened in job.rounds.values() for one in opened.ledger.leases
                }
                assert list(job.stalls.clocks()) == sorted(map(clock_of_worker, leased))

    run(scenario)
