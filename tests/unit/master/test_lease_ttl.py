"""Leases last longer where there are many workers; no job master ends one too soon."""

from __future__ import annotations

from pathlib import Path

import pytest

from backstay.consensus.store import Txn, TxnResult
from backstay.errors import StoreUnavailable
from backstay.job_engine.ledger import TaskLedger
from backstay.master import host
from backstay.master.host import lengthen_leases
from backstay.master.job import Job
from tests.memory_store import MemoryBackend, MemoryStore
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


def test_the_next_master_gives_leases_the_time_that_their_workers_were_told(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store, spec = MemoryStore(backend), counting_spec(tmp_path, task_lease_ttl_ms=TTL_MS)
        async with master_of(store, spec, 1) as (_, job):
            gather(job, CROWD)
            await lengthen_leases(job)
            given = job.assign("w1")
            assert given is not None
            await job.journal.durable(5.0)
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
    monkeypatch.setattr(host, "LEASE_TTL_WRITE_S", 0.01)

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
