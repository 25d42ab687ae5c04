"""What a loss or a restore of the cluster's rows means for a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from backstay.checkpoint.restore_state import RestoreState
from backstay.consensus.records.jobs import JobSpecRecord
from backstay.consensus.records.keys import JobKeys
from backstay.data import Shard
from backstay.errors import InvalidRequest
from backstay.job_engine.engine import JobEngine
from backstay.job_engine.opening import StateIncarnation, new_job
from backstay.job_engine.records import MemoryRecords
from backstay.job_engine.rows_change import incarnation_in
from backstay.job_spec import CheckpointSpec, DataSpec, JobSpec
from backstay.schedule.task_table import TaskTable

SPEC = JobSpec(
    name="job",
    model="model.py",
    training=DataSpec(paths=("data.csv",)),
    records_per_task=4,
    checkpoint=CheckpointSpec(every="none"),
)
LOST = RestoreState("ckpt-1", "/ckpt", "done", 0, "", 0, 1)
RESTORED = replace(LOST, version=5, done_generation=1)
NOON = 12 * 3600.0


def job(clock: Callable[[], float] = lambda: 100.0, spec: JobSpec = SPEC) -> JobEngine:
    tables = {"training": TaskTable.from_shards([Shard("data.csv", 8)], 4)}
    opened = new_job(spec, tables, JobSpecRecord("ab12", 1, spec.to_json()))
    begun = JobEngine(opened, JobKeys("job"), MemoryRecords(), clock)
    begun.advance()
    return begun


def kept(one: JobEngine, *, uid: str = "ab12", **state: Any) -> dict[str, object]:
    """What a checkpoint keeps of the job that is written now."""
    fields: dict[str, Any] = {"schedule": one.schedule.to_json(), **state}
    recorded = replace(one.state, **fields)
    document = {
        "spec": JobSpecRecord(uid, 1, SPEC.to_json()).to_json(),
        "state": recorded.to_json(),
        "done": {},
        "dead_letters": {},
        "damaged": {},
    }
    return {"restore_version": 0, "generation": 0, "jobs": {"job": document}}


def test_rows_that_are_as_noted_change_nothing() -> None:
    one = job()
    assert one.rows_are(replace(LOST, generation=0), NOON) == "none"
    assert one.state.state == "running"


def test_a_loss_ends_the_job_and_names_the_way_back() -> None:
    one = job()
    one.note_checkpoint("ckpt-000001-ab", 3, "/ckpt")
    assert one.rows_are(LOST, NOON) == "lost"
    assert one.state.state == "failed"
    assert "Restore ckpt-000001-ab" in one.state.reason
    assert one.state.inexact == "since 1970-01-01T12:00:00Z, pass 1: slots lost all their copies"


@pytest.mark.parametrize(("slots", "inexact"), [(0, False), (2, True)])
def test_a_restore_takes_the_job_back(slots: int, inexact: bool) -> None:
    one = job()
    progress = one.progress_in(kept(one))
    given = one.assign("w1")
    assert given is not None
    restore = replace(RESTORED, slots=slots)
    one.figures["tasks"] = 1
    assert one.rows_are(restore, NOON) != "none"
    one.follow(restore, progress, NOON)
    one.advance()
    assert bool(one.state.inexact) is inexact
    assert one.renew("w1", [(given.round.id, given.lease)]) != [], "its lease is void"
    # The progress could not be written: the same restore is followed once more.
    one.figures["tasks"] = 1
    one.follow(restore, progress, NOON)
    assert one.figures["went_back"] == 1
    # The restore is noted when the progress is written, and not before.
    assert one.incarnation == StateIncarnation(0, 0)
    one.note_incarnation(incarnation_in(restore))
    assert one.rows_are(restore, NOON) == "none"


def test_a_job_of_the_same_name_that_was_begun_anew_has_no_progress() -> None:
    one = job()
    assert one.progress_in(None) is None
    assert one.progress_in(kept(one, uid="cd34")) is None


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"generation": 7}, "before the job had followed a restore"),
        ({"data": {"training": "other"}}, "not the data of the progress"),
        ({"schedule": "{}"}, "schedule"),
    ],
)
def test_progress_that_does_not_fit_is_refused(state: dict[str, Any], says: str) -> None:
    one = job()
    with pytest.raises(InvalidRequest, match=says):
        one.progress_in(kept(one, **state))
    one.cannot_follow("it does not fit")
    assert one.state.state == "failed"
    assert "it does not fit. Restore another checkpoint" in one.state.reason
