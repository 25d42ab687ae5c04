"""Opens a job: as its records say, as a checkpoint kept it, or new.

The caller reads the records, asks the cluster and scans the data (``master.job``). Here is decided
what follows from them; what must be written or removed is staged.

A job master may die between two groups of its journal. The schedule may then say that a round is
over, although the last done tasks or dead letters of the round were not written, or its records are
removed in part. The schedule is right: it is written first, and only when the round is over.
Imports ``job_engine``, ``schedule`` and the records of jobs; does no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from backstay.consensus.records.jobs import JobNameRecord, JobSpecRecord, JobStateRecord
from backstay.consensus.records.keys import JobKeys
from backstay.errors import InvalidRequest, JobRefused
from backstay.job_engine.ledger import NOBODY
from backstay.job_engine.open_round import OpenRound, open_round
from backstay.job_engine.period_takes import tables_of
from backstay.job_engine.progress import KeptJob
from backstay.job_engine.records import Records
from backstay.job_engine.round_scores import RoundScores, begun_scores
from backstay.job_engine.task_store import CHUNK_TASKS, TaskBits
from backstay.job_engine.values import (
    DeadLetter,
    Failure,
    LeasedTask,
    WorkerRecord,
    first_attempt,
)
from backstay.job_engine.worker_set import WorkerPolicy, WorkerSet
from backstay.job_spec import JobSpec
from backstay.schedule.damaged import DamagedRecords
from backstay.schedule.rounds import RoundId, RoundKind, data_of
from backstay.schedule.schedule import Schedule
from backstay.schedule.task_table import TaskTable, round_table

__all__ = [
    "OpenedJob",
    "RecordedJob",
    "StateIncarnation",
    "is_over",
    "new_job",
    "new_state",
    "opened_job",
    "reconcile",
]

_UNKNOWN = Failure("a job master died before it had recorded what was wrong with it", "")

log = logging.getLogger(__name__)


class StateIncarnation(NamedTuple):
    """Identifies the rows of a cluster. If it changes, what was pushed before may be gone.

    Attributes:
        restore_version: Which restore was the last; 0: none.
        generation: Grows with each restore, and when slots lose all their copies.
    """

    restore_version: int
    generation: int


class OpenedJob(NamedTuple):
    """What the engine begins with.

    Attributes:
        spec: What the job is.
        identity: Its spec record.
        state: Where it stands.
        tables: The tasks of training, validation and prediction data.
        schedule: Which rounds are open, and which come next.
        workers: How many worker processes there are to be, and which.
        rounds: The rounds of which the journal has records.
        damaged: Damaged records of the data, as far as known.
        progressive: What is recorded of progressive metrics, as ``Progressive`` takes it.
        takes: What periods have taken of training data without an end, by the number of the period.
    """

    spec: JobSpec
    identity: JobSpecRecord
    state: JobStateRecord
    tables: Mapping[str, TaskTable]
    schedule: Schedule
    workers: WorkerSet
    rounds: Mapping[RoundId, OpenRound]
    damaged: DamagedRecords
    progressive: Mapping[str, str] = MappingProxyType({})
    takes: Mapping[int, TaskTable] = MappingProxyType({})


def new_job(spec: JobSpec, tables: Mapping[str, TaskTable], identity: JobSpecRecord) -> OpenedJob:
    """Return a job that has no records yet."""
    policy = WorkerPolicy.of(spec)
    return OpenedJob(
        spec,
        identity,
        JobStateRecord("running"),
        tables,
        Schedule.of(spec),
        WorkerSet(policy),
        {},
        DamagedRecords(),
    )


class RecordedJob:
    """The records of a job, as they are in the store."""

    def __init__(self, texts: Mapping[str, str], keys: JobKeys) -> None:
        """Take them.

        Args:
            texts: By key.
            keys: The job's keys.
        """
        self._texts = texts
        self._keys = keys

    @property
    def is_one(self) -> bool:
        """Whether there is a job, and not only the rest of a removed one."""
        return self._keys.spec in self._texts

    @property
    def uid(self) -> str:
        """The recorded uid, which tells the job from others of its name."""
        return JobSpecRecord.from_json(self._texts[self._keys.spec]).uid

    def removable(self) -> list[str]:
        """Return the keys to remove before the job begins anew."""
        return [key for key in self._texts if key not in (self._keys.master, self._keys.journal)]

    def identity(
        self, spec: JobSpec, *, uid: str, now_ms: int, kept: KeptJob | None = None
    ) -> JobSpecRecord:
        """Return which job it is: the recorded one, the one that a checkpoint kept, or a new one.

        Args:
            spec: What the job is to be.
            uid: For a new job.
            now_ms: Unix time, for a job that is not recorded.
            kept: What the checkpoint from which the servers were restored has of it; None: nothing.

        Raises:
            JobRefused: It exists with other settings; the message names them.
        """
        text, job = self._texts.get(self._keys.spec), self._keys.job
        if text is not None:
            recorded = JobSpecRecord.from_json(text)
            _check_same(spec, recorded, job)
            return replace(recorded, spec=spec.to_json())
        if kept is not None:
            where = "in the checkpoint that the servers were restored from "
            _check_same(spec, kept.identity, job, where)
            # Created then: the periods of its passes go on.
            uid, now_ms = kept.identity.uid, kept.identity.created_ms
        return JobSpecRecord(uid, now_ms, spec.to_json())

    def table(self, data: str) -> TaskTable | None:
        """Return the tasks of ``training``, ``validation`` or ``prediction`` data.

        Returns:
            None: they are not recorded, or in part only.

        Raises:
            InvalidRequest: Records are missing.
        """
        count = self._texts.get(self._keys.shard_count(data))
        if count is None:
            return None
        chunks = self.below(f"{self._keys.all_shards}{data}/")
        if not count.isdecimal() or len(chunks) < int(count):
            raise InvalidRequest(f"shards of {data}: {len(chunks)} records of {count}")
        return TaskTable.from_chunks(chunks[key] for key in sorted(chunks))

    def state(self, kept: KeptJob | None = None) -> JobStateRecord | None:
        """Return where the job stands; None: it begins, see :func:`new_state`."""
        text = self._texts.get(self._keys.state)
        if text is not None:
            return JobStateRecord.from_json(text)
        if kept is not None:
            # Its progress came with a restore that the job has not followed yet. Its tables exist.
            return JobStateRecord("running", tables=kept.state.tables)
        return None

    def below(self, prefix: str) -> dict[str, str]:
        """Return the records below a prefix, by the rest of their keys."""
        return {
            key.removeprefix(prefix): value
            for key, value in self._texts.items()
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

    def takes(self) -> dict[int, TaskTable]:
        """Return what periods have taken of training data without an end.

        Raises:
            InvalidRequest: A record cannot be read, or one is missing.
        """
        return tables_of(self.below(self._keys.all_takes))

    def without_rounds(self) -> tuple[RecordedJob, list[str]]:
        """Return the job without what is recorded of its rounds, and the keys of that."""
        keys = self._keys
        prefixes = (keys.all_takes, keys.all_done, keys.all_leased, keys.all_dead_letters)
        gone = [key for key in self._texts if key.startswith((*prefixes, keys.all_damaged))]
        kept = {key: text for key, text in self._texts.items() if key not in set(gone)}
        return RecordedJob(kept, keys), gone


def new_state(incarnation: StateIncarnation) -> JobStateRecord:
    """Return where a new job stands: it begins with these rows, whatever was restored before."""
    return JobStateRecord("running", **incarnation._asdict())


def opened_job(
    spec: JobSpec,
    keys: JobKeys,
    records: Records,
    recorded: RecordedJob,
    *,
    identity: JobSpecRecord,
    state: JobStateRecord,
    tables: Mapping[str, TaskTable],
    now_s: float,
    owner: str = "",
) -> OpenedJob:
    """Return a recorded job, as a job master that starts takes it over.

    Args:
        spec: What it is to be.
        keys: The job's keys.
        records: Where changes go.
        recorded: Its records.
        identity: Which job it is.
        state: Where it stands.
        tables: The tasks of its data.
        now_s: Monotonic seconds: the time of all leases begins now.
        owner: Owner of the job on Kubernetes: a job that has ended does not go on under the same
            owner.

    Raises:
        InvalidRequest: A record cannot be read, or is not of this data.
    """
    if state.stream is not None and state.stream.is_replaced:
        # A job master died while it took the job back to a checkpoint. This one does that again.
        recorded, gone = recorded.without_rounds()
        for key in gone:
            records.stage_removal(key)
    schedule, workers = Schedule.of(spec, state.schedule), _workers(spec, state)
    takes = recorded.takes()
    rounds = _rounds(recorded, keys, records, spec, tables, takes, schedule, state, now_s)
    has_ended = state.state == "done" and schedule.outcome is not None
    if owner and owner == state.owner:
        # A job that is unsaved goes on: its last checkpoint is tried again.
        has_ended = state.state not in ("running", "unsaved")
    state = replace(state, starts=state.starts + 1, table_notes=(), owner=owner)
    if not has_ended:
        state = replace(state, state="running", reason="")
        _retry_dead_letters(schedule, rounds, records, keys)
    records.stage_text(keys.name, JobNameRecord(identity.uid).to_json())
    records.stage_text(keys.spec, identity.to_json())
    damaged = DamagedRecords()
    damaged.learn(recorded.below(keys.all_damaged))
    progressive = recorded.below(keys.all_progressive)
    return OpenedJob(
        spec, identity, state, tables, schedule, workers, rounds, damaged, progressive, takes
    )


def _workers(spec: JobSpec, state: JobStateRecord) -> WorkerSet:
    policy = WorkerPolicy.of(spec)
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


def _rounds(
    recorded: RecordedJob,
    keys: JobKeys,
    records: Records,
    spec: JobSpec,
    tables: Mapping[str, TaskTable],
    takes: Mapping[int, TaskTable],
    schedule: Schedule,
    state: JobStateRecord,
    now_s: float,
) -> dict[RoundId, OpenRound]:
    """Return the rounds that there are records of, with the leases of their workers."""
    rounds: dict[RoundId, OpenRound] = {}
    sealed = state.stream.sealed if state.stream is not None else 0
    for round_id in sorted(recorded.rounds() | set(schedule.dead_letters), key=str):
        if round_id.kind is RoundKind.EVALUATION or data_of(round_id.kind) not in tables:
            continue
        workers = recorded.below(f"{keys.all_leased}{round_id}/")
        if is_over(schedule, round_id) and round_id not in schedule.dead_letters:
            # A job master died before it had erased these records. The record of a worker may
            # still have streams to close.
            for prefix in (keys.all_done, keys.all_dead_letters):
                for key in recorded.below(f"{prefix}{round_id}/"):
                    records.stage_removal(f"{prefix}{round_id}/{key}")
            if not workers:
                continue
        is_period = spec.is_stream and round_id.kind is RoundKind.TRAINING
        table = round_table(tables, round_id)
        if is_period:
            table = takes.get(round_id.number, table)
        done, dead_letters = _ended_tasks(recorded, keys, records, schedule, round_id, len(table))
        begun = _begun_scores(recorded, keys, spec, round_id)
        opened = open_round(
            round_id,
            table,
            spec,
            first_attempt=first_attempt(state.starts + 1),
            # A worker counts on the time that it was told by an earlier job master.
            task_lease_ttl_ms=max(spec.task_lease_ttl_ms, state.task_lease_ttl_ms),
            steps=schedule.steps,
            done=done,
            dead_letters=dead_letters,
            begun_scores=begun,
            is_sealed=not is_period or round_id.number <= sealed,
        )
        for key, text in workers.items():
            record = WorkerRecord.from_json(text)
            if begun is not None:
                record = _as_far_as_scored(record, opened.scores)
            opened.ledger.adopt_worker(keys.worker_of(key), record, now_s)
        for task in opened.scores.tasks():
            # Its lease may have been recorded before that.
            known = LeasedTask(task, 0, opened.scores.batches(task))
            opened.ledger.adopt(NOBODY, known, now_s)
        rounds[round_id] = opened
    return rounds


def _begun_scores(
    recorded: RecordedJob, keys: JobKeys, spec: JobSpec, round_id: RoundId
) -> dict[tuple[int, int], bytes] | None:
    """Return the scores that attempts of a round began with; None: the job has no such metrics."""
    if spec.progressive is None or round_id.kind is not RoundKind.TRAINING:
        return None
    texts = recorded.below(keys.all_progressive)
    return begun_scores(texts, str(round_id), spec.progressive.by)


def _as_far_as_scored(record: WorkerRecord, scores: RoundScores) -> WorkerRecord:
    """Return a worker's record with no batches acknowledged whose scores are not recorded.

    They are done again, unless a worker tells their scores once more.
    """
    leased = (
        one._replace(acknowledged=min(one.acknowledged, scores.batches(one.task)))
        for one in record.leased
    )
    return replace(record, leased=tuple(leased))


def _ended_tasks(
    recorded: RecordedJob,
    keys: JobKeys,
    records: Records,
    schedule: Schedule,
    round_id: RoundId,
    size: int,
) -> tuple[TaskBits, list[DeadLetter]]:
    """Return which tasks of a recorded round are done and which are dead-lettered."""
    name = str(round_id)
    chunks = recorded.below(f"{keys.all_done}{name}/")
    dead_texts = recorded.below(f"{keys.all_dead_letters}{name}/")
    chunk_texts = {int(number): text for number, text in chunks.items()}
    if any(number * CHUNK_TASKS >= size for number in chunk_texts):
        raise InvalidRequest(f"{round_id}: tasks are done beyond the {size} of the data")
    done, dead_letters = reconcile(
        schedule,
        round_id,
        TaskBits.from_chunks(size, chunk_texts),
        [DeadLetter.from_json(text) for text in dead_texts.values()],
    )
    for lost in dead_letters[len(dead_texts) :]:
        records.stage_text(keys.dead_letters(name, lost.task), lost.to_json())
    return done, dead_letters


def _retry_dead_letters(
    schedule: Schedule, rounds: Mapping[RoundId, OpenRound], records: Records, keys: JobKeys
) -> None:
    """Have a job that ended with dead letters go on: its dead-lettered tasks are tried again."""
    if schedule.outcome != "finished_with_dead_letters":
        return
    for round_id, opened in rounds.items():
        if opened.ledger.dead_letters and schedule.reopen(round_id):
            back = opened.ledger.retry_dead_letters()
            log.info("%s: %d dead-lettered tasks are tried again", round_id, len(back))
            opened.stage(records, keys)


def is_over(schedule: Schedule, round_id: RoundId) -> bool:
    """Return whether all tasks of a round are done or dead-lettered, as the schedule has it.

    A training pass that was cut short is not over, and neither is one that has yet to begin.
    """
    if round_id in schedule.open_rounds:
        return False
    return round_id.kind is not RoundKind.TRAINING or round_id.number <= schedule.passes_over


def reconcile(
    schedule: Schedule, round_id: RoundId, done: TaskBits, dead_letters: Sequence[DeadLetter]
) -> tuple[TaskBits, list[DeadLetter]]:
    """Return which tasks of a round are done and dead-lettered.

    Args:
        schedule: Where the job is.
        round_id: Which round.
        done: As it is recorded.
        dead_letters: Likewise.
    """
    if not is_over(schedule, round_id):
        return done, list(dead_letters)
    if round_id not in schedule.dead_letters:
        return TaskBits.full(done.size), []
    # To try again what was done does no harm: its batches are known on the servers.
    known = {one.task for one in dead_letters}
    lost = (task for task in range(done.size) if task not in done and task not in known)
    return done, [*dead_letters, *(DeadLetter(task, 0, _UNKNOWN, 0) for task in lost)]
