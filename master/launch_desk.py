"""What launchers are told: which workers should run; and what becomes of those that do not.

The worker set decides; here its times are waited for. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from backstay._proto.v1 import job_pb2
from backstay.exits import EXIT_WRONG_SETTING
from backstay.master.job import Job

__all__ = ["LaunchDesk"]

WAIT_MS_MAX = 30_000
LAST_WORDS_MAX = 1000
# A worker that runs and was not heard of for so many times the life of a lease hangs.
HANGS_AFTER_TTLS = 10
HANGS_AFTER_MIN_S = 30.0

log = logging.getLogger(__name__)


class LaunchDesk:
    """The launchers' side of a job."""

    def __init__(self, job: Job) -> None:
        """Prepare."""
        self._job = job
        self._version = 0
        self._wanted: tuple[str, ...] | None = None

    async def hear(self, request: job_pb2.LaunchRequest) -> job_pb2.LaunchResponse:
        """Take in what runs and what has ended; answer with what should run.

        The caller waits for the journal before it answers: an id that was told must never be told
        again for another process.
        """
        job = self._job
        wrong = ""
        for one in request.exits:
            how = f"signal {-one.code}" if one.code < 0 else f"exit code {one.code}"
            log.info("worker %s has ended (%s) %s", one.worker_id, how, one.last_words.strip())
            job.workers.ended(one.worker_id, one.code, how)
            if one.code == EXIT_WRONG_SETTING:
                wrong = one.last_words.strip().rpartition("\n")[2][-LAST_WORDS_MAX:] or how
        job.workers.alive(request.alive)
        # Nobody has the program running, so others would end in the same way.
        if wrong and not job.known.have_program():
            job.end("failed", f"the model file or a setting is wrong: {wrong}")
        self._replace_hanging(request.alive)
        if job.workers.failed:
            job.end("failed", job.workers.failed)
        await self._wait_for_news(request.known_version, request.wait_ms)
        return job_pb2.LaunchResponse(
            version=self._version,
            wanted=self._wanted or (),
            acknowledged=[one.worker_id for one in request.exits],
        )

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

    def _replace_hanging(self, alive: Iterable[str]) -> None:
        job = self._job
        limit_s = max(HANGS_AFTER_MIN_S, HANGS_AFTER_TTLS * job.task_lease_ttl_ms / 1000)
        for worker in alive:
            known = job.known.get(worker)
            # One that has not joined yet may be importing its framework.
            if known is None or job.now() - known.heard_s < limit_s:
                continue
            silent = f"it was silent for {job.now() - known.heard_s:.0f} s"
            if job.workers.replace(worker, silent):
                log.warning("worker %s hangs: it is replaced", worker)
