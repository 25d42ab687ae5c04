"""Checkpoints of a job, and its way back: model and progress are saved and restored together.

Progress is taken before a checkpoint begins, so what it calls done is in the model. Whether the
cluster was restored since is asked every second: every restore has a version of its own. Calls to
the cluster block and are made in threads.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

from backstay.errors import (
    BackstayError,
    CheckpointNotFound,
    CheckpointRefused,
    InvalidRequest,
    StoreUnavailable,
)
from backstay.master.core.progress import JobProgress
from backstay.master.job import Job
from backstay.trainer.checkpoints import Checkpoints, Restored

__all__ = ["Saving", "restore_version", "restored_uid"]

LOOK_S = 1.0
WRITE_LIMIT_S = 30.0
# Below it, in what a checkpoint keeps of the trainers' progress: job -> its progress.
PROGRESS = "jobs"

log = logging.getLogger(__name__)


def restore_version(checkpoints: Checkpoints) -> int:
    """Return which restore of the cluster was the last that changed anything; 0: none. Blocks."""
    return checkpoints.restore_state().version


def restored_uid(checkpoints: Checkpoints, job: str) -> str:
    """Return the uid of the job whose progress came with the last restore; empty: none. Blocks.

    A cluster that begins with a checkpoint has no records of the job, but its streams and tables.
    Under the same uid the job goes on, and what the servers remember is not counted again.
    """
    try:
        progress = _progress_in(checkpoints.restored(), job)
    except CheckpointNotFound as error:
        log.error("%s", error)
        return ""
    return "" if progress is None else progress.job_uid


def _progress_in(restored: Restored | None, job: str) -> JobProgress | None:
    jobs: Any = None if restored is None else restored.progress.get(PROGRESS)
    text = jobs.get(job) if isinstance(jobs, dict) else None
    return JobProgress.from_json(text) if isinstance(text, str) else None


class Saving:
    """Saves a job, and takes it back; belongs to one event loop."""

    def __init__(self, job: Job, name: str, checkpoints: Checkpoints) -> None:
        """Prepare.

        Args:
            job: The job.
            name: Its name.
            checkpoints: Of the cluster.
        """
        self._job = job
        self._name = name
        self._checkpoints = checkpoints
        self._idle = asyncio.Event()
        self._idle.set()

    async def save_when_due(self) -> None:
        """Save each time that the job says so; never returns."""
        while True:
            changed = self._job.changed
            if not self._job.checkpoint_due:
                await changed.wait()
                continue
            self._idle.clear()
            self._job.checkpoint_due = False
            try:
                await self._save()
            finally:
                self._idle.set()

    async def finish(self, limit_s: float) -> None:
        """Wait until nothing is left to save."""

        async def idle() -> None:
            while self._job.checkpoint_due or not self._idle.is_set():
                await asyncio.sleep(0)
                await self._idle.wait()

        try:
            await asyncio.wait_for(idle(), limit_s)
        except asyncio.TimeoutError:
            log.error("the last checkpoint took longer than %.0f s and is not waited for", limit_s)

    async def look(self) -> bool:
        """Look once whether the cluster was restored, and take the job back if it was.

        Returns:
            Whether it was.

        Raises:
            BackstayError: No node answers, or the store does not.
        """
        job = self._job
        if not await self._was_restored():
            return False
        # It may have been restored once more in between: what is read now counts.
        version, progress = await asyncio.to_thread(self._restored)
        log.warning(
            "the cluster was restored: %s",
            "the job goes on from the progress that was saved with the checkpoint"
            if progress is not None
            else "the checkpoint has no progress of this job, so it begins anew; batches that the "
            "servers remember are not counted again",
        )
        try:
            job.go_back(progress)
        except InvalidRequest as error:
            job.end("failed", f"it cannot go on after the restore: {error}; begin with --fresh")
            return True
        await job.journal.durable(WRITE_LIMIT_S)
        job.note_restore(version)
        await job.journal.durable(WRITE_LIMIT_S)
        return True

    async def look_on(self) -> None:
        """Look every second; never returns."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self._job.is_over:
                continue
            try:
                await self.look()
            except (BackstayError, StoreUnavailable) as error:
                self._job.trouble["restore"] = f"no node tells whether it was restored: {error}"
            else:
                self._job.trouble.pop("restore", None)

    async def _was_restored(self) -> bool:
        """Ask whether the progress in memory is that of a model which is no more."""
        restore = await asyncio.to_thread(self._checkpoints.restore_state)
        # One that is only requested has changed nothing yet, and has no version.
        return restore.state != "requested" and restore.version != self._job.state.restore_version

    async def _save(self) -> None:
        """Save once; a checkpoint that fails is one less, not the end of the job."""
        job = self._job
        tags: dict[str, str | int | float] = {
            "job": self._name,
            "steps": job.course.steps,
            "passes": job.course.passes_over,
        }
        try:
            if await self._was_restored():
                # What is in memory is not what the model is; ``look`` puts that right.
                return
            progress = job.progress()
            document = {PROGRESS: {self._name: progress.to_json()}}
            info = await asyncio.to_thread(
                lambda: self._checkpoints.save(tags=tags, progress=document)
            )
        except BackstayError as error:
            level = logging.WARNING if isinstance(error, CheckpointRefused) else logging.ERROR
            log.log(level, "no checkpoint was written: %s", error)
            job.trouble["checkpoint"] = f"no checkpoint was written: {error}"
            return
        job.trouble.pop("checkpoint", None)
        log.info("checkpoint %s is written", info.id)
        job.state = replace(job.state, checkpoint=info.id)
        job.stage_state()

    def _restored(self) -> tuple[int, JobProgress | None]:
        """Return the version of the last restore, and this job's progress in it. Blocks."""
        try:
            restored = self._checkpoints.restored()
        except CheckpointNotFound as error:
            log.error("%s", error)
            return restore_version(self._checkpoints), None
        if restored is None:
            return 0, None
        progress = _progress_in(restored, self._name)
        if progress is None or progress.job_uid == self._job.identity.uid:
            return restored.version, progress
        # Of a job of the same name that was begun anew since.
        return restored.version, None
