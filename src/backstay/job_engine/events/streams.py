"""Training data without an end: what the open period takes, and when it is sealed.

The caller asks the source where its partitions begin and end, and calls ``plan_take``. When the
journal is written, it calls ``take``, and only then are there tasks: so no task is given out that
another job master would not find. May import ``job_engine`` and ``schedule``; does no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from backstay.job_engine.core import JobCore
from backstay.job_engine.open_round import OpenRound
from backstay.job_engine.period_takes import period
from backstay.schedule.takes import Take
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

    @property
    def lacks_tasks(self) -> bool:
        """Whether workers may be idle though there is something to take, as far as is known."""
        opened = self._open_period()
        lag = self.stream.lag
        return (
            opened is not None
            and not opened.ledger.counts.todo
            and lag is not None
            and lag.untaken > 0
        )

    def plan_take(self, ends: Mapping[str, PartEnds | None], unix_s: float) -> PlannedTake | None:
        """Decide what the open period takes; the caller waits for the journal and calls ``take``.

        Args:
            ends: What each partition holds, as the source told; None: it is there, and nobody can
                tell now.
            unix_s: Unix time.

        Returns:
            None: nothing now. As long as ``take`` is not called, the same again.
        """
        opened = self._open_period()
        if self._planned is not None and self._planned.opened is opened:
            return self._planned
        self._planned = None
        if self.is_over or not self.stream_record.positions:
            return None
        self.note_trouble("stream", trouble_of(ends, self.stream.positions))
        ahead = sum(one.records_ahead() for one in self.rounds.values() if self._is_period(one.id))
        known = {part: one for part, one in ends.items() if one is not None}
        if opened is not None:
            self._planned = self._plan(opened, known, ahead, unix_s)
        self.stream.measure(known, ahead)
        return self._planned

    def _plan(
        self, opened: OpenRound, ends: Mapping[str, PartEnds], ahead: int, unix_s: float
    ) -> PlannedTake | None:
        rule = self.spec.period
        assert rule is not None
        takes = self.stream.propose(ends, rule, opened.table, ahead, self.now())
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

    def _open_period(self) -> OpenRound | None:
        """Return the period that may take something; None: none may now."""
        round_id = period(self.schedule.passes_over + 1)
        opened = self.rounds.get(round_id)
        if not self.spec.is_stream or self.is_over or opened is None:
            return None
        is_open = round_id in self.schedule.open_rounds and not opened.ledger.is_sealed
        return opened if is_open else None
