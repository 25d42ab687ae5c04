"""What tells how good predictions are: exact, in numpy.

May import numpy and the errors. Never approximates: the area under the curve counts every pair
of a positive and a negative example once, and a tie as one half.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backstay.errors import InvalidRequest

__all__ = [
    "METRICS",
    "Metric",
    "accuracy",
    "auc",
    "compute",
    "logloss",
    "logloss_of_logits",
    "mae",
    "mse",
]

Metric = Callable[[NDArray[Any], NDArray[Any]], float]


def auc(labels: NDArray[Any], scores: NDArray[Any]) -> float:
    """Return the probability that a random positive scores above a random negative.

    Args:
        labels: 0 or 1, shape [n] or [n, 1].
        scores: Any increasing function of the predicted probability, shape [n] or [n, 1].

    Raises:
        InvalidRequest: The shapes differ, or only one class is present.
    """
    labels, scores = _binary(labels, scores)
    positive = labels == 1
    positives = int(positive.sum())
    negatives = labels.size - positives
    if positives == 0 or negatives == 0:
        raise InvalidRequest("the area under the curve needs both classes among the labels")
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    # Ranks start at 1; equal scores share the mean of the ranks they cover.
    mean_rank = np.cumsum(counts) - (counts - 1) / 2.0
    rank_sum = float(mean_rank[inverse[positive]].sum())
    return (rank_sum - positives * (positives + 1) / 2.0) / (positives * negatives)


def logloss(labels: NDArray[Any], probabilities: NDArray[Any], *, floor: float = 1e-15) -> float:
    """Return the mean of ``-log p(label)``, probabilities kept ``floor`` away from 0 and 1.

    Args:
        labels: 0 or 1, shape [n] or [n, 1].
        probabilities: Predicted probability of label 1, shape [n] or [n, 1].
        floor: Smallest probability given to either class.

    Raises:
        InvalidRequest: The shapes differ, or a probability lies outside 0..1.
    """
    labels, probabilities = _binary(labels, probabilities)
    if not (probabilities.min() >= 0.0 and probabilities.max() <= 1.0):
        raise InvalidRequest(
            "probabilities must lie in 0..1; for a model that answers logits use logloss_of_logits"
        )
    p = np.clip(probabilities, floor, 1.0 - floor)
    return float(-np.mean(np.where(labels == 1, np.log(p), np.log1p(-p))))


def logloss_of_logits(labels: NDArray[Any], logits: NDArray[Any]) -> float:
    """Return the mean of ``-log p(label)`` where ``p`` is the sigmoid of a logit.

    Args:
        labels: 0 or 1, shape [n] or [n, 1].
        logits: Of label 1, shape [n] or [n, 1].

    Raises:
        InvalidRequest: The shapes differ.
    """
    labels, logits = _binary(labels, logits)
    # log(1 + exp(x)) without overflow; -log p(1) is that of -x.
    return float(np.mean(np.logaddexp(0.0, np.where(labels == 1, -logits, logits))))


def accuracy(labels: NDArray[Any], predictions: NDArray[Any]) -> float:
    """Return the share of examples whose class is predicted.

    Args:
        labels: Numbers of classes, shape [n] or [n, 1].
        predictions: [n, classes], the largest of a row wins (probabilities or logits); or, with
            two classes, the probability of class 1 as [n] or [n, 1].

    Raises:
        InvalidRequest: The shapes do not fit, or a probability lies outside 0..1.
    """
    labels = _flat(labels)
    predictions = np.asarray(predictions)
    if predictions.ndim == 2 and predictions.shape[1] > 1:
        classes = predictions.argmax(axis=1)
    else:
        probabilities = _flat(predictions)
        if probabilities.size and not (probabilities.min() >= 0 and probabilities.max() <= 1):
            raise InvalidRequest(
                "probabilities must lie in 0..1; for a model that answers one logit for each "
                "record, give a function of your own"
            )
        classes = (probabilities >= 0.5).astype(np.int64)
    _check_sizes(labels, classes)
    return float(np.mean(labels == classes))


def mse(labels: NDArray[Any], predictions: NDArray[Any]) -> float:
    """Return the mean of the squared differences; both [n] or [n, 1].

    Raises:
        InvalidRequest: The shapes differ.
    """
    labels, predictions = _flat(labels), _flat(predictions)
    _check_sizes(labels, predictions)
    return float(np.mean(np.square(predictions - labels)))


def mae(labels: NDArray[Any], predictions: NDArray[Any]) -> float:
    """Return the mean of the absolute differences; both [n] or [n, 1].

    Raises:
        InvalidRequest: The shapes differ.
    """
    labels, predictions = _flat(labels), _flat(predictions)
    _check_sizes(labels, predictions)
    return float(np.mean(np.abs(predictions - labels)))


METRICS: Mapping[str, Metric] = {
    "auc": auc,
    "logloss": logloss,
    "logloss_of_logits": logloss_of_logits,
    "accuracy": accuracy,
    "mse": mse,
    "mae": mae,
}


def compute(
    metrics: Mapping[str, str | Metric], labels: NDArray[Any], predictions: NDArray[Any]
) -> dict[str, float]:
    """Return the value of each metric over all examples.

    Args:
        metrics: By name: one of ``METRICS``, or a function of (labels, predictions).
        labels: Of all examples, [n].
        predictions: Of the same examples, [n] or [n, classes].

    Raises:
        InvalidRequest: Arrays that a metric cannot judge; the message names the metric.
    """
    values = {}
    for name, metric in metrics.items():
        function = METRICS[metric] if isinstance(metric, str) else metric
        try:
            values[name] = float(function(labels, predictions))
        except InvalidRequest as error:
            raise InvalidRequest(f"metric {name!r}: {error}") from error
    return values


def _flat(values: NDArray[Any]) -> NDArray[np.float64]:
    values = np.asarray(values, dtype=np.float64)
    if values.ndim > 1 and values.size != values.shape[0]:
        raise InvalidRequest(f"one number for each example is needed, the shape is {values.shape}")
    return values.reshape(-1)


def _check_sizes(labels: NDArray[Any], predictions: NDArray[Any]) -> None:
    if labels.shape != predictions.shape or labels.size == 0:
        raise InvalidRequest(f"{labels.size} labels for {predictions.size} predictions")


def _binary(
    labels: NDArray[Any], values: NDArray[Any]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    labels, values = _flat(labels), _flat(values)
    _check_sizes(labels, values)
    if not np.isin(labels, (0.0, 1.0)).all():
        raise InvalidRequest("labels must be 0 or 1")
    return labels, values
