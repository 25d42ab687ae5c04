"""The status of a job with many workers is put together once a second, and when the job ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from backstay._proto.v1 import job_pb2
from backstay.consensus.job_records import MasterRecord
from backstay.consensus.memory_store import MemoryBackend, MemoryStore
from backstay.master.service import STATUS_KEPT_S, STATUS_KEPT_WORKERS, JobService
from tests.unit.job_records_of import counting_spec, master_of
from tests.unit.memory_nodes import run

NO_CONTEXT = cast(Any, None)


def test_a_status_of_many_workers_is_told_again_for_a_while(tmp_path: Path) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        async with master_of(MemoryStore(backend), counting_spec(tmp_path), 1) as (master, job):
            service = JobService(MasterRecord("127.0.0.1:1", 1, "here", 1))
            service.job = job

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
