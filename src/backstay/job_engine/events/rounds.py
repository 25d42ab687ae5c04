"""Rounds and their ends: the open rounds follow the schedule, and the job ends with it.

May import ``job_engine`` and ``schedule``; does no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from backstay.job_engine.core import JobCore
from backstay.job_engine.open_round import OpenRound
from backstay.job_engine.period_takes import period
from backstay.schedule.rounds import RoundId, RoundKind
from backstay.schedule.takes import PERIODS_KEPT, advance

__all__ = ["RoundEvents"]

EVALUATIONS_MAX = 100

log = logging.getLogger(__name__)


class RoundEvents(JobCore):
    """The events of rounds."""

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
                passes_over = self.schedule.passes_over
                self.schedule.round_over(opened.id, dead_letters=dead_letters)
                if self.spec.is_stream and self.schedule.passes_over > passes_over:
                    self._end_period(opened)
                if opened.id.kind is RoundKind.TRAINING:
                    self.checkpoint_due |= self.spec.checkpoint.every == "pass"
                    if not self.sees_to_rows:
                        self.figures["upkept_passes"] = self.schedule.passes_over
                    self.note_pass_ends()
            if not over:
                break
            self.stage_state()
            self.notify()
        self._end_with_schedule()
        self._end_if_all_is_done()
        self.rounds.drop_finished(self.schedule.kept_rounds)
        self._forget_periods()
        return due

    def _end_period(self, opened: OpenRound) -> None:
        """Take note, with the schedule, where the next period begins."""
        record = self.stream_record
        after = advance(record.positions, opened.table.shards)
        self.state = replace(
            self.state, stream=replace(record, positions=after.positions, began_s=0)
        )
        self.figures["dropped_records"] += after.dropped
        self.stream.dropped -= after.dropped
        self.figures["past_bad_records"] += self.damaged.of_data(self._damaged_name(opened.id))

    def _forget_periods(self) -> None:
        """Forget what old periods had taken; an audit asks for all of it."""
        if not self.spec.is_stream or self.spec.audit:
            return
        last = self.schedule.passes_over - PERIODS_KEPT
        for number in self.rounds.takes.numbers:
            if number <= last and period(number) not in self.rounds:
                self.rounds.takes.forget([number])
                self._forget_damaged(str(period(number)))

    def _may_open(self, round_id: RoundId) -> bool:
        """Whether a round is open, or nothing is to be done to the rows before it begins."""
        return self.upkeep_due is None or self.rounds.get(round_id) is not None

    def _bring(self, round_id: RoundId) -> OpenRound | None:
        """Open a round unless it is open; returns it if it is over."""
        opened = self.rounds.get(round_id)
        if opened is None:
            opened = self._open(round_id)
            if round_id.kind is RoundKind.TRAINING and round_id.number > self.state.passes_begun:
                self.state = replace(
                    self.state,
                    passes_begun=round_id.number,
                    pass_starts=self._pass_starts(round_id.number),
                )
                self.stage_state()
            if self._is_period(round_id) and len(opened.table):
                log.info("%s begins again with %d tasks", round_id, len(opened.table))
            elif self._is_period(round_id):
                log.info("%s begins", round_id)
            else:
                log.info("%s begins: %d tasks", round_id, len(opened.table))
            self.notify()
        return opened if opened.ledger.is_over else None

    def _pass_starts(self, begun: int) -> dict[str, int]:
        """Return when the newest passes began, with one that begins now."""
        kept = self.spec.lifetime.unseen_passes
        if self.unix_s is None or not kept:
            return {}
        starts = {**self.state.pass_starts, str(begun): int(self.unix_s())}
        return {name: at for name, at in starts.items() if begun - kept < int(name) <= begun}

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

    @property
    def is_finished(self) -> bool:
        """Whether the schedule is at its end and the job is not over: it is to be saved.

        The rows were seen to, then.
        """
        ended = self.schedule.outcome is not None and not self.is_over
        return ended and self.upkeep_due is None

    def _end_with_schedule(self) -> None:
        if self._ends_itself:
            self.finish()

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
