"""Sees to a job's rows at the end of each pass: asks the servers to decay and expire them.

The engine says what is due (``job_engine.upkeeps``), ``cluster.upkeep`` does it. Calls to
the cluster block, so a thread makes them.
"""

from __future__ import annotations

import asyncio
import logging
import time

from backstay.backoff import Backoff
from backstay.cluster.directory import Directory
from backstay.cluster.upkeep import EndedPass, Upkeep, end_pass, keeps_rows_of
from backstay.config import ClientConfig
from backstay.errors import BackstayError, ConfigError, InvalidRequest, UnknownTable
from backstay.job_engine.values import PassUpkeep
from backstay.master.job import Job

__all__ = ["RowUpkeep"]

# Another try would fare alike.
FINAL = (ConfigError, InvalidRequest, UnknownTable)
WRITE_LIMIT_S = 10.0
RETRY = Backoff(first_s=1.0, longest_s=30.0)

log = logging.getLogger(__name__)


class RowUpkeep:
    """The upkeep of one job's rows; belongs to one event loop."""

    def __init__(self, job: Job, name: str, directory: Directory, config: ClientConfig) -> None:
        """Prepare; from now on the job's rounds, checkpoints and its end wait for it.

        Args:
            job: The job.
            name: Its name.
            directory: Of the cluster.
            config: Of connections to it.
        """
        self._job = job
        self._name = name
        self._directory = directory
        self._config = config
        job.keep_rows(time.time)

    async def run(self) -> None:
        """See to the rows whenever a pass has ended; never returns."""
        job, retries = self._job, RETRY.begin()
        tried: PassUpkeep | None = None
        while True:
            changed, due = job.changed, job.upkeeps.due
            if due is None or job.is_over:
                await changed.wait()
                continue
            is_first_try, tried = due.is_new and due != tried, due
            try:
                # Whoever follows this job master must find the period.
                await job.journal.durable(WRITE_LIMIT_S)
                done = await asyncio.to_thread(self._end_pass, due)
            except FINAL as error:
                log.error("the rows are not seen to after pass %d: %s", due.pass_number, error)
                done = EndedPass(0, False, str(error))
            except BackstayError as error:
                job.note_trouble("lifetime", f"rows wait for decay and expiry: {error}")
                log.warning("decay and expiry after pass %d: %s", due.pass_number, error)
                await asyncio.sleep(retries.next_s())
                continue
            retries.reset()
            job.note_upkeep(due, expired=done.expired, changed=done.changed)
            trouble = done.trouble(due.pass_number, is_first_try=is_first_try)
            if done.not_decayed and is_first_try:
                log.warning("%s", trouble)
            job.note_trouble("lifetime", trouble)

    def _end_pass(self, due: PassUpkeep) -> EndedPass:
        specs = keeps_rows_of(self._name, self._directory.tables())
        if not specs:
            return EndedPass(0, False)
        with Upkeep(self._directory.endpoints(), self._config) as upkeep:
            done = end_pass(upkeep, specs, period=due.period, unseen_since_s=due.unseen_since_s)
        log.info("pass %d: %d rows expired", due.pass_number, done.expired)
        return done
