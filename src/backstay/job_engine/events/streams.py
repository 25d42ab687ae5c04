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

from backstay.job_engine.job_rounds import JobRounds
from backstay.job_engine.open_round import OpenRound
from backstay.job_engine.period_takes import period
from backstay.job_engine.standing import Basis, Standing
from backstay.job_engine.stream import Stream
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


class StreamEvents:
    """The events of training data without an end."""

    def __init__(self, basis: Basis, job: Standing, rounds: JobRounds, stream: Stream) -> None:
        """Take the parts that such data change."""
        self._basis = basis
        self._job = job
        self._rounds = rounds
        self._stream = stream
        self._planned: PlannedTake | None = None

    @property
    def wants_start(self) -> bool:
        """Whether the caller is to ask where to begin, and to call ``begin_stream``."""
        has_begun = bool(self._job.stream_record.positions)
        return self._basis.spec.is_stream and not self._job.is_over and not has_begun

    def begin_stream(self, positions: Mapping[str, int]) -> None:
        """Begin at these offsets, once and for all; they are recorded before anything is taken."""
        if not self.wants_start:
            return
        record = replace(
            self._job.stream_record, positions=dict(positions), started=dict(positions)
        )
        self._job.change(stream=record)
        self._stream.begin(positions, self._rounds.takes_of_now())
        self._job.stage()

    def note_source(self, trouble: str) -> None:
        """Take note why the source does not answer; empty: it does.

        While it does not, no task of its data is given out: workers would fail to read it.
        """
        before, self._stream.source_trouble = self._stream.source_trouble, trouble
        self._job.note_trouble("source", trouble)
        if before and not trouble:
            self._basis.notify()

    def stop_taking(self, reason: str) -> int:
        """Take nothing more, and end the job when all is done that was taken.

        Args:
            reason: For people.

        Returns:
            How many records are left to do.
        """
        if self._job.is_over:
            return 0
        stream = replace(self._job.stream_record, stopping=reason or "stopped")
        self._job.change(stream=stream)
        self._job.stage()
        self._basis.notify()
        return self._records_ahead()

    def note_part_of_source(self, trouble: str, waiting_folders: int) -> None:
        """Take note of what is wrong with some of the source, and of what is not known of it yet.

        Args:
            trouble: For people; empty: nothing.
            waiting_folders: Closed folders whose records are not counted yet.
        """
        self._job.note_trouble("some of the source", trouble)
        self._stream.waiting_folders = waiting_folders

    @property
    def lacks_tasks(self) -> bool:
        """Whether workers may be idle though there is something to take, as far as is known."""
        opened = self._open_period()
        lag = self._stream.lag
        return (
            opened is not None
            and not self._job.stream_record.stopping
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
        if self._job.is_over or not self._job.stream_record.positions:
            return None
        if folders is not None:
            # Some may be over since the source was asked.
            over = self._stream.positions
            folders = {
                name: files for name, files in folders.items() if folder_part(name) not in over
            }
            ends = {file: ends[file] for files in folders.values() for file in files}
        told = {part: None if one is None else PartEnds(*one) for part, one in ends.items()}
        # A source of folders tells itself which files are missing.
        trouble = trouble_of(told, self._stream.positions) if folders is None else ""
        self._job.note_trouble("stream", trouble)
        ahead = self._records_ahead()
        known = {part: one for part, one in told.items() if one is not None}
        if opened is not None and not self._job.stream_record.stopping:
            self._planned = self._plan(opened, known, folders, ahead, unix_s)
        self._stream.measure(known, ahead)
        return self._planned

    def _plan(
        self,
        opened: OpenRound,
        ends: Mapping[str, PartEnds],
        folders: Mapping[str, Sequence[str]] | None,
        ahead: int,
        unix_s: float,
    ) -> PlannedTake | None:
        rule = self._basis.spec.period
        assert rule is not None
        if folders is None:
            takes = self._stream.propose(ends, rule, opened.table, ahead, self._basis.now())
        else:
            takes = self._stream.propose_folders(folders, ends, rule, opened.table, ahead)
        table = opened.table
        if takes:
            table = self._rounds.takes.take(opened.id.number, takes)
        if len(table) and not self._job.stream_record.began_s:
            began = replace(self._job.stream_record, began_s=int(unix_s))
            self._job.change(stream=began)
            self._job.stage()
        seals = is_sealed(rule, table, self._job.stream_record.began_s, unix_s)
        return PlannedTake(opened, tuple(takes), table, seals) if takes or seals else None

    def _records_ahead(self) -> int:
        periods = (one for one in self._rounds.values() if self._job.is_period(one.id))
        return sum(one.records_ahead() for one in periods)

    def take(self, planned: PlannedTake) -> None:
        """Give out what was planned, which is recorded; nothing, if the job went back meanwhile."""
        if self._planned is not planned or self._open_period() is not planned.opened:
            return
        self._planned = None
        opened = planned.opened
        opened.grow(planned.table, self._basis.spec.batch_size)
        if dropped := self._stream.took(planned.takes):
            log.error(
                "%s: the source has dropped %d records before they were taken", opened.id, dropped
            )
        if planned.seals:
            opened.ledger.seal()
            record = replace(self._job.stream_record, sealed=opened.id.number)
            self._job.change(stream=record)
            self._job.stage()
            log.info("%s is sealed: %d records", opened.id, opened.table.records)
        self._basis.notify()

    def done_to(self) -> dict[str, int]:
        """Return of each partition or file the record below which all are done.

        Dead-lettered tasks hold nothing up. Of a source of folders these are the files of folders
        that are not over.
        """
        found = {part: at for part, at in self._stream.positions.items() if not is_folder(part)}
        takes = self._rounds.takes
        for number in takes.numbers:
            if number <= self._job.schedule.passes_over:
                continue
            opened = self._rounds.get(period(number))
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
        files = {part: at for part, at in done_to.items() if part not in self._stream.positions}
        return {**self._stream.behind(done_to), **files}

    def note_lag(self, seconds: float | None) -> None:
        """Take note of how old the oldest record is that is not done; None: it is not known."""
        self._stream.lag_s = seconds

    def _open_period(self) -> OpenRound | None:
        """Return the period that may take something; None: none may now."""
        round_id = period(self._job.schedule.passes_over + 1)
        opened = self._rounds.get(round_id)
        if not self._basis.spec.is_stream or self._job.is_over or opened is None:
            return None
        is_open = round_id in self._job.schedule.open_rounds and not opened.ledger.is_sealed
        return opened if is_open else None
