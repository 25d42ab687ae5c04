"""What a job is made of when its master opens it: what ``opening`` reads and ``Job`` takes over.

A value; does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from backstay.consensus.job_records import JobSpecRecord, JobStateRecord
from backstay.job_spec import JobSpec
from backstay.master.core.worker_set import WorkerSet
from backstay.master.open_round import OpenRound
from backstay.schedule.damaged import DamagedRecords
from backstay.schedule.rounds import RoundId
from backstay.schedule.schedule import Schedule
from backstay.schedule.task_table import TaskTable

__all__ = ["OpenedJob"]


class OpenedJob(NamedTuple):
    """What a job is made of when its master opens it.

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
