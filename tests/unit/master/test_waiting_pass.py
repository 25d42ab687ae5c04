"""A training pass that was begun and waits, as an evaluation goes first now, is not cut short."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from backstay.job_spec import DataSpec
from backstay.schedule.rounds import RoundKind
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.job_records_of import counting_spec, master_of
from tests.unit.memory_nodes import run

DURABLE_S = 5.0
TASKS = 10


def test_a_pass_that_waits_for_an_evaluation_is_gone_on_with(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store = MemoryStore(backend)
        counting_spec(tmp_path)
        data = DataSpec(paths=(str(tmp_path / "data.csv"),))
        spec = counting_spec(tmp_path, validation=data, evaluation_every_steps=2, batch_size=2)
        async with master_of(store, spec, 1) as (_, job):
            given = job.assign("w1")
            assert given is not None
            task = given.lease.task
            job.complete("w1", given.round.id, given.lease, batches=2, examples=4)
            job.closed([(1, task)])
            job.advance()
            assert [str(one) for one in job.schedule.open_rounds] == ["evaluation-1", "training-1"]
            await job.journal.durable(DURABLE_S)
        # From now on an evaluation comes between the passes, and one is under way.
        spec = replace(spec, evaluation_every_steps=0)
        async with master_of(store, spec, 2, replaces=1) as (_, job):
            trained: list[int] = []
            while not job.is_over:
                given = job.assign("w1")
                if given is None:
                    for opened in job.advance():
                        job.evaluated(opened, {})
                    continue
                if given.round.id.kind is RoundKind.TRAINING:
                    trained.append(given.lease.task)
                job.complete("w1", given.round.id, given.lease, batches=2, examples=4)
                job.closed([(given.round.id.number, given.lease.task)])
            assert sorted(trained) == sorted(set(range(TASKS)) - {task})

    run(scenario)
