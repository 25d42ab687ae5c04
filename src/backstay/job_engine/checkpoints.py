"""Checkpoints of the job: what is due, what was written, and what could not be written.

``master.saving`` writes them and tells the engine here. May import ``job_engine``; does no I/O.
"""

from __future__ import annotations

from backstay.job_engine.standing import Basis, Standing
from backstay.job_engine.upkeeps import Upkeeps

__all__ = ["Checkpoints"]


class Checkpoints:
    """The checkpoints of one job.

    Attributes:
        is_due: Whether one is to be written now.
        failed: How many could not be written.
        unsaved: Why the last one is not written, though nothing else is left to do.
        ends_itself: Whether the job ends with its schedule; else the caller that saves it ends it.
    """

    def __init__(self, basis: Basis, job: Standing, upkeeps: Upkeeps) -> None:
        """Begin; the job is not saved at its end before ``keep_checkpoints``."""
        self._basis = basis
        self._job = job
        self._upkeeps = upkeeps
        # Training tasks done since the last one was asked for.
        self._tasks = 0
        self.is_due = False
        self.failed = 0
        self.unsaved = ""
        self.ends_itself = True

    def keep_checkpoints(self, *, servers_end: bool) -> None:
        """Let the job outlast its schedule, until the caller has saved it and calls ``finish``.

        Args:
            servers_end: Whether the servers end with the job: what is not saved then is gone.
        """
        job, spec = self._job, self._basis.spec
        self.ends_itself = False
        job.saves_when_stopped = servers_end and spec.checkpoint.stop_wait_s > 0
        if job.state.state == "stopped":
            # It was stopped under an earlier job master, which may not have saved it.
            job.saves_still = job.saves_when_stopped and job.has_unsaved_steps

    def task_is_done(self) -> None:
        """Count a training task that is done; one may be due."""
        every = self._basis.spec.checkpoint.every_tasks
        self._tasks += 1
        if every and self._tasks >= every:
            self._tasks = 0
            self.is_due = True
            self._basis.notify()

    def pass_is_over(self) -> None:
        """Take note that a training pass has ended; one may be due."""
        self.is_due |= self._basis.spec.checkpoint.every == "pass"

    def take_due(self) -> bool:
        """Return whether a checkpoint is to be written now; the caller writes it.

        Not before the rows were seen to at the end of a pass, so that it has what that made.
        """
        if self._upkeeps.due is not None:
            return False
        due, self.is_due = self.is_due, False
        return due

    def note_checkpoint(
        self, checkpoint: str, steps: int, url: str, *, upkeeps: int = 0, passes: int = 0
    ) -> None:
        """Take note of a written checkpoint.

        Args:
            checkpoint: Its id.
            steps: Of the job when it was begun.
            url: Its folder.
            upkeeps: That had changed rows when it was begun.
            passes: That were over when it was begun.
        """
        job = self._job
        job.note_trouble("checkpoint", "")
        job.figures["saved_steps"] = steps
        job.figures["saved_upkeeps"] = upkeeps
        job.figures["saved_passes"] = passes
        job.change(checkpoint=checkpoint, checkpoint_url=url)
        job.stage()

    def note_no_checkpoint(self, why: str, *, failed: bool = True) -> None:
        """Take note that no checkpoint was written.

        Args:
            why: For people.
            failed: False if the cluster is set to keep no checkpoints.
        """
        self._job.note_trouble("checkpoint", why)
        self.failed += failed

    def wait_unsaved(self, why: str) -> None:
        """Have a job that is all done wait for its last checkpoint; say why it is not written."""
        self.unsaved = why
        self._basis.notify()

    def stopped_is_saved(self) -> None:
        """Take note that a stopped job is saved, or that it will not be."""
        self._job.saves_still = False
        self._basis.notify()
