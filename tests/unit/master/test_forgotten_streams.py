"""What ends while a checkpoint is written: more tasks than slots remember, a pass cut short."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from backstay.consensus.records.jobs import JobSpecRecord, JobStateRecord
from backstay.job_engine.progress import kept_job
from backstay.pserver.checkpoints.jobs import (
    ENDED_MAX,
    JOBS_PROGRESS,
    MAX_CLOSED_STREAMS,
    jobs_cut_short,
    progress_of_jobs,
    with_cut_short,
    with_forgotten,
)
from backstay.schedule.rounds import RoundId, RoundKind
from backstay.schedule.schedule import Schedule, SchedulePlan
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.job_records_of import KEYS, counting_spec, master_of
from tests.unit.memory_nodes import run

STREAM_RS = Path(__file__).parents[3] / "crates" / "backstay-core" / "src" / "stream_memory.rs"


def progress(**tasks: int) -> dict[str, Any]:
    jobs = {
        name: {
            "spec": JobSpecRecord("ab12", 1, "{}").to_json(),
            "state": JobStateRecord("running", figures={"tasks": done}).to_json(),
            **{part: {} for part in ("done", "dead_letters", "damaged")},
        }
        for name, done in tasks.items()
    }
    return {"mine": 7, JOBS_PROGRESS: {"restore_version": 0, "generation": 0, "jobs": jobs}}


def inexact(kept: dict[str, Any], job: str) -> str:
    saved = kept_job(kept[JOBS_PROGRESS], job)
    assert saved is not None
    return saved.state.inexact


@pytest.mark.parametrize(
    ("ended", "took_s", "is_exact"),
    [
        (ENDED_MAX, 10.0, True),
        (ENDED_MAX + 1, 10.0, False),
        # However long it took.
        (1, 1e6, True),
    ],
)
def test_a_checkpoint_that_may_count_tasks_twice_says_so(
    ended: int, took_s: float, is_exact: bool
) -> None:
    kept = with_forgotten(progress(a=500), progress(a=500 + ended), took_s)
    assert (inexact(kept, "a") == "") == is_exact
    if is_exact:
        assert kept == progress(a=500)
    else:
        assert f"{ended} tasks ended in the {took_s:.0f} s" in inexact(kept, "a")
        assert "raise records_per_task" in inexact(kept, "a")
    assert kept["mine"] == 7


def test_all_jobs_share_what_slots_remember() -> None:
    # The second one began meanwhile; the third has done nothing, so none of it can count twice.
    now = progress(a=4000, b=ENDED_MAX, c=9)
    kept = with_forgotten(progress(a=3000, c=9), now, 10.0)
    assert inexact(kept, "a") != ""
    assert inexact(kept, "c") == ""
    assert "b" not in kept[JOBS_PROGRESS]["jobs"]


def schedule(*, steps: int) -> str:
    one = Schedule(SchedulePlan(passes=2, max_steps=8))
    one.count_steps(RoundId(RoundKind.TRAINING, 1), steps)
    return one.to_json()


def at(record: str, *, uid: str = "ab12") -> dict[str, Any]:
    one = progress(a=3)
    one[JOBS_PROGRESS]["jobs"]["a"] |= {
        "spec": JobSpecRecord(uid, 1, "{}").to_json(),
        "state": JobStateRecord("running", schedule=record).to_json(),
    }
    return one


@pytest.mark.parametrize(
    ("before", "after", "cut"),
    [
        (at(schedule(steps=7)), at(schedule(steps=8)), ["a"]),
        (at(""), at(schedule(steps=8)), ["a"]),
        # It may have been cut short before somebody removed it, or began it anew.
        (at(schedule(steps=7)), {}, ["a"]),
        (at(schedule(steps=7)), at(schedule(steps=1), uid="cd34"), ["a"]),
        (at(schedule(steps=7)), at(schedule(steps=7)), []),
        # What is closed then was closed before, or is of tasks that are done.
        (at(schedule(steps=8)), at(schedule(steps=8)), []),
        (at(schedule(steps=8)), {}, []),
        ({}, at(schedule(steps=8)), []),
    ],
)
def test_a_job_that_is_cut_short_while_a_checkpoint_is_written(
    before: dict[str, Any], after: dict[str, Any], cut: list[str]
) -> None:
    assert jobs_cut_short(before, after) == cut
    kept = with_cut_short(before, cut)
    if cut:
        assert "cut short" in inexact(kept, "a")
    else:
        assert kept == before


def test_no_jobs_and_jobs_that_are_gone_are_no_trouble() -> None:
    assert with_forgotten({}, {}, 1e9) == {}
    assert with_forgotten({"mine": 7}, progress(a=10**6), 1.0) == {"mine": 7}
    assert with_forgotten(progress(a=1), {}, 1.0) == progress(a=1)
    # Begun anew under its name.
    assert with_forgotten(progress(a=10**6), progress(a=3), 1.0) == progress(a=10**6)


def test_the_bound_is_that_of_the_servers() -> None:
    (text,) = re.findall(r"MAX_CLOSED: usize = ([0-9_]+);", STREAM_RS.read_text())
    assert int(text.replace("_", "")) == MAX_CLOSED_STREAMS > ENDED_MAX


def test_a_master_counts_its_tasks_and_a_restore_keeps_the_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backstay.pserver.checkpoints.jobs.ENDED_MAX", 2)

    async def scenario(backend: MemoryBackend) -> None:
        store, spec = MemoryStore(backend), counting_spec(tmp_path)
        async with master_of(store, spec, 1) as (_, job):
            before = await progress_of_jobs(store, 0, 0)
            for _ in range(3):
                given = job.assign("w1")
                assert given is not None
                job.complete("w1", given.round.id, given.lease, batches=1, examples=4)
            await job.journal.durable(5.0)
            now = await progress_of_jobs(store, 0, 0)
            assert job.figures["tasks"] == 3
            kept = with_forgotten(before, now, 10.0)
            saved = kept_job(kept[JOBS_PROGRESS], KEYS.job)
            assert saved is not None
            job.go_back(saved.progress(job.tables))
            assert job.state.inexact.startswith("since a restore of a checkpoint: 3 tasks ended")
            assert job.figures["tasks"] == 0

    run(scenario)
