"""Area under the ROC curve and logistic loss, exact, in numpy.

May import numpy only. Never approximates: the area counts every pair of a positive and a
negative example once, and a tie as one half.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["auc", "logloss"]


def auc(labels: NDArray[Any], scores: NDArray[Any]) -> float:
    """Return the probability that a random positive scores above a random negative.

    Args:
        labels: 0 or 1, shape [n].
        scores: Any increasing function of the predicted probability, shape [n].

    Raises:
        ValueError: The shapes differ, or only one class is present.
    """
    labels, scores = _checked(labels, scores)
    positive = labels == 1
    positives = int(positive.sum())
    negatives = labels.size - positives
    if positives == 0 or negatives == 0:
        raise ValueError("the area under the curve needs both classes among the labels")
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    # Ranks start at 1; equal scores share the mean of the ranks they cover.
    mean_rank = np.cumsum(counts) - (counts - 1) / 2.0
    rank_sum = float(mean_rank[inverse[positive]].sum())
    return (rank_sum - positives * (positives + 1) / 2.0) / (positives * negatives)


def logloss(labels: NDArray[Any], probabilities: NDArray[Any], *, floor: float = 1e-15) -> float:
    """Return the mean of ``-log p(label)``, probabilities kept ``floor`` away from 0 and 1.

    Args:
        labels: 0 or 1, shape [n].
        probabilities: Predicted probability of label 1, shape [n].
        floor: Smallest probability given to either class.

    Raises:
        ValueError: The shapes differ, or a probability lies outside 0..1.
    """
    labels, probabilities = _checked(labels, probabilities)
    if probabilities.min() < 0.0 or probabilities.max() > 1.0:
        raise ValueError("probabilities must lie in 0..1; were scores passed by mistake?")
    p = np.clip(probabilities, floor, 1.0 - floor)
    return float(-np.mean(np.where(labels == 1, np.log(p), np.log1p(-p))))


def _checked(
    labels: NDArray[Any], values: NDArray[Any]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    labels = np.asarray(labels, dtype=np.float64).reshape(-1)
    values = np.asarray(values, dtype=np.float64).reshape(-1)
    if labels.shape != values.shape or labels.size == 0:
        raise ValueError(f"{labels.size} labels for {values.size} predictions")
    if not np.isin(labels, (0.0, 1.0)).all():
        raise ValueError("labels must be 0 or 1")
    return labels, values
