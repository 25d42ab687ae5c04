"""How far a job over data without an end is: its lag in seconds, and what others are shown of it.

Every few seconds the source is asked how old the oldest record is that is not done, and is given
the records below which all are done: topics of Kafka commit these to the consumer group that the
job names. Nobody reads them back. What fails is a trouble that people see; the job goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from backstay.data.source import Source
from backstay.errors import BackstayError
from backstay.master.job import Job

__all__ = ["LagReport"]

REPORT_S = 5.0
# The last report, when the job is over.
LAST_S = 10.0

T = TypeVar("T")

log = logging.getLogger(__name__)


class LagReport:
    """Reports of one job; belongs to one event loop."""

    def __init__(self, job: Job, source: Source, unix_s: Callable[[], float] = time.time) -> None:
        """Prepare.

        Args:
            job: The job; its training data have no end.
            source: Of these data.
            unix_s: The clock.
        """
        self._job = job
        self._source = source
        self._unix_s = unix_s
        self._committed: dict[str, int] = {}
        self._said: dict[str, str] = {}

    async def run(self) -> None:
        """Report every few seconds; never returns."""
        while True:
            await self.report()
            await asyncio.sleep(REPORT_S)

    async def last(self) -> None:
        """Report once more, for no longer than some seconds."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.report(), LAST_S)

    async def report(self) -> None:
        """Report once."""
        job = self._job
        if not job.stream_record.positions or job.stream.lag is None:
            return
        behind = job.behind()
        if behind or job.stream.waiting_folders:
            oldest_s = await self._asked("lag", lambda: self._source.oldest_s(behind))
            job.note_lag(None if oldest_s is None else max(0.0, self._unix_s() - oldest_s))
        else:
            job.note_lag(0.0)
        done_to = job.done_to()
        if done_to != self._committed:
            await self._asked("group", lambda: self._source.commit(done_to))
            if not self._said.get("group"):
                self._committed = done_to

    async def _asked(self, what: str, ask: Callable[[], T]) -> T | None:
        """Return what the source answers; None: it does not, and people see why."""
        answer, trouble = None, ""
        try:
            answer = await asyncio.to_thread(ask)
        except BackstayError as error:
            trouble = str(error)
        if trouble and not self._said.get(what):
            log.warning("%s: %s; the job goes on", what, trouble)
        self._said[what] = trouble
        # While the source is away, that is said once.
        self._job.note_trouble(what, "" if self._job.stream.source_trouble else trouble)
        return answer
