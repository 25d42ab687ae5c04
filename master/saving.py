"""Checkpoints of a job, and its way back: model and progress are saved and restored together.

The node that writes a checkpoint keeps the records of all jobs with it, read
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

from backstay.checkpoint.remote import RestoreState
from backstay.cluster.checkpoints import Checkpoints
from backstay.consensus.job_records import JobSpecRecord, JobStateRecord
from backstay.consensus.json_fields import fields_of
from backstay.errors import (
    BackstayError,
    CheckpointNotFound,
    CheckpointRefused,
    InvalidRequest,
    NoCheckpointFolder,
)
from backstay.job_engine.progress import JobProgress, RoundProgress
from backstay.job_engine.values import DeadLetter
from backstay.master.job import Job
from backstay.master.rows_change import StateIncarnation, change_of, why_inexact
from backstay.schedule.rounds import RoundId
from backstay.schedule.task_table import TaskTable, round_table
from backstay.tasks import end_tasks

__all__ = ["KeptJob", "Saving", "incarnation_of", "kept_job", "restored_job"]

LOOK_S = 1.0
WRITE_LIMIT_S = 30.0
# Between two tries of the last checkpoint; doubled each time, up to the last.
TRY_PAUSE_FIRST_S = 1.0
TRY_PAUSE_MAX_S = 30.0
# How long the last checkpoint is tried on servers that outlive the job.
LAST_SAVE_S = 120.0
# A save that says nothing for so long is not waited for; the servers give one up before that.
SAVE_LIMIT_S = 3600.0
# Below it a checkpoint keeps the records of jobs.
PROGRESS = "backstay_jobs"

log = logging.getLogger(__name__)


def incarnation_of(checkpoints: Checkpoints) -> StateIncarnation:
    """Return the state incarnation of the cluster. Blocks."""
    restore = checkpoints.restore_state()
    return StateIncarnation(restore.version, restore.generation)


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
        job.ends_itself = False
        job.saves_when_stopped = servers_end and job.spec.checkpoint.stop_wait_s > 0

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
        tries = _Tries(self._limit_s())
        while not job.is_over:
            changed = job.changed
            if not job.is_finished:
                # Or not any more: a restore took it back.
                job.unsaved, tries = "", _Tries(self._limit_s())
                await changed.wait()
            elif await self._rows_changed():
                if trouble := job.trouble["restore"]:
                    # This is said of a job without unsaved steps, too: its rows may be lost.
                    job.unsaved = trouble
                    if tries.are_over():
                        job.end_unsaved(trouble)
                        return
                    job.notify()
            elif not job.has_unsaved_steps:
                job.finish()
            elif not (why := await self._save()):
                if self._keeps_none:
                    # The folder is read anew: it may have been set since the last try.
                    job.finish()
            else:
                job.unsaved = why
                if tries.are_over():
                    job.end_unsaved(why)
                    return
                job.notify()
                log.error("the job waits for its last checkpoint: %s", why)
                await self._pause(tries.next_pause_s())

    async def save_stopped(self) -> None:
        """Save a job that was stopped, within ``checkpoint.stop_wait_s``."""
        limit_s = self._job.spec.checkpoint.stop_wait_s
        try:
            await asyncio.wait_for(self._save(), limit_s)
        except asyncio.TimeoutError:
            why = f"the last checkpoint took longer than {limit_s} s and is not waited for"
            log.error("%s", why)
            self._job.note_trouble("checkpoint", why)
            self._job.checkpoints_failed += 1

    def try_now(self) -> bool:
        """Try a last checkpoint at once that could not be written; whether there is one."""
        self._try_now.set()
        return bool(self._job.unsaved)

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

    async def _rows_changed(self) -> bool:
        """Look whether rows have changed; also True if no server could tell, after a while."""
        try:
            changed = await self.look()
        except BackstayError as error:
            trouble = f"no node tells whether it was restored: {error}"
            self._job.note_trouble("restore", trouble)
            await asyncio.sleep(LOOK_S)
            return True
        self._job.note_trouble("restore", "")
        return changed

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
        change = change_of(_noted(job), restore)
        if change == "none":
            return False
        why = why_inexact(change, restore)
        if change == "lost":
            self._note_inexact(why)
            job.end(
                "failed",
                f"{why}, so what was trained on is not in the model any more. "
                f"{_what_to_do(job.state.checkpoint)}",
            )
            return True
        try:
            progress = await asyncio.to_thread(self._restored)
            job.go_back(progress)
        except (InvalidRequest, CheckpointNotFound) as error:
            reason = f"its progress cannot follow the restore of the cluster: {error}"
            job.end("failed", f"{reason}. Restore another checkpoint, or begin with --fresh")
            return True
        cause = _cause(restore)
        job.note_trouble("loss", cause if restore.lost else "")
        log.warning(
            "%s: %s",
            cause,
            "the job goes on from the progress that was saved with the checkpoint"
            if progress is not None
            else "the checkpoint is from before the job, so the job begins anew",
        )
        if why:
            self._note_inexact(why)
        await job.journal.durable(WRITE_LIMIT_S)
        # If it was restored once more in between, this is of the earlier one, and the next look
        # goes back once more.
        job.note_incarnation(StateIncarnation(restore.version, restore.generation))
        await job.journal.durable(WRITE_LIMIT_S)
        return True

    async def look_on(self) -> None:
        """Look every second; never returns."""
        while True:
            await asyncio.sleep(LOOK_S)
            if not self._job.is_over:
                await self._rows_changed()

    def _note_inexact(self, why: str) -> None:
        job = self._job
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        log.error("records may count never or twice from now on: %s", why)
        job.note_inexact(f"since {now}, pass {job.schedule.passes_over + 1}: {why}")

    async def _save(self) -> str:
        """Save once; returns why not, empty if it is written, or if the cluster keeps none."""
        async with self._saving:
            return await self._save_once()

    async def _save_once(self) -> str:
        job = self._job
        steps = job.schedule.steps
        tags: dict[str, str | int | float] = {
            "job": self._name,
            "steps": steps,
            "passes": job.schedule.passes_over,
        }
        try:
            now = await asyncio.to_thread(self._checkpoints.restore_state)
            if change_of(_noted(job), now) != "none":
                # What is in memory is not what the model is; ``look`` puts that right.
                return "rows of the cluster have changed"
            saving = asyncio.to_thread(lambda: self._checkpoints.save(tags=tags))
            info = await asyncio.wait_for(saving, SAVE_LIMIT_S)
        except (BackstayError, asyncio.TimeoutError) as error:
            why = str(error) or f"the servers have not answered for {SAVE_LIMIT_S:.0f} s"
            level = logging.WARNING if isinstance(error, CheckpointRefused) else logging.ERROR
            log.log(level, "no checkpoint was written: %s", why)
            job.note_trouble("checkpoint", f"no checkpoint was written: {why}")
            self._keeps_none = isinstance(error, NoCheckpointFolder)
            if self._keeps_none:
                return ""
            job.checkpoints_failed += 1
            return why
        job.note_trouble("checkpoint", "")
        self._keeps_none = False
        log.info("checkpoint %s is written", info.id)
        job.note_checkpoint(info.id, steps, info.url)
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
        saved = kept_job(restored.progress.get(PROGRESS), self._name)
        if saved is None or saved.identity.uid != self._job.identity.uid:
            # It had not begun, or it is a job of the same name that was begun anew since.
            return None
        return saved.progress(self._job.tables)


class _Tries:
    """When the last checkpoint is tried again, and for how long."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._pause_s = TRY_PAUSE_FIRST_S / 2
        self._first_s: float | None = None

    def are_over(self) -> bool:
        now_s = asyncio.get_running_loop().time()
        self._first_s = self._first_s or now_s
        return now_s - self._first_s >= self._limit_s

    def next_pause_s(self) -> float:
        self._pause_s = min(2 * self._pause_s, TRY_PAUSE_MAX_S)
        return self._pause_s


