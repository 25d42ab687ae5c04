"""The records of a job: what it is, who its job master is, where it stands.

Values, strict about their JSON form, like those of ``consensus.records``. All lie below
``jobs/<job>/`` and are written by the job master alone, each write under the condition that its
``master`` key is the one it created. What concerns tasks (shards, done, leased, dead-lettered) has
the forms of ``job_engine``. No clock, no I/O.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from backstay.errors import InvalidRequest
from backstay.json_record import Count, JsonRecord

__all__ = [
    "JOBS_PROGRESS",
    "OVER_STATES",
    "JobNameRecord",
    "JobSpecRecord",
    "JobStateRecord",
    "JournalRecord",
    "MasterRecord",
    "RunState",
    "StreamRecord",
    "stream_job_of",
]

# The member of a checkpoint's progress that holds the records of jobs; trainers' own progress has
# other names.
JOBS_PROGRESS = "backstay_jobs"

RunState = Literal["running", "done", "stopped", "failed", "unsaved"]
RUN_STATES: tuple[RunState, ...] = get_args(RunState)
# States in which a job is over.
OVER_STATES: tuple[RunState, ...] = ("done", "stopped", "failed", "unsaved")


def stream_job_of(uid: str) -> int:
    """Return the first part of the ids of a job's streams: 63 bits, never 0."""
    digest = hashlib.blake2b(uid.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 1) or 1


@dataclass(frozen=True)
class JobNameRecord(JsonRecord, what="job name"):
    """``jobs/@/<job>``: there is a job of that name.

    Attributes:
        uid: Which one.
    """

    uid: str


@dataclass(frozen=True)
class JobSpecRecord(JsonRecord, what="job spec"):
    """``spec``: what the job is; written once, and again where settings that may change do.

    Attributes:
        uid: What tells it from others of its name.
        created_ms: Unix time.
        spec: The spec as ``backstay.job_spec`` writes it.
    """

    uid: str
    created_ms: int
    spec: str


@dataclass(frozen=True)
class MasterRecord(JsonRecord, what="job master"):
    """``master``: the process that is the job master; bound to its lease.

    Attributes:
        address: ``host:port`` of its gRPC services.
        instance: Of the process.
        host: Its machine, for people.
        pid: Its process id there.
    """

    address: str
    instance: int
    host: str
    pid: int


@dataclass(frozen=True)
class JournalRecord(JsonRecord, what="job journal"):
    """``journal``: the last transaction of a job master.

    Each transaction writes it and compares its revision: one whose outcome was unknown cannot
    take effect behind a later one.

    Attributes:
        instance: The job master.
        number: 1, 2, ... of its transactions.
    """

    instance: int
    number: int


@dataclass(frozen=True)
class StreamRecord(JsonRecord, what="stream"):
    """In ``state``: how far a job is in training data without an end.

    Attributes:
        positions: The next offset of each partition when the open period began; its takes are
            records of their own. Empty: the job has not asked yet where to begin.
        started: The same when the job began; a partition that is not there began at 0.
        sealed: The number of the last period that takes no more; 0: none.
        began_s: Unix time when the open period took its first records; 0: not known.
        stopping: Why the job takes nothing more and ends when all is done that was taken; empty: it
            goes on.
        is_replaced: Whether the job is going back to a checkpoint: what is recorded of its periods
            is of the time before or after, and counts for nothing until all of it is written.
    """

    positions: Mapping[str, Count] = field(default_factory=dict)
    started: Mapping[str, Count] = field(default_factory=dict)
    sealed: Count = 0
    began_s: Count = 0
    stopping: str = ""
    is_replaced: bool = False


@dataclass(frozen=True)
class JobStateRecord(JsonRecord, what="job state", added=("progressive", "stream")):
    """``state``: where the job stands, but for the tasks.

    Attributes:
        state: ``running``, ``done``, ``stopped``, ``failed``, or ``unsaved``: all tasks are done,
            and the last checkpoint could not be written.
        reason: Why, if it does not run.
        starts: How often a job master took the job over.
        schedule: Which rounds it is at, as ``backstay.schedule`` writes it; empty: not begun.
        workers: Which workers are wanted, as ``job_engine.worker_set`` writes it.
        tables: Names of the job's tables, in order; empty: not declared yet.
        data: Digest of the tasks of ``training``, ``validation``, ...: task numbers mean nothing
            for other data.
        restore_version: Which restore of the cluster the progress goes with; 0: none.
        generation: Of the cluster's rows that it goes with: it grows when some are lost.
        inexact: Since when and why records may count never or twice; empty: each counts once.
        checkpoint: The newest checkpoint of the job; empty: none.
        checkpoint_url: Where it was written to; empty: not since the servers were restored.
        passes_begun: Training passes of which a task was given out, or may have been.
        pass_starts: When the newest of them began, in seconds of Unix time, by the number of the
            pass; as ``lifetime.unseen_passes`` of the spec needs them.
        task_lease_ttl_ms: How long workers may count on a lease; never less than any of them was
            told.
        figures: Sums, most of them for people: ``examples``, ``steps``, ``bad_records``, ...
            ``tasks``, the number of tasks that have ended, says whether a checkpoint is exact;
            ``saved_steps``, the steps of the job's newest checkpoint, whether one is missing, and
            so does ``saved_upkeeps``. ``upkept_passes`` is the last pass whose end was seen to,
            ``upkeeps`` how many of these changed rows. Of data without an end: ``dropped_records``,
            offsets that the source had dropped before they were taken, in the periods that are
            over, and ``past_bad_records``, damaged ones of periods that are forgotten.
        evaluations: The last evaluations: objects with ``round``, ``steps``, ``records`` and
            ``metrics``.
        table_notes: What became of settings that the tables did not have, since a job master
            opened the job; for people.
        owner: Of the job on Kubernetes: uid of the Deployment whose job master opened it last.
            Empty: it ran elsewhere.
        progressive: Figures of progressive metrics, for people, as ``Progressive.shown`` has them;
            empty: there are none.
        stream: Of training data without an end: how far the job is in them.
    """

    state: RunState
    reason: str = ""
    starts: int = 0
    schedule: str = ""
    workers: str = ""
    tables: tuple[str, ...] = ()
    data: Mapping[str, str] = field(default_factory=dict)
    restore_version: int = 0
    generation: int = 0
    inexact: str = ""
    checkpoint: str = ""
    checkpoint_url: str = ""
    passes_begun: int = 0
    pass_starts: Mapping[str, Count] = field(default_factory=dict)
    task_lease_ttl_ms: int = 0
    figures: Mapping[str, Count] = field(default_factory=dict)
    evaluations: tuple[Mapping[str, Any], ...] = ()
    table_notes: tuple[str, ...] = ()
    owner: str = ""
    progressive: Mapping[str, Any] = field(default_factory=dict)
    stream: StreamRecord | None = None

    def __post_init__(self) -> None:
        """Refuse a state that is none."""
        if self.state not in RUN_STATES:
            raise InvalidRequest(f"job state: unknown state {self.state!r}")
