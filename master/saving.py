"""Checkpoints of a job, and its way back: model and progress are saved and restored together.

The node that writes a checkpoint, whoever asked for it, keeps the records of all jobs with it, read
before it begins: what they call done is in the model. Whether the cluster was restored since is
asked every second: every restore has a version of its own. Calls to the cluster block and are made
in threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import NamedTuple

from backstay.consensus.job_records import JobSpecRecord, JobStateRecord
from backstay.consensus.json_fields import fields_of
from backstay.course.rounds import RoundId
from backstay.course.task_table import TaskTable, round_table
from backstay.errors import (
    BackstayError,
    CheckpointNotFound,
    CheckpointRefused,
    InvalidRequest,
)
from backstay.master.core.holds import ParkedTask
from backstay.master.core.progress import JobProgress, RoundProgress
from backstay.master.job import Job
from backstay.master.rows_change import RowsIdentity, change_of, why_inexact
from backstay.trainer.checkpoints import Checkpoints

__all__ = ["KeptJob", "Saving", "kept_job", "restored_job", "rows_of"]

LOOK_S = 1.0
WRITE_LIMIT_S = 30.0
# Below it a checkpoint keeps the records of jobs.
PROGRESS = "backstay_jobs"

log = logging.getLogger(__name__)


def rows_of(checkpoints: Checkpoints) -> RowsIdentity:
    """Return which rows the cluster has now. Blocks."""
    restore = checkpoints.restore_state()
    return RowsIdentity(restore.version, restore.generation)


def restored_job(checkpoints: Checkpoints, job: str) -> KeptJob | None:
    """Return what the last restore brought of a job of that name; None: nothing. Blocks.

    A cluster that begins with a checkpoint has no records of the job, but its streams and tables.
    Under the same uid the job goes on, and what the servers remember is not counted again.

    Raises:
        InvalidRequest: It cannot be read.
    """
    try:
        restored = checkpoints.restored()
    except CheckpointNotFound as error:
        log.error("%s", error)
        return None
    return None if restored is None else kept_job(restored.progress.get(PROGRESS), job)


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
        self._is_saving = False
        # Set when a checkpoint is written, or has failed.
        self._saved = asyncio.Event()

    async def save_when_due(self) -> None:
        """Save each time that the job says so; never returns."""
        while True:
            changed = self._job.changed
            if not self._job.take_checkpoint_due():
                await changed.wait()
                continue
            self._is_saving = True
            try:
                await self._save()
            finally:
                self._is_saving = False
                self._saved.set()

    async def finish(self, limit_s: float) -> None:
        """Wait until nothing is left to save."""

        async def idle() -> None:
            while self._job.checkpoint_due or self._is_saving:
                self._saved.clear()
                await self._saved.wait()

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
        restore = await asyncio.to_thread(self._checkpoints.restore_state)
        change = change_of(_noted(job), restore)
        if change == "none":
            return False
        why = why_inexact(change, restore)
        if change == "lost":
            self._note_inexact(why)
            newest = job.state.checkpoint or "a checkpoint"
            job.end(
                "failed",
                f"{why}, so what was trained on is not in the model any more. Restore {newest} "
                "(pserverctl checkpoint restore) and start the job again: it goes on from there. "
                "Or begin with --fresh",
            )
            return True
        try:
            progress = await asyncio.to_thread(self._restored)
            job.go_back(progress)
        except (InvalidRequest, CheckpointNotFound) as error:
            reason = f"its progress cannot follow the restore of the cluster: {error}"
            job.end("failed", f"{reason}. Restore another checkpoint, or begin with --fresh")
            return True
        log.warning(
            "the cluster was restored: %s",
            "the job goes on from the progress that was saved with the checkpoint"
            if progress is not None
            else "the checkpoint is from before the job, so the job begins anew",
        )
        if why:
            self._note_inexact(why)
        await job.journal.durable(WRITE_LIMIT_S)
        # If it was restored once more in between, this is of the earlier one, and the next look
        # goes back once more.
        job.note_rows(RowsIdentity(restore.version, restore.generation))
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
            except BackstayError as error:
                trouble = f"no node tells whether it was restored: {error}"
                self._job.note_trouble("restore", trouble)
            else:
                self._job.note_trouble("restore", "")

    def _note_inexact(self, why: str) -> None:
        job = self._job
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        log.error("records may count never or twice from now on: %s", why)
        job.note_inexact(f"since {now}, pass {job.course.passes_over + 1}: {why}")

    async def _save(self) -> None:
        """Save once; a checkpoint that fails is one less, not the end of the job."""
        job = self._job
        tags: dict[str, str | int | float] = {
            "job": self._name,
            "steps": job.course.steps,
            "passes": job.course.passes_over,
        }
        try:
            now = await asyncio.to_thread(self._checkpoints.restore_state)
            if change_of(_noted(job), now) != "none":
                # What is in memory is not what the model is; ``look`` puts that right.
                return
            info = await asyncio.to_thread(lambda: self._checkpoints.save(tags=tags))
        except BackstayError as error:
            level = logging.WARNING if isinstance(error, CheckpointRefused) else logging.ERROR
            log.log(level, "no checkpoint was written: %s", error)
            job.note_trouble("checkpoint", f"no checkpoint was written: {error}")
            return
        job.note_trouble("checkpoint", "")
        log.info("checkpoint %s is written", info.id)
        job.note_checkpoint(info.id)

    def _restored(self) -> JobProgress | None:
        """Return this job's progress in what the cluster was restored from last. Blocks.

        Raises:
            InvalidRequest: The progress is not that of the model.
            CheckpointNotFound: The checkpoint is gone.
        """
        restored = self._checkpoints.restored()
        if restored is None:
            return None
        saved = kept_job(restored.progress.get(PROGRESS), self._name)
        if saved is None or saved.identity.uid != self._job.identity.uid:
            # It had not begun, or it is a job of the same name that was begun anew since.
            return None
        return saved.progress(self._job.tables)


def _noted(job: Job) -> RowsIdentity:
    return RowsIdentity(job.state.restore_version, job.state.generation)


class KeptJob(NamedTuple):
    """What a checkpoint keeps of a job.

    Attributes:
        identity: Which job, and its spec then.
        state: Where it stood.
        done: Its bitmaps, by round and chunk.
        parked: Its parked tasks, by round and task.
        damaged: Damaged records of its data, by data and part.
        is_current: Whether it had followed the cluster's last restore when they were read.
    """

    identity: JobSpecRecord
    state: JobStateRecord
    done: Mapping[str, str]
    parked: Mapping[str, str]
    damaged: Mapping[str, str]
    is_current: bool

    def progress(self, tables: Mapping[str, TaskTable]) -> JobProgress:
        """Return how far the job was.

        Raises:
            InvalidRequest: It is not the progress of the model, or not of this data.
        """
        if not self.is_current:
            raise InvalidRequest(
                "the checkpoint was written before the job had followed a restore or a loss of rows"
            )
        for name, table in tables.items():
            if self.state.data.get(name) != table.digest():
                raise InvalidRequest(f"the {name} data are not those that the progress is of")
        names = {key.partition("/")[0] for key in (*self.done, *self.parked)}
        rounds = {RoundId.parse(name): self._round(name, tables) for name in names}
        state = self.state
        return JobProgress(
            self.identity.uid,
            state.course,
            rounds,
            state.figures,
            state.inexact,
            self.damaged,
            state.passes_begun,
        )

    def _round(self, name: str, tables: Mapping[str, TaskTable]) -> RoundProgress:
        table = round_table(tables, RoundId.parse(name))
        return RoundProgress(
            size=len(table),
            table_digest=table.digest(),
            done={int(key): value for key, value in _below(self.done, name)},
            parked=tuple(ParkedTask.from_json(value) for _, value in _below(self.parked, name)),
        )


def _below(records: Mapping[str, str], name: str) -> list[tuple[str, str]]:
    prefix = f"{name}/"
    return [
        (key.removeprefix(prefix), value)
        for key, value in records.items()
        if key.startswith(prefix)
    ]


def kept_job(progress: object, job: str) -> KeptJob | None:
    """Return what a checkpoint keeps of a job, None if there was none of that name.

    Args:
        progress: As ``pserver.checkpoints.jobs`` reads it; None: there was no job at all.
        job: Its name.

    Raises:
        InvalidRequest: It is not of that form.
    """
    if progress is None:
        return None
    what = "progress of jobs"
    fields = fields_of(what, progress, {"restore_version": int, "generation": int, "jobs": dict})
    document = fields["jobs"].get(job)
    if document is None:
        return None
    expected = {"spec": str, "state": str, **dict.fromkeys(("done", "parked", "damaged"), dict)}
    records = fields_of(what, document, expected)
    state = JobStateRecord.from_json(records["state"])
    return KeptJob(
        identity=JobSpecRecord.from_json(records["spec"]),
        state=state,
        done=records["done"],
        parked=records["parked"],
        damaged=records["damaged"],
        is_current=(state.restore_version, state.generation)
        == (fields["restore_version"], fields["generation"]),
    )
