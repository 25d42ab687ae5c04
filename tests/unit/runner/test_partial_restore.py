"""A restore of some slots only: jobs that train on all of them keep it out, or say so."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from backstay._proto.v1 import job_pb2
from backstay.checkpoint.restore_state import RestoreState
from backstay.cli.progress import Display
from backstay.errors import CheckpointRefused
from backstay.exit_codes import ExitCode
from backstay.job_engine.opening import StateIncarnation
from backstay.job_engine.progress import JobProgress, kept_job
from backstay.job_engine.rows_change import change_of, why_inexact
from backstay.master.job import Job
from backstay.pserver.checkpoints.jobs import (
    JOBS_PROGRESS,
    progress_of_jobs,
    refuse_while_jobs_go_on,
)
from backstay.runner.audit import audit_lines
from backstay.runner.outcome import Outcome
from backstay.runner.show import Servers
from backstay.runner.status_words import summary_lines
from backstay.trainer.worker.audit import RecordsAudit
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.job_records_of import KEYS, counting_spec, master_of
from tests.unit.memory_nodes import run

DURABLE_S = 5.0


@pytest.mark.parametrize("state", ["running", "stopped", "failed"])
def test_a_job_that_may_go_on_keeps_partial_restores_out(tmp_path: Path, state: str) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store = MemoryStore(backend)
        # No job, nothing to say.
        await refuse_while_jobs_go_on(store)
        async with master_of(store, counting_spec(tmp_path), 1) as (_, job):
            if state != "running":
                job.end(state, "for a reason")  # type: ignore[arg-type]
                await job.journal.durable(DURABLE_S)
        # Also when it has no job master now: the next one goes on from the records.
        with pytest.raises(
            CheckpointRefused, match=rf"job 'counting' \({state}\).*without --slots"
        ):
            await refuse_while_jobs_go_on(store)

    run(scenario)


def test_a_job_that_is_done_keeps_nobody_out(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store = MemoryStore(backend)
        async with master_of(store, counting_spec(tmp_path), 1) as (_, job):
            with pytest.raises(CheckpointRefused):
                await refuse_while_jobs_go_on(store)
            job.end("done", "")
            await job.journal.durable(DURABLE_S)
        await refuse_while_jobs_go_on(store)

    run(scenario)


SINCE = "since 1970-01-01T00:00:00Z, pass 1: slots were lost"
NOTED = StateIncarnation(restore_version=7, generation=2)


def told(version: int, generation: int, **fields: Any) -> RestoreState:
    """What a node tells of the last restore."""
    state = fields.pop("state", "done")
    return RestoreState("ckpt-1", "/ckpt", state, 0, "", version, generation, **fields)


@pytest.mark.parametrize(
    ("now", "change"),
    [
        (told(7, 2, done_generation=2), "none"),
        # A loss; a restore of all slots, or of some; a loss behind that.
        (told(7, 3, done_generation=2), "lost"),
        (told(9, 3, done_generation=3), "restored"),
        (told(9, 3, done_generation=3, slots=2), "partly_restored"),
        (told(9, 4, done_generation=3, slots=2), "lost"),
        (told(9, 4, done_generation=3), "lost"),
        # Not done yet, or told by a node that lags behind.
        (told(9, 3, state="loading"), "none"),
        (told(0, 3, state="requested"), "none"),
        (told(6, 2, done_generation=2), "none"),
        (told(7, 1, done_generation=1), "none"),
        (told(9, 2, done_generation=3), "none"),
    ],
)
def test_what_became_of_the_rows(now: RestoreState, change: str) -> None:
    assert change_of(NOTED, now) == change
    says = why_inexact(change_of(NOTED, now), now)
    assert bool(says) == (change in ("lost", "partly_restored"))


def test_a_job_is_inexact_until_it_goes_back_with_all_slots(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store, spec = MemoryStore(backend), counting_spec(tmp_path)

        async def saved(job: Job) -> JobProgress:
            saved = kept_job((await progress_of_jobs(store, 0, 0))[JOBS_PROGRESS], KEYS.job)
            assert saved is not None
            return saved.progress(job.tables)

        async with master_of(store, spec, 1) as (_, job):
            before = await saved(job)
            job.note_inexact("slots were lost", 0.0)
            job.note_inexact("slots were lost again", 60.0)
            await job.journal.durable(DURABLE_S)
            since = await saved(job)
        async with master_of(store, spec, 2, replaces=1) as (_, job):
            # The next job master knows, and so does a checkpoint that was written meanwhile.
            assert job.state.inexact == SINCE
            job.go_back(before)
            assert job.state.inexact == ""
            job.go_back(since)
            assert job.state.inexact == SINCE
            job.go_back(None)
            assert job.state.inexact == ""
            await job.journal.durable(DURABLE_S)

    run(scenario)


def test_a_job_that_is_not_exact_says_so_wherever_it_is_shown() -> None:
    why = "since 2026-01-01T00:00:00Z, pass 2: slots lost all their copies"
    status = job_pb2.JobStatus(job="counting", state="running", inexact=why)
    assert f"records may count never or twice {why}" in summary_lines(status)
    console = Console(file=StringIO(), width=200)
    with Display("counting", console=console) as shown:
        shown.update(status, Servers(2, 2))
    assert why in cast(StringIO, console.file).getvalue()
    # Counters may be right by chance, or have been in other slots.
    audit = RecordsAudit(1, 10, 10, 0, 0, 0, 0, ())
    assert audit.records_counted_once
    audit = replace(audit, inexact=why)
    assert not audit.records_counted_once
    assert audit_lines(audit)[0] == "records_counted_once false"
    assert any(why in line for line in audit_lines(audit))
    assert Outcome(status, "done", "", 1.0, audit, is_finished=True).exit_code == ExitCode.FAILED
