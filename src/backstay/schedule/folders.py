"""Closed folders as training data without an end: what a period takes of them.

Folders are taken one after the other, and the files of a folder in their order. What is taken of a
file is a take like any other. When all files of a folder are taken, a take without records ends it:
its part is the folder's name with a slash, its number is how many files there were. So a folder is
over exactly if the records of a period say so. Imports ``backstay.schedule``; does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from backstay.schedule.takes import Take, folder_part
from backstay.schedule.taking import PartEnds, Room
from backstay.schedule.task_table import TaskTable

__all__ = ["next_folder_takes"]


def next_folder_takes(
    folders: Mapping[str, Sequence[str]],
    ends: Mapping[str, PartEnds],
    positions: Mapping[str, int],
    room: Room,
    table: TaskTable,
    *,
    folders_left: int | None,
) -> list[Take]:
    """Return what to take now.

    Args:
        folders: Closed folders that are not over, in their order, with their files.
        ends: What each of these files holds.
        positions: The next record of each file; of one that is not there: 0.
        room: How much may be taken.
        table: What the period has taken.
        folders_left: So many folders make the period full; None: it does not end with folders.
    """
    takes: list[Take] = []
    has_records = len(table) > 0
    for folder, files in folders.items():
        if folders_left is not None and folders_left <= 0:
            break
        for file in files:
            first = max(positions.get(file, 0), ends[file].lowest)
            wanted = max(0, ends[file].end - first)
            count = _fitting(wanted, room, table.records_per_task)
            if count:
                takes.append(Take(file, first, count))
                room = _less(room, count, -(-count // table.records_per_task))
                has_records = True
            if count < wanted:
                return takes
        takes.append(Take(folder_part(folder), len(files), 0))
        if folders_left is not None and has_records:
            # A period begins with the first folder that has records.
            folders_left -= 1
    return takes


def _fitting(wanted: int, room: Room, records_per_task: int) -> int:
    """Return how many of the next records of a file may be taken: whole tasks, or all of them.

    Only the last task of a period may be short before the end of the file.
    """
    tasks = room.tasks * records_per_task
    most = min(room.ahead, tasks)
    if room.period is not None and room.period <= min(wanted, most):
        return room.period
    return wanted if wanted <= most else most - most % records_per_task


def _less(room: Room, records: int, tasks: int) -> Room:
    period = None if room.period is None else room.period - records
    return Room(room.ahead - records, period, room.tasks - tasks)
