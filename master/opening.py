"""Opening a job: making it, or reading its records so that it goes on where it was.

The process that calls it has the leadership, so no other process writes. What is written goes
through the journal and is durable before the next step needs it. If a master dies in between, the
next one does the step again. Imports ``backstay.consensus``, ``backstay.schedule`` and
``job_engine``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from backstay.consensus.job_records import JobNameRecord, JobSpecRecord, JobStateRecord
from backstay.consensus.keys import JobKeys
from backstay.consensus.store import CoordinationStore, KeyValue
from backstay.errors import InvalidRequest, JobRefused
from backstay.job.data_scan import scan
from backstay.job_engine.ledger import NOBODY
from backstay.job_engine.open_round import OpenRound, open_round, worker_policy
from backstay.job_engine.opened_job import OpenedJob
from backstay.job_engine.reconcile import is_over, reconcile
from backstay.job_engine.task_bits import CHUNK_TASKS, TaskBits
from backstay.job_engine.values import ATTEMPTS_PER_MASTER, DeadLetter, WorkerRecord
from backstay.job_engine.worker_set import WorkerSet
from backstay.job_spec import JobSpec
from backstay.master.journal import Journal
from backstay.master.rows_change import StateIncarnation
from backstay.master.saving import KeptJob
from backstay.schedule.damaged import DamagedRecords
from backstay.schedule.rounds import RoundId, RoundKind, data_of
from backstay.schedule.schedule import Schedule
from backstay.schedule.task_table import TaskTable, round_table

__all__ = ["open_job"]

# Writing a new job's records, or removing an old one's.
WRITE_LIMIT_S = 60.0

log = logging.getLogger(__name__)


class _Found:
    """The records of a job as they are in the store."""

    def __init__(self, items: Mapping[str, KeyValue], keys: JobKeys) -> None:
        self.values = {key: item.value for key, item in items.items()}
        self._keys = keys

    def text(self, key: str) -> str | None:
        return self.values.get(key)

    def below(self, prefix: str) -> dict[str, str]:
        """Return the records below a prefix, by the rest of their keys."""
        return {
            key.removeprefix(prefix): value
            for key, value in self.values.items()
            if key.startswith(prefix)
        }

    def rounds(self) -> set[RoundId]:
        """Return the rounds that there are records of."""
        keys = self._keys
        names = {
            key.partition("/")[0]
            for prefix in (keys.all_done, keys.all_leased, keys.all_dead_letters)
            for key in self.below(prefix)
        }
        return {RoundId.parse(name) for name in names}


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

    Raises:
        JobRefused: The job exists with another spec, here or in the checkpoint that the servers
            began with; the message names the fields.
        InvalidRequest: A record cannot be read.
        BackstayError: The data cannot be scanned, or the store does not answer.
    """
    found = _Found((await store.range(keys.root)).values(), keys)
    text = found.text(keys.spec)
    kept: KeptJob | None = None
    if text is None or fresh:
        await _remove_all(found, keys, journal)
        kept = None if fresh else await asyncio.to_thread(restored)
        if kept is not None:
            where = "in the checkpoint that the servers were restored from "
            _check_same(spec, kept.identity, keys.job, where)
            uid = kept.identity.uid
        identity = JobSpecRecord(uid, now_ms, spec.to_json())
        found = _Found({}, keys)
    else:
        identity = JobSpecRecord.from_json(text)
        _check_same(spec, identity, keys.job)
        identity = replace(identity, spec=spec.to_json())
    tables = await _tables(found, keys, journal, spec)
    state = await _state(found, keys, incarnation, kept)
    schedule, workers = Schedule.of(spec, state.schedule), _workers(spec, state)
    rounds = _rounds(found, keys, journal, spec, tables, schedule, state, clock())
    is_over = state.state == "done" and schedule.outcome is not None
    state = replace(state, starts=state.starts + 1)
    if not is_over:
        state = replace(state, state="running", reason="")
        _retry_dead_letters(schedule, rounds, journal, keys)
    journal.stage_text(keys.name, JobNameRecord(identity.uid).to_json())
    journal.stage_text(keys.spec, identity.to_json())
    damaged = DamagedRecords()
    damaged.learn(found.below(keys.all_damaged))
    return OpenedJob(spec, identity, state, tables, schedule, workers, rounds, damaged)


def _workers(spec: JobSpec, state: JobStateRecord) -> WorkerSet:
    policy = worker_policy(spec)
    goes_on = state.workers and state.state == "running"
    return WorkerSet.from_json(policy, state.workers) if goes_on else WorkerSet(policy)


def _check_same(spec: JobSpec, identity: JobSpecRecord, job: str, where: str = "") -> None:
    recorded = JobSpec.from_json(identity.spec)
    differing = spec.fixed_differences(recorded)
    if differing:
        shown = "; ".join(
            f"{name} is {getattr(spec, name)!r}, was {getattr(recorded, name)!r}"
            for name in differing
        )
        raise JobRefused(
            f"job {job!r} exists {where}with other settings: {shown}. Use those, or another name, "
            "or --fresh to begin anew"
        )


