"""Workers come and go: they join, call and leave; a launcher reports which processes run and ended.

A worker that has ended, hangs or is replaced by another process loses its tasks at once. May import
``job_engine``; does no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

from backstay.errors import BackstayError, InvalidRequest, JobRefused, TableConflict
from backstay.exit_codes import ExitCode
from backstay.job_engine.core import JobCore
from backstay.job_engine.known_workers import KnownWorker
from backstay.job_engine.launch import ExitReason, LauncherReport, WorkerExit, WorkerWish
from backstay.logs import message_of

__all__ = ["WorkerEvents"]

TABLES_MAX = 64
TABLE_NOTES_MAX = 64
LAST_WORDS_MAX = 1000
# A worker that runs and was not heard of for so many times the life of a lease hangs.
HANGS_AFTER_TTLS = 10
HANGS_AFTER_MIN_S = 30.0

log = logging.getLogger(__name__)


class WorkerEvents(JobCore):
    """The events of workers and launchers."""

    def join(self, worker: str, instance: int, host: str, pid: int) -> None:
        """Take note of a worker's process.

        Raises:
            JobRefused: The job is over.
            InvalidRequest: Name or instance is missing.
            LimitExceeded: There are too many workers.
        """
        try:
            if self.is_over:
                state = self.state
                raise JobRefused(f"job {self.spec.name!r} is {state.state}: {state.reason}")
            _, replaces = self.known.join(worker, instance, host, pid, self.now())
        except BackstayError as error:
            self.refusals.log_error(worker, error, self.now())
            raise
        if replaces:
            self._take_tasks_back(worker, "another process has joined in its place")

    def hear(
        self, worker: str, instance: int, host: str, pid: int, *, sync_address: str = ""
    ) -> KnownWorker:
        """Take note of a worker's call. It may have joined at an earlier job master.

        Raises:
            WorkerReplaced: Another process has joined under its name.
            InvalidRequest: Name or instance is missing.
            LimitExceeded: There are too many workers.
        """
        try:
            known = self.known.hear(worker, instance, host, pid, self.now())
        except BackstayError as error:
            self.refusals.log_error(worker, error, self.now())
            raise
        known.sync_address = sync_address
        return known

    def told_end(self, worker: str) -> None:
        """Take note that a worker was told that the job is over."""
        if (known := self.known.get(worker)) is not None:
            known.knows_end = True
        self.notify()

    @property
    def workers_know_end(self) -> bool:
        """Whether each living worker has heard that the job is over, and no stream is open."""
        ttl_s = self.task_lease_ttl_ms / 1000
        alive = [one for one in self.known if self.now() - one.heard_s < ttl_s]
        has_streams = any(opened.ledger.open_streams for opened in self.rounds.values())
        return not any(has_streams or not one.knows_end for one in alive)

    def declare_tables(
        self, names: Sequence[str], notes: Sequence[str] = (), *, worker: str = ""
    ) -> None:
        """Take the job's tables from the first worker, and compare those of the others.

        Args:
            names: Of the tables.
            notes: What became of settings that the tables did not have.
            worker: Whose they are. If they fit, its program runs.

        Raises:
            TableConflict: They differ.
            InvalidRequest: These cannot be the tables of a job.
        """
        try:
            _check_tables(names, self.state.tables)
        except BackstayError as error:
            self.refusals.log_error(worker, error, self.now())
            raise
        if not self.state.tables:
            self.state = replace(self.state, tables=tuple(names))
            self.stage_state()
        for note in notes:
            told = self.state.table_notes
            if note not in told and len(told) < TABLE_NOTES_MAX:
                log.info("%s", note)
                # A short job may be over before anyone has asked its job master.
                self.state = replace(self.state, table_notes=(*told, note))
                self.stage_state()
        if (known := self.known.get(worker)) is not None:
            known.has_program = True

    # The launcher.

    def report(self, report: LauncherReport) -> None:
        """Take in what a launcher tells: which processes run, and which have ended.

        A wrong setting, or too few workers that can be kept, ends the job. A worker that hangs is
        replaced.
        """
        told = {end.worker_id for end in self.reported.exits}
        self.reported = report
        # Asked first: a worker that has ended is not one of the wanted ones any more.
        wrong = self._wrong_setting(report.exits)
        for end in report.exits:
            if end.worker_id not in told:
                log.info("worker %s %s %s", end.worker_id, end.how, end.last_words.strip())
            self._worker_ended(end)
        self.workers.note_waiting(report.waiting)
        for end in self.workers.running(report.running, self.now()):
            self._worker_ended(end)
        # No worker has the program running, so others would end in the same way.
        if wrong and not self.known.have_program():
            self.end("failed", wrong)
        self._replace_hanging(report.running)
        if self.workers.failed:
            self.end("failed", self.workers.failed)

    def _wrong_setting(self, exits: Iterable[WorkerExit]) -> str:
        """Return why a worker ended that would end so again; empty: none did."""
        wrong = ""
        for end in exits:
            # A launcher tells old exits again to a new job master.
            if end.code == ExitCode.WRONG_SETTING and self.workers.has_place(end.worker_id):
                said = message_of(end.last_words.strip().rpartition("\n")[2])
                what = "the model file or a setting is wrong"
                if end.reason in (ExitReason.CANNOT_START, ExitReason.NOT_ALLOWED):
                    what = "no worker can be started"
                wrong = f"{what}: {said[-LAST_WORDS_MAX:] or end.how}"
        return wrong

    def _worker_ended(self, end: WorkerExit) -> None:
        self.workers.exited(end, self.now())
        self.drop_worker(end.worker_id, f"it {end.how}")
        self.stage_state()

    def _replace_hanging(self, running: Iterable[str]) -> None:
        now_s = self.now()
        limit_s = max(HANGS_AFTER_MIN_S, HANGS_AFTER_TTLS * self.task_lease_ttl_ms / 1000)
        for worker in running:
            known = self.known.get(worker)
            # One that has not joined yet may be importing its framework.
            if known is None or now_s - known.heard_s < limit_s:
                continue
            if self.workers.replace(worker, now_s):
                self.drop_worker(worker, f"it was silent for {now_s - known.heard_s:.0f} s")
                self.stage_state()
                log.warning("worker %s hangs: it is replaced", worker)

    def wish(self) -> WorkerWish:
        """Return which workers should run. The launcher hears of it once the journal has it."""
        wanted = self.workers.wanted(self.now())
        if wanted != self._wish.workers:
            self.stage_state()
        if wanted != self._wish.workers or not self._wish.version:
            # Versions of an earlier job master must not be mistaken for this one's.
            version = max(self._wish.version, self.state.starts << 32) + 1
            self._wish = WorkerWish(version, wanted)
        return self._wish


def _check_tables(names: Sequence[str], known: Sequence[str]) -> None:
    """Check a worker's list of tables: every worker's model makes the same ones, in one order.

    A batch's pushes are numbered by it, so two lists would let batches count twice or not at all.

    Args:
        names: The worker's.
        known: The job's; empty: not known yet.

    Raises:
        TableConflict: They differ; the message says where.
        InvalidRequest: These cannot be the tables of a job.
    """
    if len(names) > TABLES_MAX or len(set(names)) != len(names):
        raise InvalidRequest(
            f"{len(names)} tables: at most {TABLES_MAX}, each once; a job's batches are numbered "
            "by batch and table"
        )
    if not known:
        return
    for number, (theirs, ours) in enumerate(zip(names, known, strict=False)):
        if theirs != ours:
            raise TableConflict(
                f"table {number} of this worker's model is {theirs!r}, of the job's {ours!r}: each "
                "worker must run the same model file with the same parameters"
            )
    if len(names) != len(known):
        raise TableConflict(
            f"this worker's model makes {len(names)} tables, the job has {len(known)} "
            f"({', '.join(known)}): each worker must run the same model file"
        )
