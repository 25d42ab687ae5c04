"""Leases last longer where there are many workers, once that is recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstay.consensus.records.jobs import JobSpecRecord
from backstay.consensus.records.keys import JobKeys
from backstay.data import Shard
from backstay.job_engine.engine import JobEngine
from backstay.job_engine.leases import wanted_lease_ttl_ms
from backstay.job_engine.opening import new_job
from backstay.job_engine.records import MemoryRecords
from backstay.job_spec import WorkersSpec
from backstay.schedule.task_table import TaskTable
from tests.unit.job_engine.test_rows import SPEC

LEAST_MS = 200
CROWD = 1500
CROWDS_MS = 6000


@pytest.mark.parametrize(
    ("least_ms", "workers", "expected_ms"),
    [
        (2000, 0, 2000),
        (2000, 500, 2000),
        (2000, 501, 4000),
        (2000, 10_000, 40_000),
        (60_000, 10_000, 60_000),
        (LEAST_MS, CROWD, CROWDS_MS),
    ],
)
def test_renewals_stay_below_what_a_job_master_answers(
    least_ms: int, workers: int, expected_ms: int
) -> None:
    assert wanted_lease_ttl_ms(least_ms, workers) == expected_ms


def engine(workers: int = 2) -> JobEngine:
    spec = replace(
        SPEC,
        task_lease_ttl_ms=LEAST_MS,
        workers=WorkersSpec(initial=workers, max=max(workers, CROWD)),
    )
    tables = {"training": TaskTable.from_shards([Shard("data.csv", 8)], 4)}
    opened = new_job(spec, tables, JobSpecRecord("ab12", 1, spec.to_json()))
    begun = JobEngine(opened, JobKeys("job"), MemoryRecords(), lambda: 100.0)
    begun.advance()
    return begun


def gather(job: JobEngine, workers: int) -> None:
    for number in range(workers):
        job.join(f"w{number}", 1, "here", 1)


def test_a_longer_time_counts_when_the_caller_says_that_it_is_recorded() -> None:
    job = engine()
    assert job.plan_lease_ttl() is None
    gather(job, CROWD)
    assert job.plan_lease_ttl() == CROWDS_MS
    assert (job.record().task_lease_ttl_ms, job.task_lease_ttl_ms) == (CROWDS_MS, LEAST_MS)
    assert job.plan_lease_ttl() == CROWDS_MS, "it was not recorded in time, and is tried again"
    job.lengthen_leases(CROWDS_MS)
    assert job.plan_lease_ttl() is None
    (opened,) = job.rounds.values()
    assert (job.task_lease_ttl_ms, opened.ledger.lease_ttl_s) == (CROWDS_MS, CROWDS_MS / 1000)


def test_a_plan_that_is_recorded_late_does_not_take_over_a_longer_one_that_is_not() -> None:
    job = engine()
    gather(job, CROWD // 2)
    first_ms = job.plan_lease_ttl()
    assert first_ms == CROWDS_MS // 2
    gather(job, CROWD)
    assert job.plan_lease_ttl() == CROWDS_MS
    job.lengthen_leases(first_ms)
    assert job.task_lease_ttl_ms == first_ms


def test_workers_that_are_yet_to_come_count() -> None:
    assert engine(workers=CROWD).plan_lease_ttl() == CROWDS_MS


def test_leases_never_last_shorter_again() -> None:
    job = engine()
    gather(job, CROWD)
    planned_ms = job.plan_lease_ttl()
    assert planned_ms is not None
    job.lengthen_leases(planned_ms)
    for number in range(1, CROWD):
        job.drop_worker(f"w{number}", "it has ended")
    assert job.plan_lease_ttl() is None
    assert (job.record().task_lease_ttl_ms, job.task_lease_ttl_ms) == (CROWDS_MS, CROWDS_MS)
