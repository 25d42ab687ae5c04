"""How far a job is in training data without an end, as its job master knows it now.

``StreamRecord`` has the positions of when the open period began. Here are those of now, what waits
for a whole task, and the lag as it was told last. Nothing of this is recorded: it follows from the
records and the source. Imports ``schedule``; does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from backstay.job_spec import PeriodSpec
from backstay.schedule.takes import Take, followed
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
    """

    def __init__(self) -> None:
        """Begin without any position."""
        self.positions: dict[str, int] = {}
        self.dropped = 0
        self.lag: Lag | None = None
        self._waiting: dict[str, Waiting] = {}

    def begin(self, positions: Mapping[str, int], takes: Iterable[tuple[str, int]]) -> None:
        """Begin anew.

        Args:
            positions: As recorded.
            takes: What the periods have taken since.
        """
        self.positions, self.dropped = followed(positions, takes)
        self.lag = None
        self._waiting = {}

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

    def took(self, takes: Iterable[Take]) -> int:
        """Take note of takes; returns how many offsets before them the source had dropped."""
        shards = [(take.name, take.records) for take in takes]
        after = followed(self.positions, shards)
        self.positions = after.positions
        self.dropped += after.dropped
        if self.lag is not None:
            taken, lag = sum(records for _, records in shards), self.lag
            self.lag = Lag(lag.untaken - taken, lag.ahead + taken, lag.dropped - after.dropped)
        return after.dropped

    def measure(self, ends: Mapping[str, PartEnds], ahead: int) -> None:
        """Take note of how far the job is behind."""
        self.lag = lag_of(ends, self.positions, ahead)
