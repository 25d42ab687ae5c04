"""The engine of one job: it takes events, decides, and stages the records that must be written.

Each event is a method. Follow one from here:

| module of ``events`` | what happens | methods |
| --- | --- | --- |
| workers | a worker joins, calls, leaves; a launcher reports | ``join``, ``hear``, ``report`` |
| tasks | a worker asks for a task, renews leases, ends them | ``give``, ``renew``, ``complete`` |
| rounds | a round begins or ends, the job ends | ``advance``, ``evaluated``, ``finish`` |
| restores | the cluster was restored, or rows are lost | ``rows_are``, ``follow`` |
| orders | a user or a rule wants something | ``stop``, ``scale``, ``retry_dead_letters`` |
| streams | data without an end have grown | ``plan_take``, ``take`` |
| timers | time passes | ``expire``, ``plan_lease_ttl`` |

Two parts take events of their own: ``checkpoints`` (one is due, written or missing) and ``upkeeps``
(the rows are seen to at the end of a pass).

The events share the parts of the job, each with its own state: where it stands (``standing``), its
open rounds (``job_rounds``), its workers (``known_workers``, ``stalls``, ``refusals``), damaged
records (``damage``) and data without an end (``stream``).

The caller drives the engine: it calls ``advance`` after events, ``expire`` when time has passed,
and answers when the staged records are written. The job master does so over the coordination store
(``master.job``), ``--local`` over memory, the simulator in virtual time. Does no I/O; reads time
from the clock that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from backstay.consensus.records.jobs import stream_job_of
from backstay.consensus.records.keys import JobKeys
from backstay.job_engine.checkpoints import Checkpoints
from backstay.job_engine.damage import Damage
from backstay.job_engine.events.orders import OrderEvents
from backstay.job_engine.events.restores import RestoreEvents
from backstay.job_engine.events.rounds import RoundEvents
from backstay.job_engine.events.streams import StreamEvents
from backstay.job_engine.events.tasks import TaskEvents
from backstay.job_engine.events.timers import TimerEvents
from backstay.job_engine.events.workers import WorkerEvents
from backstay.job_engine.job_rounds import JobRounds, is_recorded_done
from backstay.job_engine.known_workers import KnownWorkers
from backstay.job_engine.launch import LauncherReport
from backstay.job_engine.leases import RENEWALS_PER_S_MAX
from backstay.job_engine.opening import OpenedJob
from backstay.job_engine.period_takes import PeriodTakes
from backstay.job_engine.progressive import Progressive
from backstay.job_engine.records import Records
from backstay.job_engine.refusals import Refusals
from backstay.job_engine.stalls import Stalls
from backstay.job_engine.standing import Basis, Standing
from backstay.job_engine.stream import Stream
from backstay.job_engine.upkeeps import Upkeeps

__all__ = ["JobEngine"]


class _Parts:
    """The parts of one job, and the events that change them: all of it is wired here."""

    def __init__(
        self,
        basis: Basis,
        job: Standing,
        opened: OpenedJob,
        *,
        renewals_per_s_max: int,
    ) -> None:
        keys, records = basis.keys, basis.records
        takes = PeriodTakes(opened.takes, basis.spec.records_per_task, keys, records)
        self.rounds = JobRounds(basis, job, opened.rounds, takes)
        self.known = KnownWorkers()
        self.stalls = Stalls(basis.spec, self.known, self.rounds)
        self.refusals = Refusals()
        self.stream = Stream()
        self.stream.begin(job.stream_record.positions, self.rounds.takes_of_now())
        self.damage = Damage(basis, job, opened.damaged)
        self.upkeeps = Upkeeps(basis, job)
        self.checkpoints = Checkpoints(basis, job, self.upkeeps)
        self.workers = WorkerEvents(basis, job, self.rounds, self.known, self.refusals)
        self.tasks = TaskEvents(
            basis,
            job,
            self.rounds,
            self.known,
            self.stalls,
            self.refusals,
            self.damage,
            self.stream,
            self.checkpoints,
        )
        self.ends = RoundEvents(
            basis, job, self.rounds, self.damage, self.stream, self.upkeeps, self.checkpoints
        )
        self.restores = RestoreEvents(
            basis, job, self.rounds, self.known, self.damage, self.stream, self.upkeeps
        )
        self.orders = OrderEvents(basis, job, self.rounds, self.checkpoints)
        self.streams = StreamEvents(basis, job, self.rounds, self.stream)
        self.timers = TimerEvents(
            basis,
            job,
            self.rounds,
            self.known,
            self.stalls,
            renewals_per_s_max=renewals_per_s_max,
        )


class JobEngine(Standing):
    """One job: where it stands, and the events that it takes; not thread-safe.

    Attributes:
        spec, identity, tables, keys, now, notify: As in ``Basis``.
        stream_job: Number of the job in the names of its streams.
        rounds: The open rounds: tasks, leases, outputs.
        known: The workers that were heard of.
        stalls: The workers that make no progress though others wait for them.
        refusals: The log of answers that say no to a worker.
        stream: Of training data without an end: the positions of now.
        damaged: Damaged records of the data, as far as known.
        checkpoints: What is due, written and missing.
        upkeeps: What is done to the rows at the end of a pass.
        scalings: The newest changes of the numbers of workers and servers that a rule made, for
            people.
    """

    def __init__(
        self,
        opened: OpenedJob,
        keys: JobKeys,
        records: Records,
        clock: Callable[[], float],
        *,
        notify: Callable[[], None] = lambda: None,
        renewals_per_s_max: int = RENEWALS_PER_S_MAX,
    ) -> None:
        """Take the job over as its records say.

        Keys, records, clock and ``notify`` are as in ``Basis``; ``renewals_per_s_max`` is how many
        renewals of leases a second the caller can answer.
        """
        basis = Basis(opened.spec, opened.identity, opened.tables, keys, records, clock, notify)
        super().__init__(basis, opened, _progressive(basis, opened))
        self.spec, self.identity, self.tables = opened.spec, opened.identity, opened.tables
        self.keys, self.now, self.notify = keys, clock, notify
        self.stream_job = stream_job_of(opened.identity.uid)
        parts = _Parts(basis, self, opened, renewals_per_s_max=renewals_per_s_max)
        self._parts = parts
        self.rounds, self.known, self.stalls = parts.rounds, parts.known, parts.stalls
        self.refusals, self.stream, self.damaged = parts.refusals, parts.stream, opened.damaged
        self.checkpoints, self.upkeeps = parts.checkpoints, parts.upkeeps
        self.scalings = parts.orders.scalings
        # The events, by their kinds.
        self.stage_state = self.stage
        workers = parts.workers
        self.join, self.hear, self.told_end = workers.join, workers.hear, workers.told_end
        self.declare_tables, self.drop_worker = workers.declare_tables, workers.drop_worker
        self.report, self.wish = workers.report, workers.wish
        tasks = parts.tasks
        self.give, self.assign, self.ask_again_ms = tasks.give, tasks.assign, tasks.ask_again_ms
        self.renew, self.complete = tasks.renew, tasks.complete
        self.give_back, self.fail = tasks.give_back, tasks.fail
        self.goes_with, self.is_of_later_master = tasks.goes_with, tasks.is_of_later_master
        self.damaged_left, self.closed = tasks.damaged_left, tasks.closed
        self.streams_to_close = tasks.streams_to_close
        ends = parts.ends
        self.advance, self.evaluated, self.finish = ends.advance, ends.evaluated, ends.finish
        saves = parts.checkpoints
        self.keep_checkpoints, self.take_checkpoint_due = saves.keep_checkpoints, saves.take_due
        self.note_checkpoint = saves.note_checkpoint
        self.note_no_checkpoint = saves.note_no_checkpoint
        self.wait_unsaved, self.stopped_is_saved = saves.wait_unsaved, saves.stopped_is_saved
        self.keep_rows, self.note_upkeep = parts.upkeeps.keep_rows, parts.upkeeps.note_upkeep
        restores = parts.restores
        self.rows_are, self.change_of_rows = restores.rows_are, restores.change_of_rows
        self.progress_in, self.follow = restores.progress_in, restores.follow
        self.cannot_follow, self.go_back = restores.cannot_follow, restores.go_back
        self.note_inexact, self.note_incarnation = restores.note_inexact, restores.note_incarnation
        orders = parts.orders
        self.stop, self.scale, self.follow_scaling = (
            orders.stop,
            orders.scale,
            orders.follow_scaling,
        )
        self.retry_dead_letters = orders.retry_dead_letters
        streams = parts.streams
        self.begin_stream, self.stop_taking = streams.begin_stream, streams.stop_taking
        self.note_source, self.note_lag = streams.note_source, streams.note_lag
        self.note_part_of_source = streams.note_part_of_source
        self.plan_take, self.take = streams.plan_take, streams.take
        self.done_to, self.behind = streams.done_to, streams.behind
        timers = parts.timers
        self.expire, self.plan_lease_ttl = timers.expire, timers.plan_lease_ttl
        self.lengthen_leases = timers.lengthen_leases
        self.rounds.count_all_steps()

    # What callers ask.

    @property
    def scored_values(self) -> Sequence[str]:
        """The values of the column of ``progressive.by`` that have figures of their own."""
        return () if self.progressive is None else self.progressive.values

    @property
    def task_lease_ttl_ms(self) -> int:
        """How long leases last; the record may already have a longer time."""
        return self.rounds.task_lease_ttl_ms

    @property
    def reported(self) -> LauncherReport:
        """What the launcher told last."""
        return self._parts.workers.reported

    @property
    def workers_know_end(self) -> bool:
        """Whether each living worker has heard that the job is over, and no stream is open."""
        return self._parts.workers.know_end

    @property
    def is_finished(self) -> bool:
        """Whether the schedule is at its end and the job is not over: it is to be saved."""
        return self._parts.ends.is_finished

    @property
    def wants_start(self) -> bool:
        """Whether the caller is to ask where to begin, and to call ``begin_stream``."""
        return self._parts.streams.wants_start

    @property
    def lacks_tasks(self) -> bool:
        """Whether workers may be idle though there is something to take, as far as is known."""
        return self._parts.streams.lacks_tasks


def _progressive(basis: Basis, opened: OpenedJob) -> Progressive | None:
    """Return the metrics of predictions before training; None: the job has none."""
    if basis.spec.progressive is None:
        return None
    progressive = Progressive(
        basis.spec,
        basis.keys,
        basis.records,
        opened.progressive,
        partial(is_recorded_done, opened.schedule, opened.rounds),
        basis.now(),
    )
    progressive.show_windows(opened.state.progressive)
    return progressive
