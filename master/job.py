"""A job in its job master: opened from the records, then the engine over the coordination store.

Opening makes the job, or reads its records so that it goes on where it was. The process that calls
it has the leadership, so no other process writes. Each write goes through the journal and is
durable before the next step needs it. If a job master dies in between, the next one does the step
again.
The engine decides (``job_engine.opening``); this module reads, asks, scans and waits.

What the engine stages goes to the journal, and calls wait here for something new. A job belongs to
one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from backstay.consensus.records.keys import JobKeys
from backstay.consensus.store import CoordinationStore
from backstay.job.data_scan import scan
from backstay.job_engine.engine import JobEngine
from backstay.job_engine.leases import RENEWALS_PER_S_MAX
from backstay.job_engine.opening import (
    OpenedJob,
    RecordedJob,
    StateIncarnation,
    new_state,
    opened_job,
)
from backstay.job_engine.progress import KeptJob
from backstay.job_spec import JobSpec
from backstay.master.journal import Journal
from backstay.schedule.task_table import TaskTable

__all__ = ["Job", "open_job"]

# Writing a new job's records, or removing an old one's.
WRITE_LIMIT_S = 60.0


async def open_job(
    store: CoordinationStore,
    keys: JobKeys,
    journal: Journal,
    spec: JobSpec,
    *,
    uid: str,
    now_ms: int,
    fresh: bool,
    clock: Callable[[], float],
    incarnation: Callable[[], StateIncarnation],
    restored: Callable[[], KeptJob | None],
    run: str = "",
    owner: str = "",
) -> OpenedJob:
    """Make a job, or take over what is recorded of it.

    Args:
        store: The coordination store.
        keys: The job's keys.
        journal: Open, and running.
        spec: What the job is to be.
        uid: For a new job.
        now_ms: Unix time, for a new job.
        fresh: Begin anew, whatever is recorded.
        clock: Monotonic seconds.
        incarnation: Asks for the state incarnation of the cluster; blocks.
        restored: Asks what came with them of a job of that name; blocks.
        run: Uid that the job has in this run of its schedule: what another run has recorded counts
            no more. Empty: the job has no schedule.
        owner: Of the job on Kubernetes; what has ended under it goes on under another one only.

    Raises:
        JobRefused: The job exists with another spec, here or in the checkpoint that the servers
            began with; the message names the fields.
        InvalidRequest: A record cannot be read.
        BackstayError: The data cannot be scanned, or the store does not answer.
    """
    found = (await store.range(keys.root)).values()
    recorded = RecordedJob({key: item.value for key, item in found.items()}, keys)
    kept: KeptJob | None = None
    fresh = fresh or (recorded.is_one and run not in ("", recorded.uid))
    if fresh or not recorded.is_one:
        for key in recorded.removable():
            journal.outbox.stage_removal(key)
        await journal.durable(WRITE_LIMIT_S)
        recorded = RecordedJob({}, keys)
        kept = None if fresh else await asyncio.to_thread(restored)
        if kept is not None and run not in ("", kept.identity.uid):
            kept = None
    identity = recorded.identity(spec, uid=run or uid, now_ms=now_ms, kept=kept)
    tables = {data: await _table(recorded, keys, journal, spec, data) for data in spec.data}
    state = recorded.state(kept) or new_state(await asyncio.to_thread(incarnation))
    return opened_job(
        spec,
        keys,
        journal.outbox,
        recorded,
        identity=identity,
        state=state,
        tables=tables,
        now_s=clock(),
        owner=owner,
    )


async def _table(
    recorded: RecordedJob, keys: JobKeys, journal: Journal, spec: JobSpec, data: str
) -> TaskTable:
    """Return the tasks of data, as they are recorded or as a scan finds them."""
    if spec.grows(data):
        # Each of its periods has a table of its own.
        return TaskTable((), (), spec.records_per_task)
    table = recorded.table(data)
    return await _scan(keys, journal, spec, data) if table is None else table


async def _scan(keys: JobKeys, journal: Journal, spec: JobSpec, data: str) -> TaskTable:
    """Scan data and record its tasks."""
    table = await asyncio.to_thread(scan, spec, data)
    texts = table.to_chunks()
    for number, text in enumerate(texts):
        journal.outbox.stage_text(keys.shards(data, number), text)
    await journal.durable(WRITE_LIMIT_S)
    # The record comes last, so a scan that was half recorded is done again.
    journal.outbox.stage_text(keys.shard_count(data), str(len(texts)))
    return table


class Job(JobEngine):
    """One job, in its job master.

    Attributes:
        journal: Writes its records.
    """

    def __init__(
        self,
        opened: OpenedJob,
        keys: JobKeys,
        journal: Journal,
        clock: Callable[[], float],
        *,
        renewals_per_s_max: int = RENEWALS_PER_S_MAX,
    ) -> None:
        """Take the job over as its records say; see ``JobEngine``."""
        self.journal = journal
        self._news = _News()
        super().__init__(
            opened,
            keys,
            journal.outbox,
            clock,
            notify=self._news.come,
            renewals_per_s_max=renewals_per_s_max,
        )

    @property
    def changed(self) -> asyncio.Event:
        """Set when there may be something new for those who wait: tasks, rounds, the end."""
        return self._news.next


class _News:
    """Wakes all who wait for the next news."""

    def __init__(self) -> None:
        self.next = asyncio.Event()

    def come(self) -> None:
        self.next.set()
        self.next = asyncio.Event()
