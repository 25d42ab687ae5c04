"""What a period takes next of training data without an end, and when it is sealed.

Whole tasks are taken as soon as their records are there and there is room for them. Fewer records
become a short task after a while, so that a quiet partition is trained on, too; and the last task
of a period may be short, so that the period has as many records as the job says. Imports
``backstay.schedule`` and ``backstay.job_spec``; does no I/O, and time is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from backstay.job_spec import PeriodSpec
from backstay.listing import listed
from backstay.schedule.takes import Take, folders_taken, is_folder
from backstay.schedule.task_table import TaskTable

__all__ = [
    "PERIOD_TASKS_MAX",
    "Lag",
    "PartEnds",
    "Room",
    "Waiting",
    "is_sealed",
    "lag_of",
    "next_takes",
    "trouble_of",
]

# A period with so many tasks is sealed, whatever the job says: its records stay readable.
PERIOD_TASKS_MAX = 1 << 18


class PartEnds(NamedTuple):
    """What a partition holds: the offsets from ``lowest`` to ``end`` - 1."""

    lowest: int
    end: int


class Waiting(NamedTuple):
    """Records that are too few for a task.

    Attributes:
        first: The first offset.
        since_s: When they were seen first.
    """

    first: int
    since_s: float


class Room(NamedTuple):
    """How much may be taken.

    Attributes:
        ahead: Records until so many are taken and not done as the job allows.
        period: Records until the period is full; None: it ends by time.
        tasks: Tasks until the period has as many as a period may have.
    """

    ahead: int
    period: int | None
    tasks: int

    @classmethod
    def of(cls, period: PeriodSpec, table: TaskTable, ahead: int) -> Room:
        """Return the room of a period.

        Args:
            period: What the job says of periods.
            table: What it has taken.
            ahead: Records of these that are not done.
        """
        left = max(0, period.records - table.records) if period.records else None
        return cls(
            max(0, period.ahead_records - ahead), left, max(0, PERIOD_TASKS_MAX - len(table))
        )


class Lag(NamedTuple):
    """How far a job is behind its source.

    Attributes:
        untaken: Records that are there and not taken.
        ahead: Records that are taken and not done.
        dropped: Records that the source has dropped before they were taken, at partitions of which
            nothing was taken since.
    """

    untaken: int
    ahead: int
    dropped: int

    @property
    def records(self) -> int:
        """All records that are there and not done."""
        return self.untaken + self.ahead


def next_takes(
    ends: Mapping[str, PartEnds],
    positions: Mapping[str, int],
    waiting: Mapping[str, Waiting],
    now_s: float,
    room: Room,
    *,
    records_per_task: int,
    linger_s: float,
) -> tuple[list[Take], dict[str, Waiting]]:
    """Return what to take now.

    Args:
        ends: What each partition holds.
        positions: The next offset of each partition; of one that is not there: 0.
        waiting: What waited for a whole task when this was asked last.
        now_s: Monotonic seconds.
        room: How much may be taken.
        records_per_task: Of a whole task.
        linger_s: Records too few for a task wait so long.

    Returns:
        The takes, one for a partition at most, and what waits now.
    """
    first = {part: max(one.lowest, positions.get(part, 0)) for part, one in ends.items()}
    there = {part: max(0, one.end - first[part]) for part, one in ends.items()}
    records = room.ahead if room.period is None else min(room.ahead, room.period)
    whole = {part: count // records_per_task for part, count in there.items()}
    tasks = _shared(whole, min(records // records_per_task, room.tasks))
    counts = {part: number * records_per_task for part, number in tasks.items()}
    taken, made = sum(counts.values()), sum(tasks.values())
    left: dict[str, Waiting] = {}
    for part in sorted(ends):
        rest = there[part] - counts[part]
        if not rest:
            continue
        begin = first[part] + counts[part]
        before = waiting.get(part)
        since_s = before.since_s if before is not None and before.first == begin else now_s
        short = 0
        if taken + records_per_task > records == room.period:
            # The last task of the period: it need not wait for more records than it will have.
            missing = records - taken
            has_waited = rest >= missing or now_s - since_s >= linger_s
            short = min(rest, missing) if has_waited else 0
        elif rest < records_per_task and now_s - since_s >= linger_s and rest <= records - taken:
            short = rest
        if short and made < room.tasks:
            counts[part] += short
            taken, made = taken + short, made + 1
        if not short or short < rest:
            left[part] = Waiting(first[part] + counts[part], since_s)
    takes = [Take(part, first[part], count) for part, count in sorted(counts.items()) if count]
    return takes, left


def _shared(wanted: Mapping[str, int], most: int) -> dict[str, int]:
    """Share ``most`` tasks among partitions that have so many: alike, as far as they have them."""
    shares = {}
    for number, part in enumerate(sorted(wanted, key=lambda part: (wanted[part], part))):
        shares[part] = min(wanted[part], most // (len(wanted) - number))
        most -= shares[part]
    return shares


def is_sealed(period: PeriodSpec, table: TaskTable, began_s: int, unix_s: float) -> bool:
    """Return whether a period takes no more.

    Args:
        period: What the job says of periods.
        table: What it has taken; one that has nothing goes on.
        began_s: Unix time when it took its first records; 0: not known.
        unix_s: Unix time.
    """
    if not len(table):
        return False
    if period.records and table.records >= period.records:
        return True
    if period.folders and folders_taken(table) >= period.folders:
        return True
    if period.seconds and began_s and unix_s - began_s >= period.seconds:
        return True
    return len(table) >= PERIOD_TASKS_MAX


def lag_of(ends: Mapping[str, PartEnds], positions: Mapping[str, int], ahead: int) -> Lag:
    """Return how far a job is behind; ``ahead`` records are taken and not done."""
    untaken = dropped = 0
    for part, one in ends.items():
        position = positions.get(part, 0)
        untaken += max(0, one.end - max(one.lowest, position))
        dropped += max(0, one.lowest - position)
    return Lag(untaken, ahead, dropped)


def trouble_of(ends: Mapping[str, PartEnds | None], positions: Mapping[str, int]) -> str:
    """Return which partitions nothing can be taken of, though it was before; empty: none.

    Args:
        ends: What each partition holds; None: nobody can tell now.
        positions: The next offset of each partition.
    """
    gone = sorted(part for part in positions if part not in ends and not is_folder(part))
    away = sorted(part for part, one in ends.items() if one is None)
    behind = [
        f"{part} ends at offset {one.end}, and all below {positions[part]} was taken"
        for part, one in sorted(ends.items())
        if one is not None and one.end < positions.get(part, 0)
    ]
    texts = []
    if away:
        texts.append(f"{listed(away)}: no broker leads it now")
    if gone:
        texts.append(f"{listed(gone)}: no such partition any more")
    if behind:
        texts.append(
            f"{listed(behind)}: was the topic made anew? Nothing is taken there until it is longer"
        )
    return "; ".join(texts)
