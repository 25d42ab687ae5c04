"""The course of a job: which rounds are open now, which comes next, when it ends.

Level-triggered: events come in, and ``open_rounds``, ``cut_rounds`` and ``outcome`` say how things
should stand; the caller makes it so. Training passes follow one another; an evaluation comes after
each pass (the next pass waits for it, so that it sees one state of the model) or every so many
steps (beside the training; at most one waits). Imports ``master.core`` and ``json_fields``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from backstay.master.core.rounds import RoundId

__all__ = ["Course", "CoursePlan", "EarlyStopRule", "Outcome"]

Outcome = Literal["finished", "finished_with_parked", "stopped", "failed"]


@dataclass(frozen=True)
class EarlyStopRule:
    """When training has stopped getting better.

    Attributes:
        metric: Name of the metric that is looked at.
        mode: Whether a higher ("max") or a lower value is better.
        patience: Training ends after so many evaluations in a row without a better value.
        min_delta: A value must be better by more than this to count as better.
    """

    metric: str
    mode: Literal["max", "min"] = "max"
    patience: int = 1
    min_delta: float = 0.0


@dataclass(frozen=True)
class CoursePlan:
    """What a job consists of.

    Attributes:
        passes: Training passes; 0 for a job that only evaluates or predicts.
        evaluates: Whether there is validation data.
        evaluation_every_steps: Steps between evaluations; 0 evaluates after each pass.
        max_steps: Training ends after so many steps; 0 for no such limit.
        early_stop: See there; needs ``evaluates``.
        train_end: Whether one task is run at the end of training (export, callbacks).
        predicts: Whether there is prediction data.
    """

    passes: int = 1
    evaluates: bool = False
    evaluation_every_steps: int = 0
    max_steps: int = 0
    early_stop: EarlyStopRule | None = None
    train_end: bool = False
    predicts: bool = False


class Course:
    """Where a job is in its plan. All of it is in ``to_json``."""

    def __init__(self, plan: CoursePlan) -> None:
        """Begin a job with its first round open."""
        raise NotImplementedError

    @property
    def open_rounds(self) -> tuple[RoundId, ...]:
        """The rounds whose tasks are to be given out, those to be served first at the front."""
        raise NotImplementedError

    @property
    def outcome(self) -> Outcome | None:
        """How the job ended; None while it goes on."""
        raise NotImplementedError

    @property
    def reason(self) -> str:
        """Why training or the job ended before its plan was done; else empty."""
        raise NotImplementedError

    @property
    def steps(self) -> int:
        """Training steps (batches) so far, all passes together."""
        raise NotImplementedError

    @property
    def metrics(self) -> Mapping[str, float]:
        """The last evaluation's metrics."""
        raise NotImplementedError

    def add_steps(self, steps: int) -> None:
        """Count training steps: may make an evaluation due, or end the training."""
        raise NotImplementedError

    def round_over(
        self, round_id: RoundId, parked: int = 0, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Take note that a round's tasks are all done or parked.

        Args:
            round_id: Which; a round that is not open is ignored.
            parked: How many of its tasks are parked.
            metrics: Of an evaluation; may be empty.
        """
        raise NotImplementedError

    def reopen(self, round_id: RoundId) -> bool:
        """Open a round again whose parked tasks were put back; False if it never ended so."""
        raise NotImplementedError

    def stop(self, reason: str) -> None:
        """End the job now, as "stopped"."""
        raise NotImplementedError

    def fail(self, reason: str) -> None:
        """End the job now, as "failed"."""
        raise NotImplementedError

    def to_json(self) -> str:
        """Return where the job is, as JSON."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, plan: CoursePlan, text: str) -> Course:
        """Return the course that ``to_json`` wrote, under a plan that may have changed.

        Raises:
            InvalidRequest: It is no such text.
        """
        raise NotImplementedError
