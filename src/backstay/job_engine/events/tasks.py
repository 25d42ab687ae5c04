"""Tasks and leases: a worker asks for a task, renews its leases, and ends them.

The ledger of the round decides who has which lease. Here is what follows for the job: records,
steps, figures, damaged records, outputs of evaluations. May import ``job_engine`` and ``schedule``;
does no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from backstay.errors import BackstayError, InvalidRequest, LimitExceeded
from backstay.job.metrics import METRICS
from backstay.job.score_counts import Scores
from backstay.job_engine.checkpoints import Checkpoints
from backstay.job_engine.damage import Damage
from backstay.job_engine.job_rounds import JobRounds
from backstay.job_engine.known_workers import KnownWorker, KnownWorkers, WorkerSigns
from backstay.job_engine.open_round import Assignment, OpenRound
from backstay.job_engine.opening import StateIncarnation
from backstay.job_engine.refusals import Refusals
from backstay.job_engine.round_scores import Scored
from backstay.job_engine.stalls import Stalls
from backstay.job_engine.standing import Basis, Standing
from backstay.job_engine.stream import Stream
from backstay.job_engine.values import Failure, LeasedTask, first_attempt
from backstay.schedule.damaged import DamagedRecords
from backstay.schedule.evaluation import TaskOutputs
from backstay.schedule.rounds import RoundId, RoundKind

__all__ = ["TaskEvents"]

# A worker that got no task asks again after this, times the number of workers: a crowd that waits
# makes no more than 1000 calls a second, which one job master answers beside its other work.
WAIT_MS_PER_WORKER = 1
WAIT_MS_MIN = 50
WAIT_MS_MAX = 10_000

log = logging.getLogger(__name__)


class TaskEvents:
    """The events of tasks and leases."""

    def __init__(
        self,
        basis: Basis,
        job: Standing,
        rounds: JobRounds,
        known: KnownWorkers,
        stalls: Stalls,
        refusals: Refusals,
        damage: Damage,
        stream: Stream,
        checkpoints: Checkpoints,
    ) -> None:
        """Take the parts that tasks change."""
        self._basis = basis
        self._job = job
        self._rounds = rounds
        self._known = known
        self._stalls = stalls
        self._refusals = refusals
        self._damage = damage
        self._stream = stream
        self._checkpoints = checkpoints

    # A worker asks for a task.

    def give(
        self,
        worker: str,
        request: int,
        incarnation: StateIncarnation | None,
        *,
        can_record: bool = True,
    ) -> Assignment | None:
        """Give a task to a worker that asks for one; the same task if it repeats its request.

        Args:
            worker: Who asks; it was heard of.
            request: Number of its request; 0: it has none.
            incarnation: The rows that it pushes to; None: it does not say.
            can_record: Whether records can be written now. A lease that cannot be recorded is not
                told, and would expire through no fault of the worker.

        Returns:
            None: there is none now, or none for a worker with these rows (:meth:`goes_with`).
        """
        known = self._known.get(worker)
        if known is None:
            # It was dropped while it waited for a task.
            return None
        known.has_program = True
        given = self._given_before(known, request)
        if not self.goes_with(incarnation):
            # What is acknowledged in another state incarnation is not in this one, and what is
            # done may have to be done again.
            self._refuse_rows(worker, incarnation)
        elif given is None and can_record:
            given = self.assign(worker)
        # Which worker leads may change, so that answer is not repeated.
        known.request, known.answer = request, None if given and given.leader else given
        return given

    def _refuse_rows(self, worker: str, rows: StateIncarnation | None) -> None:
        if rows is not None:
            its = "restore {}, generation {}".format(*rows)
            jobs = "restore {}, generation {}".format(*self._job.incarnation)
            why = f"it pushes to the rows of {its}; the progress of the job belongs to {jobs}"
            self._refusals.log(worker, why, self._basis.now())

    def _given_before(self, known: KnownWorker, request: int) -> Assignment | None:
        """Return what the same request was given already, if that still holds."""
        given = known.answer
        if not request or request != known.request or given is None:
            return None
        if self._rounds.get(given.round.id) is not given.round:
            return None
        leased = given.round.ledger.record_of(known.id).leased
        if not any(one[:2] == given.lease[:2] for one in leased):
            return None
        # The worker counts its time from this answer.
        revoked = given.round.ledger.renew(known.id, [given.lease], self._basis.now())
        self._rounds.stage(given.round)
        return None if revoked else given

    def goes_with(self, incarnation: StateIncarnation | None) -> bool:
        """Return whether the progress belongs to a worker's rows; None, unknown, counts as yes."""
        return incarnation is None or incarnation == self._job.incarnation

    def assign(self, worker: str) -> Assignment | None:
        """Give a worker a task of the first open round that has one; None: there is none now."""
        if self._job.is_over:
            return None
        found = map(self._rounds.get, self._job.schedule.open_rounds)
        rounds = [opened for opened in found if opened is not None]
        if self._stream.source_trouble:
            rounds = [opened for opened in rounds if not self._job.is_period(opened.id)]
        # The second time round it is known that no round has a task to do for this worker.
        for is_idle, opened in product((False, True), rounds):
            if self._basis.spec.mode.kind == "sync" and _is_led(opened):
                return _led_by_other(opened, self._known, worker)
            grant = opened.ledger.assign(worker, self._basis.now(), is_idle=is_idle)
            if grant is None:
                continue
            if grant.speculative:
                log.info(
                    "%s gets a speculative attempt of %s task %d", worker, opened.id, grant.task
                )
            if self._job.progressive is not None:
                opened.record_scores(
                    self._basis.records, self._basis.keys, grant.task, grant.first_batch
                )
            self._rounds.stage(opened)
            self._stalls.task_given(worker, self._basis.now())
            return Assignment(opened, LeasedTask(grant.task, grant.attempt, grant.first_batch))
        return None

    def ask_again_ms(self) -> int:
        """Return how long a worker that got no task is to wait before it asks again.

        A crowd that waits makes no more than 1000 calls a second.
        """
        return min(max(len(self._known) * WAIT_MS_PER_WORKER, WAIT_MS_MIN), WAIT_MS_MAX)

    # A worker has leases.

    def renew(
        self,
        worker: str,
        leases: Sequence[tuple[RoundId, LeasedTask]],
        signs: WorkerSigns | None = None,
        scored: Mapping[tuple[RoundId, LeasedTask], Scored] | None = None,
    ) -> list[tuple[RoundId, LeasedTask]]:
        """Extend leases, and take in what their worker tells of itself; returns the revoked ones.

        Args:
            worker: Whose.
            leases: All that it has, with their batches that are acknowledged.
            signs: How far it is; None: it does not say.
            scored: What was predicted of these batches, by lease.
        """
        known = self._known.get(worker)
        if known is not None and signs is not None:
            known.measure(signs, self._basis.now())
            # It may have told its tables to an earlier job master.
            known.has_program |= bool(leases)
            self._stalls.heard(worker, signs, self._basis.now())
        by_round: dict[RoundId, list[LeasedTask]] = {}
        for round_id, leased in leases:
            by_round.setdefault(round_id, []).append(leased)
        revoked: list[tuple[RoundId, LeasedTask]] = []
        for round_id, leased_tasks in by_round.items():
            for leased in self._renew_in_round(worker, round_id, leased_tasks):
                revoked.append((round_id, leased))
                self._refuse(worker, round_id, leased, "the lease of {} is over")
        for (round_id, leased), one in (scored or {}).items():
            if (round_id, leased) not in revoked:
                self._tell_scores(round_id, leased, one)
        return revoked

    def _tell_scores(self, round_id: RoundId, leased: LeasedTask, scored: Scored | None) -> None:
        """Take in what was predicted of acknowledged batches of a task that is not done."""
        opened = self._rounds.get(round_id)
        if opened is not None and scored is not None and self._job.progressive is not None:
            opened.scores.tell(leased.task, leased.acknowledged, scored)

    def _renew_in_round(
        self, worker: str, round_id: RoundId, leases: Sequence[LeasedTask]
    ) -> Sequence[LeasedTask]:
        """Extend leases of one round; returns the revoked ones."""
        opened = self._rounds.get(round_id)
        if opened is None or self._job.is_over:
            return leases
        before = opened.ledger.batches
        revoked = opened.ledger.renew(worker, leases, self._basis.now())
        self._rounds.stage(opened)
        if opened.ledger.batches != before:
            self._rounds.count_steps(opened)
        return revoked

    def _refuse(self, worker: str, round_id: RoundId, leased: LeasedTask, what: str) -> None:
        """Log that a lease, which ``{}`` in ``what`` names, gives its worker no right any more."""
        opened = self._rounds.get(round_id)
        if opened is None:
            why = "the round is not open"
        else:
            why = opened.ledger.why_revoked(worker, leased.task, leased.attempt)
            # Nothing is wrong with the lease itself.
            why = why or f"the job is {self._job.state.state}"
        lease = f"{round_id} task {leased.task}, attempt {leased.attempt}"
        self._refusals.log(worker, f"{what.format(lease)}: {why}", self._basis.now())

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
        scores: Scores | None = None,
        scored_from: int = 0,
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
            scores: Progressive metrics: what was predicted in this attempt; None: nothing.
            scored_from: The first batch of this attempt.

        Returns:
            Whether this attempt counts, and whether the task became done by this call.
        """
        self._note_damaged(round_id, lease.task, damaged)
        opened = self._rounds.get(round_id)
        if opened is None:
            self._refuse(worker, round_id, lease, "the completion of {} does not count")
            return False, False
        before = opened.ledger.counts.done
        try:
            counts = opened.ledger.complete(
                worker, lease.task, lease.attempt, self._basis.now(), batches=batches
            )
        except BackstayError as error:
            self._refusals.log_error(worker, error, self._basis.now())
            raise
        if not counts:
            self._refuse(worker, round_id, lease, "the completion of {} does not count")
        is_new = opened.ledger.counts.done > before
        self._rounds.count_steps(opened)
        if is_new:
            if round_id.kind is RoundKind.TRAINING:
                self._job.figures.update(examples=examples, tasks=1)
                self._checkpoints.task_is_done()
            elif self._basis.spec.training is None:
                # An evaluation or prediction is the job's own work; beside a training it is not.
                self._job.figures.update(examples=examples)
            self._job.stage()
            if outputs is not None and opened.is_evaluation:
                self._keep_outputs(opened, lease.task, outputs, metrics or {})
        if is_new and round_id.kind is RoundKind.TRAINING:
            self._count_scores(opened, lease.task, scores or Scores(), scored_from)
        self._rounds.stage(opened)
        if is_new:
            self._forget_scores(opened, lease.task)
            self._job.look_at_scores()
        if opened.ledger.is_over or self._job.stream_record.stopping:
            self._basis.notify()
        return counts, is_new

    def _count_scores(self, opened: OpenRound, task: int, scores: Scores, scored_from: int) -> None:
        """Count what was predicted of a task that is done; before it is staged as done."""
        if self._job.progressive is None:
            return
        whole = opened.scores.finish(task, scored_from, scores)
        if whole.all.examples or whole.all.skipped:
            self._job.progressive.add(str(opened.id), task, whole)

    def _forget_scores(self, opened: OpenRound, task: int) -> None:
        """Forget what earlier attempts predicted; after the task is staged as done."""
        for batch in opened.scores.forget(task):
            self._basis.records.stage_removal(
                self._basis.keys.progressive_begun(str(opened.id), task, batch)
            )

    def _keep_outputs(
        self, opened: OpenRound, task: int, outputs: TaskOutputs, metrics: Mapping[str, str]
    ) -> None:
        unknown = set(metrics.values()) - METRICS.keys()
        try:
            if unknown:
                raise InvalidRequest(f"no metric {min(unknown)!r}; known: {', '.join(METRICS)}")
            opened.outputs.add(task, outputs)
        except (InvalidRequest, LimitExceeded) as error:
            self._job.end("failed", f"{opened.id}: {error}")
        else:
            opened.metrics.update(metrics)

    def give_back(
        self,
        worker: str,
        round_id: RoundId,
        lease: LeasedTask,
        reason: str,
        *,
        damaged: int = 0,
        scored: Scored | None = None,
    ) -> None:
        """End a lease for no fault of the task.

        Args:
            worker: Whose.
            round_id: Of which round.
            lease: The task, with its batches that are acknowledged.
            reason: For people.
            damaged: How many damaged records its worker met.
            scored: What was predicted of these batches.
        """
        if damaged > self._damage.records.of_task(self._damage.name_of(round_id), lease.task):
            # An earlier attempt may have read more of the task.
            self._note_damaged(round_id, lease.task, damaged)
        opened = self._rounds.get(round_id)
        if opened is None:
            self._refuse(worker, round_id, lease, "the return of {} does not count")
            return
        try:
            had_it = opened.ledger.give_back(
                worker, lease.task, lease.attempt, lease.acknowledged, reason=reason
            )
        except BackstayError as error:
            self._refusals.log_error(worker, error, self._basis.now())
            raise
        if had_it:
            self._tell_scores(round_id, lease, scored)
            log.info("%s gives %s task %d back: %s", worker, round_id, lease.task, reason)
        else:
            self._refuse(worker, round_id, lease, "the return of {} does not count")
        self._rounds.came_back(opened)

    def fail(
        self,
        worker: str,
        round_id: RoundId,
        lease: LeasedTask,
        failure: Failure,
        *,
        damaged: int = 0,
        first_damaged: str = "",
        scored: Scored | None = None,
    ) -> bool:
        """End a lease because the task failed; returns whether it is dead-lettered.

        Args:
            worker: Whose.
            round_id: Of which round.
            lease: The task, with its batches that are acknowledged.
            failure: Why.
            damaged: How many damaged records its worker met; more than the job allows end it.
            first_damaged: Where the first of them is, and what is wrong with it.
            scored: What was predicted of these batches.
        """
        if damaged > self._basis.spec.max_bad_records:
            # Another try would meet the same records.
            self._note_damaged(round_id, lease.task, damaged, first_damaged)
        opened = self._rounds.get(round_id)
        if opened is None:
            self._refuse(worker, round_id, lease, "the failure of {} does not count")
            return False
        try:
            outcome = opened.ledger.fail(
                worker, lease.task, lease.attempt, failure, acknowledged=lease.acknowledged
            )
        except BackstayError as error:
            self._refusals.log_error(worker, error, self._basis.now())
            raise
        level = logging.ERROR if outcome == "dead_lettered" else logging.WARNING
        last_line = failure.error.strip().rpartition("\n")[2]
        log.log(level, "%s task %d (%s): %s", round_id, lease.task, outcome, last_line)
        if outcome == "revoked":
            self._refuse(worker, round_id, lease, "the failure of {} does not count")
        else:
            self._tell_scores(round_id, lease, scored)
        self._rounds.came_back(opened)
        return outcome == "dead_lettered"

    def is_of_later_master(self, leased: LeasedTask) -> bool:
        """Whether a later job master gave the lease, so that this one no longer is one."""
        return leased.attempt >= first_attempt(self._job.state.starts + 1)

    def damaged_left(self, round_id: RoundId, task: int) -> int:
        """Return how many damaged records a task may have, given those of the other tasks."""
        data = self._damage.name_of(round_id)
        others = self._damage.records.of_data(data) - self._damage.records.of_task(data, task)
        return max(0, self._basis.spec.max_bad_records - others)

    def _note_damaged(self, round_id: RoundId, task: int, records: int, first: str = "") -> None:
        """Take note of how many records of a task are damaged; too many in the data end the job."""
        data, is_period = self._damage.name_of(round_id), self._job.is_period(round_id)
        if is_period and round_id not in self._rounds:
            # A call that was repeated: they are counted.
            return
        before = self._damage.records.of_task(data, task)
        if round_id.kind is RoundKind.TRAIN_END or not self._damage.records.note(
            data, task, records
        ):
            return
        number, limit = DamagedRecords.part_of(task), self._basis.spec.max_bad_records
        key = self._basis.keys.damaged(data, number)
        # A task that is recorded as done is not read again in this pass.
        self._basis.records.stage_first(
            key, lambda: self._damage.records.part(data, number) or None
        )
        if is_period and self._damage.is_over_period(data):
            # A task that was dead-lettered in a period before.
            self._job.figures["past_bad_records"] += records - before
        self._damage.count()
        self._job.stage()
        if self._damage.records.of_data(data) > limit:
            where = f"period {round_id.number}" if is_period else f"the {data} data"
            found = f"{self._damage.records.of_data(data)} damaged records in {where}"
            found += f" ({first})" if first else ""
            per = "a period" if is_period else "one pass over them"
            self._job.end("failed", f"{found}; max_bad_records allows {limit} in {per}")

    def closed(self, streams: Iterable[tuple[int, int]]) -> None:
        """Take note of streams (pass, task) that are closed on all servers."""
        if self._rounds.closed(streams):
            self._basis.notify()

    def streams_to_close(self, worker: str) -> list[tuple[int, int]]:
        """Return streams (pass, task) that this worker is to close for others."""
        return self._rounds.streams_to_close(worker)


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
