"""Checkpoints of a job, and its way back: model and progress are saved and restored together.

The node that writes a checkpoint keeps the records of all jobs with it. It reads them before it
begins, so what they call done is in the model. ``Saving`` asks every second whether the cluster was
restored, and tells the engine, which decides. Calls to the cluster block, so threads make them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Literal, NamedTuple

from backstay.backoff import Backoff
from backstay.cluster.checkpoints import Checkpoints, Restored
from backstay.consensus.records.jobs import JOBS_PROGRESS
from backstay.errors import (
    BackstayError,
    CheckpointNotFound,
    CheckpointRefused,
    InvalidRequest,
    JobRefused,
    NoCheckpointFolder,
)
from backstay.job_engine.opening import StateIncarnation
from backstay.job_engine.progress import JobProgress, KeptJob, kept_job
from backstay.job_engine.rows_change import incarnation_in
from backstay.job_spec import JobSpec
from backstay.master.job import Job
from backstay.tasks import end_tasks

__all__ = ["Saving", "check_own", "incarnation_of", "restored_job"]

LOOK_S = 1.0
WRITE_LIMIT_S = 30.0
# Between two tries of the last checkpoint; doubled each time, up to the last.
RETRY = Backoff(first_s=1.0, longest_s=30.0)
# How long the last checkpoint is tried on servers that outlive the job.
LAST_SAVE_S = 120.0
# A save that says nothing for so long is not waited for; the servers give one up before that.
SAVE_LIMIT_S = 3600.0

log = logging.getLogger(__name__)


def incarnation_of(checkpoints: Checkpoints) -> StateIncarnation:
    """Return the state incarnation of the cluster. Blocks."""
    return incarnation_in(checkpoints.restore_state())


def restored_job(
    checkpoints: Checkpoints, spec: JobSpec, *, servers_end: bool = False
) -> KeptJob | None:
    """Return what the last restore brought of a job; None: nothing. Blocks.

    A cluster that begins with a checkpoint has no records of the job, but its streams and tables.
    Under the same uid the job goes on, and what the servers remember is not counted again.

    Args:
        checkpoints: Of the cluster.
        spec: The job.
        servers_end: Whether the servers are the job's own, and so all that they were restored from.

    Raises:
        InvalidRequest: It cannot be read.
        JobRefused: Servers of the job's own have another job's rows, or no model to work with.
    """
    try:
        restored = checkpoints.restored()
    except CheckpointNotFound as error:
        log.error("%s", error)
        return None
    progress = None if restored is None else restored.progress.get(JOBS_PROGRESS)
    if servers_end:
        check_own(spec, restored, progress)
    return None if restored is None else kept_job(progress, spec.name)


def check_own(spec: JobSpec, restored: Restored | None, progress: Any) -> None:
    """Refuse what servers of a job's own have begun with, if it is not for this job.

    Two jobs with one folder would train each other's rows, and delete each other's checkpoints.

    Args:
        spec: The job.
        restored: What its servers were restored from; None: nothing.
        progress: What that holds of jobs.

    Raises:
        JobRefused: It is another job's, or there is no model to work with.
    """
    url = spec.checkpoint.url
    if spec.kind != "training":
        if restored is None:
            raise JobRefused(
                f"there is no checkpoint of a trained model in {url}; train it first, or set "
                "checkpoint.url to the folder of its checkpoints"
            )
        return
    jobs = progress.get("jobs", {}) if isinstance(progress, dict) else {}
    if restored is not None and jobs and spec.name not in jobs:
        raise JobRefused(
            f"checkpoint.url: the newest checkpoint in {url}, {restored.checkpoint.id}, is of job "
            f"{', '.join(sorted(jobs))}, not of {spec.name}: name a folder that no other job has"
        )


class Saving:
    """Saves a job, and takes it back; belongs to one event loop."""

    def __init__(
        self, job: Job, name: str, checkpoints: Checkpoints, *, servers_end: bool = False
    ) -> None:
        """Prepare; from now on the job does not end with its schedule, but in ``end_schedule``.

        Args:
            job: The job.
            name: Its name.
            checkpoints: Of the cluster.
            servers_end: Whether the servers end with the job: what is not saved then is gone.
        """
        self._job = job
        self._name = name
        self._checkpoints = checkpoints
        self._servers_end = servers_end
        self._saving = asyncio.Lock()
        self._looking = asyncio.Lock()
        self._try_now = asyncio.Event()
        # The cluster has no folder for them.
        self._keeps_none = False
        job.keep_checkpoints(servers_end=servers_end)

    async def save_when_due(self) -> None:
        """Save each time that the job says so; never returns."""
        while True:
            changed = self._job.changed
            if not self._job.take_checkpoint_due():
                await changed.wait()
                continue
            await self._save()

    async def end_schedule(self) -> None:
        """End the job when its schedule is at its end and what it has made is safe; returns then.

        Its rows are looked at once more before: what was lost in its last second is not done. One
        whose last checkpoint cannot be written waits, and is ``unsaved`` in the end.
        """
        job = self._job
        tries = _SaveRetries(self._limit_s())
        while not job.is_over:
            changed = job.changed
            if not job.is_finished:
                # Or not any more: a restore took it back.
                tries = _SaveRetries(self._limit_s())
                await changed.wait()
                continue
            rows = await self._look_or_tell()
            if isinstance(rows, _Unknown):
                # This is said of a job without unsaved steps, too: its rows may be lost.
                if tries.are_over():
                    job.end_unsaved(rows.why)
                    return
                job.wait_unsaved(rows.why)
            elif rows == "changed":
                # The job went back, or is over.
                continue
            elif not job.has_unsaved_steps:
                job.finish()
            elif not (why := await self._save()):
                if self._keeps_none:
                    # The folder is read anew: it may have been set since the last try.
                    job.finish()
            else:
                if tries.are_over():
                    job.end_unsaved(why)
                    return
                job.wait_unsaved(why)
                log.error("the job waits for its last checkpoint: %s", why)
                await self._pause(tries.next_pause_s())

    async def save_stopped(self) -> None:
        """Save a job that was stopped, within ``checkpoint.stop_wait_s``."""
        limit_s = self._job.spec.checkpoint.stop_wait_s
        try:
            await asyncio.wait_for(self._save(), limit_s)
        except asyncio.TimeoutError:
            why = f"the last checkpoint took longer than {limit_s} s (checkpoint.stop_wait_s)"
            log.error("%s", why)
            self._job.note_no_checkpoint(why)

    def try_now(self) -> bool:
        """Try a last checkpoint at once that could not be written; whether there is one."""
        self._try_now.set()
        return bool(self._job.checkpoints.unsaved)

    def _limit_s(self) -> float:
        return self._job.spec.checkpoint.unsaved_wait_s if self._servers_end else LAST_SAVE_S

    async def _pause(self, pause_s: float) -> None:
        self._try_now.clear()
        waits = asyncio.create_task(self._wait_for_try()), asyncio.create_task(self._over())
        try:
            await asyncio.wait(waits, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks(*waits)

    async def _wait_for_try(self) -> None:
        await self._try_now.wait()

    async def _over(self) -> None:
        while not self._job.is_over:
            await self._job.changed.wait()

    async def _look_or_tell(self) -> Literal["same", "changed"] | _Unknown:
        """Look whether rows have changed; if no node tells, say so, and return after a while."""
        try:
            changed = await self.look()
        except BackstayError as error:
            why = f"no node says whether the cluster was restored: {error}"
            self._job.note_trouble("restore", why)
            await asyncio.sleep(LOOK_S)
            return _Unknown(why)
        self._job.note_trouble("restore", "")
        return "changed" if changed else "same"

    async def look(self) -> bool:
        """Look once whether the cluster was restored, and take the job back if it was.

        Returns:
            Whether it was.

        Raises:
            BackstayError: No node answers, or the store does not.
        """
        async with self._looking:
            return await self._look()

    async def _look(self) -> bool:
        job = self._job
        restore = await asyncio.to_thread(self._checkpoints.restore_state)
        change = job.rows_are(restore, time.time())
        if change == "none":
            return False
        if change == "lost":
            return True
        try:
            progress = await asyncio.to_thread(self._restored)
        except (InvalidRequest, CheckpointNotFound) as error:
            job.cannot_follow(str(error))
            return True
        job.follow(restore, progress, time.time())
        await job.journal.durable(WRITE_LIMIT_S)
        # If it was restored once more in between, this is of the earlier one, and the next look
        # goes back once more.
        job.note_incarnation(incarnation_in(restore))
        await job.journal.durable(WRITE_LIMIT_S)
        return True

    async def watch_restores(self) -> None:
        """Look every second; never returns."""
        while True:
            await asyncio.sleep(LOOK_S)
            if not self._job.is_over:
                await self._look_or_tell()

    async def _save(self) -> str:
        """Save once; returns why not, empty if it is written, or if the cluster keeps none."""
        async with self._saving:
            return await self._save_once()

    async def _save_once(self) -> str:
        job = self._job
        steps, upkeeps = job.schedule.steps, job.figures["upkeeps"]
        passes = job.schedule.passes_over
        tags: dict[str, str | int | float] = {
            "job": self._name,
            "steps": steps,
            "passes": passes,
        }
        try:
            now = await asyncio.to_thread(self._checkpoints.restore_state)
            if job.change_of_rows(now) != "none":
                # What is in memory is not what the model is; ``look`` puts that right.
                return "rows of the cluster have changed"
            saving = asyncio.to_thread(lambda: self._checkpoints.save(tags=tags))
            info = await asyncio.wait_for(saving, SAVE_LIMIT_S)
        except (BackstayError, asyncio.TimeoutError) as error:
            why = str(error) or f"the servers have not answered for {SAVE_LIMIT_S:.0f} s"
            level = logging.WARNING if isinstance(error, CheckpointRefused) else logging.ERROR
            log.log(level, "no checkpoint was written: %s", why)
            self._keeps_none = isinstance(error, NoCheckpointFolder)
            job.note_no_checkpoint(f"no checkpoint was written: {why}", failed=not self._keeps_none)
            return "" if self._keeps_none else why
        self._keeps_none = False
        log.info("checkpoint %s is written", info.id)
        job.note_checkpoint(info.id, steps, info.url, upkeeps=upkeeps, passes=passes)
        return ""

    def _restored(self) -> JobProgress | None:
        """Return this job's progress in what the cluster was restored from last. Blocks.

        Raises:
            InvalidRequest: The progress is not that of the model.
            CheckpointNotFound: The checkpoint is gone.
        """
        restored = self._checkpoints.restored()
        if restored is None:
            return None
        return self._job.progress_in(restored.progress.get(JOBS_PROGRESS))


class _Unknown(NamedTuple):
    """No node tells whether rows have changed."""

    why: str


class _SaveRetries:
    """When the last checkpoint is tried again, and for how long."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._retries = RETRY.begin()
        self._first_s: float | None = None

    def are_over(self) -> bool:
        now_s = asyncio.get_running_loop().time()
        self._first_s = self._first_s or now_s
        return now_s - self._first_s >= self._limit_s

    def next_pause_s(self) -> float:
        return self._retries.next_s()
