"""The tasks that failed for good, from the records of a job: also when it has no master any more.

Reads what it is given; does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping

from backstay._proto.v1 import job_pb2
from backstay.consensus.keys import JobKeys
from backstay.master.core.values import DeadLetter
from backstay.master.status import dead_letter_message
from backstay.schedule.rounds import RoundId, data_of
from backstay.schedule.task_table import TaskTable

__all__ = ["recorded_dead_letters"]


def recorded_dead_letters(
    keys: JobKeys, records: Mapping[str, str]
) -> tuple[job_pb2.DeadLetter, ...]:
    """Return the tasks that are dead-lettered, by round and number.

    Args:
        keys: The keys of the job.
        records: All records below ``keys.all_dead_letters`` and ``keys.all_shards``, by key.

    Raises:
        InvalidRequest: A record cannot be read.
    """
    tables: dict[str, TaskTable] = {}
    tasks = []
    for key in sorted(records):
        if not key.startswith(keys.all_dead_letters):
            continue
        round_id = RoundId.parse(key.removeprefix(keys.all_dead_letters).rpartition("/")[0])
        data = data_of(round_id.kind)
        if data not in tables:
            prefix = f"{keys.all_shards}{data}/"
            chunks = [records[name] for name in sorted(records) if name.startswith(prefix)]
            tables[data] = TaskTable.from_chunks(chunks)
        dead_letter = DeadLetter.from_json(records[key])
        tasks.append(dead_letter_message(round_id, dead_letter, tables[data]))
    return tuple(tasks)
