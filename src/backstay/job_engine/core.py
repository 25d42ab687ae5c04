"""What all events of a job share: its state, and the few effects that several kinds of events have.

``JobCore`` holds the state. The modules of ``events`` change it, one module for each kind of event,
and none of them calls another: what two of them need is here. A change that must be written is
staged with the records; the caller waits until they are written before it answers. May import
``job_engine``, ``schedule`` and the records of jobs. Does no I/O; reads time from the clock that it
is given.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from backstay.consensus.records.jobs import (
    JobStateRecord,
    RunState,
    StreamRecord,
    stream_job_of,
)
from backstay.consensus.records.keys import JobKeys
from backstay.job_engine.known_workers import KnownWorkers
from backstay.job_engine.launch import LauncherReport, WorkerWish
from backstay.job_engine.leases import RENEWALS_PER_S_MAX
from backstay.job_engine.open_round import JobRounds, OpenRound
from backstay.job_engine.opening import OpenedJob, StateIncarnation, is_over
from backstay.job_engine.period_takes import PeriodTakes
from backstay.job_engine.progressive import Progressive
from backstay.job_engine.records import Records
from backstay.job_engine.refusals import Refusals
from backstay.job_engine.stalls import Stalls
from backstay.job_engine.stream import Stream
from backstay.job_engine.task_store import TaskBits
from backstay.job_engine.values import DeadLetter, PassUpkeep, first_attempt
from backstay.schedule.rounds import RoundId, RoundKind, data_of

__all__ = ["JobCore"]

SCALINGS_KEPT = 5

log = logging.getLogger(__name__)


class JobCore:
    """The state of one job.

    Attributes:
        spec: What the job is.
        identity: Its spec record: uid, time of creation, spec.
        stream_job: Number of the job in the names of its streams.
        tables: The tasks of its training, validation and prediction data.
        schedule: Which rounds are open, and which come next.
        rounds: The open rounds: tasks, leases, outputs.
        stream: Of training data without an end: the positions of now.
        source_trouble: Why their source does not answer; empty: it does.
        damaged: Damaged records of the data, as far as known.
        keys: The keys of the job's records.
        records: Where changes of the records are staged.
        now: The clock: monotonic seconds.
        known: The workers that were heard of.
        workers: Which worker processes should run.
        stalls: The workers that make no progress though others wait for them.
        refusals: The log of answers that say no to a worker.
        state: Where the job stands, as recorded last; ``record`` adds what is kept elsewhere.
        figures: Sums over the job's life, such as of examples.
        progressive: Metrics of predictions before training; None: the job has none.
        task_lease_ttl_ms: How long leases last; the record may already have a longer time
            (``plan_lease_ttl``).
        reported: What the launcher told last.
        scalings: The newest changes of the numbers of workers and servers that a rule made, for
            people.
        trouble: What is wrong, for people, by subject; an empty string: nothing any more.
        tasks_since_checkpoint: Training tasks done since the last checkpoint was asked for.
        checkpoint_due: Whether a checkpoint is to be written now.
        checkpoints_failed: How many could not be written.
        unsaved: Why the last checkpoint is not written, though nothing else is left to do.
        saves_still: Whether the job is over but for a checkpoint that is being written.
        unix_s: Unix time, if a caller sees to the rows at the end of each pass.
    """

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
            renewals_per_s_max: How many renewals of leases a second the caller can answer.
        """
        self.spec = opened.spec
        self.identity = opened.identity
        self.stream_job = stream_job_of(opened.identity.uid)
        self.tables = opened.tables
        self.schedule = opened.schedule
        self.damaged = opened.damaged
        self.keys = keys
        self.records = records
        self.now = clock
        takes = PeriodTakes(opened.takes, self.spec.records_per_task, keys, records)
        self.rounds = JobRounds(opened.rounds, self.tables, self.spec, keys, records, takes)
        self.known = KnownWorkers()
        self.workers = opened.workers
        self.stalls = Stalls(self.spec, self.known, self.rounds.values)
        self.rounds.on_leases = self.stalls.leases_changed
        self.refusals = Refusals()
        digests = {name: table.digest() for name, table in opened.tables.items()}
        self.task_lease_ttl_ms = max(opened.spec.task_lease_ttl_ms, opened.state.task_lease_ttl_ms)
        self.state = replace(opened.state, data=digests, task_lease_ttl_ms=self.task_lease_ttl_ms)
        self.figures = Counter(opened.state.figures)
        self.progressive: Progressive | None = None
        if self.spec.progressive is not None:
            self.progressive = Progressive(
                self.spec, keys, records, opened.progressive, self.is_recorded_done, clock()
            )
            self.progressive.show_windows(opened.state.progressive)
        self.stream = Stream()
        self.source_trouble = ""
        self._begin_stream()
        self._renewals_per_s_max = renewals_per_s_max
        # Workers.
        self.reported = LauncherReport()
        self._wish = WorkerWish(0, ())
        self.scalings: deque[str] = deque(maxlen=SCALINGS_KEPT)
        # Checkpoints, and how the job ends.
        self.trouble: dict[str, str] = {}
        self.tasks_since_checkpoint = 0
        self.checkpoint_due = False
        self.checkpoints_failed = 0
        self.unsaved = ""
        self.saves_still = False
        # Whether the job ends with its schedule; else the caller that saves it ends it.
        self._ends_itself = True
        self._saves_when_stopped = False
        self.unix_s: Callable[[], float] | None = None
        self._count_all_steps()

    def notify(self) -> None:
        """Say that there may be something new: tasks, rounds, the end.

        A caller overrides this if other calls wait for that.
        """

    # What is recorded.

    def stage_state(self) -> None:
        """Have the journal write where the job stands."""
        self.records.stage(self.keys.state, lambda: self.record().to_json())

    def record(self) -> JobStateRecord:
        """Return where the job stands, as it is recorded."""
        return replace(
            self.state,
            schedule=self.schedule.to_json(),
            workers=self.workers.to_json(),
            figures={**self.figures, "steps": self.schedule.steps},
            progressive={} if self.progressive is None else self.progressive.shown(),
        )

    @property
    def incarnation(self) -> StateIncarnation:
        """The state incarnation that the progress belongs to."""
        return StateIncarnation(self.state.restore_version, self.state.generation)

    def note_trouble(self, what: str, trouble: str) -> None:
        """Show people what is wrong with something; empty: nothing any more."""
        self.trouble[what] = trouble

    def is_recorded_done(self, round_name: str, task: int) -> bool:
        """Return whether a task of a round is done, as its records say."""
        round_id = RoundId.parse(round_name)
        opened = self.rounds.get(round_id)
        if opened is None:
            return is_over(self.schedule, round_id)
        done = opened.ledger.done
        return task < done.size and task in done

    @property
    def scored_values(self) -> Sequence[str]:
        """The values of the column of ``progressive.by`` that have figures of their own."""
        return () if self.progressive is None else self.progressive.values

    # Training data without an end.

    @property
    def stream_record(self) -> StreamRecord:
        """How far the job is in such data, as recorded."""
        return self.state.stream or StreamRecord()

    def _begin_stream(self) -> None:
        """Find the positions of now from what is recorded."""
        takes = self.rounds.takes.after(self.schedule.passes_over)
        self.stream.begin(self.stream_record.positions, takes)

    def _is_sealed(self, round_id: RoundId) -> bool:
        """Whether a round gets no more tasks than it has."""
        return not self._is_period(round_id) or round_id.number <= self.stream_record.sealed

    def _damaged_name(self, round_id: RoundId) -> str:
        """Return under which name the damaged records of a round are known.

        Tasks of passes are the same in each; those of periods are not.
        """
        return str(round_id) if self._is_period(round_id) else data_of(round_id.kind)

    def _is_period(self, round_id: RoundId) -> bool:
        """Whether a round is a period of training data without an end."""
        return self.spec.is_stream and round_id.kind is RoundKind.TRAINING

    def _count_bad_records(self) -> None:
        """Bring the sum of damaged records up to date; those of periods that are over are in it."""
        over = filter(self._is_over_period, self.damaged.names) if self.spec.is_stream else ()
        known = self.damaged.total - sum(map(self.damaged.of_data, over))
        self.figures["bad_records"] = self.figures["past_bad_records"] + known

    def _is_over_period(self, name: str) -> bool:
        """Whether a name of damaged records is that of a period that is over."""
        kind, _, number = name.partition("-")
        is_period = kind == RoundKind.TRAINING.value and number.isdecimal()
        return is_period and int(number) <= self.schedule.passes_over

    def _forget_damaged(self, name: str) -> None:
        """Forget the damaged records of a period, and have the journal do so."""
        for part in self.damaged.forget(name):
            self.records.stage_removal(self.keys.damaged(name, part))

    # How the job ends.

    @property
    def is_over(self) -> bool:
        """Whether no more tasks will be given out."""
        return self.state.state != "running"

    @property
    def ended(self) -> tuple[str, str] | None:
        """How the job ended, and why; None: it is not over."""
        return (self.state.state, self.state.reason) if self.is_over else None

    @property
    def has_unsaved_steps(self) -> bool:
        """Whether steps were made since the newest checkpoint of a job that saves its model."""
        saves = self.spec.training is not None and self.spec.checkpoint.is_wanted
        done = self.schedule.steps, self.figures["upkeeps"]
        return saves and done != (self.figures["saved_steps"], self.figures["saved_upkeeps"])

    @property
    def sees_to_rows(self) -> bool:
        """Whether something is done to the rows at the end of each pass."""
        return self.unix_s is not None and self.spec.lifetime.every == "pass"

    @property
    def upkeep_due(self) -> PassUpkeep | None:
        """What is to be done to the rows, as the oldest pass whose end was not seen to asks for it.

        It is the same until it was noted, or until the job goes back. None: nothing.
        """
        pass_number = self.figures["upkept_passes"] + 1
        if not self.sees_to_rows or pass_number > self.schedule.passes_over:
            return None
        lifetime = self.spec.lifetime
        began = self.state.pass_starts.get(str(pass_number - lifetime.unseen_passes + 1))
        return PassUpkeep(
            pass_number,
            self.state.starts,
            # No pass is over in a millisecond, so a job that is made later has later ones.
            self.identity.created_ms + pass_number,
            began if lifetime.unseen_passes else None,
        )

    def end(self, state: RunState, reason: str) -> None:
        """End the job, unless it has ended; workers hear of it with their next call."""
        if self.is_over:
            return
        log.info("the job is %s%s", state, f": {reason}" if reason else "")
        saves = self._saves_when_stopped and self.has_unsaved_steps
        self.saves_still = state == "stopped" and saves
        stream = self.state.stream
        if stream is not None:
            # The same command goes on with what there is then.
            stream = replace(stream, stopping="")
        self.state = replace(self.state, state=state, reason=reason, stream=stream)
        self.workers.finish()
        self.stage_state()
        self.notify()

    def _end_if_all_is_done(self) -> None:
        """End a job that takes nothing more, once nothing of what it took is left to do."""
        reason = self.stream_record.stopping
        if not reason or self.is_over or self.upkeep_due is not None:
            return
        for round_id in self.schedule.open_rounds:
            opened = self.rounds.get(round_id)
            if opened is None or not self._is_all_done(opened):
                return
        self.end("stopped", reason)

    def _is_all_done(self, opened: OpenRound) -> bool:
        counts = opened.ledger.counts
        if counts.todo or counts.doing or not self._is_period(opened.id):
            return False
        # What is recorded becomes tasks in a moment.
        return len(self.rounds.takes.table(opened.id.number)) <= len(opened.table)

    def end_unsaved(self, why: str) -> None:
        """End a job that is all done without its last checkpoint."""
        dead_letters = f"; {self._dead_letters_text()}" if self.schedule.dead_letters else ""
        self.end("unsaved", f"the last checkpoint was not written: {why}{dead_letters}")

    def _dead_letters_text(self) -> str:
        failed = f"{sum(self.schedule.dead_letters.values())} tasks failed for good"
        how = "`backstay jobs show` tells why, and the same command tries them again"
        return f"{failed}; {how}"

    # Effects that several kinds of events have.

    def drop_worker(self, worker: str, why: str) -> None:
        """Take back all tasks of a worker that is surely gone, and forget it."""
        self._take_tasks_back(worker, why)
        self.known.forget(worker)

    def _take_tasks_back(self, worker: str, why: str) -> None:
        for opened in self.rounds.values():
            tasks = opened.ledger.drop_worker(worker)
            if tasks:
                log.warning("%s: %s; %s tasks %s go back", worker, why, opened.id, tasks)
            self._came_back(opened)

    def _look_at_scores(self) -> None:
        """End a window of progressive metrics that is full or whose time is over.

        It comes after the tasks that are counted are staged as done. An alert may stop the job,
        unless all of it is trained.
        """
        if self.progressive is None or self.is_over or self.schedule.outcome is not None:
            return
        window = self.progressive.window
        why_stop = self.progressive.look(self.schedule.steps, self.now())
        if self.progressive.window != window:
            self.stage_state()
        if why_stop:
            self.end("stopped", why_stop)

    def _came_back(self, opened: OpenRound) -> None:
        """Stage that tasks of a round are to do again, and wake those who wait for one."""
        self.rounds.stage(opened)
        self._count_steps(opened)
        self.notify()

    def _count_steps(self, opened: OpenRound) -> None:
        """Tell the schedule how many batches a round has; that may open or end rounds."""
        before = self.schedule.open_rounds
        self.schedule.count_steps(opened.id, opened.ledger.batches)
        if self.schedule.open_rounds != before:
            self.stage_state()
            self.notify()

    def _count_all_steps(self) -> None:
        for opened in self.rounds.values():
            self._count_steps(opened)

    def _open(
        self,
        round_id: RoundId,
        done: TaskBits | None = None,
        dead_letters: Iterable[DeadLetter] = (),
        begun_scores: Mapping[tuple[int, int], bytes] | None = None,
    ) -> OpenRound:
        return self.rounds.open(
            round_id,
            first_attempt=first_attempt(self.state.starts),
            task_lease_ttl_ms=self.task_lease_ttl_ms,
            steps=self.schedule.steps,
            done=done,
            dead_letters=dead_letters,
            begun_scores=begun_scores,
            is_sealed=self._is_sealed(round_id),
        )
