"""Reports of launchers, and what the job master wishes then."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any, cast

import pytest

from backstay._proto.v1 import job_pb2
from backstay.consensus.records.jobs import MasterRecord
from backstay.errors import StoreUnavailable
from backstay.exit_codes import ExitCode
from backstay.job_engine.launch import ExitReason, LauncherReport, WorkerExit, WorkerWish
from backstay.kubernetes.published_status import how_ended
from backstay.master import hosted_launcher
from backstay.master.hosted_launcher import ExitsSeen, LaunchHandler
from backstay.master.job import Job
from backstay.master.launcher import (
    report_message,
    report_of,
    wish_message,
    wish_of,
)
from backstay.master.status import job_status
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.job_records_of import counting_spec, master_of, service_of
from tests.unit.memory_nodes import run

NO_CONTEXT = cast(Any, None)
LOGGED = "2026-11-23 12:00:56,206 ERROR   __main__: "
CONFLICT = "table 'counting/users' exists with other settings: dim is 4, not 8"


def scenario(folder: Path, play: Callable[[Job, LaunchHandler], Awaitable[None]]) -> None:
    async def inside(backend: MemoryBackend) -> None:
        store, spec = MemoryStore(backend), counting_spec(folder)
        async with master_of(store, spec, 1) as (_, job):
            # The tables of an earlier run of the same job.
            job.declare_tables(["counting/users"])
            await play(job, LaunchHandler(job))

    run(inside)


def ended(worker: str, code: int, words: str = "") -> LauncherReport:
    return LauncherReport(exits=(WorkerExit(worker, ExitReason.of_code(code), code, words),))


def test_a_model_that_does_not_fit_the_tables_fails_the_job_at_once(tmp_path: Path) -> None:
    async def play(job: Job, handler: LaunchHandler) -> None:
        wanted = (await handler.exchange(LauncherReport())).workers
        await handler.exchange(
            ended(wanted[0], ExitCode.WRONG_SETTING, f"Traceback\n{LOGGED}{CONFLICT}\n")
        )
        assert job.state.state == "failed"
        assert job.state.reason == f"the model file or a setting is wrong: {CONFLICT}"

    scenario(tmp_path, play)


def test_workers_that_cannot_be_started_for_good_fail_the_job_with_the_cause(
    tmp_path: Path,
) -> None:
    async def play(job: Job, handler: LaunchHandler) -> None:
        wanted = (await handler.exchange(LauncherReport())).workers
        words = "ErrImagePull: census:1: not found"
        end = WorkerExit(wanted[0], ExitReason.CANNOT_START, ExitCode.WRONG_SETTING, words)
        await handler.exchange(LauncherReport(exits=(end,)))
        assert job.ended == ("failed", f"no worker can be started: {words}")

    scenario(tmp_path, play)


def test_a_missing_right_takes_no_worker_away_from_a_job_that_works(tmp_path: Path) -> None:
    async def play(job: Job, handler: LaunchHandler) -> None:
        words = "no right to make Pods"
        wanted = (await handler.exchange(LauncherReport())).workers
        job.join(wanted[1], 5, "here", 1)
        job.declare_tables(job.state.tables or ["wide"], worker=wanted[1])
        for number in range(3 * job.spec.workers.max_relaunches + 3):
            name = f"w-{number}"
            end = WorkerExit(name, ExitReason.NOT_ALLOWED, ExitCode.WRONG_SETTING, words)
            job.report(LauncherReport((wanted[1],), () if name == wanted[1] else (end,)))
            # The next one comes after a pause.
            assert len(job.workers.wanted(job.now() + 1e6)) == len(wanted)
        assert not job.is_over
        # It ends, too: no worker is left.
        await handler.exchange(ended(wanted[1], -9))
        last = job.workers.wanted(job.now() + 1e6)[-1]
        end = WorkerExit(last, ExitReason.NOT_ALLOWED, ExitCode.WRONG_SETTING, words)
        job.report(LauncherReport((), (end,)))
        assert job.ended == ("failed", f"no worker can be started: {words}")

    scenario(tmp_path, play)


def test_one_wrong_worker_beside_others_that_work_is_only_replaced(tmp_path: Path) -> None:
    async def play(job: Job, handler: LaunchHandler) -> None:
        service = service_of(job)
        wanted = (await handler.exchange(LauncherReport())).workers
        other = job_pb2.Worker(id=wanted[1], instance=5)
        given = await service.GetTask(job_pb2.GetTaskRequest(worker=other, request=1), NO_CONTEXT)
        assert given.HasField("task")
        await handler.exchange(ended(wanted[0], ExitCode.WRONG_SETTING, CONFLICT))
        assert not job.is_over
        # It ends, too: no worker is left.
        await handler.exchange(ended(wanted[1], -9))
        await handler.exchange(ended("w-2", ExitCode.WRONG_SETTING, CONFLICT))
        assert job.is_over

    scenario(tmp_path, play)


def test_an_old_exit_that_is_told_again_does_not_end_the_job(tmp_path: Path) -> None:
    async def play(job: Job, handler: LaunchHandler) -> None:
        await handler.exchange(LauncherReport())
        # Of a worker that was replaced in an earlier job master's time; its Pod is kept.
        await handler.exchange(ended("w-77", ExitCode.WRONG_SETTING, CONFLICT))
        assert not job.is_over

    scenario(tmp_path, play)


def test_a_worker_that_joined_an_earlier_master_counts_as_one_that_works(tmp_path: Path) -> None:
    async def play(job: Job, handler: LaunchHandler) -> None:
        service = service_of(job)
        given = job.assign("w-1")
        assert given is not None
        lease = job_pb2.TaskLease(
            kind=job_pb2.TASK_KIND_TRAINING, round=1, number=given.lease.task,
            attempt=given.lease.attempt,
        )  # fmt: skip
        sign = job_pb2.RenewLeasesRequest(
            worker=job_pb2.Worker(id="w-1", instance=5), leases=[lease]
        )
        await service.RenewLeases(sign, NO_CONTEXT)
        await handler.exchange(ended("w-0", ExitCode.WRONG_SETTING, CONFLICT))
        assert not job.is_over

    scenario(tmp_path, play)


def test_a_worker_that_ran_out_of_memory_is_told_with_what_it_used(tmp_path: Path) -> None:
    async def play(job: Job, handler: LaunchHandler) -> None:
        service = service_of(job)
        told: list[WorkerExit] = []
        handler = LaunchHandler(job, told.append)
        wanted = (await handler.exchange(LauncherReport())).workers
        sign = job_pb2.RenewLeasesRequest(
            worker=job_pb2.Worker(id=wanted[0], instance=5), resident_bytes=61 << 20
        )
        await service.RenewLeases(sign, NO_CONTEXT)
        status = job_status(job, MasterRecord("127.0.0.1:1", 1, "here", 1), 0)
        assert [one.resident_bytes for one in status.workers] == [61 << 20]
        ends = (
            WorkerExit(wanted[0], ExitReason.OUT_OF_MEMORY, 137, "its memory limit is 64Mi"),
            # It was never heard of.
            WorkerExit(wanted[1], ExitReason.OUT_OF_MEMORY, 137, "its memory limit is 64Mi"),
        )
        await handler.exchange(LauncherReport(exits=ends))
        first, second = (one.last_words for one in told)
        assert re.fullmatch(
            r"its memory limit is 64Mi\nit used 61 MiB \d+\.\d s before that was seen", first
        )
        assert second == "its memory limit is 64Mi"

    scenario(tmp_path, play)


def test_how_stale_gradients_are_is_told_of_each_worker_and_the_job(tmp_path: Path) -> None:
    async def play(job: Job, handler: LaunchHandler) -> None:
        service = service_of(job)
        wanted = (await handler.exchange(LauncherReport())).workers
        own = MasterRecord("127.0.0.1:1", 1, "here", 1)
        for worker, slots, total in ((wanted[0], 10, 20), (wanted[1], 30, 180)):
            sign = job_pb2.RenewLeasesRequest(
                worker=job_pb2.Worker(id=worker, instance=5),
                stale_slots=slots,
                staleness_sum=total,
                staleness_buckets=[0, slots],
            )
            assert not job_status(job, own, 0).HasField("staleness") or slots == 30
            await service.RenewLeases(sign, NO_CONTEXT)
        status = job_status(job, own, 0)
        assert sorted(one.staleness for one in status.workers) == [2.0, 6.0]
        assert status.staleness == 5.0
        assert sorted(tuple(one.staleness_buckets) for one in status.workers) == [(0, 10), (0, 30)]

    scenario(tmp_path, play)


def test_the_memory_of_a_worker_is_told_of_no_other_end(tmp_path: Path) -> None:
    async def play(job: Job, _: LaunchHandler) -> None:
        told: list[WorkerExit] = []
        handler = LaunchHandler(job, told.append)
        wanted = (await handler.exchange(LauncherReport())).workers
        job.hear(wanted[0], 5, "here", 1).resident_bytes = 61 << 20
        await handler.exchange(ended(wanted[0], 1, "ValueError"))
        assert [one.last_words for one in told] == ["ValueError"]

    scenario(tmp_path, play)


def test_the_end_of_a_worker_that_was_told_to_end_is_no_news(tmp_path: Path) -> None:
    async def play(job: Job, _: LaunchHandler) -> None:
        told: list[WorkerExit] = []
        handler = LaunchHandler(job, told.append)
        first, second = (await handler.exchange(LauncherReport())).workers
        job.scale(1)
        ends = tuple(WorkerExit(one, ExitReason.PREEMPTED) for one in (first, second))
        await handler.exchange(LauncherReport(exits=ends))
        assert told == [ends[0]]
        # What went wrong is news, whatever was wanted; so is the end of one that hung.
        failed = WorkerExit(second, ExitReason.FAILED, 1)
        (third,) = (await handler.exchange(LauncherReport(exits=(failed,)))).workers
        job.workers.replace(third, job.now())
        hung = WorkerExit(third, ExitReason.PREEMPTED)
        await handler.exchange(LauncherReport(exits=(hung,)))
        assert told == [ends[0], failed, hung._replace(reason=ExitReason.HUNG)]

    scenario(tmp_path, play)


@pytest.mark.parametrize(
    ("seen", "told_as"),
    [
        # What the launcher saw is what the job master's own order brought.
        (ExitReason.PREEMPTED, ExitReason.HUNG),
        (ExitReason.FINISHED, ExitReason.HUNG),
        # That explains its silence, and is what can be mended.
        (ExitReason.NODE_LOST, ExitReason.NODE_LOST),
        (ExitReason.OUT_OF_MEMORY, ExitReason.OUT_OF_MEMORY),
        (ExitReason.EVICTED, ExitReason.EVICTED),
    ],
)
def test_a_worker_that_was_told_to_end_because_it_hung_is_counted_as_such(
    tmp_path: Path, seen: ExitReason, told_as: ExitReason
) -> None:
    async def play(job: Job, _: LaunchHandler) -> None:
        exits = ExitsSeen()
        handler = LaunchHandler(job, exits)
        first, _second = (await handler.exchange(LauncherReport())).workers
        job.workers.replace(first, job.now())
        report = LauncherReport(exits=(WorkerExit(first, seen, -15),))
        await handler.exchange(report)
        # It is told until it is acknowledged.
        await handler.exchange(report)
        assert exits.counts == {told_as.name: 1}
        (end,) = exits.newest
        assert how_ended(end) == told_as.value

    scenario(tmp_path, play)


class ClusterLauncher:
    """Workers that outlive the job master, as those of a cluster manager do."""

    def __init__(self, running: set[str]) -> None:
        self.running = running
        self.exits: dict[str, WorkerExit] = {}

    def reconcile(self, wanted: Collection[str]) -> None:
        self.running |= set(wanted) - self.exits.keys()
        for one in self.running - set(wanted):
            self.end(one, ExitReason.PREEMPTED)

    def end(self, worker: str, reason: ExitReason) -> None:
        self.running.discard(worker)
        self.exits[worker] = WorkerExit(worker, reason)

    def report(self) -> LauncherReport:
        return LauncherReport(tuple(sorted(self.running)), tuple(self.exits.values()))

    def acknowledge(self, worker_ids: Collection[str]) -> None:
        for one in worker_ids:
            del self.exits[one]

    def trouble(self) -> str:
        return ""

    def close(self) -> None:
        """They go on."""


def test_a_launcher_in_the_masters_process_takes_over_what_runs(tmp_path: Path) -> None:
    async def play(job: Job, handler: LaunchHandler) -> None:
        async def follow(launcher: ClusterLauncher) -> None:
            for _ in range(3):
                wish = await handler.exchange(launcher.report())
                launcher.acknowledge(wish.acknowledged)
                launcher.reconcile(wish.workers)

        pods: set[str] = set()
        await follow(ClusterLauncher(pods))
        assert pods == {"w-0", "w-1"}
        # The next launcher finds them. One that is not wanted ends; an evicted one is replaced.
        after = ClusterLauncher(pods | {"w-77"})
        after.end("w-0", ExitReason.EVICTED)
        await follow(after)
        assert after.report() == LauncherReport(("w-1", "w-2"))

    scenario(tmp_path, play)


def test_reports_and_wishes_are_the_same_on_the_other_side() -> None:
    exits = tuple(WorkerExit("w-1", one, -9, "oh") for one in ExitReason)
    report = LauncherReport(("w-0",), exits)
    message = report_message(report, known_version=7, wait_ms=5)
    assert (message.known_version, message.wait_ms) == (7, 5)
    assert report_of(message) == report
    for wish in (WorkerWish(3, ("w-0",), ("w-1",)), WorkerWish(3, (), (), ("done", "all of it"))):
        assert wish_of(wish_message(wish)) == wish


def test_workers_that_are_wanted_no_more_end_while_all_servers_of_the_job_wait_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosted_launcher, "DURABLE_S", 0.05)

    async def inside(backend: MemoryBackend) -> None:
        async with master_of(MemoryStore(backend), counting_spec(tmp_path), 1) as (_, job):
            handler = LaunchHandler(job)
            handler.is_store_away_for_all = True
            backend.set_outage(True)
            # Of no worker is it known yet that it is wanted, so none may be told to end.
            with pytest.raises(StoreUnavailable):
                await handler.exchange(LauncherReport())
            handler.is_store_away_for_all = False
            backend.set_outage(False)
            first, second = (await handler.exchange(LauncherReport())).workers
            backend.set_outage(True)
            job.follow_scaling(1, 1, "a worker gives up its room")
            report = LauncherReport((first, second))
            with pytest.raises(StoreUnavailable):
                await handler.exchange(report)
            # No process reaches the store, so none but this one leads.
            handler.is_store_away_for_all = True
            assert await handler.exchange(report) == WorkerWish(0, (first,))
            # A new worker would need a record.
            job.follow_scaling(2, 0, "the worker comes back")
            assert await handler.exchange(report) == WorkerWish(0, (first,))
            backend.set_outage(False)
            handler.is_store_away_for_all = False

    run(inside)
