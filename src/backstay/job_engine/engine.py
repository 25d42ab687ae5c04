"""The engine of one job: its rounds, workers and figures, and what becomes of each event.

Each method takes an event, changes ledgers, schedule and worker set, and stages the records that
must be written. The shell answers a caller when they are. Time is read from the clock that is
given. Does no I/O.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone

from backstay.checkpoint.restore_state import RestoreState
from backstay.consensus.records.jobs import JobStateRecord, RunState, stream_job_of
from backstay.consensus.records.keys import JobKeys
from backstay.errors import InvalidRequest, JobRefused, LimitExceeded
from backstay.exits import EXIT_WRONG_SETTING
from backstay.job.metrics import METRICS
from backstay.job_engine.declared_tables import check_tables
from backstay.job_engine.known_workers import KnownWorker, KnownWorkers, WorkerSigns
from backstay.job_engine.launch import LauncherReport, WorkerWish
from backstay.job_engine.leases import RENEWALS_PER_S_MAX, wanted_lease_ttl_ms
from backstay.job_engine.open_round import Assignment, JobRounds, OpenRound, worker_policy
from backstay.job_engine.opening import OpenedJob, StateIncarnation, reconcile
from backstay.job_engine.progress import JobProgress, kept_job
from backstay.job_engine.records import Records
from backstay.job_engine.rows_change import (
    RowsChange,
    cause_of,
    change_of,
    what_to_do,
    why_inexact,
)
from backstay.job_engine.stalls import Stalls
from backstay.job_engine.task_store import TaskBits
from backstay.job_engine.values import DeadLetter, Failure, LeasedTask, first_attempt
from backstay.job_engine.worker_set import JobWorkers
from backstay.logs import message_of
from backstay.schedule.damaged import DamagedRecords
from backstay.schedule.evaluation import TaskOutputs
from backstay.schedule.rounds import RoundId, RoundKind, data_of
from backstay.schedule.schedule import Schedule

__all__ = ["JobEngine"]

EVALUATIONS_MAX = 100
TABLE_NOTES_MAX = 64
LAST_WORDS_MAX = 1000
SCALINGS_KEPT = 5
# A worker that runs and was not heard of for so many times the life of a lease hangs.
HANGS_AFTER_TTLS = 10
HANGS_AFTER_MIN_S = 30.0
# A worker that got no task asks again after this, times the number of workers: a crowd that waits
# makes no more than 1000 calls a second, which one job master answers beside its other work.
WAIT_MS_PER_WORKER = 1
WAIT_MS_MIN = 50
WAIT_MS_MAX = 10_000

log = logging.getLogger(__name__)


class JobEngine:
    """One job; not thread-safe."""

    def __init__(
        self,
        opened: OpenedJob,
        keys: JobKeys,
        records: Records,
        clock: Callable[[], float],
        *,
        renewals_per_s_max: int = RENEWALS_PER_S_MAX,
    ) -> None:
        """Take the job over as its records say.

        Args:
            opened: What the job is made of.
            keys: The job's keys.
            records: Where changes go.
            clock: Monotonic seconds.
            renewals_per_s_max: Of leases, which the shell can answer.
        """
        self.spec = opened.spec
        self.identity = opened.identity
        self.stream_job = stream_job_of(opened.identity.uid)
        self.tables = opened.tables
        self.schedule = opened.schedule
        self.rounds = JobRounds(opened.rounds, self.tables, self.spec, keys, records)
        self.damaged = opened.damaged
        self.known = KnownWorkers()
        # What became of settings that the job's tables did not have, in words.
        self.workers = JobWorkers(
            opened.workers, self.known, clock, drop=self.drop_worker, changed=self.stage_state
        )
        digests = {name: table.digest() for name, table in opened.tables.items()}
        # How long leases last by now; the record may be ahead of it (``plan_lease_ttl``).
        self.task_lease_ttl_ms = max(opened.spec.task_lease_ttl_ms, opened.state.task_lease_ttl_ms)
        self.state = replace(opened.state, data=digests, task_lease_ttl_ms=self.task_lease_ttl_ms)
        self.figures = Counter(opened.state.figures)
        self.keys = keys
        self.records = records
        self.now = clock
        self._renewals_per_s_max = renewals_per_s_max
        # Done since the last checkpoint was asked for.
        self.tasks_since_checkpoint = 0
        self.checkpoint_due = False
        self.trouble: dict[str, str] = {}
        # Whether the job ends with its schedule; else what looks after its checkpoints ends it.
        self._ends_itself = True
        # Whether it saves before it stops.
        self._saves_when_stopped = False
        self._wish = WorkerWish(0, ())
        # What the launcher told last.
        self.reported = LauncherReport()
        # The newest changes of the numbers of workers and servers by themselves, for people.
        self.scalings: deque[str] = deque(maxlen=SCALINGS_KEPT)
        # Why the last checkpoint is not written, though nothing else is left to do.
        self.unsaved = ""
        # Whether it is over but for a checkpoint that is being written.
        self.saves_still = False
        self.checkpoints_failed = 0
        self.stalls = Stalls(self.spec, self.known, lambda: self.rounds.values())
        self.rounds.on_leases = self.stalls.leases_changed
        self._count_all_steps()

    # Who waits for something to do, and who decides what comes next.

    def notify(self) -> None:
        """Say that there may be something new: tasks, rounds, the end. No call waits for it."""

    @property
    def is_over(self) -> bool:
        """Whether no more tasks will be given out."""
        return self.state.state != "running"

    def end(self, state: RunState, reason: str) -> None:
        """End the job, unless it has ended; workers hear of it with their next call."""
        if self.is_over:
            return
        log.info("the job is %s%s", state, f": {reason}" if reason else "")
        saves = self._saves_when_stopped and self.has_unsaved_steps
        self.saves_still = state == "stopped" and saves
        self.state = replace(self.state, state=state, reason=reason)
        self.workers.set.finish()
        self.stage_state()
        self.notify()

    @property
    def is_finished(self) -> bool:
        """Whether the schedule is at its end and the job is not over: it is to be saved."""
        return self.schedule.outcome is not None and not self.is_over

    @property
    def has_unsaved_steps(self) -> bool:
        """Whether steps were made since the newest checkpoint of a job that saves its model."""
        saves = self.spec.training is not None and self.spec.checkpoint.is_wanted
        return saves and self.schedule.steps != self.figures["saved_steps"]

    def finish(self) -> None:
        """End a job whose schedule is at its end."""
        outcome = self.schedule.outcome
        if outcome is None or self.is_over:
            return
        self.unsaved = ""
        if outcome == "finished_with_dead_letters":
            self.end("failed", self._dead_letters_text())
        else:
            self.end("done", self.schedule.reason)

    def stop(self, reason: str) -> None:
        """End the job because an operator asks for it."""
        if self.unsaved:
            self.end_unsaved(self.unsaved)
        else:
            self.end("stopped", reason)

    @property
    def ended(self) -> tuple[str, str] | None:
        """How the job ended, and why; None: it is not over."""
        return (self.state.state, self.state.reason) if self.is_over else None

    def end_unsaved(self, why: str) -> None:
        """End a job that is all done without its last checkpoint."""
        dead_letters = f"; {self._dead_letters_text()}" if self.schedule.dead_letters else ""
        self.end("unsaved", f"the last checkpoint was not written: {why}{dead_letters}")

    def _dead_letters_text(self) -> str:
        failed = f"{sum(self.schedule.dead_letters.values())} tasks failed for good"
        how = "`backstay jobs show` tells why, and the same command tries them again"
        return f"{failed}; {how}"

    # The launcher.

    def report(self, report: LauncherReport) -> None:
        """Take in what a launcher tells: what runs, and what has ended.

        A wrong setting, or too few workers that can be kept, ends the job. A worker that hangs is
        replaced.
        """
        wrong = ""
        told = {one.worker_id for one in self.reported.exits}
        self.reported = report
        for one in report.exits:
            if one.worker_id not in told:
                log.info("worker %s %s %s", one.worker_id, one.how, one.last_words.strip())
            # A launcher tells old exits again to a new job master.
            if one.code == EXIT_WRONG_SETTING and self.workers.set.has_place(one.worker_id):
                said = message_of(one.last_words.strip().rpartition("\n")[2])
                wrong = said[-LAST_WORDS_MAX:] or one.how
        self.workers.report(report)
        # No worker has the program running, so others would end in the same way.
        if wrong and not self.known.have_program():
            self.end("failed", f"the model file or a setting is wrong: {wrong}")
        self._replace_hanging(report.running)
        if self.workers.set.failed:
            self.end("failed", self.workers.set.failed)

    def _replace_hanging(self, running: Iterable[str]) -> None:
        now_s = self.now()
        limit_s = max(HANGS_AFTER_MIN_S, HANGS_AFTER_TTLS * self.task_lease_ttl_ms / 1000)
        for worker in running:
            known = self.known.get(worker)
            # One that has not joined yet may be importing its framework.
            if known is None or now_s - known.heard_s < limit_s:
                continue
            if self.workers.replace(worker, f"it was silent for {now_s - known.heard_s:.0f} s"):
                log.warning("worker %s hangs: it is replaced", worker)

    def wish(self) -> WorkerWish:
        """Return which workers should run. The launcher hears of it once the journal has it."""
        wanted = self.workers.wanted()
        if wanted != self._wish.workers or not self._wish.version:
            # Versions of an earlier job master must not be mistaken for this one's.
            version = max(self._wish.version, self.state.starts << 32) + 1
            self._wish = WorkerWish(version, wanted)
        return self._wish

    def scale(self, workers: int) -> int:
        """Want so many workers; returns how many were wanted before.

        Raises:
            JobRefused: The job is over.
            InvalidRequest: That is outside of the job's min and max.
        """
        if self.is_over:
            raise JobRefused(f"job {self.spec.name!r} is {self.state.state}")
        before = self.workers.scale(workers)
        self.notify()
        return before

    def follow_scaling(self, workers: int, lent: int, told: str) -> None:
        """Have another number of workers, or of servers elsewhere, because a rule says so.

        Args:
            workers: How many workers.
            lent: How many more are wanted once servers need their room no more.
            told: What changes and why, for people.

        Raises:
            InvalidRequest: The number is outside of the job's min and max.
        """
        if self.is_over:
            return
        if (workers, lent) != (self.workers.set.desired, self.workers.set.lent):
            self.workers.scale(workers, lent=lent)
        log.info("%s", told)
        self.scalings.append(told)
        self.notify()

    # Workers.

    def join(self, worker: str, instance: int, host: str, pid: int) -> None:
        """Take note of a worker's process.

        Raises:
            JobRefused: The job is over.
            InvalidRequest: Name or instance is missing.
            LimitExceeded: There are too many workers.
        """
        if self.is_over:
            raise JobRefused(f"job {self.spec.name!r} is {self.state.state}: {self.state.reason}")
        self.workers.join(worker, instance, host, pid)

    def hear(
        self, worker: str, instance: int, host: str, pid: int, *, sync_address: str = ""
    ) -> KnownWorker:
        """Take note of a worker's call. It may have joined at an earlier job master.

        Raises:
            WorkerReplaced: Another process has joined under its name.
            InvalidRequest: Name or instance is missing.
            LimitExceeded: There are too many workers.
        """
        known = self.known.hear(worker, instance, host, pid, self.now())
        known.sync_address = sync_address
        return known

    def ask_again_ms(self) -> int:
        """Return how long a worker that got no task is to wait before it asks again.

        A crowd that waits makes no more than 1000 calls a second.
        """
        return min(max(len(self.known) * WAIT_MS_PER_WORKER, WAIT_MS_MIN), WAIT_MS_MAX)

    @property
    def workers_know_end(self) -> bool:
        """Whether each living worker has heard that the job is over, and no stream is open."""
        ttl_s = self.task_lease_ttl_ms / 1000
        alive = [one for one in self.known if self.now() - one.heard_s < ttl_s]
        has_streams = any(opened.ledger.open_streams for opened in self.rounds.values())
        return not any(has_streams or not one.knows_end for one in alive)

    def told_end(self, worker: str) -> None:
        """Take note that a worker was told that the job is over."""
        if (known := self.known.get(worker)) is not None:
            known.knows_end = True
        self.notify()

    def plan_lease_ttl(self) -> int | None:
        """Have the record say how long leases are to last, if that is longer than they do.

        The caller waits for the journal and then calls :meth:`lengthen_leases`: the next job master
        takes leases over, and must not end one earlier than its worker was told.

        Returns:
            The time in ms. None: they last long enough.
        """
        # Workers on their way count as well: a job master that falls behind while they come stays
        # behind.
        workers = max(len(self.known), self.workers.set.desired)
        least_ms = self.spec.task_lease_ttl_ms
        wanted_ms = wanted_lease_ttl_ms(least_ms, workers, self._renewals_per_s_max)
        if wanted_ms > self.state.task_lease_ttl_ms:
            self.state = replace(self.state, task_lease_ttl_ms=wanted_ms)
            self.stage_state()
        planned_ms = self.state.task_lease_ttl_ms
        return planned_ms if planned_ms > self.task_lease_ttl_ms else None

    def lengthen_leases(self, ttl_ms: int) -> None:
        """Have leases last so long, as the record says by now; never shorter than before.

        A worker may not have heard of a shorter time.
        """
        self.task_lease_ttl_ms = max(self.task_lease_ttl_ms, ttl_ms)
        self.rounds.set_lease_ttl(self.task_lease_ttl_ms)

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
        check_tables(names, self.state.tables)
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

    def assign(self, worker: str) -> Assignment | None:
        """Give a worker a task, from the rounds that come first; None: there is none now."""
        if self.is_over:
            return None
        for round_id in self.schedule.open_rounds:
            opened = self.rounds.get(round_id)
            if opened is not None and self.spec.mode.kind == "sync" and _is_led(opened):
                return _led_by_other(opened, self.known, worker)
            grant = None if opened is None else opened.ledger.assign(worker, self.now())
            if opened is not None and grant is not None:
                if grant.speculative:
                    log.info("%s task %d is given to %s, too", round_id, grant.task, worker)
                self.rounds.stage(opened)
                self.stalls.begins(worker, self.now())
                return Assignment(opened, LeasedTask(grant.task, grant.attempt, grant.first_batch))
        return None

    def give(
        self,
        worker: str,
        request: int,
        incarnation: StateIncarnation | None,
        *,
        can_record: bool = True,
    ) -> Assignment | None:
        """Give a worker that asks a task; the same one if it repeats its request.

        Args:
            worker: Who asks; it was heard of.
            request: Number of its request; 0: it has none.
            incarnation: The rows that it pushes to; None: it does not say.
            can_record: Whether records can be written now. A lease that cannot be recorded is not
                told, and would expire through no fault of the worker.

        Returns:
            None: there is none now, or none for a worker with these rows (:meth:`goes_with`).
        """
        known = self.known.get(worker)
        if known is None:
            # It was dropped while it waited.
            return None
        known.has_program = True
        given = self._given_before(known, request)
        # What is acknowledged in another state incarnation is not in this one, and what is done
        # may have to be done again.
        if given is None and can_record and self.goes_with(incarnation):
            given = self.assign(worker)
        # Whom to follow is news each time.
        known.request, known.answer = request, None if given and given.leader else given
        return given

    def goes_with(self, incarnation: StateIncarnation | None) -> bool:
        """Return whether the progress is of the rows that a worker pushes to; None: unknown."""
        return incarnation is None or incarnation == self.incarnation

    def _given_before(self, known: KnownWorker, request: int) -> Assignment | None:
        """Return what the same request was given already, if that still holds."""
        given: Assignment | None = known.answer
        if not request or request != known.request or given is None:
            return None
        if self.rounds.get(given.round.id) is not given.round:
            return None
        leased = given.round.ledger.record_of(known.id).leased
        if not any(one[:2] == given.lease[:2] for one in leased):
            return None
        # The worker counts its time from this answer.
        revoked = given.round.ledger.renew(known.id, [given.lease], self.now())
        self.rounds.stage(given.round)
        return None if revoked else given

    def renew(
        self,
        worker: str,
        leases: Sequence[tuple[RoundId, LeasedTask]],
        signs: WorkerSigns | None = None,
    ) -> list[tuple[RoundId, LeasedTask]]:
        """Extend leases, and take in what their worker tells of itself; returns the revoked ones.

        Args:
            worker: Whose.
            leases: All that it has, with their batches that are acknowledged.
            signs: How far it is; None: it does not say.
        """
        known = self.known.get(worker)
        if known is not None and signs is not None:
            known.measure(signs, self.now())
            # It may have told its tables to an earlier job master.
            known.has_program |= bool(leases)
            self.stalls.heard(worker, signs, self.now())
        revoked: list[tuple[RoundId, LeasedTask]] = []
        by_round: dict[RoundId, list[LeasedTask]] = {}
        for round_id, leased in leases:
            by_round.setdefault(round_id, []).append(leased)
        for round_id, leased_tasks in by_round.items():
            opened = self.rounds.get(round_id)
            if opened is None or self.is_over:
                revoked += [(round_id, leased) for leased in leased_tasks]
                continue
            before = opened.ledger.batches
            over = opened.ledger.renew(worker, leased_tasks, self.now())
            revoked += [(round_id, leased) for leased in over]
            self.rounds.stage(opened)
            if opened.ledger.batches != before:
                self._count_steps(opened)
        return revoked

    def complete(
        self,
        worker: str,
        round_id: RoundId,
        lease: LeasedTask,
        *,
        batches: int,
        examples: int,
        damaged: int = 0,
        outputs: TaskOutputs | None = None,
        metrics: Mapping[str, str] | None = None,
    ) -> tuple[bool, bool]:
        """Take note that a task is done, and of what its worker found and brought.

        Args:
            worker: Who.
            round_id: Of which round.
            lease: Its lease of the task.
            batches: Of the whole task. All are acknowledged.
            examples: Records that its worker has worked on.
            damaged: How many records of the task are damaged; too many in the data end the job.
            outputs: What a task of an evaluation brought; what cannot be kept ends the job.
            metrics: What to compute from the outputs, by name.

        Returns:
            Whether this attempt counts, and whether the task became done by this call.
        """
        self._note_damaged(round_id, lease.task, damaged)
        opened = self.rounds.get(round_id)
        if opened is None:
            return False, False
        before = opened.ledger.counts.done
        counts = opened.ledger.complete(
            worker, lease.task, lease.attempt, self.now(), batches=batches
        )
        is_new = opened.ledger.counts.done > before
        self._count_steps(opened)
        if is_new:
            if round_id.kind is RoundKind.TRAINING:
                self.figures.update(examples=examples, tasks=1)
                self._checkpoint_every_tasks()
            elif self.spec.training is None:
                # What the job is there for; evaluations beside a training are not.
                self.figures.update(examples=examples)
            self.stage_state()
            if outputs is not None and opened.is_evaluation:
                self._keep_outputs(opened, lease.task, outputs, metrics or {})
        self.rounds.stage(opened)
        if opened.ledger.is_over:
            self.notify()
        return counts, is_new

    def damaged_left(self, round_id: RoundId, task: int) -> int:
        """Return how many damaged records a task may have, with those that others have."""
        data = data_of(round_id.kind)
        others = self.damaged.of_data(data) - self.damaged.of_task(data, task)
        return max(0, self.spec.max_bad_records - others)

    def _note_damaged(self, round_id: RoundId, task: int, records: int, first: str = "") -> None:
        """Take note of how many records of a task are damaged; too many in the data end the job."""
        data = data_of(round_id.kind)
        if round_id.kind is RoundKind.TRAIN_END or not self.damaged.note(data, task, records):
            return
        number, limit = DamagedRecords.part_of(task), self.spec.max_bad_records
        key = self.keys.damaged(data, number)
        # A task that is recorded as done is not read again in this pass.
        self.records.stage_first(key, lambda: self.damaged.part(data, number) or None)
        self.figures["bad_records"] = self.damaged.total
        self.stage_state()
        if self.damaged.of_data(data) > limit:
            found = f"{self.damaged.of_data(data)} damaged records in the {data} data"
            found += f" ({first})" if first else ""
            self.end("failed", f"{found}; max_bad_records allows {limit} in one pass over them")

    def _keep_outputs(
        self, opened: OpenRound, task: int, outputs: TaskOutputs, metrics: Mapping[str, str]
    ) -> None:
        unknown = set(metrics.values()) - METRICS.keys()
        try:
            if unknown:
                raise InvalidRequest(f"no metric {min(unknown)!r}; known: {', '.join(METRICS)}")
            opened.outputs.add(task, outputs)
        except (InvalidRequest, LimitExceeded) as error:
            self.end("failed", f"{opened.id}: {error}")
        else:
            opened.metrics.update(metrics)

    def give_back(
        self, worker: str, round_id: RoundId, lease: LeasedTask, reason: str, *, damaged: int = 0
    ) -> None:
        """End a lease for no fault of the task.

        Args:
            worker: Whose.
            round_id: Of which round.
            lease: The task, with its batches that are acknowledged.
            reason: For people.
            damaged: How many damaged records its worker met.
        """
        if damaged > self.damaged.of_task(data_of(round_id.kind), lease.task):
            # Of a task that was read in part only, more may be known.
            self._note_damaged(round_id, lease.task, damaged)
        opened = self.rounds.get(round_id)
        if opened is None:
            return
        log.info("%s gives %s task %d back: %s", worker, round_id, lease.task, reason)
        opened.ledger.give_back(
            worker, lease.task, lease.attempt, lease.acknowledged, reason=reason
        )
        self._came_back(opened)

    def fail(
        self,
        worker: str,
        round_id: RoundId,
        lease: LeasedTask,
        failure: Failure,
        *,
        damaged: int = 0,
        first_damaged: str = "",
    ) -> bool:
        """End a lease because the task failed; returns whether it is dead-lettered.

        Args:
            worker: Whose.
            round_id: Of which round.
            lease: The task, with its batches that are acknowledged.
            failure: Why.
            damaged: How many damaged records its worker met; more than the job allows end it.
            first_damaged: Where the first of them is, and what is wrong with it.
        """
        if damaged > self.spec.max_bad_records:
            # Another try would end alike.
            self._note_damaged(round_id, lease.task, damaged, first_damaged)
        opened = self.rounds.get(round_id)
        if opened is None:
            return False
        outcome = opened.ledger.fail(
            worker, lease.task, lease.attempt, failure, acknowledged=lease.acknowledged
        )
        level = logging.ERROR if outcome == "dead_lettered" else logging.WARNING
        last_line = failure.error.strip().rpartition("\n")[2]
        log.log(level, "%s task %d (%s): %s", round_id, lease.task, outcome, last_line)
        self._came_back(opened)
        return outcome == "dead_lettered"

    def drop_worker(self, worker: str, why: str) -> None:
        """Take back all tasks of a worker that is surely gone."""
        for opened in self.rounds.values():
            tasks = opened.ledger.drop_worker(worker)
            if tasks:
                log.warning("%s: %s; %s tasks %s go back", worker, why, opened.id, tasks)
            self._came_back(opened)
        self.known.forget(worker)

    def expire(self) -> float | None:
        """Take back the tasks whose leases have run out, or whose workers hang.

        Workers that were silent for long are forgotten.

        Returns:
            A time before which no lease runs out that there is now; None: there is none.
        """
        self.stalls.look(self.now())
        for opened in self.rounds.values():
            tasks = opened.ledger.expire(self.now())
            if tasks:
                log.warning("%s: the leases of tasks %s have run out", opened.id, tasks)
                self._came_back(opened)
        self.known.forget_silent(self.now())
        return self.rounds.next_expiry()

    # Streams.

    def closed(self, streams: Iterable[tuple[int, int]]) -> None:
        """Take note of streams (pass, task) that are closed on all servers."""
        if self.rounds.closed(streams):
            self.notify()

    def streams_to_close(self, worker: str) -> list[tuple[int, int]]:
        """Return streams (pass, task) that this worker is to close for others."""
        return self.rounds.streams_to_close(worker)

    # Rounds.

    def advance(self) -> list[OpenRound]:
        """Bring the rounds in line with the schedule; returns evaluations whose end is due.

        Call :meth:`evaluated` for each of those.
        """
        due: list[OpenRound] = []
        if self.schedule.outcome is None:
            # Tasks were put back, or a restore took the job back.
            self.unsaved = ""
        while not self.is_over:
            wanted = self.schedule.open_rounds
            self.rounds.cut_others(self.schedule.kept_rounds, self.schedule.reason)
            ended = [self._bring(round_id) for round_id in wanted]
            due = [one for one in ended if one is not None and one.is_evaluation]
            over = [one for one in ended if one is not None and not one.is_evaluation]
            for opened in over:
                dead_letters = opened.ledger.counts.dead_letters
                log.info(
                    "%s is over%s",
                    opened.id,
                    f", {dead_letters} tasks dead-lettered" if dead_letters else "",
                )
                self.schedule.round_over(opened.id, dead_letters=dead_letters)
                if opened.id.kind is RoundKind.TRAINING and self.spec.checkpoint.every == "pass":
                    self.checkpoint_due = True
            if not over:
                break
            self.stage_state()
            self.notify()
        self._end_with_schedule()
        self.rounds.drop_finished(self.schedule.kept_rounds)
        return due

    def evaluated(self, opened: OpenRound, metrics: Mapping[str, float]) -> None:
        """Take the metrics of an evaluation whose tasks are all over."""
        if self.rounds.get(opened.id) is not opened:
            # The cluster was restored meanwhile: these are figures of a model that is gone.
            return
        problems = opened.outputs.problems
        for name, problem in problems.items():
            log.warning("metric %s: %s", name, problem)
            self.note_trouble(f"metric {name}", problem)
        result = {
            "round": opened.id.number,
            "steps": opened.steps,
            "records": opened.outputs.records,
            # NaN and infinity are no JSON.
            "metrics": {name: repr(float(value)) for name, value in metrics.items()},
        }
        shown = ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())
        log.info("%s after %d steps: %s", opened.id, opened.steps, shown or "no metrics")
        # One that is done again after a restore takes the place of the first.
        others = [one for one in self.state.evaluations if one["round"] != result["round"]]
        kept = (*others, result)[-EVALUATIONS_MAX:]
        self.state = replace(self.state, evaluations=kept)
        self.schedule.round_over(
            opened.id, dead_letters=opened.ledger.counts.dead_letters, metrics=dict(metrics)
        )
        self.rounds.forget(opened.id)
        self.stage_state()
        self.notify()

    def retry_dead_letters(self, numbers: Sequence[int]) -> int:
        """Give dead-lettered tasks their tries again; none named: all of them.

        Raises:
            JobRefused: The job is over.
        """
        if self.is_over:
            raise JobRefused(
                f"job {self.spec.name!r} is {self.state.state}; start it again: that tries its "
                "dead-lettered tasks once more"
            )
        count = 0
        # First: without it, tasks that are not dead-lettered any more would be taken for over.
        self.stage_state()
        for opened in self.rounds.values():
            back = opened.ledger.retry_dead_letters(numbers or None)
            if back:
                self.schedule.reopen(opened.id)
                self._came_back(opened)
            count += len(back)
        return count

    def is_of_later_master(self, leased: LeasedTask) -> bool:
        """Whether a later job master gave the lease, so that this one no longer is one."""
        return leased.attempt >= first_attempt(self.state.starts + 1)

    # Checkpoints.

    def keep_checkpoints(self, *, servers_end: bool) -> None:
        """Let the job go on after its schedule, until its driver has saved what is to be kept.

        Args:
            servers_end: Whether the servers end with the job: what is not saved then is gone.
        """
        self._ends_itself = False
        self._saves_when_stopped = servers_end and self.spec.checkpoint.stop_wait_s > 0
        if self.state.state == "stopped":
            # It was stopped under an earlier job master, which may not have saved it.
            self.saves_still = self._saves_when_stopped and self.has_unsaved_steps

    def wait_unsaved(self, why: str) -> None:
        """Have a job that is all done wait for its last checkpoint; say why it is not written."""
        self.unsaved = why
        self.notify()

    def note_no_checkpoint(self, why: str, *, failed: bool = True) -> None:
        """Take note that no checkpoint was written.

        Args:
            why: For people.
            failed: Whether that is a failure; it is none if the cluster keeps no checkpoints.
        """
        self.note_trouble("checkpoint", why)
        self.checkpoints_failed += failed

    def stopped_is_saved(self) -> None:
        """Take note that a stopped job is saved, or that it will not be."""
        self.saves_still = False
        self.notify()

    def take_checkpoint_due(self) -> bool:
        """Return whether one is to be written now; the caller writes it."""
        due, self.checkpoint_due = self.checkpoint_due, False
        return due

    def note_checkpoint(self, checkpoint: str, steps: int, url: str) -> None:
        """Take note of the newest one, how many steps there were when it was begun, and where."""
        self.note_trouble("checkpoint", "")
        self.figures["saved_steps"] = steps
        self.state = replace(self.state, checkpoint=checkpoint, checkpoint_url=url)
        self.stage_state()

    def note_trouble(self, what: str, trouble: str) -> None:
        """Show people what is wrong with something; empty: nothing any more."""
        self.trouble[what] = trouble

    # The rows of the cluster.

    @property
    def incarnation(self) -> StateIncarnation:
        """The state incarnation that the progress goes with."""
        return StateIncarnation(self.state.restore_version, self.state.generation)

    def change_of_rows(self, restore: RestoreState) -> RowsChange:
        """Return what became of the rows that the progress goes with."""
        return change_of(self.incarnation, restore)

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
        Schedule.of(self.spec, progress.schedule)
        DamagedRecords().learn(progress.damaged)
        for one in progress.rounds.values():
            one.done_bits()
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
        """End a job for which there is no progress that goes with the restored rows."""
        reason = f"its progress cannot follow the restore of the cluster: {why}"
        self.end("failed", f"{reason}. Restore another checkpoint, or begin with --fresh")

    def go_back(self, progress: JobProgress | None, restore_version: int = 0) -> None:
        """Take progress that was restored with the model; None: begin anew.

        All leases are void from now on. A job that had ended goes on, unless the progress says
        that it had ended then, too.
        """
        schedule = Schedule.of(self.spec, "" if progress is None else progress.schedule)
        kept = {} if progress is None else progress.rounds
        before = self.figures
        self.figures = Counter({} if progress is None else progress.figures)
        times = max(before["went_back"], self.figures["went_back"])
        # A job that continues in a new cluster has nothing there to lose. If the journal was not
        # written, the job follows the same restore again: that counts once.
        if before["tasks"] > 0 and before["went_back_by"] != restore_version:
            times += 1
        self.figures["went_back"], self.figures["went_back_by"] = times, restore_version
        if progress is not None:
            self.damaged.learn(progress.damaged)
            for (data, number), text in self.damaged.parts().items():
                self.records.stage_text(self.keys.damaged(data, number), text)
        self.figures["bad_records"] = self.damaged.total
        inexact = "" if progress is None else progress.inexact
        begun = schedule.passes_begun(0 if progress is None else progress.passes_begun)
        self.rounds.erase_all(range(schedule.passes_over + 1, self.state.passes_begun + 1))
        starts = self.state.starts + 1
        self.state = replace(self.state, starts=starts, inexact=inexact, passes_begun=begun)
        self.schedule = schedule
        for round_id, one in kept.items():
            self._open(round_id, *reconcile(schedule, round_id, one.done_bits(), one.dead_letters))
        self.rounds.stage_all()
        self._count_all_steps()
        # Later ones are of a model that is gone.
        steps = self.figures["steps"]
        evaluations = tuple(one for one in self.state.evaluations if one["steps"] <= steps)
        self.state = replace(self.state, evaluations=evaluations)
        # Before any attempt of this start is recorded: no job master gives their numbers again.
        self.stage_state()
        if schedule.outcome is None and self.is_over:
            self.state = replace(self.state, state="running", reason="")
            self.workers.begin_anew(worker_policy(self.spec))
        for known in self.known:
            known.answer = None

    def note_inexact(self, why: str, unix_s: float) -> None:
        """Take note why records may count never or twice from now on; the first time counts."""
        log.error("records may count never or twice from now on: %s", why)
        if not self.state.inexact:
            date = datetime.fromtimestamp(unix_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
            since = f"since {date}, pass {self.schedule.passes_over + 1}: {why}"
            self.state = replace(self.state, inexact=since)
            self.stage_state()

    def note_incarnation(self, incarnation: StateIncarnation) -> None:
        """Take note of the state incarnation that the progress goes with."""
        self.state = replace(self.state, **incarnation._asdict())
        self.stage_state()
        self.notify()

    # How it is done.

    def stage_state(self) -> None:
        """Have the journal write where the job stands."""
        self.records.stage(self.keys.state, lambda: self.record().to_json())

    def record(self) -> JobStateRecord:
        """Return where the job stands, as it is recorded."""
        return replace(
            self.state,
            schedule=self.schedule.to_json(),
            workers=self.workers.set.to_json(),
            figures={**self.figures, "steps": self.schedule.steps},
        )

    def _open(
        self,
        round_id: RoundId,
        done: TaskBits | None = None,
        dead_letters: Iterable[DeadLetter] = (),
    ) -> OpenRound:
        return self.rounds.open(
            round_id,
            first_attempt=first_attempt(self.state.starts),
            task_lease_ttl_ms=self.task_lease_ttl_ms,
            steps=self.schedule.steps,
            done=done,
            dead_letters=dead_letters,
        )

    def _bring(self, round_id: RoundId) -> OpenRound | None:
        """Open a round unless it is open; returns it if it is over."""
        opened = self.rounds.get(round_id)
        if opened is None:
            opened = self._open(round_id)
            if round_id.kind is RoundKind.TRAINING and round_id.number > self.state.passes_begun:
                self.state = replace(self.state, passes_begun=round_id.number)
                self.stage_state()
            log.info("%s begins: %d tasks", round_id, len(opened.table))
            self.notify()
        return opened if opened.ledger.is_over else None

    def _end_with_schedule(self) -> None:
        if self._ends_itself:
            self.finish()

    def _count_steps(self, opened: OpenRound) -> None:
        before = self.schedule.open_rounds
        self.schedule.count_steps(opened.id, opened.ledger.batches)
        if self.schedule.open_rounds != before:
            self.stage_state()
            self.notify()

    def _count_all_steps(self) -> None:
        for opened in self.rounds.values():
            self._count_steps(opened)

    def _came_back(self, opened: OpenRound) -> None:
        self.rounds.stage(opened)
        self._count_steps(opened)
        self.notify()

    def _checkpoint_every_tasks(self) -> None:
        every = self.spec.checkpoint.every_tasks
        self.tasks_since_checkpoint += 1
        if every and self.tasks_since_checkpoint >= every:
            self.tasks_since_checkpoint = 0
            self.checkpoint_due = True
            self.notify()


# Sync mode: one training task at a time. The worker with its lease leads its steps, and who asks
# for a task meanwhile is sent there.


def _is_led(opened: OpenRound) -> bool:
    """Return whether a worker has a lease of a task of this round, which must be of training."""
    return opened.id.kind is RoundKind.TRAINING and opened.ledger.counts.doing > 0


def _led_by_other(opened: OpenRound, known: KnownWorkers, worker: str) -> Assignment | None:
    """Return the task of the leader.

    None if no leader is known: the leader has not been heard of since this job master began, it
    hangs, or it is this worker itself.
    """
    for lease in opened.ledger.leases:
        leader = known.get(lease.worker)
        leads = lease.worker != worker and not (lease.expired or lease.withdrawn)
        if leads and leader is not None and leader.sync_address:
            return Assignment(
                opened, LeasedTask(lease.task.number, lease.attempt, 0), leader.sync_address
            )
    return None
