"""Checkpoints of the job: what is due, what was written, and what could not be written.

``master.saving`` writes them and tells the engine here. May import ``job_engine``; does no I/O.
"""

from __future__ import annotations

from dataclasses import replace

from backstay.job_engine.core import JobCore

__all__ = ["CheckpointEvents"]


class CheckpointEvents(JobCore):
    """The events of checkpoints."""

    def keep_checkpoints(self, *, servers_end: bool) -> None:
        """Let the job outlast its schedule, until the caller has saved it and calls ``finish``.

        Args:
            servers_end: Whether the servers end with the job: what is not saved then is gone.
        """
        self._ends_itself = False
        self._saves_when_stopped = servers_end and self.spec.checkpoint.stop_wait_s > 0
        if self.state.state == "stopped":
            # It was stopped under an earlier job master, which may not have saved it.
            self.saves_still = self._saves_when_stopped and self.has_unsaved_steps

    def take_checkpoint_due(self) -> bool:
        """Return whether a checkpoint is to be written now; the caller writes it.

        Not before the rows were seen to at the end of a pass, so that it has what that made.
        """
        if self.upkeep_due is not None:
            return False
        due, self.checkpoint_due = self.checkpoint_due, False
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
        self.note_trouble("checkpoint", "")
        self.figures["saved_steps"] = steps
        self.figures["saved_upkeeps"] = upkeeps
        self.figures["saved_passes"] = passes
        self.state = replace(self.state, checkpoint=checkpoint, checkpoint_url=url)
        self.stage_state()

    def note_no_checkpoint(self, why: str, *, failed: bool = True) -> None:
        """Take note that no checkpoint was written.

        Args:
            why: For people.
            failed: False if the cluster is set to keep no checkpoints.
        """
        self.note_trouble("checkpoint", why)
        self.checkpoints_failed += failed

    def wait_unsaved(self, why: str) -> None:
        """Have a job that is all done wait for its last checkpoint; say why it is not written."""
        self.unsaved = why
        self.notify()

    def stopped_is_saved(self) -> None:
        """Take note that a stopped job is saved, or that it will not be."""
        self.saves_still = False
        self.notify()
