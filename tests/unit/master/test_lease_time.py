"""Leases last longer where there are many workers, and no master takes one for over too soon."""

from __future__ import annotations

from pathlib import Path

import pytest

from backstay.consensus.memory_store import MemoryBackend, MemoryStore
from backstay.consensus.store import Txn, TxnResult
from backstay.errors import StoreUnavailable
from backstay.job_engine.ledger import TaskLedger
from backstay.job_spec import WorkersSpec
from backstay.master import lease_time
from backstay.master.job import Job
from backstay.master.lease_time import lengthen_leases, task_lease_ttl_ms
from tests.unit.job_records_of import counting_spec, master_of
from tests.unit.memory_nodes import run

TTL_MS = 200
CROWD = 1500
CROWDS_TTL_S = 6.0


class Distant(MemoryStore):
    """Does not answer while it is away."""

    is_away = False

    async def transaction(self, txn: Txn) -> TxnResult:
        if self.is_away:
            raise StoreUnavailable("the store is away")
        return await super().transaction(txn)


def gather(job: Job, workers: int) -> None:
    for number in range(workers):
        job.known.join(f"w{number}", 1, "here", 1, job.now())


def ledger_of(job: Job) -> TaskLedger:
    (opened,) = job.rounds.values()
    return opened.ledger


@pytest.mark.parametrize(
    ("least_ms", "workers", "expected_ms"),
    [
        (2000, 0, 2000),
        (2000, 500, 2000),
        (2000, 501, 4000),
        (2000, 10_000, 40_000),
        (60_000, 10_000, 60_000),
        (200, CROWD, 6000),
    ],
)
def test_the_time_of_leases_keeps_signs_of_life_to_what_a_master_can_answer(
    least_ms: int, workers: int, expected_ms: int
) -> None:
    assert task_lease_ttl_ms(least_ms, workers) == expected_ms


def test_the_next_master_gives_leases_the_time_that_their_workers_were_told(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store, spec = MemoryStore(backend), counting_spec(tmp_path, task_lease_ttl_ms=TTL_MS)
        async with master_of(store, spec, 1) as (_, job):
            gather(job, CROWD)
            await lengthen_leases(job)
            given = job.assign("w1")
            assert given is not None
            await job.journal.durable(lease_time.DURABLE_S)
        # None of the crowd has called this one yet.
        async with master_of(store, spec, 2, replaces=1) as (master, job):
            assert job.task_lease_ttl_ms == CROWDS_TTL_S * 1000
            master.now_s += CROWDS_TTL_S - 0.1
            job.expire()
            assert ledger_of(job).counts.doing == 1
            # What it gives out itself lasts as long.
            assert job.assign("w2") is not None
            master.now_s += CROWDS_TTL_S - 0.1
            job.expire()
            assert ledger_of(job).counts.doing == 1

    run(scenario)


def test_a_longer_time_is_told_only_when_it_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_time, "DURABLE_S", 0.01)

    async def scenario(backend: MemoryBackend) -> None:
        store, spec = Distant(backend), counting_spec(tmp_path, task_lease_ttl_ms=TTL_MS)
        async with master_of(store, spec, 1) as (_, job):
            gather(job, CROWD)
            store.is_away = True
            await lengthen_leases(job)
            assert job.task_lease_ttl_ms == TTL_MS
            assert ledger_of(job).lease_ttl_s == TTL_MS / 1000
            store.is_away = False
            await job.journal.durable(5.0)
            await lengthen_leases(job)
            assert job.task_lease_ttl_ms == CROWDS_TTL_S * 1000
            assert ledger_of(job).lease_ttl_s == CROWDS_TTL_S

    run(scenario)


def test_workers_that_are_yet_to_come_count(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        workers = WorkersSpec(initial=CROWD, max=CROWD)
        spec = counting_spec(tmp_path, task_lease_ttl_ms=TTL_MS, workers=workers)
        async with master_of(MemoryStore(backend), spec, 1) as (_, job):
            await lengthen_leases(job)
            assert job.task_lease_ttl_ms == CROWDS_TTL_S * 1000

    run(scenario)


def test_the_time_of_leases_never_gets_shorter(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store, spec = MemoryStore(backend), counting_spec(tmp_path, task_lease_ttl_ms=TTL_MS)
        async with master_of(store, spec, 1) as (_, job):
            gather(job, CROWD)
            await lengthen_leases(job)
            for number in range(1, CROWD):
                job.known.forget(f"w{number}")
            await lengthen_leases(job)
            assert job.task_lease_ttl_ms == CROWDS_TTL_S * 1000

    run(scenario)
