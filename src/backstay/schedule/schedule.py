"""The schedule of a job: which rounds are open now, which comes next, when it ends.

Level-triggered: events come in, and ``open_rounds`` and ``outcome`` say how things should stand;
the caller makes it so. A round that is no longer open and not over is to be cut short. Training
passes follow one another; an evaluation comes after each pass (the next pass waits for it, so that
it sees one state of the model) or every so many steps, beside the training; at most one more waits.
Imports ``backstay.schedule.rounds``, ``backstay.job_spec``, ``backstay.errors`` and
``json_record``; does no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from backstay.errors import ConfigError, InvalidRequest
from backstay.job_spec import EarlyStop, JobSpec
from backstay.json_record import Count, JsonRecord
from backstay.schedule.rounds import RoundId, RoundKind

__all__ = [
    "Outcome",
    "Schedule",
    "SchedulePlan",
    "is_cut_short",
    "recorded_dead_letters",
    "recorded_passes",
]

Outcome = Literal["finished", "finished_with_dead_letters"]


@dataclass(frozen=True)
class SchedulePlan:
    """What a job consists of.

    Attributes:
        passes: Training passes; 0 for a job that only evaluates or predicts, or is endless.
        endless: Whether training passes, which are periods then, follow each other until something
            else ends the training.
        evaluates: Whether there is validation data.
        evaluation_every_steps: Steps between evaluations; 0 evaluates after each pass.
        max_steps: Training ends after so many steps; 0 for no such limit.
        early_stop: When training has stopped getting better; needs ``evaluates``.
        train_end: Whether one task is run at the end of training (export, callbacks).
        predicts: Whether there is prediction data.
    """

    passes: int = 1
    endless: bool = False
    evaluates: bool = False
    evaluation_every_steps: int = 0
    max_steps: int = 0
    early_stop: EarlyStop | None = None
    train_end: bool = False
    predicts: bool = False

    def __post_init__(self) -> None:
        for name in ("passes", "evaluation_every_steps", "max_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be at least 0")
        if self.endless and self.passes:
            raise ConfigError(f"passes = {self.passes}: must be 0 for training without an end")
        if not (self.trains or self.evaluates or self.predicts):
            raise ConfigError(
                "the job has no data: neither to train on, to evaluate nor to predict"
            )
        if self.early_stop is not None and not (self.trains and self.evaluates):
            raise ConfigError("early_stop: needs training and validation data")

    @property
    def trains(self) -> bool:
        """Whether there is training data."""
        return self.endless or self.passes > 0

    def has_pass_after(self, passes: int) -> bool:
        """Return whether another training pass follows so many."""
        return self.endless or passes < self.passes

    @classmethod
    def of(cls, spec: JobSpec) -> SchedulePlan:
        """Return what a job consists of."""
        trains = spec.training is not None
        return cls(
            passes=spec.epochs if trains and not spec.is_stream else 0,
            endless=spec.is_stream,
            evaluates=spec.validation is not None,
            evaluation_every_steps=spec.evaluation_every_steps,
            max_steps=spec.max_steps,
            early_stop=spec.early_stop,
            train_end=trains,
            predicts=spec.prediction is not None,
        )


class Schedule:
    """Where a job is in its plan. All of it is in ``to_json``."""

    def __init__(self, plan: SchedulePlan) -> None:
        """Begin a job with its first round open."""
        self._plan = plan
        self._passes_over = 0
        self._training_over = not plan.trains
        # Steps of the passes that are over for good, and of others as they were counted last.
        self._steps_over = 0
        self._steps_of: dict[RoundId, int] = {}
        # The round that is open, else 0; whether another waits; the steps at the last one's start.
        self._evaluation = 0
        self._evaluation_waits = not plan.trains and plan.evaluates
        self._evaluations = 0
        self._evaluated_steps = 0
        # So many times ``evaluation_every_steps`` were done when one was due last.
        self._evaluations_due = 0
        self._metrics: dict[str, float] = {}
        self._best: float | None = None
        self._not_better = 0
        self._train_end_due = plan.train_end and plan.trains
        self._train_ends = 0
        self._predicted = not plan.predicts
        self._dead_letters: dict[RoundId, int] = {}
        self._reopened: set[RoundId] = set()
        self._ended: Outcome | None = None
        self._reason = ""
        self._advance()

    @property
    def plan(self) -> SchedulePlan:
        """What the job consists of."""
        return self._plan

    @property
    def open_rounds(self) -> tuple[RoundId, ...]:
        """The rounds whose tasks are to be given out, those to be served first at the front."""
        if self._ended is not None:
            return ()
        rounds = sorted(self._reopened, key=lambda each: (each.kind.value, each.number))
        if self._evaluation:
            rounds.append(RoundId(RoundKind.EVALUATION, self._evaluation))
        if self._trains:
            rounds.append(RoundId(RoundKind.TRAINING, self._passes_over + 1))
        if not rounds and self._train_end_due:
            rounds.append(RoundId(RoundKind.TRAIN_END, self._train_ends + 1))
        if not rounds and not self._predicted:
            rounds.append(RoundId(RoundKind.PREDICTION, 1))
        return tuple(rounds)

    @property
    def kept_rounds(self) -> tuple[RoundId, ...]:
        """The open rounds, and a training pass that may have begun and waits for an evaluation.

        It has, if the job went on with evaluations after each pass instead of every so many steps.
        """
        if self._ended is not None or self._training_over:
            return self.open_rounds
        return tuple({*self.open_rounds, RoundId(RoundKind.TRAINING, self._passes_over + 1)})

    def passes_begun(self, noted: int) -> int:
        """Return of how many passes the rows may have some that were saved beside this schedule.

        Args:
            noted: How many had begun as far as was noted.
        """
        if self._training_over:
            return noted
        # The pass that comes next may have begun while they were saved.
        has_next = self._plan.has_pass_after(self._passes_over)
        return max(noted, self._passes_over + has_next)

    @property
    def outcome(self) -> Outcome | None:
        """How the job ended; None while it goes on."""
        return self._ended

    @property
    def reason(self) -> str:
        """Why training or the job ended before its plan was done; else empty."""
        return self._reason

    @property
    def steps(self) -> int:
        """Training steps (batches) so far, all passes together."""
        return self._steps_over + sum(self._steps_of.values())

    @property
    def passes_over(self) -> int:
        """How many training passes are over."""
        return self._passes_over

    @property
    def metrics(self) -> Mapping[str, float]:
        """The last evaluation's metrics."""
        return MappingProxyType(self._metrics)

    @property
    def evaluated_steps(self) -> int:
        """Training steps when the last evaluation began."""
        return self._evaluated_steps

    @property
    def evaluated(self) -> int:
        """Number of the last evaluation that is over; 0: none."""
        return self._evaluations - (1 if self._evaluation else 0)

    @property
    def dead_letters(self) -> Mapping[RoundId, int]:
        """How many tasks are dead-lettered in rounds that are over."""
        return MappingProxyType(self._dead_letters)

    def count_steps(self, round_id: RoundId, steps: int) -> None:
        """Take note how many steps a pass has had; may make an evaluation due, or end the training.

        The number is the whole pass's, and may be told again: it is never added up. A new job
        master may know of fewer than the one before it until the workers have told it.

        Args:
            round_id: Which pass; one that is not open is ignored.
            steps: Of its tasks that are done and of those under way.

        Raises:
            InvalidRequest: ``steps`` is negative.
        """
        if steps < 0:
            raise InvalidRequest(f"{steps} steps: must not be negative")
        if round_id.kind is not RoundKind.TRAINING or round_id not in self.open_rounds:
            return
        self._steps_of[round_id] = steps
        if self._training_over:
            return
        every = self._plan.evaluation_every_steps
        if self._plan.evaluates and every and self.steps // every > self._evaluations_due:
            self._evaluations_due = self.steps // every
            self._evaluation_waits = True
        if self._plan.max_steps and self.steps >= self._plan.max_steps:
            self._end_training(f"max_steps: {self._plan.max_steps} steps are done")
        self._advance()

    def round_over(
        self, round_id: RoundId, dead_letters: int = 0, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Take note that a round's tasks are all done or dead-lettered.

        Args:
            round_id: Which; a round that is not open is ignored.
            dead_letters: How many of its tasks are dead-lettered.
            metrics: Of an evaluation; may be empty.
        """
        if round_id not in self.open_rounds:
            return
        self._dead_letters.pop(round_id, None)
        if dead_letters:
            self._dead_letters[round_id] = dead_letters
        else:
            self._steps_over += self._steps_of.pop(round_id, 0)
        if round_id in self._reopened:
            self._reopened.discard(round_id)
        elif round_id.kind is RoundKind.TRAINING:
            self._passes_over += 1
            if self._plan.evaluates and not self._plan.evaluation_every_steps:
                self._evaluation_waits = True
            if not self._plan.has_pass_after(self._passes_over):
                self._end_training("")
        elif round_id.kind is RoundKind.EVALUATION:
            self._evaluation = 0
            self._judge(metrics or {})
        elif round_id.kind is RoundKind.TRAIN_END:
            self._train_end_due = False
            self._train_ends += 1
        else:
            self._predicted = True
        self._advance()

    def reopen(self, round_id: RoundId) -> bool:
        """Open a round again whose dead-lettered tasks were put back; False if it is not known so.

        Works after the job has ended with dead-lettered tasks, too: it goes on with these, runs the
        end of training again, and ends anew. An evaluation is not opened again; its outputs are
        gone.
        """
        if round_id not in self._dead_letters or round_id.kind is RoundKind.EVALUATION:
            return False
        if RoundId(RoundKind.TRAIN_END, self._train_ends + 1) in self.open_rounds:
            # It is cut short. The next one has another name, so that no lease of this one counts.
            self._train_ends += 1
        self._ended = None
        self._reopened.add(round_id)
        if round_id.kind is RoundKind.TRAINING:
            self._train_end_due = self._plan.train_end
        return True

    def to_json(self) -> str:
        """Return where the job is, as JSON."""
        return _Form(
            passes_over=self._passes_over,
            training_over=self._training_over,
            steps_over=self._steps_over,
            # Those of open passes follow from their tasks.
            steps_of={
                str(round_id): steps
                for round_id, steps in self._steps_of.items()
                if round_id not in self.open_rounds
            },
            evaluation=self._evaluation,
            evaluation_waits=self._evaluation_waits,
            evaluations=self._evaluations,
            evaluated_steps=self._evaluated_steps,
            evaluations_due=self._evaluations_due,
            # NaN and infinity are no JSON: every number goes as a string.
            metrics={name: repr(value) for name, value in self._metrics.items()},
            best="" if self._best is None else repr(self._best),
            not_better=self._not_better,
            train_ends=self._train_ends,
            train_end_due=self._train_end_due,
            predicted=self._predicted,
            dead_letters={str(round_id): count for round_id, count in self._dead_letters.items()},
            reopened=tuple(sorted(map(str, self._reopened))),
            ended=self._ended or "",
            reason=self._reason,
        ).to_json()

    @classmethod
    def of(cls, spec: JobSpec, record: str = "") -> Schedule:
        """Return the schedule of a job: where its record says, or at the beginning without one.

        Raises:
            InvalidRequest: The record is not one of a schedule.
        """
        plan = SchedulePlan.of(spec)
        return cls.from_json(plan, record) if record else cls(plan)

    @classmethod
    def from_json(cls, plan: SchedulePlan, text: str) -> Schedule:
        """Return the schedule that ``to_json`` wrote, under a plan that may have changed.

        With more passes than were planned before, a job that had finished goes on.

        Raises:
            InvalidRequest: It is no such string.
        """
        form = _Form.from_json(text)
        schedule = cls(plan)
        for name in _AS_THEY_ARE:
            setattr(schedule, f"_{name}", getattr(form, name))
        try:
            schedule._metrics = {name: float(value) for name, value in form.metrics.items()}
            schedule._best = float(form.best) if form.best else None
        except ValueError as error:
            raise InvalidRequest(f"schedule: metrics and best: {error}") from error
        schedule._steps_of = {RoundId.parse(name): n for name, n in form.steps_of.items()}
        schedule._dead_letters = {RoundId.parse(name): n for name, n in form.dead_letters.items()}
        schedule._reopened = set(map(RoundId.parse, form.reopened))
        schedule._ended = form.ended or None
        schedule._take_over_plan()
        return schedule

    @property
    def _trains(self) -> bool:
        """Whether a training pass is open: not before the evaluation after the last one."""
        between = self._plan.evaluation_every_steps == 0 and self._evaluation
        return not self._training_over and not between

    def _advance(self) -> None:
        """Open the evaluation that waits, and end the job when nothing is left."""
        if self._ended is not None:
            return
        if self._evaluation_waits and not self._evaluation:
            self._evaluation_waits = False
            self._evaluations += 1
            self._evaluation = self._evaluations
            self._evaluated_steps = self.steps
        if not self.open_rounds:
            self._ended = "finished_with_dead_letters" if self._dead_letters else "finished"

    def _end_training(self, reason: str, *, evaluates: bool = True) -> None:
        """Stop training; the model as it is then is evaluated once, unless it just was.

        Args:
            reason: Why, for people; empty: the plan is done.
            evaluates: Whether the plan's evaluation of the last model is still wanted.
        """
        self._training_over = True
        self._reason = self._reason or reason
        # An evaluation under way or just over saw the model before the last steps, if there were
        # any since it began.
        if self._plan.evaluates and evaluates:
            self._evaluation_waits |= self._evaluated_steps < self.steps or not self._evaluations

    def _judge(self, metrics: Mapping[str, float]) -> None:
        """Take in the metrics of an evaluation; end the training if it got no better."""
        self._metrics = dict(metrics)
        rule = self._plan.early_stop
        if rule is None:
            return
        value = metrics.get(rule.metric, math.nan)
        if _is_better(rule, value, self._best):
            self._best = value
            self._not_better = 0
            return
        self._not_better += 1
        if self._not_better >= rule.patience and not self._training_over:
            best = "none so far" if self._best is None else f"{self._best:g}"
            self._evaluation_waits = False
            # That is a judgement on the model: no further one is needed.
            self._end_training(
                f"early_stop: {rule.metric} was not better in {self._not_better} evaluations "
                f"(last {value:g}, best {best})",
                evaluates=False,
            )

    def _take_over_plan(self) -> None:
        """Train on if the plan has more passes than it had and nothing else ended the training.

        A pass that was cut short (max_steps, early stop) is never taken up again: the streams of
        its unfinished tasks are closed.
        """
        has_more = self._plan.has_pass_after(self._passes_over)
        if self._training_over and not self._reason and has_more:
            self._training_over = False
            self._ended = None
            self._train_end_due = self._plan.train_end
        self._advance()


def is_cut_short(record: str) -> bool:
    """Return whether a job's training ended before its plan was done (most steps, early stop).

    A pass that was open then is never taken up again, and streams of its tasks are closed.

    Args:
        record: What ``Schedule.to_json`` wrote; empty: the job has not begun.

    Raises:
        InvalidRequest: It is no such string.
    """
    if not record:
        return False
    form = _Form.from_json(record)
    return form.training_over and bool(form.reason)


def recorded_passes(record: str) -> int:
    """Return how many training passes are over.

    Args:
        record: What ``Schedule.to_json`` wrote; empty: the job has not begun.

    Raises:
        InvalidRequest: It is no such string.
    """
    return _Form.from_json(record).passes_over if record else 0


def recorded_dead_letters(record: str) -> int:
    """Return how many tasks are dead-lettered in rounds that are over.

    Args:
        record: What ``Schedule.to_json`` wrote; empty: the job has not begun.

    Raises:
        InvalidRequest: It is no such string.
    """
    return sum(_Form.from_json(record).dead_letters.values()) if record else 0


def _is_better(rule: EarlyStop, value: float, best: float | None) -> bool:
    """Return whether a value is better than the best one so far (None: there is none)."""
    if math.isnan(value):
        return False
    if best is None:
        return True
    gain = value - best if rule.mode == "max" else best - value
    return gain > rule.min_delta


@dataclass(frozen=True, kw_only=True)
class _Form(JsonRecord, what="schedule"):
    """The JSON form of a ``Schedule``: its fields, with rounds and numbers as strings."""

    passes_over: Count
    training_over: bool
    steps_over: Count
    steps_of: Mapping[str, Count]
    evaluation: Count
    evaluation_waits: bool
    evaluations: Count
    evaluated_steps: Count
    evaluations_due: Count
    metrics: Mapping[str, str]
    best: str
    not_better: Count
    train_ends: Count
    train_end_due: bool
    predicted: bool
    dead_letters: Mapping[str, Count]
    reopened: tuple[str, ...]
    ended: Literal["", "finished", "finished_with_dead_letters"]
    reason: str


# Fields that have the same value in the form and in the schedule.
_AS_THEY_ARE = (
    "passes_over",
    "training_over",
    "steps_over",
    "evaluation",
    "evaluation_waits",
    "evaluations",
    "evaluated_steps",
    "evaluations_due",
    "not_better",
    "train_ends",
    "train_end_due",
    "predicted",
    "reason",
)