def _cause(restore: RestoreState) -> str:
    """Return why the rows are those of a checkpoint, and from when."""
    if not restore.lost:
        return f"the cluster was restored from {restore.id}"
    slots = "1 slot" if restore.lost == 1 else f"{restore.lost} slots"
    return f"{slots} lost all copies: all goes on from {restore.id} of {restore.created}"


def _what_to_do(checkpoint: str) -> str:
    """Return how a job whose rows are lost is helped."""
    if not checkpoint:
        return (
            "The job has no checkpoint: accept the loss (pserverctl slots accept-loss) and begin "
            "with --fresh"
        )
    return (
        f"Restore {checkpoint} (pserverctl checkpoint restore) and start the job again: it goes on "
        "from there. Or begin with --fresh"
    )


def _noted(job: Job) -> StateIncarnation:
    return StateIncarnation(job.state.restore_version, job.state.generation)


class KeptJob(NamedTuple):
    """What a checkpoint keeps of a job.

    Attributes:
        identity: Which job, and its spec then.
        state: Where it stood.
        done: Its bitmaps, by round and chunk.
        dead_letters: Its dead-lettered tasks, by round and task.
        damaged: Damaged records of its data, by data and part.
        is_current: Whether it had followed the cluster's last restore when they were read.
    """

    identity: JobSpecRecord
    state: JobStateRecord
    done: Mapping[str, str]
    dead_letters: Mapping[str, str]
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
        names = {key.partition("/")[0] for key in (*self.done, *self.dead_letters)}
        rounds = {RoundId.parse(name): self._round(name, tables) for name in names}
        state = self.state
        return JobProgress(
            self.identity.uid,
            state.schedule,
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
            dead_letters=tuple(
                DeadLetter.from_json(value) for _, value in _below(self.dead_letters, name)
            ),
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
    expected = {
        "spec": str,
        "state": str,
        **dict.fromkeys(("done", "dead_letters", "damaged"), dict),
    }
    records = fields_of(what, document, expected)
    state = JobStateRecord.from_json(records["state"])
    return KeptJob(
        identity=JobSpecRecord.from_json(records["spec"]),
        state=state,
        done=records["done"],
        dead_letters=records["dead_letters"],
        damaged=records["damaged"],
        is_current=(state.restore_version, state.generation)
        == (fields["restore_version"], fields["generation"]),
    )
