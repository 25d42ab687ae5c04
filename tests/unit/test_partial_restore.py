"""A restore of some slots only waits for the jobs that train on all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from backstay.consensus.memory_store import MemoryBackend, MemoryStore
from backstay.errors import CheckpointRefused
from backstay.pserver.checkpoints.jobs import refuse_while_jobs_go_on
from tests.unit.job_records_of import counting_spec, master_of
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
        # Also when it has no master now: the next one goes on from the records.
        with pytest.raises(
            CheckpointRefused, match=rf"job 'counting' \({state}\).*without --slots"
        ):
            await refuse_while_jobs_go_on(store)

    run(scenario)


def test_a_job_that_is_done_keeps_nobody_out(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store = MemoryStore(backend)
        async with master_of(store, counting_spec(tmp_path), 1) as (_, job):
            job.end("done", "")
            await job.journal.durable(DURABLE_S)
        await refuse_while_jobs_go_on(store)

    run(scenario)
