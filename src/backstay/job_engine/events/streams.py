"""Training data without an end: what the open period takes, and when it is sealed.

The caller asks the source where its partitions begin and end, and calls ``plan_take``. When the
journal is written, it calls ``take``, and only then are there tasks: so no task is given out that
another job master would not find. May import ``job_engine`` and ``schedule``; does no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from backstay.job_engine.core import JobCore
from backstay.job_engine.open_round import OpenRound
from backstay.job_engine.period_takes import period
from backstay.schedule.takes import Take, folder_part, is_folder, part_and_offset
from backstay.schedule.taking import PartEnds, is_sealed, trouble_of
from backstay.schedule.task_table import TaskTable

__all__ = ["PlannedTake", "StreamEvents"]

log = logging.getLogger(__name__)


class PlannedTake(NamedTuple):
    """What a period takes when it is recorded.

    Attributes:
        opened: The period.
        takes: What it takes.
        table: All that it has then.
        seals: Whether it takes no more after that.
    """

    opened: OpenRound
    takes: tuple[Take, ...]
    table: TaskTable
    seals: bool


class StreamEvents(JobCore):
    """The events of training data without an end."""

    _planned: PlannedTake | None = None

    @property
    def wants_start(self) -> bool:
        """Whether the caller is to ask where to begin, and to call ``begin_stream``."""
        return self.spec.is_stream and not self.is_over and not self.stream_record.positions

    def begin_stream(self, positions: Mapping[str, int]) -> None:
        """Begin at these offsets, once and for all; they are recorded before anything is taken."""
        if not self.wants_start:
            return
        record = replace(self.stream_record, positions=dict(positions), started=dict(positions))
        self.state = replace(self.state, stream=record)
        self._begin_stream()
        self.stage_state()

    def note_source(self, trouble: str) -> None:
        """Take note why the source does not answer; empty: it does.

        While it does not, no task of its data is given out: workers would fail to read it.
        """
        before, self.source_trouble = self.source_trouble, trouble
        self.note_trouble("source", trouble)
        if before and not trouble:
            self.notify()

    def stop_taking(self, reason: str) -> int:
        """Take nothing more, and end the job when all is done that was taken.

        Args:
            reason: For people.

        Returns:
            How many records are left to do.
        """
        if self.is_over:
            return 0
        stream = replace(self.stream_record, stopping=reason or "stopped")
        self.state = replace(self.state, stream=stream)
        self.stage_state()
        self.notify()
        return sum(one.records_ahead() for one in self.rounds.values() if self._is_period(one.id))

    def note_part_of_source(self, trouble: str, waiting_folders: int) -> None:
        """Take note of what is wrong with some of the source, and of what is not known of it yet.

        Args:
            trouble: For people; empty: nothing.
            waiting_folders: Closed folders whose records are not counted yet.
        """
        self.note_trouble("some of the source", trouble)
        self.stream.waiting_folders = waiting_folders

    @property
    def lacks_tasks(self) -> bool:
        """Whether workers may be idle though there is something to take, as far as is known."""
        opened = self._open_period()
        lag = self.stream.lag
        return (
            opened is not None
            and not self.stream_record.stopping
            and not opened.ledger.counts.todo
            and lag is not None
            and lag.untaken > 0
        )

    def plan_take(
        self,
        ends: Mapping[str, tuple[int, int] | None],
        unix_s: float,
        folders: Mapping[str, Sequence[str]] | None = None,
    ) -> PlannedTake | None:
        """Decide what the open period takes; the caller waits for the journal and calls ``take``.

        Args:
            ends: What each partition or file holds, as the source told: the first record and the
                one after the last; None: it is there, and nobody can tell now.
            unix_s: Unix time.
            folders: Closed folders that are not over, in their order, with their files; None: the
                source has none.

        Returns:
            None: nothing now. As long as ``take`` is not called, the same again.
        """
        opened = self._open_period()
        if self._planned is not None and self._planned.opened is opened:
            return self._planned
        self._planned = None
        if self.is_over or not self.stream_record.positions:
            return None
        if folders is not None:
            # Some may be over since the source was asked.
            over = self.stream.positions
            folders = {
                name: files for name, files in folders.items() if folder_part(name) not in over
            }
            ends = {file: ends[file] for files in folders.values() for file in files}
        told = {part: None if one is None else PartEnds(*one) for part, one in ends.items()}
        # A source of folders tells itself which files are missing.
        trouble = trouble_of(told, self.stream.positions) if folders is None else ""
        self.note_trouble("stream", trouble)
        ahead = sum(one.records_ahead() for one in self.rounds.values() if self._is_period(one.id))
        known = {part: one for part, one in told.items() if one is not None}
        if opened is not None and not self.stream_record.stopping:
            self._planned = self._plan(opened, known, folders, ahead, unix_s)
        self.stream.measure(known, ahead)
        return self._planned

    def _plan(
        self,
        opened: OpenRound,
        ends: Mapping[str, PartEnds],
        folders: Mapping[str, Sequence[str]] | None,
        ahead: int,
        unix_s: float,
    ) -> PlannedTake | None:
        rule = self.spec.period
        assert rule is not None
        if folders is None:
            takes = self.stream.propose(ends, rule, opened.table, ahead, self.now())
        else:
            takes = self.stream.propose_folders(folders, ends, rule, opened.table, ahead)
        table = opened.table
        if takes:
            table = self.rounds.takes.take(opened.id.number, takes)
        if len(table) and not self.stream_record.began_s:
            began = replace(self.stream_record, began_s=int(unix_s))
            self.state = replace(self.state, stream=began)
            self.stage_state()
        seals = is_sealed(rule, table, self.stream_record.began_s, unix_s)
        return PlannedTake(opened, tuple(takes), table, seals) if takes or seals else None

    def take(self, planned: PlannedTake) -> None:
        """Give out what was planned, which is recorded; nothing, if the job went back meanwhile."""
        if self._planned is not planned or self._open_period() is not planned.opened:
            return
        self._planned = None
        opened = planned.opened
        opened.grow(planned.table, self.spec.batch_size)
        if dropped := self.stream.took(planned.takes):
            log.error(
                "%s: the source has dropped %d records before they were taken", opened.id, dropped
            )
        if planned.seals:
            opened.ledger.seal()
            record = replace(self.stream_record, sealed=opened.id.number)
            self.state = replace(self.state, stream=record)
            self.stage_state()
            log.info("%s is sealed: %d records", opened.id, opened.table.records)
        self.notify()

    def done_to(self) -> dict[str, int]:
        """Return of each partition or file the record below which all are done.

        Dead-lettered tasks hold nothing up. Of a source of folders these are the files of folders
        that are not over.
        """
        found = {part: at for part, at in self.stream.positions.items() if not is_folder(part)}
        takes = self.rounds.takes
        for number in takes.numbers:
            if number <= self.schedule.passes_over:
                continue
            opened = self.rounds.get(period(number))
            if opened is not None:
                ahead = opened.firsts_ahead()
            else:
                # A restored job has not come to it yet.
                ahead = [(name, 0) for name, records in takes.table(number).shards if records]
            for shard, start in ahead:
                part, first = part_and_offset(shard)
                found[part] = min(found.get(part, first + start), first + start)
        return found

    def behind(self) -> dict[str, int]:
        """Return the first record that is there and not done, of parts that have one.

        Those with most such records come first.
        """
        done_to = self.done_to()
        # Files of folders that are over have no position any more.
        files = {part: at for part, at in done_to.items() if part not in self.stream.positions}
        return {**self.stream.behind(done_to), **files}

    def note_lag(self, seconds: float | None) -> None:
        """Take note of how old the oldest record is that is not done; None: it is not known."""
        self.stream.lag_s = seconds

    def _open_period(self) -> OpenRound | None:
        """Return the period that may take something; None: none may now."""
        round_id = period(self.schedule.passes_over + 1)
        opened = self.rounds.get(round_id)
        if not self.spec.is_stream or self.is_over or opened is None:
            return None
        is_open = round_id in self.schedule.open_rounds and not opened.ledger.is_sealed
        return opened if is_open else None