async def _remove_all(found: _Found, keys: JobKeys, journal: Journal) -> None:
    for key in found.values:
        if key not in (keys.master, keys.journal):
            journal.stage_removal(key)
    await journal.durable(WRITE_LIMIT_S)


async def _tables(
    found: _Found, keys: JobKeys, journal: Journal, spec: JobSpec
) -> dict[str, TaskTable]:
    """Return the tasks of the job's data, from the records, or scan the data and record it."""
    tables: dict[str, TaskTable] = {}
    for name in spec.data:
        chunks = found.below(f"{keys.all_shards}{name}/")
        count = found.text(keys.shard_count(name))
        if count is not None:
            if not count.isdecimal() or len(chunks) < int(count):
                raise InvalidRequest(f"shards of {name}: {len(chunks)} records of {count}")
            tables[name] = TaskTable.from_chunks(chunks[key] for key in sorted(chunks))
            continue
        tables[name] = table = await asyncio.to_thread(scan, spec, name)
        texts = table.to_chunks()
        for number, text in enumerate(texts):
            journal.stage_text(keys.shards(name, number), text)
        await journal.durable(WRITE_LIMIT_S)
        # The record comes last, so a scan that was half recorded is done again.
        journal.stage_text(keys.shard_count(name), str(len(texts)))
    return tables


async def _state(
    found: _Found, keys: JobKeys, incarnation: Callable[[], StateIncarnation], kept: KeptJob | None
) -> JobStateRecord:
    text = found.text(keys.state)
    if text is not None:
        return JobStateRecord.from_json(text)
    if kept is not None:
        # Its progress came with a restore that it has not taken note of yet. Its tables are there.
        return JobStateRecord("running", tables=kept.state.tables)
    # What the cluster was restored from before the job began is where it begins.
    now = await asyncio.to_thread(incarnation)
    return JobStateRecord("running", **now._asdict())


def _rounds(
    found: _Found,
    keys: JobKeys,
    journal: Journal,
    spec: JobSpec,
    tables: Mapping[str, TaskTable],
    schedule: Schedule,
    state: JobStateRecord,
    now_s: float,
) -> dict[RoundId, OpenRound]:
    """Return the rounds that there are records of, with the leases of their workers."""
    rounds: dict[RoundId, OpenRound] = {}
    for round_id in sorted(found.rounds() | set(schedule.dead_letters), key=str):
        if round_id.kind is RoundKind.EVALUATION or data_of(round_id.kind) not in tables:
            continue
        name = str(round_id)
        size = len(round_table(tables, round_id))
        chunks = found.below(f"{keys.all_done}{name}/")
        recorded = found.below(f"{keys.all_dead_letters}{name}/")
        if is_over(schedule, round_id) and round_id not in schedule.dead_letters:
            # A master died before it had erased them. A worker's record may have streams to close.
            for prefix in (keys.all_done, keys.all_dead_letters):
                for key in found.below(f"{prefix}{name}/"):
                    journal.stage_removal(f"{prefix}{name}/{key}")
            if not found.below(f"{keys.all_leased}{name}/"):
                continue
        chunk_texts = {int(number): text for number, text in chunks.items()}
        if any(number * CHUNK_TASKS >= size for number in chunk_texts):
            raise InvalidRequest(f"{round_id}: tasks are done beyond the {size} of the data")
        done, dead_letters = reconcile(
            schedule,
            round_id,
            TaskBits.from_chunks(size, chunk_texts),
            [DeadLetter.from_json(text) for text in recorded.values()],
        )
        for lost in dead_letters[len(recorded) :]:
            journal.stage_text(keys.dead_letters(name, lost.task), lost.to_json())
        opened = open_round(
            round_id,
            tables,
            spec,
            first_attempt=(state.starts + 1) * ATTEMPTS_PER_MASTER,
            # A worker counts on the time that it was told by an earlier master.
            task_lease_ttl_ms=max(spec.task_lease_ttl_ms, state.task_lease_ttl_ms),
            steps=schedule.steps,
            done=done,
            dead_letters=dead_letters,
        )
        for worker, text in found.below(f"{keys.all_leased}{name}/").items():
            record = WorkerRecord.from_json(text)
            opened.ledger.adopt_worker(NOBODY if worker == "@" else worker, record, now_s)
        rounds[round_id] = opened
    return rounds


def _retry_dead_letters(
    schedule: Schedule, rounds: Mapping[RoundId, OpenRound], journal: Journal, keys: JobKeys
) -> None:
    """Give the dead-lettered tasks of a job that ended with them their tries again: it goes on."""
    if schedule.outcome != "finished_with_dead_letters":
        return
    for round_id, opened in rounds.items():
        if opened.ledger.dead_letters and schedule.reopen(round_id):
            back = opened.ledger.retry_dead_letters()
            log.info("%s: %d dead-lettered tasks are tried again", round_id, len(back))
            opened.stage(journal, keys)
