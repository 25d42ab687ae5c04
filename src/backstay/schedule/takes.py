"""Takes: what a period of training data without an end is made of.

A take is some offsets of one partition that follow each other. It is a shard of the period's
``TaskTable``, and its name says where it begins: ``clicks/3@1000``. So the takes of a period say
which offsets its tasks have, where the next take begins, and which offsets were left out because
the source had dropped them. Where the source is closed folders, their files are the partitions, and
a take without records says that a folder is over (``schedule.folders``). Imports
``backstay.schedule`` and ``backstay.errors``; does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from backstay.errors import InvalidRequest
from backstay.schedule.task_table import TaskTable

__all__ = [
    "FOLDERS_KEPT",
    "PERIODS_KEPT",
    "TAKES_PER_RECORD",
    "Advanced",
    "Take",
    "advance",
    "folder_part",
    "folders_taken",
    "is_folder",
    "part_and_offset",
    "with_takes",
]

# Of one record of a period's takes.
TAKES_PER_RECORD = 128
# As many periods that are over stay recorded: a checkpoint that is being written may need them.
PERIODS_KEPT = 8
# As many folders that are over stay known by name, the ones that sort last. One that sorts before
# all of them is an old one.
FOLDERS_KEPT = 512


class Take(NamedTuple):
    """Offsets of one partition.

    Attributes:
        part: The partition, such as ``clicks/3``.
        first: The first offset.
        records: How many offsets.
    """

    part: str
    first: int
    records: int

    @property
    def name(self) -> str:
        """The name of its shard."""
        return f"{self.part}@{self.first}"


class Advanced(NamedTuple):
    """Where takes lead to.

    Attributes:
        positions: The next offset of each partition; of a folder that is over, instead of its
            files, how many there were.
        dropped: Offsets that the source had dropped before they were taken.
    """

    positions: dict[str, int]
    dropped: int


def folder_part(folder: str) -> str:
    """Return what stands for a folder among partitions."""
    return f"{folder}/"


def is_folder(part: str) -> bool:
    """Return whether a partition stands for a folder."""
    return part.endswith("/")


def part_and_offset(shard: str) -> tuple[str, int]:
    """Return the partition and the first offset of a take, given the name of its shard.

    Raises:
        InvalidRequest: It is no such name.
    """
    part, sign, first = shard.rpartition("@")
    if not (part and sign and first.isdecimal()):
        raise InvalidRequest(f"shard {shard!r}: expected a partition, @ and an offset")
    return part, int(first)


def advance(positions: Mapping[str, int], takes: Iterable[tuple[str, int]]) -> Advanced:
    """Return where the takes of periods lead to.

    Args:
        positions: The next offset of each partition before them; of one that is not there: 0.
        takes: Names and numbers of records of their shards, in their order.

    Raises:
        InvalidRequest: Offsets are there twice, or the name of a shard is that of no take.
    """
    found, dropped = dict(positions), 0
    for shard, records in takes:
        part, first = part_and_offset(shard)
        if is_folder(part):
            if part in found:
                raise InvalidRequest(f"takes: folder {part} was taken before")
            found = _without_files(found, part)
            found[part] = first
            continue
        gap = first - found.get(part, 0)
        if gap < 0:
            raise InvalidRequest(f"takes: offset {first} of {part} was taken before")
        dropped += gap
        found[part] = first + records
    return Advanced(found, dropped)


def _without_files(positions: Mapping[str, int], folder: str) -> dict[str, int]:
    """Return positions without the files of a folder, and without the oldest of many folders."""
    folders = sorted(part for part in positions if is_folder(part))
    old = set(folders[: max(0, len(folders) + 1 - FOLDERS_KEPT)]) - {folder}
    return {
        part: at
        for part, at in positions.items()
        if part not in old and (is_folder(part) or not part.startswith(folder))
    }


def with_takes(table: TaskTable, takes: Iterable[Take]) -> TaskTable:
    """Return a table with takes at its end."""
    found = list(takes)
    return table.with_shards([take.name for take in found], [take.records for take in found])


def folders_taken(table: TaskTable) -> int:
    """Return how many whole folders a period has; empty ones before its first record are none."""
    count, has_records = 0, False
    for name, records in table.shards:
        has_records = has_records or records > 0
        count += has_records and is_folder(name.rpartition("@")[0])
    return count
