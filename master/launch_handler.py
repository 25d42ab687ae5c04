"""The request handler of launchers: their reports in, the wish of worker processes out.

The worker set decides; here its times are waited for. ``JobService`` calls it for a launcher in
another process; a launcher in the job master's process calls it as it is. Belongs to one event
loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from backstay.exits import EXIT_WRONG_SETTING
from backstay.job_engine.launch import LauncherReport, WorkerWish
from backstay.master.job import Job

__all__ = ["LaunchHandler"]

WAIT_MS_MAX = 30_000
# How long a call waits for the journal; launchers repeat it.
DURABLE_S = 4.0
LAST_WORDS_MAX = 1000
# A worker that runs and was not heard of for so many times the life of a lease hangs.
HANGS_AFTER_TTLS = 10
HANGS_AFTER_MIN_S = 30.0

log = logging.getLogger(__name__)


class LaunchHandler:
    """Answers the launcher of one job."""

    def __init__(self, job: Job) -> None:
        """Prepare."""
        self._job = job
        self._version = 0
        self._wanted: tuple[str, ...] | None = None

    async def exchange(
        self, report: LauncherReport, *, known_version: int = 0, wait_ms: int = 0
    ) -> WorkerWish:
        """Take in what runs and what has ended; return what should run, once it is recorded.

        The id of a worker that was told must never be told again for another process.

        Args:
            report: What the launcher tells.
            known_version: Of the wish that it knows; 0: none.
            wait_ms: How long to wait for another wish, at most.

        Raises:
            StoreUnavailable: The journal cannot be written now.
        """
        job = self._job
        self._take(report)
        await self._wait_for_news(known_version, wait_ms)
        wish = WorkerWish(
            self._version, self._wanted or (), tuple(one.worker_id for one in report.exits)
        )
        await job.journal.durable(DURABLE_S)
        if not job.is_over:
            return wish
        return wish._replace(ended=(job.state.state, job.state.reason))

    def _take(self, report: LauncherReport) -> None:
        job = self._job
        wrong = ""
        for one in report.exits:
            log.info("worker %s %s %s", one.worker_id, one.how, one.last_words.strip())
            if one.code == EXIT_WRONG_SETTING:
                wrong = one.last_words.strip().rpartition("\n")[2][-LAST_WORDS_MAX:] or one.how
        job.workers.report(report)
        # Nobody has the program running, so others would end in the same way.
        if wrong and not job.known.have_program():
            job.end("failed", f"the model file or a setting is wrong: {wrong}")
        self._replace_hanging(report.running)
        if job.workers.failed:
            job.end("failed", job.workers.failed)

    async def _wait_for_news(self, known_version: int, wait_ms: int) -> None:
        job = self._job
        deadline_s = job.now() + min(wait_ms, WAIT_MS_MAX) / 1000
        while True:
            changed = job.changed
            self._look()
            now_s = job.now()
            if self._version != known_version or job.is_over or now_s >= deadline_s:
                return
            next_s = job.workers.next_change_s()
            until_s = deadline_s if next_s is None else min(deadline_s, next_s)
            try:
                await asyncio.wait_for(changed.wait(), max(until_s - now_s, 0.001))
            except asyncio.TimeoutError:
                continue

    def _look(self) -> None:
        """Take a new version if other workers are wanted than before."""
        wanted = self._job.workers.wanted()
        if wanted == self._wanted:
            return
        if self._wanted is None:
            # Versions of an earlier master must not be mistaken for this one's.
            self._version = self._job.state.starts << 32
        self._wanted = wanted
        self._version += 1

    def _replace_hanging(self, running: Iterable[str]) -> None:
        job = self._job
        limit_s = max(HANGS_AFTER_MIN_S, HANGS_AFTER_TTLS * job.task_lease_ttl_ms / 1000)
        for worker in running:
            known = job.known.get(worker)
            # One that has not joined yet may be importing its framework.
            if known is None or job.now() - known.heard_s < limit_s:
                continue
            silent = f"it was silent for {job.now() - known.heard_s:.0f} s"
            if job.workers.replace(worker, silent):
                log.warning("worker %s hangs: it is replaced", worker)
