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
from functools import partial

from backstay.checkpoint.restore_state import RestoreState
from backstay.consensus.records.jobs import StreamRecord
from backstay.job_engine.damage import Damage
from backstay.job_engine.job_rounds import JobRounds, is_recorded_done
from backstay.job_engine.known_workers import KnownWorkers
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
from backstay.job_engine.standing import Basis, Standing
from backstay.job_engine.stream import Stream
from backstay.job_engine.upkeeps import Upkeeps
from backstay.job_engine.values import DeadLetter
from backstay.job_engine.worker_set import WorkerPolicy, WorkerSet
from backstay.schedule.damaged import DamagedRecords
from backstay.schedule.rounds import RoundId
from backstay.schedule.schedule import Schedule
from backstay.schedule.takes import advance

__all__ = ["RestoreEvents"]

log = logging.getLogger(__name__)


class RestoreEvents:
    """The events of restores and losses."""

    def __init__(
        self,
        basis: Basis,
        job: Standing,
        rounds: JobRounds,
        known: KnownWorkers,
        damage: Damage,
        stream: Stream,
        upkeeps: Upkeeps,
    ) -> None:
        """Take the parts that go back."""
        self._basis = basis
        self._job = job
        self._rounds = rounds
        self._known = known
        self._damage = damage
        self._stream = stream
        self._upkeeps = upkeeps

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
            self._job.end(
                "failed",
                f"{why}, so what was trained on is not in the model any more. "
                f"{what_to_do(self._job.state.checkpoint)}",
            )
        return change

    def change_of_rows(self, restore: RestoreState) -> RowsChange:
        """Return what became of the rows that the progress belongs to."""
        return change_of(self._job.incarnation, restore)

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
        saved = kept_job(kept, self._basis.spec.name)
        if saved is None or saved.identity.uid != self._basis.identity.uid:
            return None
        progress = saved.progress(self._basis.tables)
        # What cannot be read is refused here, so that ``follow`` changes all or nothing.
        schedule = Schedule.of(self._basis.spec, progress.schedule)
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
        self._job.note_trouble("loss", cause if restore.lost else "")
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
        self._job.end("failed", f"{reason}. Restore another checkpoint, or begin with --fresh")

    def go_back(self, progress: JobProgress | None, restore_version: int = 0) -> None:
        """Take progress that was restored with the model; None: begin anew.

        All leases are void from now on. A job that had ended goes on, unless the progress says
        that it had ended then, too.
        """
        if progress is None:
            progress = JobProgress(self._basis.identity.uid, schedule="", rounds={})
        schedule = Schedule.of(self._basis.spec, progress.schedule)
        if self._basis.spec.is_stream:
            self._replace_stream(progress)
        self._take_figures(progress, restore_version)
        self._rounds.erase_all(range(schedule.passes_over + 1, self._job.state.passes_begun + 1))
        self._rounds.takes.replace(progress.takes)
        self._job.schedule = schedule
        begun = schedule.passes_begun(progress.passes_begun)
        self._job.change(
            starts=self._job.state.starts + 1,
            inexact=progress.inexact,
            passes_begun=begun,
            pass_starts={n: at for n, at in self._job.state.pass_starts.items() if int(n) <= begun},
            pass_ends={**self._job.state.pass_ends, **progress.pass_ends},
            # Later ones are of a model that is gone.
            evaluations=tuple(
                one
                for one in self._job.state.evaluations
                if one["steps"] <= self._job.figures["steps"]
            ),
        )
        self._upkeeps.went_back()
        for round_id, one in progress.rounds.items():
            done, dead_letters = reconcile(schedule, round_id, one.done_bits(), one.dead_letters)
            scores = self._begun_scores(round_id, progress, dead_letters)
            self._rounds.open(round_id, done, dead_letters, scores)
        self._rounds.stage_all()
        if self._job.progressive is not None:
            is_done = partial(is_recorded_done, schedule, self._rounds)
            self._job.progressive.go_back(progress.progressive, is_done, self._basis.now())
        positions = self._job.stream_record.positions
        self._stream.begin(positions, self._rounds.takes_of_now())
        self._damage.count()
        self._rounds.count_all_steps()
        # Before any attempt of this start is recorded: no job master gives their numbers again.
        self._job.stage()
        if schedule.outcome is None and self._job.is_over:
            self._job.change(state="running", reason="")
            self._job.workers = WorkerSet(WorkerPolicy.of(self._basis.spec))
        for known in self._known:
            known.answer = None

    def _begun_scores(
        self, round_id: RoundId, progress: JobProgress, dead_letters: Iterable[DeadLetter]
    ) -> dict[tuple[int, int], bytes]:
        """Return the scores of acknowledged batches of tasks that are dead-lettered.

        All others begin anew.
        """
        spec, failed = self._basis.spec.progressive, {one.task for one in dead_letters}
        if spec is None or not failed:
            return {}
        found = begun_scores(progress.progressive, str(round_id), spec.by)
        return {place: packed for place, packed in found.items() if place[0] in failed}

    def _replace_stream(self, progress: JobProgress) -> None:
        """Take the positions of restored progress, and forget what is known of other periods.

        The records of periods are replaced one after the other. Until all of them are, and the
        restore is noted, the state says that they count for nothing.
        """
        record, started = progress.stream, self._job.stream_record.started
        if record is None or not record.positions:
            # It begins where it did begin, not where the source is by now.
            record = StreamRecord(positions=started, started=started)
        stopping = self._job.stream_record.stopping
        record = replace(record, is_replaced=True, stopping=stopping)
        self._job.change(stream=record)
        self._basis.records.stage_first(self._basis.keys.state, self._job.text)
        self._damage.forget_periods()

    def _take_figures(self, progress: JobProgress, restore_version: int) -> None:
        """Take the sums and damaged records of restored progress; count that the job went back."""
        before, self._job.figures = self._job.figures, Counter(progress.figures)
        times = max(before["went_back"], self._job.figures["went_back"])
        # A job that continues in a new cluster has nothing there to lose. If the journal was not
        # written, the job follows the same restore again: that counts once.
        if before["tasks"] > 0 and before["went_back_by"] != restore_version:
            times += 1
        self._job.figures["went_back"], self._job.figures["went_back_by"] = times, restore_version
        self._damage.records.learn(progress.damaged)
        for (data, number), text in self._damage.records.parts().items():
            self._basis.records.stage_text(self._basis.keys.damaged(data, number), text)

    def note_inexact(self, why: str, unix_s: float) -> None:
        """Take note why records may count never or twice from now on; the first time counts."""
        log.error("records may count never or twice from now on: %s", why)
        if not self._job.state.inexact:
            date = datetime.fromtimestamp(unix_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
            since = f"since {date}, pass {self._job.schedule.passes_over + 1}: {why}"
            self._job.change(inexact=since)
            self._job.stage()

    def note_incarnation(self, incarnation: StateIncarnation) -> None:
        """Take note of the state incarnation that the progress belongs to."""
        stream = self._job.state.stream
        if stream is not None:
            # All that is recorded of its periods is of one moment again.
            stream = replace(stream, is_replaced=False)
        self._job.change(stream=stream, **incarnation._asdict())
        self._job.stage()
        self._basis.notify()
