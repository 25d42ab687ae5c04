"""What a user's code is told while a job runs.

The ``callbacks()`` function of a model file returns a list of these. Imports the standard
library only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = [
    "Callback",
    "Callbacks",
    "Evaluation",
    "LearningRateScheduler",
    "TaskReport",
    "TrainEnd",
]

# One rate for all optimizers of the model file, or one by the name of each.
Rate: TypeAlias = "float | Mapping[str, float]"


@dataclass(frozen=True)
class TaskReport:
    """A training task that this worker has finished.

    Attributes:
        pass_number: From 1.
        task: Its number in the pass.
        examples: Records that this worker trained on.
        batches: Batches that this worker trained on.
        loss: Mean over those batches; None if there was none left to do.
    """

    pass_number: int
    task: int
    examples: int
    batches: int
    loss: float | None


@dataclass(frozen=True)
class Evaluation:
    """An evaluation that is over.

    Attributes:
        number: From 1 within the job.
        metrics: By name.
    """

    number: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class TrainEnd:
    """What there is at the end of training, once for a job and on one worker only.

    Attributes:
        model: The Paddle or PyTorch model, its dense parameters as trained. Rows of embeddings
            that are on the servers are not in it.
        output: ``output`` of the job, where files belong; may be empty.
        passes: Of the job; fewer were trained if it ended early.
    """

    model: Any
    output: str
    passes: int


class Callback:
    """Base of callbacks: every method does nothing.

    Methods run on the worker, between batches: what takes long holds its training up. An
    exception in one fails the task.
    """

    def on_batch_begin(self, step: int) -> None:
        """Before a batch is trained.

        Args:
            step: Batches of the whole job before this one, all workers together, as far as this
                worker knows: what others do arrives with a delay of up to half a second.
        """

    def on_task_end(self, report: TaskReport) -> None:
        """This worker has finished a training task."""

    def on_pass_end(self, pass_number: int) -> None:
        """This worker has seen its first task of a later pass, or the end of training.

        A worker that joined after the pass is not told of it.
        """

    def on_evaluation(self, metrics: Mapping[str, float]) -> None:
        """An evaluation is complete: every worker is told, before its next task.

        Only of the newest one, if several came between two of its tasks. After a restore, an
        evaluation that is done again is told again. A worker that is given no further task is
        not told of the last one; the one that is given the end of training is.
        """

    def on_train_end(self, end: TrainEnd) -> None:
        """All passes are done; called on one worker of the job."""

    # Given by the worker before anything else is called.
    set_learning_rate: Callable[[Rate], None] = staticmethod(lambda rate: None)


class LearningRateScheduler(Callback):
    """Sets the learning rate before each batch.

    Args:
        schedule: Called with the number of batches of the job so far, all workers together (about:
            see ``Callback.on_batch_begin``); returns the rate, or with several optimizers in a dict
            the rates of the optimizers that it names. A list's optimizers are "0", "1" and so on.

    Example:
        >>> def callbacks():
        ...     return [LearningRateScheduler(lambda step: 0.001 * 0.5 ** (step // 10_000))]
    """

    def __init__(self, schedule: Callable[[int], Rate]) -> None:
        self._schedule = schedule

    def on_batch_begin(self, step: int) -> None:
        """Set the rate of the coming batch."""
        rate = self._schedule(step)
        self.set_learning_rate(rate if isinstance(rate, Mapping) else float(rate))


class Callbacks:
    """A list of callbacks, told together, in order."""

    def __init__(self, members: Sequence[Callback], set_learning_rate: Callable[[Rate], None]):
        self._members = tuple(members)
        for member in self._members:
            member.set_learning_rate = set_learning_rate
        self._pass: int | None = None
        self._evaluation = ""

    def batch_begins(self, step: int) -> None:
        """Before a batch."""
        for member in self._members:
            member.on_batch_begin(step)

    def task_ended(self, report: TaskReport) -> None:
        """After a training task."""
        for member in self._members:
            member.on_task_end(report)

    def pass_is(self, pass_number: int) -> None:
        """A task of this pass begins; a pass before it that was seen has ended."""
        before, self._pass = self._pass, pass_number
        if before is not None and before < pass_number:
            for member in self._members:
                member.on_pass_end(before)

    def evaluation_is(self, newest: Evaluation | None) -> None:
        """This is the newest evaluation as a task begins; told once."""
        # Compared as strings: NaN is not equal to itself, but is no news.
        seen, self._evaluation = self._evaluation, repr(newest)
        if newest is not None and repr(newest) != seen:
            for member in self._members:
                member.on_evaluation(newest.metrics)

    def training_ended(self, end: TrainEnd) -> None:
        """After the last pass: its end first, if it was seen."""
        self.pass_is((self._pass or 0) + 1)
        self._pass = None
        for member in self._members:
            member.on_train_end(end)
