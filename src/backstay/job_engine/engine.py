"""The engine of one job: its rounds, workers and figures, and what becomes of each event.

Each method takes an event, changes ledgers, schedule and worker set, and stages the records that
must be written. Whoever answers a caller waits until they are. Time is read from the clock that is
given. Does no I/O.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from backstay.consensus.job_records import RunState, stream_job_of
from backstay.consensus.keys import JobKeys
from backstay.errors import InvalidRequest, LimitExceeded
from backstay.job.metrics import METRICS
from backstay.job_engine.declared_tables import check_tables
from backstay.job_engine.job_rounds import JobRounds
from backstay.job_engine.job_workers import JobWorkers
from backstay.job_engine.known_workers import KnownWorkers
from backstay.job_engine.open_round import Assignment, OpenRound, worker_policy
from backstay.job_engine.opened_job import OpenedJob, StateIncarnation
from backstay.job_engine.progress import JobProgress
from backstay.job_engine.reconcile import reconcile
from backstay.job_engine.records import Records
from backstay.job_engine.stalls import Stalls
from backstay.job_engine.task_bits import TaskBits
from backstay.job_engine.values import ATTEMPTS_PER_MASTER, DeadLetter, Failure, LeasedTask
from backstay.schedule.damaged import DamagedRecords
from backstay.schedule.evaluation import TaskOutputs
from backstay.schedule.rounds import RoundId, RoundKind, data_of
from backstay.schedule.schedule import Schedule

__all__ = ["JobEngine"]

EVALUATIONS_MAX = 100
TABLE_NOTES_MAX = 64

log = logging.getLogger(__name__)


class JobEngine:
    """One job; not thread-safe."""

    def __init__(
        self, opened: OpenedJob, keys: JobKeys, records: Records, clock: Callable[[], float]
    ) -> None:
        """Take the job over as its records say.

        Args:
            opened: What the job is made of.
            keys: The job's keys.
            records: Where changes go.
            clock: Monotonic seconds.
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
        self.table_notes: list[str] = []
        self.workers = JobWorkers(
            opened.workers, self.known, clock, drop=self.drop_worker, changed=self.stage_state
        )
        digests = {name: table.digest() for name, table in opened.tables.items()}
        # How long leases last by now; the record may be ahead of it (``lease_time``).
        self.task_lease_ttl_ms = max(opened.spec.task_lease_ttl_ms, opened.state.task_lease_ttl_ms)
        self.state = replace(opened.state, data=digests, task_lease_ttl_ms=self.task_lease_ttl_ms)
        self.figures = Counter(opened.state.figures)
        self.keys = keys
        self.records = records
        self.now = clock
        # Done since the last checkpoint was asked for.
        self.tasks_since_checkpoint = 0
        self.checkpoint_due = False
        self.trouble: dict[str, str] = {}
        # Whether the job ends with its schedule; else whoever looks after its checkpoints ends it.
        self.ends_itself = True
        # Whether it saves before it stops.
        self.saves_when_stopped = False
        # Why the last checkpoint is not written, though nothing else is left to do.
        self.unsaved = ""
        # Whether it is over but for a checkpoint that is being written.
        self.saves_still = False
        self.checkpoints_failed = 0
        self.stalls = Stalls(self.spec, self.known, lambda: self.rounds.values())
        self._count_all_steps()

    # Who waits for something to do, and who decides what comes next.

    def notify(self) -> None:
        """Say that there may be something new: tasks, rounds, the end. Nobody waits for it here."""

    @property
    def is_over(self) -> bool:
        """Whether no more tasks will be given out."""
        return self.state.state != "running"

    def end(self, state: RunState, reason: str) -> None:
        """End the job, unless it has ended; workers hear of it with their next call."""
        if self.is_over:
            return
        log.info("the job is %s%s", state, f": {reason}" if reason else "")
        self.saves_still = state == "stopped" and self.saves_when_stopped and self.has_unsaved_steps
        self.state = replace(self.state, state=state, reason=reason)
        self.workers.finish()
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

    def end_unsaved(self, why: str) -> None:
        """End a job that is all done without its last checkpoint."""
        dead_letters = f"; {self._dead_letters_text()}" if self.schedule.dead_letters else ""
        self.end("unsaved", f"the last checkpoint was not written: {why}{dead_letters}")

    def _dead_letters_text(self) -> str:
        failed = f"{sum(self.schedule.dead_letters.values())} tasks failed for good"
        how = "`backstay jobs show` tells why, and the same command tries them again"
        return f"{failed}; {how}"

    # Workers.

    def plan_lease_time(self, ttl_ms: int) -> None:
        """Have the record say that leases are to last so long; see ``lease_time``."""
        self.state = replace(self.state, task_lease_ttl_ms=ttl_ms)
        self.stage_state()

    def take_lease_time(self) -> None:
        """Have leases last as long as the record says, which must be written."""
        self.task_lease_ttl_ms = self.state.task_lease_ttl_ms
        self.rounds.set_lease_ttl(self.task_lease_ttl_ms)

    def declare_tables(self, names: Sequence[str], notes: Sequence[str] = ()) -> None:
        """Take the job's tables from the first worker, and compare those of the others.

        Args:
            names: Of the tables.
            notes: What became of settings that the tables did not have.

        Raises:
            TableConflict: They differ.
            InvalidRequest: These cannot be the tables of a job.
        """
        check_tables(names, self.state.tables)
        if not self.state.tables:
            self.state = replace(self.state, tables=tuple(names))
            self.stage_state()
        for note in notes:
            if note not in self.table_notes and len(self.table_notes) < TABLE_NOTES_MAX:
                log.info("%s", note)
                self.table_notes.append(note)

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

    def renew(
        self, worker: str, leases: Iterable[tuple[RoundId, LeasedTask]]
    ) -> list[tuple[RoundId, LeasedTask]]:
        """Extend leases; returns those that are revoked."""
        revoked: list[tuple[RoundId, LeasedTask]] = []
        by_round: dict[RoundId, list[LeasedTask]] = {}
        for round_id, leased in leases:
            by_round.setdefault(round_id, []).append(leased)
        for round_id, leased_tasks in by_round.items():
            opened = self.rounds.get(round_id)
            if opened is None or self.is_over:
                revoked += [(round_id, leased) for leased in leased_tasks]
                continue
            over = opened.ledger.renew(worker, leased_tasks, self.now())
            revoked += [(round_id, leased) for leased in over]
            self.rounds.stage(opened)
            self._count_steps(opened)
        return revoked

    def note_damaged(self, round_id: RoundId, task: int, records: int, first: str = "") -> bool:
        """Take note of the damaged records that a task was found to have; too many end the job.

        Args:
            round_id: Of which round.
            task: Its number.
            records: How many.
            first: Where the first of them is, and what is wrong, as far as known.

        Returns:
            Whether that is news. It must be written before the task is recorded as done: nobody
            reads it again in this pass.
        """
        data = data_of(round_id.kind)
        if round_id.kind is RoundKind.TRAIN_END or not self.damaged.note(data, task, records):
            return False
        number, limit = DamagedRecords.part_of(task), self.spec.max_bad_records
        key = self.keys.damaged(data, number)
        self.records.stage(key, lambda: self.damaged.part(data, number) or None)
        self.figures["bad_records"] = self.damaged.total
        self.stage_state()
        if self.damaged.of_data(data) > limit:
            found = f"{self.damaged.of_data(data)} damaged records in the {data} data"
            found += f" ({first})" if first else ""
            self.end("failed", f"{found}; max_bad_records allows {limit} in one pass over them")
        return True

    def complete(
        self, worker: str, round_id: RoundId, lease: LeasedTask, examples: int
    ) -> tuple[bool, bool]:
        """Take note that a task is done.

        Returns:
            Whether this attempt counts, and whether the task became done by this call.
        """
        opened = self.rounds.get(round_id)
        if opened is None:
            return False, False
        before = opened.ledger.counts.done
        counts = opened.ledger.complete(
            worker, lease.task, lease.attempt, self.now(), batches=lease.acknowledged
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
        self.rounds.stage(opened)
        if opened.ledger.is_over:
            self.notify()
        return counts, is_new

    def add_outputs(
        self, round_id: RoundId, task: int, outputs: TaskOutputs, metrics: Mapping[str, str]
    ) -> None:
        """Keep what an evaluation task brought; what cannot be kept ends the job."""
        opened = self.rounds.get(round_id)
        if opened is None:
            return
        unknown = set(metrics.values()) - METRICS.keys()
        try:
            if unknown:
                raise InvalidRequest(f"no metric {min(unknown)!r}; known: {', '.join(METRICS)}")
            opened.outputs.add(task, outputs)
        except (InvalidRequest, LimitExceeded) as error:
            self.end("failed", f"{round_id}: {error}")
        else:
            opened.metrics.update(metrics)

    def give_back(self, worker: str, round_id: RoundId, lease: LeasedTask, reason: str) -> None:
        """End a lease for no fault of the task."""
        opened = self.rounds.get(round_id)
        if opened is None:
            return
        log.info("%s gives %s task %d back: %s", worker, round_id, lease.task, reason)
        opened.ledger.give_back(
            worker, lease.task, lease.attempt, lease.acknowledged, self.now(), reason=reason
        )
        self._came_back(opened)

    def fail(self, worker: str, round_id: RoundId, lease: LeasedTask, failure: Failure) -> bool:
        """End a lease because the task failed; returns whether it is dead-lettered."""
        opened = self.rounds.get(round_id)
        if opened is None:
            return False
        outcome = opened.ledger.fail(
            worker, lease.task, lease.attempt, failure, self.now(), acknowledged=lease.acknowledged
        )
        level = logging.ERROR if outcome == "dead_lettered" else logging.WARNING
        last_line = failure.error.strip().rpartition("\n")[2]
        log.log(level, "%s task %d (%s): %s", round_id, lease.task, outcome, last_line)
        self._came_back(opened)
        return outcome == "dead_lettered"

    def drop_worker(self, worker: str, why: str) -> None:
        """Take back all tasks of a worker that is surely gone."""
        for opened in self.rounds.values():
            tasks = opened.ledger.drop_worker(worker, self.now())
            if tasks:
                log.warning("%s: %s; %s tasks %s go back", worker, why, opened.id, tasks)
            self._came_back(opened)
        self.known.forget(worker)

    def expire(self) -> None:
        """Take back the tasks whose leases have run out, or whose workers hang."""
        self.stalls.look(self.now())
        for opened in self.rounds.values():
            tasks = opened.ledger.expire(self.now())
            if tasks:
                log.warning("%s: the leases of tasks %s have run out", opened.id, tasks)
                self._came_back(opened)

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
            # The cluster was restored meanwhile: these are figures of a model that is no more.
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
        kept = (*self.state.evaluations, result)[-EVALUATIONS_MAX:]
        self.state = replace(self.state, evaluations=kept)
        self.schedule.round_over(
            opened.id, dead_letters=opened.ledger.counts.dead_letters, metrics=dict(metrics)
        )
        self.rounds.forget(opened.id)
        self.stage_state()
        self.notify()

    def retry_dead_letters(self, numbers: Sequence[int]) -> int:
        """Give dead-lettered tasks their tries again; none named: all of them."""
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

    # Checkpoints.

    def take_checkpoint_due(self) -> bool:
        """Return whether one is to be written now; whoever asks writes it."""
        due, self.checkpoint_due = self.checkpoint_due, False
        return due

    def note_checkpoint(self, checkpoint: str, steps: int, url: str) -> None:
        """Take note of the newest one, how many steps there were when it was begun, and where."""
        self.figures["saved_steps"] = steps
        self.state = replace(self.state, checkpoint=checkpoint, checkpoint_url=url)
        self.stage_state()

    def note_trouble(self, what: str, trouble: str) -> None:
        """Show people what is wrong with something; empty: nothing any more."""
        self.trouble[what] = trouble

    def go_back(self, progress: JobProgress | None) -> None:
        """Take progress that was restored with the model; None: begin anew.

        All leases are void from now on. The caller waits for the journal, and only then takes note
        of the restore with :meth:`note_incarnation`. A job that had ended goes on, unless the
        progress says that it had ended then, too.
        """
        schedule = Schedule.of(self.spec, "" if progress is None else progress.schedule)
        kept = {} if progress is None else progress.rounds
        self.figures = Counter({} if progress is None else progress.figures)
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
        # Before any attempt of this start is recorded: no master gives their numbers again.
        self.stage_state()
        if schedule.outcome is None and self.is_over:
            self.state = replace(self.state, state="running", reason="")
            self.workers.begin_anew(worker_policy(self.spec))
        for known in self.known:
            known.answer = None

    def note_inexact(self, why: str) -> None:
        """Take note since when and why records may count never or twice; the first time counts."""
        if not self.state.inexact:
            self.state = replace(self.state, inexact=why)
            self.stage_state()

    def note_incarnation(self, incarnation: StateIncarnation) -> None:
        """Take note of the state incarnation that the progress goes with."""
        self.state = replace(self.state, **incarnation._asdict())
        self.stage_state()
        self.notify()

    # How it is done.

    def stage_state(self) -> None:
        """Have the journal write where the job stands."""
        self.records.stage(self.keys.state, self._state_text)

    def _state_text(self) -> str:
        return replace(
            self.state,
            schedule=self.schedule.to_json(),
            workers=self.workers.to_json(),
            figures={**self.figures, "steps": self.schedule.steps},
        ).to_json()

    def _open(
        self,
        round_id: RoundId,
        done: TaskBits | None = None,
        dead_letters: Iterable[DeadLetter] = (),
    ) -> OpenRound:
        return self.rounds.open(
            round_id,
            first_attempt=self.state.starts * ATTEMPTS_PER_MASTER,
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
        if self.ends_itself:
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
    """Return whether somebody has a lease of a task of this round, which must be of training."""
    return opened.id.kind is RoundKind.TRAINING and opened.ledger.counts.doing > 0


def _led_by_other(opened: OpenRound, known: KnownWorkers, worker: str) -> Assignment | None:
    """Return the task of whoever leads.

    None if nobody is known to: the leader has not been heard of since this master began, it hangs,
    or it is this worker itself.
    """
    for lease in opened.ledger.leases:
        leader = known.get(lease.worker)
        leads = lease.worker != worker and not (lease.expired or lease.withdrawn)
        if leads and leader is not None and leader.sync_address:
            return Assignment(
                opened, LeasedTask(lease.task.number, lease.attempt, 0), leader.sync_address
            )
    return None
