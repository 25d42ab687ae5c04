"""Rounds and their ends: the open rounds follow the schedule, and the job ends with it.

May import ``job_engine`` and ``schedule``; does no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from backstay.job_engine.checkpoints import Checkpoints
from backstay.job_engine.damage import Damage
from backstay.job_engine.job_rounds import JobRounds
from backstay.job_engine.open_round import OpenRound
from backstay.job_engine.period_takes import period
from backstay.job_engine.standing import Basis, Standing
from backstay.job_engine.stream import Stream
from backstay.job_engine.upkeeps import Upkeeps
from backstay.schedule.rounds import RoundId, RoundKind
from backstay.schedule.takes import PERIODS_KEPT, advance

__all__ = ["RoundEvents"]

EVALUATIONS_MAX = 100

log = logging.getLogger(__name__)


class RoundEvents:
    """The events of rounds."""

    def __init__(
        self,
        basis: Basis,
        job: Standing,
        rounds: JobRounds,
        damage: Damage,
        stream: Stream,
        upkeeps: Upkeeps,
        checkpoints: Checkpoints,
    ) -> None:
        """Take the parts that rounds change."""
        self._basis = basis
        self._job = job
        self._rounds = rounds
        self._damage = damage
        self._stream = stream
        self._upkeeps = upkeeps
        self._checkpoints = checkpoints

    def advance(self) -> list[OpenRound]:
        """Bring the rounds in line with the schedule; returns evaluations whose end is due.

        Call :meth:`evaluated` for each of those.
        """
        due: list[OpenRound] = []
        if self._job.schedule.outcome is None:
            # Tasks were put back, or a restore took the job back.
            self._checkpoints.unsaved = ""
        while not self._job.is_over:
            wanted = self._job.schedule.open_rounds
            self._rounds.cut_others(self._job.schedule.kept_rounds, self._job.schedule.reason)
            ended = [self._bring(round_id) for round_id in wanted if self._may_open(round_id)]
            due = [one for one in ended if one is not None and one.is_evaluation]
            over = [one for one in ended if one is not None and not one.is_evaluation]
            for opened in over:
                dead_letters = opened.ledger.counts.dead_letters
                log.info(
                    "%s is over%s",
                    opened.id,
                    f", {dead_letters} tasks dead-lettered" if dead_letters else "",
                )
                passes_over = self._job.schedule.passes_over
                self._job.schedule.round_over(opened.id, dead_letters=dead_letters)
                if self._basis.spec.is_stream and self._job.schedule.passes_over > passes_over:
                    self._end_period(opened)
                if opened.id.kind is RoundKind.TRAINING:
                    self._checkpoints.pass_is_over()
                    self._upkeeps.pass_is_over()
            if not over:
                break
            self._job.stage()
            self._basis.notify()
        if self._checkpoints.ends_itself:
            self.finish()
        self._end_if_all_is_done()
        self._rounds.drop_finished(self._job.schedule.kept_rounds)
        self._forget_periods()
        return due

    def _end_period(self, opened: OpenRound) -> None:
        """Take note, with the schedule, where the next period begins."""
        record = self._job.stream_record
        after = advance(record.positions, opened.table.shards)
        self._job.change(stream=replace(record, positions=after.positions, began_s=0))
        self._job.figures["dropped_records"] += after.dropped
        self._stream.dropped -= after.dropped
        name = self._damage.name_of(opened.id)
        self._job.figures["past_bad_records"] += self._damage.records.of_data(name)

    def _forget_periods(self) -> None:
        """Forget what old periods had taken; an audit asks for all of it."""
        if not self._basis.spec.is_stream or self._basis.spec.audit:
            return
        last = self._job.schedule.passes_over - PERIODS_KEPT
        for number in self._rounds.takes.numbers:
            if number <= last and period(number) not in self._rounds:
                self._rounds.takes.forget([number])
                self._damage.forget(str(period(number)))

    def _may_open(self, round_id: RoundId) -> bool:
        """Whether a round is open, or nothing is to be done to the rows before it begins."""
        return self._upkeeps.due is None or self._rounds.get(round_id) is not None

    def _bring(self, round_id: RoundId) -> OpenRound | None:
        """Open a round unless it is open; returns it if it is over."""
        opened = self._rounds.get(round_id)
        if opened is None:
            opened = self._rounds.open(round_id)
            begun = self._job.state.passes_begun
            if round_id.kind is RoundKind.TRAINING and round_id.number > begun:
                self._job.change(
                    passes_begun=round_id.number,
                    pass_starts=self._upkeeps.pass_starts(round_id.number),
                )
                self._job.stage()
            if self._job.is_period(round_id) and len(opened.table):
                log.info("%s begins again with %d tasks", round_id, len(opened.table))
            elif self._job.is_period(round_id):
                log.info("%s begins", round_id)
            else:
                log.info("%s begins: %d tasks", round_id, len(opened.table))
            self._basis.notify()
        return opened if opened.ledger.is_over else None

    def _end_if_all_is_done(self) -> None:
        """End a job that takes nothing more, once nothing of what it took is left to do."""
        reason = self._job.stream_record.stopping
        if not reason or self._job.is_over or self._upkeeps.due is not None:
            return
        for round_id in self._job.schedule.open_rounds:
            opened = self._rounds.get(round_id)
            if opened is None or not self._is_all_done(opened):
                return
        self._job.end("stopped", reason)

    def _is_all_done(self, opened: OpenRound) -> bool:
        counts = opened.ledger.counts
        if counts.todo or counts.doing or not self._job.is_period(opened.id):
            return False
        # What is recorded becomes tasks in a moment.
        return len(self._rounds.takes.table(opened.id.number)) <= len(opened.table)

    def evaluated(self, opened: OpenRound, metrics: Mapping[str, float]) -> None:
        """Take the metrics of an evaluation whose tasks are all over."""
        if self._rounds.get(opened.id) is not opened:
            # The cluster was restored meanwhile: these are figures of a model that is gone.
            return
        problems = opened.outputs.problems
        for name, problem in problems.items():
            log.warning("metric %s: %s", name, problem)
            self._job.note_trouble(f"metric {name}", problem)
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
        others = [one for one in self._job.state.evaluations if one["round"] != result["round"]]
        kept = (*others, result)[-EVALUATIONS_MAX:]
        self._job.change(evaluations=kept)
        self._job.schedule.round_over(
            opened.id, dead_letters=opened.ledger.counts.dead_letters, metrics=dict(metrics)
        )
        self._rounds.forget(opened.id)
        self._job.stage()
        self._basis.notify()

    @property
    def is_finished(self) -> bool:
        """Whether the schedule is at its end and the job is not over: it is to be saved.

        The rows were seen to, then.
        """
        ended = self._job.schedule.outcome is not None and not self._job.is_over
        return ended and self._upkeeps.due is None

    def finish(self) -> None:
        """End a job whose schedule is at its end."""
        outcome = self._job.schedule.outcome
        if outcome is None or self._job.is_over:
            return
        self._checkpoints.unsaved = ""
        if outcome == "finished_with_dead_letters":
            self._job.end("failed", self._job.dead_letters_text())
        else:
            self._job.end("done", self._job.schedule.reason)
