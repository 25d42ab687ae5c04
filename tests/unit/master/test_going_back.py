"""A job that goes back with a restore: what is recorded of it then, and what is not any more."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from backstay.job_engine.values import ATTEMPTS_PER_MASTER, LeasedTask, WorkerRecord
from backstay.schedule.rounds import RoundId
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.job_records_of import (
    DURABLE_S,
    KEYS,
    counting_spec,
    do_one,
    master_of,
    saved_progress,
)
from tests.unit.memory_nodes import run


def test_going_back_forgets_what_was_done_of_a_pass_that_was_cut_short(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store = MemoryStore(backend)
        spec = counting_spec(tmp_path, batch_size=1, max_steps=5)
        async with master_of(store, spec, 1) as (_, job):
            for _ in range(2):
                await do_one(job, 4)
            job.advance()
            await job.journal.durable(DURABLE_S)
            assert "max_steps" in job.schedule.reason
            assert RoundId.parse("training-1") not in job.rounds
        assert await store.get(KEYS.done("training-1", 0)) is not None, "an audit asks for it"
        async with master_of(store, spec, 2, replaces=1) as (_, job):
            job.go_back(None)
            job.advance()
            await job.journal.durable(DURABLE_S)
        async with master_of(store, spec, 3, replaces=2) as (_, job):
            opened = job.rounds[RoundId.parse("training-1")]
            assert len(opened.ledger.done) == 0

    run(scenario)


@pytest.mark.parametrize(("early_stop", "begun"), [("", 2), ("auc is not better", 1)])
def test_going_back_tells_which_passes_the_rows_may_have_some_of(
    tmp_path: Path, early_stop: str, begun: int
) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store = MemoryStore(backend)
        async with master_of(store, counting_spec(tmp_path, epochs=3), 1) as (_, job):
            for _ in range(10):
                await do_one(job, 4)
            job.advance()
            await job.journal.durable(DURABLE_S)
            progress = await saved_progress(store, job)
            ended = {"training_over": bool(early_stop), "reason": early_stop}
            schedule = json.loads(progress.schedule) | ended
            job.go_back(replace(progress, schedule=json.dumps(schedule), passes_begun=1))
            assert job.schedule.passes_over == 1
            # While training goes on, the next pass may have begun as the rows were saved.
            assert job.state.passes_begun == begun

    run(scenario)


def test_going_back_leaves_no_lease_of_a_task_that_was_done(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store = MemoryStore(backend)
        spec = counting_spec(tmp_path)
        async with master_of(store, spec, 1) as (_, job):
            task = await do_one(job)
            await job.journal.durable(DURABLE_S)
        # A job master died after it had written that the task is done, and before its worker's
        # record.
        stale = WorkerRecord(leased=(LeasedTask(task, ATTEMPTS_PER_MASTER, 0),))
        await store.put(KEYS.leased("training-1", "w9"), stale.to_json())
        async with master_of(store, spec, 2, replaces=1) as (_, job):
            job.go_back(None)
            await job.journal.durable(DURABLE_S)
        assert (await store.range(KEYS.all_leased)).items == ()

    run(scenario)
