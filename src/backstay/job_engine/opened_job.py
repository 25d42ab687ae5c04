"""What a job is made of when it is opened: what its records say, or its beginning.

Values; does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from backstay.consensus.job_records import JobSpecRecord, JobStateRecord
from backstay.job_engine.open_round import OpenRound, worker_policy
from backstay.job_engine.worker_set import WorkerSet
from backstay.job_spec import JobSpec
from backstay.schedule.damaged import DamagedRecords
from backstay.schedule.rounds import RoundId
from backstay.schedule.schedule import Schedule
from backstay.schedule.task_table import TaskTable

__all__ = ["OpenedJob", "StateIncarnation", "new_job"]


class StateIncarnation(NamedTuple):
    """Which rows a cluster has: another identity, and what was pushed may be gone.

    Attributes:
        restore_version: Which restore was the last; 0: none.
        generation: Grows with each restore, and when slots lose all their copies.
    """

    restore_version: int
    generation: int


class OpenedJob(NamedTuple):
    """What a job is made of.

    Attributes:
        spec: What it is.
        identity: Its spec record.
        state: Where it stands.
        tables: The tasks of training, validation and prediction data.
        schedule: Which rounds are open, and which come next.
        workers: How many worker processes there are to be, and which.
        rounds: Those that the journal knows.
        damaged: Damaged records of the data, as far as known.
    """

    spec: JobSpec
    identity: JobSpecRecord
    state: JobStateRecord
    tables: Mapping[str, TaskTable]
    schedule: Schedule
    workers: WorkerSet
    rounds: Mapping[RoundId, OpenRound]
    damaged: DamagedRecords


def new_job(spec: JobSpec, tables: Mapping[str, TaskTable], identity: JobSpecRecord) -> OpenedJob:
    """Return a job that begins."""
    policy = worker_policy(spec)
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
