"""A job on the store in memory: what the tests of the job master's journal and opening share."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from backstay.consensus.records.jobs import MasterRecord
from backstay.consensus.records.keys import JobKeys
from backstay.consensus.store import CoordinationStore
from backstay.job_engine.opening import StateIncarnation
from backstay.job_engine.progress import JobProgress, KeptJob, kept_job
from backstay.job_spec import CheckpointSpec, DataSpec, JobSpec
from backstay.master.hosted_launcher import LaunchHandler
from backstay.master.job import Job, open_job
from backstay.master.journal import CHANGES_MAX, Journal
from backstay.master.leadership import Leadership
from backstay.master.service import JobService
from backstay.pserver.checkpoints.jobs import JOBS_PROGRESS, progress_of_jobs
from backstay.tasks import end_tasks
from tests.memory_store import MemoryStore

KEYS = JobKeys("counting")
DURABLE_S = 5.0


def counting_spec(folder: Path, *, records: int = 40, **fields: object) -> JobSpec:
    """A job of ``records`` / 4 tasks a pass, over a real file."""
    data = folder / "data.csv"
    if not data.exists():
        lines = "\n".join(str(number) for number in range(records))
        data.write_text(f"x\n{lines}\n", encoding="utf-8")
    values: dict[str, object] = {
        "name": KEYS.job,
        "model": "model.py",
        "training": DataSpec(paths=(str(data),)),
        "records_per_task": 4,
        "checkpoint": CheckpointSpec(every="none"),
        **fields,
    }
    return JobSpec(**values)  # type: ignore[arg-type]


def service_of(
    job: Job,
    own: MasterRecord = MasterRecord("127.0.0.1:1", 1, "here", 1),  # noqa: B008 (frozen)
) -> JobService:
    """The calls on a job, as one process answers them."""
    return JobService(
        own, job, LaunchHandler(job), on_stop=lambda _: None, try_save_now=lambda: False
    )


class Master:
    """A job master in this process, without its gRPC server."""

    def __init__(
        self,
        store: CoordinationStore,
        spec: JobSpec,
        instance: int,
        *,
        changes_max: int = CHANGES_MAX,
    ) -> None:
        self._store, self._spec = store, spec
        own = MasterRecord("127.0.0.1:1", instance, "here", 1)
        # No test waits for the lease to expire, and a loaded machine must not make it.
        self.leadership = Leadership(store, KEYS, own, lease_ttl_ms=600_000)
        self.journal = Journal(store, KEYS, instance, changes_max=changes_max)
        self.writing: asyncio.Task[None] | None = None
        self.now_s = 100.0
        # What a restore of the cluster brought of the job.
        self.restored: KeptJob | None = None

    async def open(
        self, *, replaces: int = 0, fresh: bool = False, run: str = "", owner: str = ""
    ) -> Job:
        await self.journal.open(await self.leadership.take(replaces))
        self.writing = asyncio.create_task(self.journal.run())
        opened = await open_job(
            self._store,
            KEYS,
            self.journal,
            self._spec,
            uid="ab12",
            now_ms=1,
            fresh=fresh,
            clock=lambda: self.now_s,
            incarnation=lambda: StateIncarnation(0, 0),
            restored=lambda: self.restored,
            run=run,
            owner=owner,
        )
        job = Job(opened, KEYS, self.journal, lambda: self.now_s)
        job.stage_state()
        job.advance()
        await self.journal.durable(DURABLE_S)
        return job

    async def kill(self) -> None:
        """End as a process does that is killed: nothing more is written, no word is said."""
        if self.writing is not None:
            await end_tasks(self.writing)


@asynccontextmanager
async def master_of(
    store: CoordinationStore, spec: JobSpec, instance: int, **opening: object
) -> AsyncIterator[tuple[Master, Job]]:
    """A job master that is killed at the end."""
    master = Master(store, spec, instance)
    try:
        yield master, await master.open(**opening)  # type: ignore[arg-type]
    finally:
        await master.kill()


async def do_one(job: Job, batches: int = 0) -> int:
    """Do the next task, of so many batches; return its number."""
    given = job.assign("w1")
    assert given is not None
    job.complete("w1", given.round.id, given.lease, batches=batches, examples=4)
    await job.journal.durable(DURABLE_S)
    job.closed([(given.round.id.number, given.lease.task)])
    return given.lease.task


async def saved_progress(store: MemoryStore, job: Job, restore_version: int = 0) -> JobProgress:
    """What a checkpoint that is written now keeps of the job."""
    kept = json.loads(json.dumps(await progress_of_jobs(store, restore_version, 0)))
    saved = kept_job(kept[JOBS_PROGRESS], KEYS.job)
    assert saved is not None
    assert saved.identity == job.identity
    return saved.progress(job.tables)
