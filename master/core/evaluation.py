"""The outputs of an evaluation round put together, each task's once.

Imports numpy and ``backstay.errors``; does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

__all__ = ["EvaluationOutputs", "Metric"]

# (labels, predictions) of all records, first axis the records -> value.
Metric = Callable[[npt.NDArray[np.generic], npt.NDArray[np.generic]], float]


class EvaluationOutputs:
    """Labels and predictions of an evaluation's tasks."""

    def __init__(self, bytes_max: int = 1 << 30) -> None:
        """Begin empty.

        Args:
            bytes_max: The most that is kept.
        """
        raise NotImplementedError

    def add(
        self, task: int, labels: npt.NDArray[np.generic], predictions: npt.NDArray[np.generic]
    ) -> bool:
        """Keep the outputs of a task, in the order of its records; False if it had been added.

        Raises:
            InvalidRequest: They do not have one length, or not the shape of the others.
            LimitExceeded: All together would be more than ``bytes_max``.
        """
        raise NotImplementedError

    @property
    def records(self) -> int:
        """Number of records so far."""
        raise NotImplementedError

    def compute(self, metrics: Mapping[str, Metric]) -> dict[str, float]:
        """Return each metric over all records in the order of tasks; empty without records."""
        raise NotImplementedError
