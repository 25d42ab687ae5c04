"""What is done to the rows at the end of a pass: when it is due, and that it counts once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from backstay.consensus.records.jobs import JobSpecRecord
from backstay.consensus.records.keys import JobKeys
from backstay.data import Shard
from backstay.errors import ConfigError
from backstay.job_engine.engine import JobEngine
from backstay.job_engine.opening import new_job
from backstay.job_engine.progress import JobProgress
from backstay.job_engine.records import MemoryRecords
from backstay.job_engine.upkeeps import PASS_ENDS_KEPT
from backstay.job_engine.values import PassUpkeep
from backstay.job_spec import CheckpointSpec, DataSpec, JobSpec, LifetimeSpec
from backstay.schedule.task_table import TaskTable

CREATED_MS = 1_700_000_000_000


class Wall:
    """A clock on the wall."""

    def __init__(self) -> None:
        self.now_s = 5000.5

    def __call__(self) -> float:
        return self.now_s


def job(wall: Wall, *, created_ms: int = CREATED_MS, **fields: Any) -> JobEngine:
    """A job of one task a pass that keeps its rows."""
    spec = JobSpec(
        name="job",
        model="model.py",
        training=DataSpec(paths=("data.csv",)),
        **{"epochs": 4, **fields},
    )
    tables = {"training": TaskTable.from_shards([Shard("data.csv", 8)], 8)}
    opened = new_job(spec, tables, JobSpecRecord("ab12", created_ms, spec.to_json()))
    begun = JobEngine(opened, JobKeys("job"), MemoryRecords(), lambda: 100.0)
    begun.keep_checkpoints(servers_end=False)
    begun.keep_rows(wall)
    begun.advance()
    return begun


def followed(one: JobEngine, spec: JobSpec, wall: Wall) -> JobEngine:
    """The job as the next job master opens it, with this spec."""
    opened = new_job(spec, one.tables, one.identity)
    opened = opened._replace(state=one.record(), schedule=one.schedule)
    follower = JobEngine(opened, JobKeys("job"), MemoryRecords(), lambda: 100.0)
    follower.keep_checkpoints(servers_end=False)
    follower.keep_rows(wall)
    follower.advance()
    return follower


def do_pass(one: JobEngine) -> None:
    one.advance()
    given = one.assign("w1")
    assert given is not None
    one.complete("w1", given.round.id, given.lease, batches=1, examples=8)
    one.closed([(given.round.id.number, given.lease.task)])
    one.advance()


def due_of(one: JobEngine) -> PassUpkeep | None:
    """What is due now; a function, for it changes with events."""
    return one.upkeeps.due


def note(one: JobEngine, *, expired: int = 0, changed: bool = False) -> None:
    due = due_of(one)
    assert due is not None
    one.note_upkeep(due, expired=expired, changed=changed)


def progress_of(one: JobEngine) -> JobProgress:
    figures = {**one.figures, "steps": one.schedule.steps}
    return JobProgress("ab12", one.schedule.to_json(), {}, figures)


def test_the_end_of_each_pass_is_due_once_in_order() -> None:
    one = job(Wall())
    assert due_of(one) is None
    do_pass(one)
    first = due_of(one)
    assert one.assign("w1") is None, "the next pass waits"
    one.advance()
    assert due_of(one) == first
    note(one, expired=3, changed=True)
    do_pass(one)
    second = due_of(one)
    assert first is not None
    assert second is not None
    assert (first.pass_number, second.pass_number) == (1, 2)
    assert second.period > first.period
    note(one)
    assert due_of(one) is None
    assert one.figures["rows_expired"] == 3
    assert one.figures["upkeeps"] == 1


def test_a_later_job_has_higher_periods_whatever_its_pass() -> None:
    one = job(Wall())
    for _ in range(3):
        do_pass(one)
        note(one)
    do_pass(one)
    last = due_of(one)
    later = job(Wall(), created_ms=CREATED_MS + 1000)
    do_pass(later)
    assert last is not None
    first = due_of(later)
    assert first is not None
    assert last.pass_number == 4
    assert first.period > last.period


def test_a_pass_decays_in_the_period_of_its_end() -> None:
    wall = Wall()
    wall.now_s = CREATED_MS / 1000 + 60
    one = job(wall)
    do_pass(one)
    first = due_of(one)
    assert first is not None
    assert first.period == CREATED_MS + 60_000
    wall.now_s -= 30  # A clock that was set back.
    note(one)
    do_pass(one)
    second = due_of(one)
    assert second is not None
    assert second.period == first.period + 1


def test_who_follows_has_the_period_that_was_recorded() -> None:
    wall = Wall()
    wall.now_s = CREATED_MS / 1000 + 60
    one = job(wall)
    do_pass(one)
    first = due_of(one)
    assert first is not None
    assert first.is_new
    wall.now_s += 60
    follower = followed(one, one.spec, wall)
    again = due_of(follower)
    assert again == first._replace(is_new=False)


def test_times_of_more_passes_than_are_kept_begin_anew_when_a_job_goes_back() -> None:
    wall = Wall()
    wall.now_s = CREATED_MS / 1000
    one = job(wall, epochs=PASS_ENDS_KEPT + 3)
    saved = progress_of(one)
    for _ in range(PASS_ENDS_KEPT + 2):
        wall.now_s += 1
        do_pass(one)
        last = due_of(one)
        note(one)
    assert last is not None
    assert len(one.state.pass_ends) == PASS_ENDS_KEPT
    one.go_back(saved)
    periods = [last.period]
    for _ in range(3):
        wall.now_s += 1
        do_pass(one)
        due = due_of(one)
        assert due is not None
        periods.append(due.period)
        note(one)
    assert periods == sorted(set(periods))


def test_an_upkeep_of_before_the_job_went_back_does_not_count() -> None:
    one = job(Wall())
    do_pass(one)
    note(one)
    saved = progress_of(one)
    do_pass(one)
    before = due_of(one)
    assert before is not None
    one.go_back(saved)
    one.advance()
    assert due_of(one) is None, "pass 2 is done again"
    one.note_upkeep(before, expired=5, changed=True)
    assert one.figures["upkept_passes"] == 1
    do_pass(one)
    again = due_of(one)
    assert again is not None
    assert again.period == before.period, "a slot that has it from before skips it"
    one.note_upkeep(before, expired=5, changed=True)
    assert due_of(one) == again


def test_checkpoints_and_the_end_wait_for_it() -> None:
    one = job(Wall())
    do_pass(one)
    assert not one.take_checkpoint_due()
    note(one)
    assert one.take_checkpoint_due()
    assert not one.take_checkpoint_due()
    for _ in range(3):
        do_pass(one)
        assert not one.is_finished
        note(one)
    do_pass(one)  # the end of training
    assert one.is_finished


def test_rows_that_changed_after_the_last_checkpoint_are_saved() -> None:
    one = job(Wall(), checkpoint=CheckpointSpec(every="none", every_tasks=1))
    do_pass(one)
    one.note_checkpoint("ckpt-1", one.schedule.steps, "/ckpt", upkeeps=one.figures["upkeeps"])
    note(one, changed=False)
    assert not one.has_unsaved_steps
    do_pass(one)
    one.note_checkpoint("ckpt-2", one.schedule.steps, "/ckpt", upkeeps=one.figures["upkeeps"])
    note(one, changed=True)
    assert one.has_unsaved_steps


def test_rows_unseen_in_whole_passes_go_by_the_beginning_of_the_first_of_these() -> None:
    wall = Wall()
    one = job(wall, lifetime=LifetimeSpec(unseen_passes=2))
    since = []
    for _ in range(3):
        one.advance()
        began_s, wall.now_s = int(wall.now_s), wall.now_s + 60
        do_pass(one)
        due = due_of(one)
        assert due is not None
        since.append((due.unseen_since_s, began_s))
        note(one)
    # After the first pass nothing can be unseen in two; then the pass before the one that ended.
    assert since[0][0] is None
    assert since[1][0] == since[0][1]
    assert since[2][0] == since[1][1]
    assert len(one.state.pass_starts) == 2


def test_a_job_that_leaves_its_rows_alone_owes_nothing_when_it_no_longer_does() -> None:
    wall = Wall()
    one = job(wall, lifetime=LifetimeSpec(every="none"))
    do_pass(one)
    assert due_of(one) is None
    one = followed(one, replace(one.spec, lifetime=LifetimeSpec()), wall)
    assert due_of(one) is None
    do_pass(one)
    due = due_of(one)
    assert due is not None
    assert due.pass_number == 2


def test_passes_are_not_counted_where_their_ends_do_nothing() -> None:
    with pytest.raises(ConfigError, match="unseen_passes"):
        LifetimeSpec(every="none", unseen_passes=1)
