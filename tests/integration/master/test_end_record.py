"""A record beside the store that says that a job is over: written and read while leading."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

from backstay._proto.v1 import job_pb2
from backstay.cluster.directory import Directory
from backstay.consensus.records.jobs import RunState
from backstay.consensus.records.keys import JobKeys
from backstay.job.calls import read_keys
from backstay.job_spec import JobSpec
from backstay.master.config import MasterConfig
from backstay.master.host import MasterHost
from backstay.master.hosted_launcher import ExitsSeen
from backstay.master.job_client import JobClient
from tests.integration.counting_jobs import CLIENT, JOB, LIMIT_S, counting_spec
from tests.unit.memory_nodes import until

KEYS = JobKeys(JOB)


class Record:
    """Keeps what is written, and which process led then."""

    def __init__(self, endpoints: list[str], over: RunState | None = None) -> None:
        self._endpoints = endpoints
        self.over = over
        self.reason = ""
        self.had_job = False
        self.led_at: list[bool] = []

    async def read(self) -> RunState | None:
        await self._look()
        return self.over

    async def write(
        self, end: RunState, reason: str, status: job_pb2.JobStatus | None, exits: ExitsSeen
    ) -> None:
        await self._look()
        self.over, self.reason = end, reason

    async def _look(self) -> None:
        found = await asyncio.to_thread(recorded, self._endpoints)
        self.led_at.append(KEYS.master in found)
        self.had_job = KEYS.spec in found


def recorded(endpoints: list[str]) -> dict[str, str]:
    directory = Directory(endpoints, CLIENT)
    try:
        return dict(read_keys(directory, KEYS.root))
    finally:
        directory.close()


def served(endpoints: list[str], record: Record, spec: JobSpec, *, stops: bool = False) -> str:
    async def serve() -> str:
        config = MasterConfig(endpoints=tuple(endpoints), client=CLIENT)
        host = MasterHost(config, spec, end_record=record)

        async def is_open() -> bool:
            return host.status() is not None

        running = asyncio.create_task(host.run())
        if stops:
            await asyncio.wait_for(until(is_open), LIMIT_S)
            with closing(JobClient(endpoints, JOB, config=CLIENT)) as client:
                await asyncio.to_thread(client.stop, "enough", keep_state=False)
        return await asyncio.wait_for(running, LIMIT_S)

    return asyncio.run(serve())


def test_a_job_that_is_over_by_the_record_is_not_opened(
    endpoints: list[str], tmp_path: Path
) -> None:
    record = Record(endpoints, over="stopped")
    assert served(endpoints, record, counting_spec(tmp_path)) == "stopped"
    # An earlier job master may have written it while this one waited for the leadership.
    assert record.led_at == [True]
    assert KEYS.spec not in recorded(endpoints)


def test_the_end_is_recorded_while_the_process_leads_and_has_the_jobs_records(
    endpoints: list[str], tmp_path: Path
) -> None:
    record = Record(endpoints)
    assert served(endpoints, record, counting_spec(tmp_path), stops=True) == "stopped"
    assert (record.over, record.reason, record.led_at) == ("stopped", "enough", [True, True])
    assert (record.had_job, KEYS.spec in recorded(endpoints)) == (True, False)


def test_a_job_that_cannot_be_opened_has_failed_while_the_process_leads(
    endpoints: list[str], tmp_path: Path
) -> None:
    record, spec = Record(endpoints), counting_spec(tmp_path)
    (path,) = spec.data["training"].paths
    Path(path).write_text("", encoding="utf-8")
    assert served(endpoints, record, spec) == "failed"
    assert record.reason
    assert record.led_at == [True, True]
