"""Workers come and go: they join, call and leave; a launcher reports which processes run and ended.

A worker that has ended, hangs or is replaced by another process loses its tasks at once. May import
``job_engine``; does no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from backstay.errors import BackstayError, InvalidRequest, JobRefused, TableConflict
from backstay.exit_codes import ExitCode
from backstay.job_engine.job_rounds import JobRounds
from backstay.job_engine.known_workers import KnownWorker, KnownWorkers
from backstay.job_engine.launch import ExitReason, LauncherReport, WorkerExit, WorkerWish
from backstay.job_engine.refusals import Refusals
from backstay.job_engine.standing import Basis, Standing
from backstay.logs import message_of

__all__ = ["WorkerEvents"]

TABLES_MAX = 64
TABLE_NOTES_MAX = 64
LAST_WORDS_MAX = 1000
# A worker that runs and was not heard of for so many times the life of a lease hangs.
HANGS_AFTER_TTLS = 10
HANGS_AFTER_MIN_S = 30.0

log = logging.getLogger(__name__)


class WorkerEvents:
    """The events of workers and launchers."""

    def __init__(
        self,
        basis: Basis,
        job: Standing,
        rounds: JobRounds,
        known: KnownWorkers,
        refusals: Refusals,
    ) -> None:
        """Take the parts that workers change."""
        self._basis = basis
        self._job = job
        self._rounds = rounds
        self._known = known
        self._refusals = refusals
        # What the launcher told last, and what it was told.
        self.reported = LauncherReport()
        self._wish = WorkerWish(0, ())

    def join(self, worker: str, instance: int, host: str, pid: int) -> None:
        """Take note of a worker's process.

        Raises:
            JobRefused: The job is over.
            InvalidRequest: Name or instance is missing.
            LimitExceeded: There are too many workers.
        """
        try:
            if self._job.is_over:
                state = self._job.state
                raise JobRefused(f"job {self._basis.spec.name!r} is {state.state}: {state.reason}")
            _, replaces = self._known.join(worker, instance, host, pid, self._basis.now())
        except BackstayError as error:
            self._refusals.log_error(worker, error, self._basis.now())
            raise
        if replaces:
            self._rounds.take_back(worker, "another process has joined in its place")

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
            known = self._known.hear(worker, instance, host, pid, self._basis.now())
        except BackstayError as error:
            self._refusals.log_error(worker, error, self._basis.now())
            raise
        known.sync_address = sync_address
        return known

    def drop_worker(self, worker: str, why: str) -> None:
        """Take back all tasks of a worker that is surely gone, and forget it."""
        self._rounds.take_back(worker, why)
        self._known.forget(worker)

    def told_end(self, worker: str) -> None:
        """Take note that a worker was told that the job is over."""
        if (known := self._known.get(worker)) is not None:
            known.knows_end = True
        self._basis.notify()

    @property
    def know_end(self) -> bool:
        """Whether each living worker has heard that the job is over, and no stream is open."""
        ttl_s = self._rounds.task_lease_ttl_ms / 1000
        alive = [one for one in self._known if self._basis.now() - one.heard_s < ttl_s]
        has_streams = any(opened.ledger.open_streams for opened in self._rounds.values())
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
            _check_tables(names, self._job.state.tables)
        except BackstayError as error:
            self._refusals.log_error(worker, error, self._basis.now())
            raise
        if not self._job.state.tables:
            self._job.change(tables=tuple(names))
            self._job.stage()
        for note in notes:
            told = self._job.state.table_notes
            if note not in told and len(told) < TABLE_NOTES_MAX:
                log.info("%s", note)
                # A short job may be over before anyone has asked its job master.
                self._job.change(table_notes=(*told, note))
                self._job.stage()
        if (known := self._known.get(worker)) is not None:
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
        self._job.workers.note_waiting(report.waiting)
        for end in self._job.workers.running(report.running, self._basis.now()):
            self._worker_ended(end)
        # No worker has the program running, so others would end in the same way.
        if wrong and not self._known.have_program():
            self._job.end("failed", wrong)
        self._replace_hanging(report.running)
        if self._job.workers.failed:
            self._job.end("failed", self._job.workers.failed)

    def _wrong_setting(self, exits: Iterable[WorkerExit]) -> str:
        """Return why a worker ended that would end so again; empty: none did."""
        wrong = ""
        for end in exits:
            # A launcher tells old exits again to a new job master.
            if end.code == ExitCode.WRONG_SETTING and self._job.workers.has_place(end.worker_id):
                said = message_of(end.last_words.strip().rpartition("\n")[2])
                what = "the model file or a setting is wrong"
                if end.reason in (ExitReason.CANNOT_START, ExitReason.NOT_ALLOWED):
                    what = "no worker can be started"
                wrong = f"{what}: {said[-LAST_WORDS_MAX:] or end.how}"
        return wrong

    def _worker_ended(self, end: WorkerExit) -> None:
        self._job.workers.exited(end, self._basis.now())
        self.drop_worker(end.worker_id, f"it {end.how}")
        self._job.stage()

    def _replace_hanging(self, running: Iterable[str]) -> None:
        now_s = self._basis.now()
        limit_s = max(HANGS_AFTER_MIN_S, HANGS_AFTER_TTLS * self._rounds.task_lease_ttl_ms / 1000)
        for worker in running:
            known = self._known.get(worker)
            # One that has not joined yet may be importing its framework.
            if known is None or now_s - known.heard_s < limit_s:
                continue
            if self._job.workers.replace(worker, now_s):
                self.drop_worker(worker, f"it was silent for {now_s - known.heard_s:.0f} s")
                self._job.stage()
                log.warning("worker %s hangs: it is replaced", worker)

    def wish(self) -> WorkerWish:
        """Return which workers should run. The launcher hears of it once the journal has it."""
        wanted = self._job.workers.wanted(self._basis.now())
        if wanted != self._wish.workers:
            self._job.stage()
        if wanted != self._wish.workers or not self._wish.version:
            # Versions of an earlier job master must not be mistaken for this one's.
            version = max(self._wish.version, self._job.state.starts << 32) + 1
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
