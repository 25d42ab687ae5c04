"""Training data without an end: asks their source what has come, and has the job take it.

The engine decides what is taken (``job_engine.events.streams``). The source is asked about once a
second, in a thread. While it does not answer, the job shows why, and nothing of it is given out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from backstay.data.source import Source, SourceLook
from backstay.errors import BackstayError, DataError, StoreUnavailable
from backstay.job_engine.events.streams import PlannedTake
from backstay.master.job import Job

__all__ = ["SourcePoll"]

ASK_S = 1.0
# Between two looks at what was told before: a new period has no tasks until something is taken.
LOOK_S = 0.1
WRITE_LIMIT_S = 10.0

log = logging.getLogger(__name__)


class SourcePoll:
    """Has one job take what its source has; belongs to one event loop."""

    def __init__(self, job: Job, source: Source) -> None:
        """Prepare.

        Args:
            job: The job; its training data have no end.
            source: Of these data.
        """
        self._job = job
        self._source = source
        self._said = ""

    async def run(self) -> None:
        """Ask and take as long as the job goes on; never returns."""
        try:
            while True:
                look = await self._ask()
                # The time of the next question, whatever is taken meanwhile.
                asked_s = self._job.now()
                while look is not None and not self._job.is_over:
                    await self._take(look)
                    if not await self._lacks_tasks_before(asked_s + ASK_S):
                        break
                await asyncio.sleep(max(0.0, asked_s + ASK_S - self._job.now()))
        finally:
            await asyncio.to_thread(self._source.close)

    async def _ask(self) -> SourceLook | None:
        """Return what the source has now; None: it does not answer."""
        job = self._job
        if job.is_over:
            return None
        try:
            if job.wants_start:
                job.begin_stream(await asyncio.to_thread(self._source.start))
            look = await asyncio.to_thread(self._source.look, dict(job.stream.positions))
        except DataError as error:
            self._say(f"the training data are not there: {error}")
            return None
        except BackstayError as error:
            job.end("failed", str(error))
            return None
        self._say("")
        job.note_part_of_source(look.trouble, look.waiting_folders)
        return look

    def _say(self, trouble: str) -> None:
        if trouble and not self._said:
            log.warning("%s; it is asked again and again", trouble)
        elif self._said and not trouble:
            log.info("the source of the training data answers again")
        self._said = trouble
        self._job.note_source(trouble)

    async def _take(self, look: SourceLook) -> None:
        planned = self._job.plan_take(look.ends, time.time(), look.folders)
        if planned is not None:
            await self._recorded(planned)

    async def _recorded(self, planned: PlannedTake) -> None:
        """Wait until it is recorded, however long that takes, and have the job take it."""
        while True:
            with suppress(StoreUnavailable):
                await self._job.journal.durable(WRITE_LIMIT_S)
                break
        self._job.take(planned)

    async def _lacks_tasks_before(self, until_s: float) -> bool:
        """Wait until then, or until workers have no task to do though there are records: True."""
        job = self._job
        while not job.is_over:
            left_s = until_s - job.now()
            if left_s <= 0:
                return False
            changed = job.changed
            await asyncio.sleep(min(LOOK_S, left_s))
            if job.lacks_tasks:
                return True
            left_s = until_s - job.now()
            if left_s > 0:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(changed.wait(), left_s)
        return False
