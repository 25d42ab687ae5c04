"""Restores and losses of rows: the job goes back with its model, or ends.

Model and progress belong together. When the cluster is restored, the caller reads the progress that
the checkpoint keeps, and the job goes on from there. May import ``job_engine``, ``schedule`` and
the state of a restore; does no I/O.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timezone

from backstay.checkpoint.restore_state import RestoreState
from backstay.consensus.records.jobs import StreamRecord
from backstay.job_engine.core import JobCore
from backstay.job_engine.opening import StateIncarnation, reconcile
from backstay.job_engine.period_takes import takes_after
from backstay.job_engine.progress import JobProgress, kept_job
from backstay.job_engine.progressive import Progressive
from backstay.job_engine.round_scores import begun_scores
from backstay.job_engine.rows_change import (
    RowsChange,
    cause_of,
    change_of,
    what_to_do,
    why_inexact,
)
from backstay.job_engine.values import DeadLetter
from backstay.job_engine.worker_set import WorkerPolicy, WorkerSet
from backstay.schedule.damaged import DamagedRecords
from backstay.schedule.rounds import RoundId, RoundKind
from backstay.schedule.schedule import Schedule
from backstay.schedule.takes import advance

__all__ = ["RestoreEvents"]

log = logging.getLogger(__name__)


class RestoreEvents(JobCore):
    """The events of restores and losses."""

    def rows_are(self, restore: RestoreState, unix_s: float) -> RowsChange:
        """Take in what a node tells of the cluster's last restore; a loss ends the job.

        If the rows were restored, the caller reads what that checkpoint keeps
        (:meth:`progress_in`), and calls :meth:`follow` or :meth:`cannot_follow`.

        Args:
            restore: The last restore.
            unix_s: Unix time.
        """
        change = self.change_of_rows(restore)
        if change == "lost":
            why = why_inexact(change, restore)
            self.note_inexact(why, unix_s)
            self.end(
                "failed",
                f"{why}, so what was trained on is not in the model any more. "
                f"{what_to_do(self.state.checkpoint)}",
            )
        return change

    def change_of_rows(self, restore: RestoreState) -> RowsChange:
        """Return what became of the rows that the progress belongs to."""
        return change_of(self.incarnation, restore)

    def progress_in(self, kept: object) -> JobProgress | None:
        """Return this job's progress in what a checkpoint keeps of jobs.

        It changes nothing, and may be called in a thread.

        Args:
            kept: As ``kept_job`` takes it.

        Returns:
            None if the job had not begun, or if it was begun anew since.

        Raises:
            InvalidRequest: It cannot be read, is not the progress of the model, or is not of this
                data.
        """
        saved = kept_job(kept, self.spec.name)
        if saved is None or saved.identity.uid != self.identity.uid:
            return None
        progress = saved.progress(self.tables)
        # What cannot be read is refused here, so that ``follow`` changes all or nothing.
        schedule = Schedule.of(self.spec, progress.schedule)
        if progress.stream is not None:
            advance(progress.stream.positions, takes_after(progress.takes, schedule.passes_over))
        DamagedRecords().learn(progress.damaged)
        for one in progress.rounds.values():
            one.done_bits()
        Progressive.check(progress.progressive)
        return progress

    def follow(self, restore: RestoreState, progress: JobProgress | None, unix_s: float) -> None:
        """Go back with a restore of the cluster.

        The caller waits for the journal, and only then takes note of the restore with
        :meth:`note_incarnation`.

        Args:
            restore: What ``rows_are`` was told.
            progress: What the checkpoint keeps of the job; None: nothing, it begins anew.
            unix_s: Unix time.
        """
        cause, change = cause_of(restore), self.change_of_rows(restore)
        self.go_back(progress, restore.version)
        self.note_trouble("loss", cause if restore.lost else "")
        log.warning(
            "%s: %s",
            cause,
            "the job goes on from the progress that was saved with the checkpoint"
            if progress is not None
            else "the checkpoint is from before the job, so the job begins anew",
        )
        if why := why_inexact(change, restore):
            self.note_inexact(why, unix_s)

    def cannot_follow(self, why: str) -> None:
        """End a job for which there is no progress that belongs to the restored rows."""
        reason = f"its progress cannot follow the restore of the cluster: {why}"
        self.end("failed", f"{reason}. Restore another checkpoint, or begin with --fresh")

    def go_back(self, progress: JobProgress | None, restore_version: int = 0) -> None:
        """Take progress that was restored with the model; None: begin anew.

        All leases are void from now on. A job that had ended goes on, unless the progress says
        that it had ended then, too.
        """
        if progress is None:
            progress = JobProgress(self.identity.uid, schedule="", rounds={})
        schedule = Schedule.of(self.spec, progress.schedule)
        if self.spec.is_stream:
            self._replace_stream(progress)
        self._take_figures(progress, restore_version)
        self.rounds.erase_all(range(schedule.passes_over + 1, self.state.passes_begun + 1))
        self.rounds.takes.replace(progress.takes)
        self.schedule = schedule
        begun = schedule.passes_begun(progress.passes_begun)
        self.state = replace(
            self.state,
            starts=self.state.starts + 1,
            inexact=progress.inexact,
            passes_begun=begun,
            pass_starts={n: at for n, at in self.state.pass_starts.items() if int(n) <= begun},
            pass_ends={**self.state.pass_ends, **progress.pass_ends},
            # Later ones are of a model that is gone.
            evaluations=tuple(
                one for one in self.state.evaluations if one["steps"] <= self.figures["steps"]
            ),
        )
        self._ended_here.clear()
        self.note_pass_ends()
        for round_id, one in progress.rounds.items():
            done, dead_letters = reconcile(schedule, round_id, one.done_bits(), one.dead_letters)
            scores = self._begun_scores(round_id, progress, dead_letters)
            self._open(round_id, done, dead_letters, scores)
        self.rounds.stage_all()
        if self.progressive is not None:
            self.progressive.go_back(progress.progressive, self.is_recorded_done, self.now())
        self._begin_stream()
        self._count_bad_records()
        self._count_all_steps()
        # Before any attempt of this start is recorded: no job master gives their numbers again.
        self.stage_state()
        if schedule.outcome is None and self.is_over:
            self.state = replace(self.state, state="running", reason="")
            self.workers = WorkerSet(WorkerPolicy.of(self.spec))
        for known in self.known:
            known.answer = None

    def _begun_scores(
        self, round_id: RoundId, progress: JobProgress, dead_letters: Iterable[DeadLetter]
    ) -> dict[tuple[int, int], bytes]:
        """Return the scores of acknowledged batches of tasks that are dead-lettered.

        All others begin anew.
        """
        spec, failed = self.spec.progressive, {one.task for one in dead_letters}
        if spec is None or not failed:
            return {}
        found = begun_scores(progress.progressive, str(round_id), spec.by)
        return {place: packed for place, packed in found.items() if place[0] in failed}

    def _replace_stream(self, progress: JobProgress) -> None:
        """Take the positions of restored progress, and forget what is known of other periods.

        The records of periods are replaced one after the other. Until all of them are, and the
        restore is noted, the state says that they count for nothing.
        """
        record, started = progress.stream, self.stream_record.started
        if record is None or not record.positions:
            # It begins where it did begin, not where the source is by now.
            record = StreamRecord(positions=started, started=started)
        stopping = self.stream_record.stopping
        record = replace(record, is_replaced=True, stopping=stopping)
        self.state = replace(self.state, stream=record)
        self.records.stage_first(self.keys.state, lambda: self.record().to_json())
        for name in self.damaged.names:
            if name.startswith(f"{RoundKind.TRAINING.value}-"):
                self._forget_damaged(name)

    def _take_figures(self, progress: JobProgress, restore_version: int) -> None:
        """Take the sums and damaged records of restored progress; count that the job went back."""
        before, self.figures = self.figures, Counter(progress.figures)
        times = max(before["went_back"], self.figures["went_back"])
        # A job that continues in a new cluster has nothing there to lose. If the journal was not
        # written, the job follows the same restore again: that counts once.
        if before["tasks"] > 0 and before["went_back_by"] != restore_version:
            times += 1
        self.figures["went_back"], self.figures["went_back_by"] = times, restore_version
        self.damaged.learn(progress.damaged)
        for (data, number), text in self.damaged.parts().items():
            self.records.stage_text(self.keys.damaged(data, number), text)

    def note_inexact(self, why: str, unix_s: float) -> None:
        """Take note why records may count never or twice from now on; the first time counts."""
        log.error("records may count never or twice from now on: %s", why)
        if not self.state.inexact:
            date = datetime.fromtimestamp(unix_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
            since = f"since {date}, pass {self.schedule.passes_over + 1}: {why}"
            self.state = replace(self.state, inexact=since)
            self.stage_state()

    def note_incarnation(self, incarnation: StateIncarnation) -> None:
        """Take note of the state incarnation that the progress belongs to."""
        stream = self.state.stream
        if stream is not None:
            # All that is recorded of its periods is of one moment again.
            stream = replace(stream, is_replaced=False)
        self.state = replace(self.state, stream=stream, **incarnation._asdict())
        self.stage_state()
        self.notify()
