"""What is seen of a job before its numbers are decided, and what is said of its servers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from backstay.job_engine import scaling
from backstay.job_engine.launch import LauncherReport
from backstay.job_engine.scaling import ScalingPolicy, Seen
from backstay.kubernetes.job_scale import JobScale, least_text, seen_of, waits_text
from backstay.kubernetes.server_scale import ServerScale, ServersSeen
from backstay.master.host import MasterHost
from backstay.master.hosted_launcher import LaunchHandler
from backstay.master.job import Job
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.job_records_of import counting_spec, master_of
from tests.unit.memory_nodes import run

ROOM = "room on a node: 0/2 nodes are available: 2 Insufficient cpu."


def test_what_is_seen_of_a_job(tmp_path: Path) -> None:
    async def inside(backend: MemoryBackend) -> None:
        async with master_of(MemoryStore(backend), counting_spec(tmp_path), 1) as (_, job):
            handler = LaunchHandler(job)
            first, second = (await handler.exchange(LauncherReport())).workers
            job.join(first, 5, "here", 1)
            # One works, one waits, and one that is not wanted any more has not ended.
            await handler.exchange(LauncherReport((first, second, "w-9"), (), (second,)))
            servers = ServersSeen(3, 2, {"ps-2": ROOM}, 1, True, 0.5, 0.25)
            assert seen_of(job, servers, 7) == Seen(
                now_ms=7,
                workers=2,
                lent=0,
                placed=1,
                waiting=1,
                ending=1,
                working=1,
                is_training=True,
                servers=3,
                serving=2,
                servers_waiting=1,
                is_planning=True,
                memory_share=0.5,
                cpu_share=0.25,
            )
            job.follow_scaling(1, 1, "1 workers wanted, 2 before: for a test")
            assert (await handler.exchange(LauncherReport((first, second)))).workers == (first,)
            seen = seen_of(job, ServersSeen(), 8)
            assert (seen.workers, seen.lent, seen.ending) == (1, 1, 1)
            assert list(job.scalings) == ["1 workers wanted, 2 before: for a test"]
            # Whoever says a number means it.
            assert job.scale(2) == 1
            assert job.workers.lent == 0

    run(inside)


def test_all_servers_are_away_if_no_pod_of_theirs_runs() -> None:
    assert ServersSeen(2, 0, {"ps-0": ROOM, "ps-1": "its node"}).are_all_away
    assert not ServersSeen(2, 0, {"ps-0": ROOM, "ps-1": ""}).are_all_away
    # The other one is being ended.
    assert not ServersSeen(2, 0, {"ps-0": ROOM}).are_all_away
    assert not ServersSeen(0, 0).are_all_away


def test_servers_that_a_job_waits_for_are_told() -> None:
    assert waits_text(ServersSeen(3, 3), 2) == ""
    assert waits_text(ServersSeen(3, 2, {"ps-2": ROOM}), 2) == f"1 server waits for {ROOM}"
    both = ServersSeen(3, 1, {"ps-1": ROOM, "ps-2": ROOM})
    assert waits_text(both, 2) == f"1 of at least 2 servers run; 2 servers wait for {ROOM}"
    # Two run, and do not serve before the third has come.
    first = ServersSeen(3, 0, {"ps-0": "", "ps-1": "", "ps-2": ROOM})
    assert waits_text(first, 3) == f"2 of at least 3 servers run; 1 server waits for {ROOM}"
    assert waits_text(ServersSeen(3, 1), 2) == "1 of at least 2 servers run"


def test_fewer_workers_than_the_least_are_told() -> None:
    assert least_text(Seen(0, workers=4, placed=1, waiting=3), 2) == (
        "1 of at least 2 workers have room"
    )
    assert least_text(Seen(0, workers=4, placed=2, waiting=2), 2) == ""
    # They are being made.
    assert least_text(Seen(0, workers=4), 2) == ""


class ServersAtTheirLimit:
    """Servers that are to grow; while they are asked for that, a user says a number of workers."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.asked: list[int] = []

    def look(self) -> ServersSeen:
        return ServersSeen(2, 2, memory_share=0.9)

    def resize(self, servers: int) -> None:
        self.asked.append(servers)
        self.job.scale(1)


def test_a_number_that_a_user_says_meanwhile_stays(tmp_path: Path) -> None:
    async def inside(backend: MemoryBackend) -> None:
        async with master_of(MemoryStore(backend), counting_spec(tmp_path), 1) as (_, job):
            servers = ServersAtTheirLimit(job)
            policy = ScalingPolicy(servers="load", servers_most=4, cool_down_ms=0)
            told: list[bool] = []
            note = SimpleNamespace(job=job, note_store_away_for_all=told.append)
            host = cast(MasterHost, note)
            changes: list[tuple[str, str]] = []

            def tell(reason: str, text: str) -> None:
                changes.append((reason, text))

            await JobScale(host, policy, cast(ServerScale, servers), tell).look()
            assert servers.asked == [3]
            assert job.workers.desired == 1
            (said,) = job.scalings
            assert "3 servers wanted, 2 before" in said
            assert told == [False]
            # Events have times of their own.
            assert changes == [("Scaled", said.partition(" UTC: ")[2])]

    run(inside)


class FullServers:
    """Servers of which one finds no room."""

    def look(self) -> ServersSeen:
        return ServersSeen(2, 1, {"ps-1": ROOM}, no_room=1)


def test_a_change_of_roles_is_told_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[tuple[str, str]] = []

    def tell(reason: str, text: str) -> None:
        changes.append((reason, text))

    monkeypatch.setattr(scaling, "PLACEMENT_MS", 0)

    async def inside(backend: MemoryBackend) -> None:
        async with master_of(MemoryStore(backend), counting_spec(tmp_path), 1) as (_, job):
            note = SimpleNamespace(job=job, note_store_away_for_all=lambda _: None)
            policy = ScalingPolicy(workers_most=2, servers_least=1, servers_most=2)
            servers = cast(ServerScale, FullServers())
            job.report(LauncherReport(running=job.wish().workers))
            await JobScale(cast(MasterHost, note), policy, servers, tell).look()
            why = "1 server finds no room: a worker gives up its room"
            assert changes == [("RoleChanged", f"1 workers wanted, 2 before: {why}")]

    run(inside)
