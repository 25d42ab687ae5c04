"""What a job is when its records are read, without a store."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstay.consensus.records.jobs import JobSpecRecord, JobStateRecord
from backstay.consensus.records.keys import JobKeys
from backstay.data import Shard
from backstay.errors import InvalidRequest, JobRefused
from backstay.job_engine.opening import (
    OpenedJob,
    RecordedJob,
    StateIncarnation,
    new_state,
    opened_job,
)
from backstay.job_engine.records import MemoryRecords
from backstay.job_engine.values import LeasedTask, WorkerRecord, first_attempt
from backstay.schedule.rounds import RoundId
from backstay.schedule.task_table import TaskTable
from tests.unit.job_engine.test_rows import SPEC

KEYS = JobKeys("job")
TABLE = TaskTable.from_shards([Shard("data.csv", 8)], 4)
PASS = RoundId.parse("training-1")
RECORDS = {
    KEYS.spec: JobSpecRecord("ab12", 1, SPEC.to_json()).to_json(),
    KEYS.state: JobStateRecord("running", starts=3, task_lease_ttl_ms=8000).to_json(),
    KEYS.shard_count("training"): "1",
    KEYS.shards("training", 0): TABLE.to_chunks()[0],
}


def opened(texts: dict[str, str]) -> OpenedJob:
    recorded = RecordedJob(texts, KEYS)
    state, table = recorded.state(), recorded.table("training")
    assert state is not None
    assert table is not None
    return opened_job(
        SPEC,
        KEYS,
        MemoryRecords(),
        recorded,
        identity=recorded.identity(SPEC, uid="none", now_ms=9),
        state=state,
        tables={"training": table},
        now_s=100.0,
    )


def test_a_job_goes_on_with_its_leases_and_the_batches_of_tasks_without_one() -> None:
    records = {
        KEYS.leased(str(PASS), "w1"): WorkerRecord((LeasedTask(0, 7, 1),)).to_json(),
        KEYS.leased(str(PASS), ""): WorkerRecord((LeasedTask(1, 0, 2),)).to_json(),
    }
    job = opened({**RECORDS, **records})
    assert (job.identity.uid, job.identity.created_ms, job.state.starts) == ("ab12", 1, 4)
    ledger = job.rounds[PASS].ledger
    assert (tuple(ledger.counts), ledger.batches) == ((1, 1, 0, 0), 3)
    assert [lease.worker for lease in ledger.leases] == ["w1"]
    assert ledger.next_expiry() == 108.0, "as long as its worker was told"
    grant = ledger.assign("w2", 100.0)
    assert grant is not None
    assert (grant.task, grant.attempt, grant.first_batch) == (1, first_attempt(4), 2)


def test_a_job_with_other_settings_is_refused_unless_it_begins_anew() -> None:
    other = replace(SPEC, records_per_task=5)
    recorded = RecordedJob(RECORDS, KEYS)
    assert recorded.is_one
    with pytest.raises(JobRefused, match="records_per_task is 5, was 4"):
        recorded.identity(other, uid="cd34", now_ms=9)
    assert RecordedJob({}, KEYS).identity(other, uid="cd34", now_ms=9).uid == "cd34"


def test_what_is_left_of_a_job_is_none_and_all_of_it_goes_but_the_leadership() -> None:
    left = {KEYS.state: "", KEYS.master: "", KEYS.journal: ""}
    recorded = RecordedJob(left, KEYS)
    assert not recorded.is_one
    assert recorded.removable() == [KEYS.state]


def test_data_are_scanned_until_all_their_tasks_are_recorded() -> None:
    half = {key: text for key, text in RECORDS.items() if key != KEYS.shard_count("training")}
    assert RecordedJob(half, KEYS).table("training") is None
    lost = {key: text for key, text in RECORDS.items() if key != KEYS.shards("training", 0)}
    with pytest.raises(InvalidRequest, match="shards of training: 0 records of 1"):
        RecordedJob(lost, KEYS).table("training")


def test_a_new_job_begins_with_the_rows_that_the_cluster_has() -> None:
    assert RecordedJob({}, KEYS).state() is None
    state = new_state(StateIncarnation(9, 4))
    assert (state.state, state.restore_version, state.generation) == ("running", 9, 4)
