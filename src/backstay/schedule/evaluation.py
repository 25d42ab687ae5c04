"""The outputs of an evaluation round put together, each task's once.

Kept in memory only: a new job master begins the evaluation again. Imports numpy and
``backstay.errors``; does no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backstay.errors import InvalidRequest, LimitExceeded

__all__ = ["Metric", "RoundOutputs", "TaskOutputs"]

# (labels, predictions) of all records, first axis the records -> value.
Metric = Callable[[NDArray[Any], NDArray[Any]], float]


@dataclass(frozen=True)
class TaskOutputs:
    """What an evaluation task brings, in the order of its records.

    Attributes:
        records: Number of records.
        labels: First axis the records; None if no metric needs them.
        predictions: Likewise; None exactly if ``labels`` is.
        values: Values of metrics that were computed from the task alone: the mean over all
            tasks, each weighted with its records, is taken.
    """

    records: int
    labels: NDArray[Any] | None = None
    predictions: NDArray[Any] | None = None
    values: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.records < 0:
            raise InvalidRequest(f"outputs of {self.records} records")
        if (self.labels is None) != (self.predictions is None):
            raise InvalidRequest("outputs have labels without predictions, or the reverse")
        for name in ("labels", "predictions"):
            array = getattr(self, name)
            if array is not None and (array.ndim == 0 or len(array) != self.records):
                raise InvalidRequest(
                    f"{name} have the shape {array.shape}, expected {self.records} records"
                )

    @property
    def bytes(self) -> int:
        """What the arrays take."""
        if self.labels is None or self.predictions is None:
            return 0
        return self.labels.nbytes + self.predictions.nbytes


class RoundOutputs:
    """The outputs of an evaluation's tasks."""

    def __init__(self, bytes_max: int = 1 << 30) -> None:
        """Begin empty.

        Args:
            bytes_max: The most that is kept of labels and predictions.
        """
        self._bytes_max = bytes_max
        self._bytes = 0
        self._records = 0
        self._tasks: dict[int, TaskOutputs] = {}
        self._shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self._problems: dict[str, str] = {}

    def add(self, task: int, outputs: TaskOutputs) -> bool:
        """Keep the outputs of a task; False, and nothing changes, if it had been added.

        Raises:
            InvalidRequest: Its rows have another shape than those of the other tasks.
            LimitExceeded: All together would be more than ``bytes_max``.
        """
        if task in self._tasks:
            return False
        if outputs.labels is not None and outputs.predictions is not None and outputs.records:
            shapes = (outputs.labels.shape[1:], outputs.predictions.shape[1:])
            if self._shapes is not None and shapes != self._shapes:
                raise InvalidRequest(
                    f"labels and predictions of task {task} have rows of the shapes {shapes}, "
                    f"those of earlier tasks {self._shapes}"
                )
            if self._bytes + outputs.bytes > self._bytes_max:
                raise LimitExceeded(
                    f"outputs of this evaluation are more than {self._bytes_max} bytes: give less "
                    "validation data, or metrics as functions, which are averaged by task"
                )
            self._shapes = shapes
        self._bytes += outputs.bytes
        self._records += outputs.records
        self._tasks[task] = outputs
        return True

    @property
    def records(self) -> int:
        """Number of records so far."""
        return self._records

    @property
    def problems(self) -> Mapping[str, str]:
        """Why metrics could not be computed, by name; as of the last ``compute``."""
        return MappingProxyType(self._problems)

    def compute(self, metrics: Mapping[str, Metric]) -> dict[str, float]:
        """Return the metrics over all records, taken in the order of the tasks.

        The result does not depend on who evaluated what, nor in which order. A metric that
        cannot be computed is left out and named in ``problems``.

        Args:
            metrics: What to compute from all labels and predictions. Metrics that came as values
                of the tasks are there without being named.
        """
        self._problems = {}
        ordered = [self._tasks[task] for task in sorted(self._tasks)]
        results = self._means(ordered)
        labels = [each.labels for each in ordered if each.labels is not None and each.records]
        predictions = [
            each.predictions for each in ordered if each.predictions is not None and each.records
        ]
        if metrics and not labels:
            self._problems |= dict.fromkeys(metrics, "there are no records")
            return results
        if metrics:
            all_labels, all_predictions = np.concatenate(labels), np.concatenate(predictions)
            for name, metric in metrics.items():
                try:
                    results[name] = float(metric(all_labels, all_predictions))
                except (InvalidRequest, ValueError, TypeError) as error:
                    self._problems[name] = str(error) or type(error).__name__
        return results

    def _means(self, ordered: list[TaskOutputs]) -> dict[str, float]:
        names = {name for outputs in ordered for name in outputs.values}
        means: dict[str, float] = {}
        for name in sorted(names):
            having = [each for each in ordered if name in each.values and each.records]
            records = sum(each.records for each in having)
            if records:
                total = math.fsum(each.values[name] * each.records for each in having)
                means[name] = total / records
        return means
