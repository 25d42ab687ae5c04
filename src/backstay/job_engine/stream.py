"""How far a job is in training data without an end, as its job master knows it now.

``StreamRecord`` has the positions of when the open period began. Here are those of now, what waits
for a whole task, and the lag as it was told last. Nothing of this is recorded: it follows from the
records and the source. Imports ``schedule``; does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from backstay.job_spec import PeriodSpec
from backstay.schedule.folders import next_folder_takes
from backstay.schedule.takes import Take, advance, folders_taken
from backstay.schedule.taking import Lag, PartEnds, Room, Waiting, lag_of, next_takes
from backstay.schedule.task_table import TaskTable

__all__ = ["Stream"]


class Stream:
    """The next offset of each partition, and what is known of the offsets after it.

    Attributes:
        positions: The next offset of each partition.
        dropped: Offsets that the source had dropped before they were taken, in the periods that are
            not over.
        lag: How far the job is behind; None: not known yet.
        lag_s: How long the oldest record that is not done has been there; None: not known.
        waiting_folders: Closed folders whose records are not counted yet.
        source_trouble: Why their source does not answer; empty: it does.
    """

    def __init__(self) -> None:
        """Begin without any position."""
        self.positions: dict[str, int] = {}
        self.dropped = 0
        self.lag: Lag | None = None
        self.lag_s: float | None = None
        self.waiting_folders = 0
        self.source_trouble = ""
        self._ends: Mapping[str, PartEnds] = {}
        self._waiting: dict[str, Waiting] = {}

    def begin(self, positions: Mapping[str, int], takes: Iterable[tuple[str, int]]) -> None:
        """Begin anew.

        Args:
            positions: As recorded.
            takes: What the periods have taken since.
        """
        self.positions, self.dropped = advance(positions, takes)
        self.lag = self.lag_s = None
        self._ends, self._waiting = {}, {}

    def propose(
        self,
        ends: Mapping[str, PartEnds],
        period: PeriodSpec,
        table: TaskTable,
        ahead: int,
        now_s: float,
    ) -> list[Take]:
        """Return what the open period may take; nothing has changed but what waits."""
        takes, self._waiting = next_takes(
            ends,
            self.positions,
            self._waiting,
            now_s,
            Room.of(period, table, ahead),
            records_per_task=table.records_per_task,
            linger_s=period.linger_s,
        )
        return takes

    def propose_folders(
        self,
        folders: Mapping[str, Sequence[str]],
        ends: Mapping[str, PartEnds],
        period: PeriodSpec,
        table: TaskTable,
        ahead: int,
    ) -> list[Take]:
        """Return what the open period may take of closed folders; nothing has changed."""
        left = period.folders - folders_taken(table) if period.folders else None
        room = Room.of(period, table, ahead)
        return next_folder_takes(folders, ends, self.positions, room, table, folders_left=left)

    def took(self, takes: Iterable[Take]) -> int:
        """Take note of takes; returns how many offsets before them the source had dropped."""
        shards = [(take.name, take.records) for take in takes]
        after = advance(self.positions, shards)
        self.positions = after.positions
        self.dropped += after.dropped
        if self.lag is not None:
            taken, lag = sum(records for _, records in shards), self.lag
            self.lag = Lag(lag.untaken - taken, lag.ahead + taken, lag.dropped - after.dropped)
        return after.dropped

    def measure(self, ends: Mapping[str, PartEnds], ahead: int) -> None:
        """Take note of how far the job is behind."""
        self._ends = ends
        self.lag = lag_of(ends, self.positions, ahead)

    def behind(self, done_to: Mapping[str, int]) -> dict[str, int]:
        """Return the first record that is there and not done, of parts that have one.

        Args:
            done_to: Of each part the record below which all are done.

        Returns:
            Those with most such records first.
        """
        counts, firsts = {}, {}
        for part, one in self._ends.items():
            first = max(done_to.get(part, 0), one.lowest)
            if first < one.end:
                counts[part], firsts[part] = one.end - first, first
        return {part: firsts[part] for part in sorted(counts, key=lambda part: -counts[part])}
