"""A job ends when what it has made is safe: its rows are looked at, its last checkpoint is written.

The job master, its journal and its records are real; the cluster's checkpoints are a stand-in, so
that rows are lost, and disks are full, at a known moment.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from backstay.backoff import Backoff
from backstay.checkpoint.remote import CheckpointInfo
from backstay.checkpoint.restore_state import RestoreState
from backstay.cluster.checkpoints import Checkpoints
from backstay.consensus.records.jobs import MasterRecord
from backstay.errors import (
    BackstayError,
    CheckpointUnavailable,
    NoCheckpointFolder,
    ServerUnavailable,
)
from backstay.job_spec import CheckpointSpec
from backstay.master import saving as module
from backstay.master.job import Job
from backstay.master.saving import Saving
from backstay.master.status import job_status
from backstay.tasks import end_tasks
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.job_records_of import DURABLE_S, counting_spec, do_one, master_of
from tests.unit.memory_nodes import run, until

FULL = CheckpointUnavailable("/disk: No space left on device")


class Rows:
    """Checkpoints of a cluster whose rows can be lost, on a disk that may be full."""

    def __init__(self) -> None:
        self.generation = 0
        self.saved = 0
        self.refusals: list[BackstayError] = []
        self.is_silent = False
        self.before_save: Callable[[], None] = lambda: None

    def restore_state(self) -> RestoreState:
        if self.is_silent:
            raise ServerUnavailable("ps-0: connection refused")
        return RestoreState("", "", "", 0, "", 0, self.generation, 0)

    def save(self, *, tags: dict[str, Any]) -> CheckpointInfo:
        self.before_save()
        if self.refusals:
            raise self.refusals.pop(0)
        self.saved += 1
        return cast(
            CheckpointInfo,
            type("Info", (), {"id": f"ckpt-{self.saved:06d}-abcdef", "url": "/disk"}),
        )


class End:
    """A job whose tasks are done one by one, and what looks after its end."""

    def __init__(self, job: Job, rows: Rows, *, servers_end: bool) -> None:
        self.job, self.rows = job, rows
        self.saving = Saving(job, job.spec.name, cast(Checkpoints, rows), servers_end=servers_end)
        self.task = asyncio.create_task(self.saving.end_schedule())

    async def do_all(self) -> None:
        while not self.job.is_finished:
            await do_one(self.job, batches=4)
            self.job.advance()

    async def ended(self) -> str:
        await asyncio.wait_for(self.task, 10.0)
        return self.job.state.state

    async def waits(self) -> None:
        while not self.job.checkpoints.unsaved:
            await self.job.changed.wait()


def scenario(
    folder: Path,
    play: Callable[[End], Awaitable[None]],
    *,
    servers_end: bool = True,
    **fields: Any,
) -> None:
    spec = counting_spec(folder, records=8, **{"checkpoint": CheckpointSpec(), **fields})

    async def body(backend: MemoryBackend) -> None:
        async with AsyncExitStack() as stack:
            _, job = await stack.enter_async_context(master_of(MemoryStore(backend), spec, 1))
            end = End(job, Rows(), servers_end=servers_end)
            stack.push_async_callback(end_tasks, end.task)
            await play(end)

    run(body)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY", Backoff(0.001, 0.001))
    monkeypatch.setattr(module, "LOOK_S", 0.001)


def test_a_job_is_done_when_its_last_checkpoint_is_written(tmp_path: Path) -> None:
    async def play(end: End) -> None:
        await end.do_all()
        assert not end.job.is_over
        assert await end.ended() == "done"
        assert (end.rows.saved, end.job.state.checkpoint) == (1, "ckpt-000001-abcdef")
        assert job_status(end.job, MasterRecord("", 1, "", 0), 0).checkpoint_url == "/disk"

    scenario(tmp_path, play)


def test_a_job_that_is_cut_short_is_saved_at_its_end(tmp_path: Path) -> None:
    async def play(end: End) -> None:
        await end.do_all()
        assert end.job.schedule.reason.startswith("max_steps")
        assert await end.ended() == "done"
        assert end.rows.saved == 1

    scenario(tmp_path, play, max_steps=4)


@pytest.mark.parametrize("checkpoint", [CheckpointSpec(), CheckpointSpec(every="none")])
def test_rows_that_are_lost_just_before_the_end_fail_the_job(
    tmp_path: Path, checkpoint: CheckpointSpec
) -> None:
    async def play(end: End) -> None:
        end.rows.generation = 1
        await end.do_all()
        assert await end.ended() == "failed"
        assert "slots lost all their copies" in end.job.state.reason
        assert end.job.state.inexact
        assert end.rows.saved == 0

    scenario(tmp_path, play, checkpoint=checkpoint)


def test_rows_that_are_lost_while_the_last_checkpoint_is_written_fail_the_job(
    tmp_path: Path,
) -> None:
    async def play(end: End) -> None:
        def lose() -> None:
            end.rows.generation = 1

        end.rows.before_save = lose
        await end.do_all()
        assert await end.ended() == "failed"

    scenario(tmp_path, play)


def test_a_full_disk_is_tried_again_until_there_is_room(tmp_path: Path) -> None:
    async def play(end: End) -> None:
        end.rows.refusals = [FULL] * 3
        await end.do_all()
        assert await end.ended() == "done"
        assert (end.rows.saved, end.job.checkpoints.failed) == (1, 3)
        assert end.job.trouble["checkpoint"] == ""

    scenario(tmp_path, play)


def test_somebody_tries_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY", Backoff(1000.0, 1000.0))

    async def play(end: End) -> None:
        assert not end.saving.try_now()
        end.rows.refusals = [FULL]
        await end.do_all()
        # It says so and begins its pause in one step.
        await end.waits()
        assert end.saving.try_now()
        assert await end.ended() == "done"

    scenario(tmp_path, play)


@pytest.mark.parametrize("servers_end", [True, False])
def test_a_job_that_cannot_be_saved_is_unsaved_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers_end: bool
) -> None:
    monkeypatch.setattr(module, "LAST_SAVE_S", 0.0)
    checkpoint = CheckpointSpec(unsaved_wait_s=0)

    async def play(end: End) -> None:
        end.rows.refusals = [FULL] * 100
        await end.do_all()
        assert await end.ended() == "unsaved"
        assert "No space left on device" in end.job.state.reason

    scenario(tmp_path, play, servers_end=servers_end, checkpoint=checkpoint)


def test_a_cluster_that_keeps_no_checkpoints_has_jobs_that_end(tmp_path: Path) -> None:
    async def play(end: End) -> None:
        end.rows.refusals = [NoCheckpointFolder("no folder for checkpoints is set")] * 100
        await end.do_all()
        assert await end.ended() == "done"
        assert "no folder" in end.job.trouble["checkpoint"]
        assert end.job.checkpoints.failed == 0

    scenario(tmp_path, play, servers_end=False)


@pytest.mark.parametrize("servers_end", [True, False])
def test_a_stopped_job_is_saved_if_its_servers_end_with_it(
    tmp_path: Path, servers_end: bool
) -> None:
    async def play(end: End) -> None:
        await do_one(end.job, batches=4)
        end.job.end("stopped", "Ctrl-C")
        assert end.job.saves_still == servers_end
        await end.saving.save_stopped()
        assert await end.ended() == "stopped"
        assert end.job.state.checkpoint

    scenario(tmp_path, play, servers_end=servers_end)


def test_a_job_master_that_takes_over_a_stopped_job_saves_what_is_not_saved(
    tmp_path: Path,
) -> None:
    spec = counting_spec(tmp_path, records=8, checkpoint=CheckpointSpec())

    async def body(backend: MemoryBackend) -> None:
        store = MemoryStore(backend)
        async with master_of(store, spec, 1, owner="d") as (master, job):
            end = End(job, Rows(), servers_end=True)
            await do_one(job, batches=4)
            job.end("stopped", "Ctrl-C")
            await end.ended()
            await master.journal.durable(DURABLE_S)
        for instance, saves in ((2, True), (3, False)):
            async with master_of(store, spec, instance, replaces=instance - 1, owner="d") as (
                master,
                job,
            ):
                end = End(job, Rows(), servers_end=True)
                assert job.saves_still == saves
                if saves:
                    await end.saving.save_stopped()
                    await master.journal.durable(DURABLE_S)
                assert await end.ended() == "stopped"

    run(body)


def test_a_folder_that_is_set_after_a_checkpoint_was_refused_gets_the_last_one(
    tmp_path: Path,
) -> None:
    async def play(end: End) -> None:
        end.rows.refusals = [NoCheckpointFolder("no folder for checkpoints is set")]
        end.job.checkpoints.is_due = True
        periodic = asyncio.create_task(end.saving.save_when_due())
        end.job.notify()

        async def is_refused() -> bool:
            return "checkpoint" in end.job.trouble

        await until(is_refused)
        await end_tasks(periodic)
        # Somebody sets one before the job ends.
        await end.do_all()
        assert await end.ended() == "done"
        assert end.rows.saved == 1

    scenario(tmp_path, play, servers_end=False)


def test_a_stopped_job_whose_checkpoint_takes_too_long_tells_it(tmp_path: Path) -> None:
    async def play(end: End) -> None:
        may_end = threading.Event()

        def wait() -> None:
            may_end.wait(10.0)

        end.rows.before_save = wait
        await do_one(end.job, batches=4)
        end.job.end("stopped", "Ctrl-C")
        await end.saving.save_stopped()
        may_end.set()
        assert "took longer than 1 s" in end.job.trouble["checkpoint"]
        assert end.job.checkpoints.failed == 1

    scenario(tmp_path, play, checkpoint=CheckpointSpec(stop_wait_s=1))


def test_a_job_at_its_end_that_no_node_answers_is_unsaved_until_one_does(tmp_path: Path) -> None:
    async def play(end: End) -> None:
        end.rows.is_silent = True
        await end.do_all()
        await end.waits()
        status = job_status(end.job, MasterRecord("", 1, "", 0), 0)
        assert (status.state, status.saving) == ("unsaved", True)
        assert "no node says whether the cluster was restored" in status.reason
        assert end.saving.try_now()
        end.rows.is_silent = False
        assert await end.ended() == "done"
        assert job_status(end.job, MasterRecord("", 1, "", 0), 0).state == "done"

    scenario(tmp_path, play)


def test_a_job_at_its_end_that_no_node_answers_for_too_long_ends(tmp_path: Path) -> None:
    async def play(end: End) -> None:
        end.rows.is_silent = True
        await end.do_all()
        assert await end.ended() == "unsaved"
        assert "connection refused" in end.job.state.reason

    scenario(tmp_path, play, checkpoint=CheckpointSpec(unsaved_wait_s=0))
