"""The status of a job with many workers is put together once a second, and when the job ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from backstay._proto.v1 import job_pb2
from backstay.consensus.records.jobs import JobStateRecord
from backstay.master.service import STATUS_KEPT_S, STATUS_KEPT_WORKERS
from backstay.master.status import recorded_status
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.job_records_of import DURABLE_S, counting_spec, master_of, service_of
from tests.unit.memory_nodes import run

NO_CONTEXT = cast(Any, None)


def test_a_status_of_many_workers_is_told_again_for_a_while(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        async with master_of(MemoryStore(backend), counting_spec(tmp_path), 1) as (master, job):
            service = service_of(job)

            async def status() -> job_pb2.JobStatus:
                return await service.GetJob(job_pb2.GetJobRequest(), NO_CONTEXT)

            for number in range(STATUS_KEPT_WORKERS + 1):
                # Of few workers it is as things are.
                if number in (0, STATUS_KEPT_WORKERS - 1, STATUS_KEPT_WORKERS):
                    assert len((await status()).workers) == number
                job.known.join(f"w{number}", 1, "here", 1, job.now())
            assert len((await status()).workers) == STATUS_KEPT_WORKERS
            master.now_s += STATUS_KEPT_S
            assert len((await status()).workers) == STATUS_KEPT_WORKERS + 1
            job.end("stopped", "by hand")
            assert (await status()).reason == "by hand"

    run(scenario)


def test_notes_about_tables_are_told_after_the_job_master_has_gone(tmp_path: Path) -> None:
    note = "table 'users' goes on with learning_rate: 0.1 -> 0.05"

    async def scenario(backend: MemoryBackend) -> None:
        store, spec = MemoryStore(backend), counting_spec(tmp_path)
        async with master_of(store, spec, 1) as (_, job):
            job.declare_tables(["users"], [note, note])
            job.end("stopped", "by hand")
            await job.journal.durable(DURABLE_S)
            recorded = JobStateRecord.from_json(job.record().to_json())
            assert list(recorded_status(spec.name, recorded).table_notes) == [note]
        # The next run tells its own.
        async with master_of(store, spec, 2, replaces=1) as (_, again):
            assert again.record().table_notes == ()

    run(scenario)
