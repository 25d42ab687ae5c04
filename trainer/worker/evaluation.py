"""Outputs of evaluation batches, put together for the job's metrics.

May import numpy, the metrics and the link's messages. Computes the user's own
functions here, on the worker that has the user's code. The job master computes named metrics,
because it has all outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backstay.errors import ConfigError
from backstay.job.messages import EvaluationOutputs
from backstay.job.metrics import Metric, compute

__all__ = ["Outputs", "labels_of"]


def labels_of(labels: Any, shape: tuple[int, ...], what: str) -> NDArray[Any]:
    """Return labels as one array [n].

    Args:
        labels: As the user's ``feed`` returned them.
        shape: Of the predictions, [n] or [n, ...].
        what: What they are for, for the message.

    Raises:
        ConfigError: They are not one array with a number for each prediction.
    """
    if hasattr(labels, "numpy"):
        labels = labels.numpy()
    if isinstance(labels, dict | tuple):
        raise ConfigError(
            f"labels are a {type(labels).__name__}: {what}, feed must return them as one array"
        )
    array = np.asarray(labels)
    if array.ndim > 1 and array.size == len(array):
        array = array.reshape(-1)
    if array.shape != shape[:1]:
        raise ConfigError(
            f"labels have the shape {array.shape}, predictions {shape}: one label for each "
            "prediction is needed"
        )
    return array


class Outputs:
    """Predictions and labels of some batches."""

    def __init__(self) -> None:
        self._predictions: list[NDArray[Any]] = []
        self._labels: list[NDArray[Any]] = []

    def add(self, predictions: NDArray[Any], labels: Any) -> None:
        """Take a batch's: predictions [n] or [n, width], labels [n] or [n, 1].

        Raises:
            ConfigError: The labels are not one array with a number for each prediction.
        """
        array = labels_of(labels, predictions.shape, "to be evaluated")
        if predictions.ndim > 1 and predictions.size == len(predictions):
            predictions = predictions.reshape(-1)
        self._predictions.append(predictions)
        self._labels.append(array)

    def message(self, metrics: Mapping[str, str | Metric]) -> EvaluationOutputs:
        """Return what the job master is told of these batches."""
        labels, predictions = self._arrays()
        named = {name: metric for name, metric in metrics.items() if isinstance(metric, str)}
        own = {name: metric for name, metric in metrics.items() if name not in named}
        values = compute(own, labels, predictions) if len(labels) else {}
        return EvaluationOutputs(
            predictions=predictions.astype(np.float32) if named else None,
            labels=labels.astype(np.float32) if named else None,
            values=values,
            records=len(labels),
            metrics=named,
        )

    def _arrays(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return all labels and all predictions; empty arrays if there was no batch."""
        if not self._labels:
            return np.empty(0, np.float32), np.empty(0, np.float32)
        return np.concatenate(self._labels), np.concatenate(self._predictions)
