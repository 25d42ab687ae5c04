"""Starts and ends the export of a job, with the calls of ``pserverctl``.

Calls to the cluster block, so threads make them.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from backstay.backoff import Backoff
from backstay.checkpoint import remote_exports
from backstay.cluster.directory import Directory
from backstay.errors import BackstayError, ConfigError, ExportRefused, InvalidRequest, text_of
from backstay.job_spec import ExportsSpec
from backstay.master.job import Job

__all__ = ["JobExport"]

# Another try would fail in the same way.
FINAL = (ConfigError, InvalidRequest, ExportRefused)
LOOK_S = 5.0
RETRY = Backoff(first_s=1.0, longest_s=30.0)
# How long the end of a job waits for the last increment.
STOP_WAIT_S = 60.0
STOP_LOOK_S = 0.2

log = logging.getLogger(__name__)


class JobExport:
    """The export of one job; belongs to one event loop."""

    def __init__(self, job: Job, name: str, spec: ExportsSpec, directory: Directory) -> None:
        """Prepare.

        Args:
            job: The job, which is told of troubles.
            name: Its name, and that of the export.
            spec: What the job file says of it.
            directory: Of the cluster.
        """
        self._job = job
        self._name = name
        self._spec = spec
        self._directory = directory
        self._calling = asyncio.Lock()
        self._has_ended = False

    async def run(self) -> None:
        """Start it, and tell the job how it goes, until it is stopped."""
        retries = RETRY.begin()
        while True:
            try:
                async with self._calling:
                    if self._has_ended:
                        return
                    trouble = await asyncio.to_thread(self._look)
                retries.reset()
                pause_s = LOOK_S
            except FINAL as error:
                trouble, pause_s = text_of(error), RETRY.longest_s
            except BackstayError as error:
                trouble, pause_s = text_of(error), retries.next_s()
            self._job.note_trouble("exports", trouble and f"the export: {trouble}")
            await asyncio.sleep(pause_s)

    async def stop(self) -> None:
        """End it after a last increment with all that was pushed."""
        self._has_ended = True
        try:
            await asyncio.wait_for(self._stop(), STOP_WAIT_S)
        except (BackstayError, asyncio.TimeoutError) as error:
            why = str(error) or f"it was not written in {STOP_WAIT_S:g} s"
            log.error("the export of the job has no last increment: %s", why)

    def _look(self) -> str:
        """Start it if it does not go on; return what is wrong with it."""
        running = self._running()
        if running is None:
            self._start()
            return ""
        try:
            # If it goes on with the same settings, nothing happens.
            self._start()
        except ExportRefused:
            # It is of an earlier run, whose job master could not end it.
            self._end(now=True)
            self._start()
        return running.trouble or running.topic_trouble

    def _start(self) -> None:
        patterns = self._spec.tables or ("*",)
        spec = replace(self._spec, tables=tuple(f"{self._name}/{one}" for one in patterns))
        self._directory.call(
            lambda channel, timeout_s: remote_exports.start(
                channel, self._name, spec, timeout_s=timeout_s
            )
        )

    async def _stop(self) -> None:
        async with self._calling:
            if await asyncio.to_thread(self._running) is None:
                return
        await asyncio.to_thread(self._end, now=False)
        while True:
            if await asyncio.to_thread(self._running) is None:
                return
            await asyncio.sleep(STOP_LOOK_S)

    def _end(self, *, now: bool) -> None:
        self._directory.call(
            lambda channel, timeout_s: remote_exports.stop(
                channel, self._name, now=now, timeout_s=timeout_s
            )
        )

    def _running(self) -> remote_exports.RunningExport | None:
        exports = self._directory.call(
            lambda channel, timeout_s: remote_exports.list_exports(channel, timeout_s=timeout_s)
        )
        return next((one for one in exports if one.name == self._name), None)
