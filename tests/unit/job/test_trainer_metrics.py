"""Metrics against values worked out by hand and PyTorch's, and the outputs they judge."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from backstay.errors import ConfigError, InvalidRequest
from backstay.job.metrics import METRICS, accuracy, auc, compute, logloss, logloss_of_logits
from backstay.job.metrics import mae as mean_absolute
from backstay.job.metrics import mse as mean_squared
from backstay.trainer.worker.evaluation import Outputs


def test_auc_by_hand() -> None:
    # Of the four pairs only 0.35 against 0.4 is in the wrong order.
    assert auc(np.array([0, 0, 1, 1]), np.array([0.1, 0.4, 0.35, 0.8])) == 0.75
    assert auc(np.array([0, 1, 0, 1]), np.array([0.2, 0.2, 0.5, 0.7])) == (0.5 + 0 + 1 + 1) / 4
    assert auc(np.array([1, 0]), np.array([3.0, 3.0])) == 0.5


def test_auc_counts_every_pair() -> None:
    generator = np.random.default_rng(5)
    labels = generator.integers(0, 2, 300)
    scores = generator.integers(0, 40, 300) / 7
    positives, negatives = scores[labels == 1], scores[labels == 0]
    difference = positives[:, None] - negatives[None, :]
    pairs = (difference > 0).mean() + (difference == 0).mean() / 2
    assert auc(labels, scores) == pytest.approx(pairs, rel=1e-12)


def test_logloss_by_hand() -> None:
    assert logloss(np.array([1, 0]), np.array([0.8, 0.4])) == pytest.approx(
        -(math.log(0.8) + math.log(0.6)) / 2
    )
    assert logloss(np.array([1]), np.array([0.0])) == pytest.approx(-math.log(1e-15))


def test_logloss_against_pytorch() -> None:
    torch = pytest.importorskip("torch")
    generator = np.random.default_rng(6)
    labels = generator.integers(0, 2, 5000)
    chances = np.clip(generator.random(5000), 0.01, 0.99)
    judged = torch.nn.functional.binary_cross_entropy(
        torch.from_numpy(chances), torch.from_numpy(labels.astype(np.float64))
    )
    assert logloss(labels, chances) == pytest.approx(float(judged), abs=1e-12)


@pytest.mark.parametrize(
    ("labels", "scores", "message"),
    [
        ([1, 1], [0.1, 0.2], "both classes"),
        ([1, 0], [0.1], "2 labels for 1"),
        ([2, 0], [0.1, 0.2], "0 or 1"),
        ([], [], "0 labels"),
    ],
)
def test_auc_says_what_does_not_fit(labels: list[int], scores: list[float], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        auc(np.array(labels), np.array(scores))


def test_logloss_refuses_scores() -> None:
    with pytest.raises(InvalidRequest, match=r"0\.\.1"):
        logloss(np.array([1]), np.array([1.5]))


def test_accuracy_of_classes_and_of_probabilities() -> None:
    scores = np.array([[0.1, 2.0, -1.0], [5.0, 2.0, 1.0], [0.0, 0.0, 1.0]])
    assert accuracy(np.array([1, 0, 1]), scores) == pytest.approx(2 / 3)
    assert accuracy(np.array([1, 0, 1, 0]), np.array([0.9, 0.5, 0.1, 0.2])) == 0.5
    assert accuracy(np.array([[1], [0]]), np.array([[0.9], [0.2]])) == 1.0
    with pytest.raises(InvalidRequest, match=r"0\.\.1"):
        accuracy(np.array([1]), np.array([3.0]))


def test_errors_by_hand() -> None:
    labels, predictions = np.array([1.0, 2.0, 4.0]), np.array([[1.0], [3.0], [1.0]])
    assert mean_squared(labels, predictions) == pytest.approx((0 + 1 + 9) / 3)
    assert mean_absolute(labels, predictions) == pytest.approx((0 + 1 + 3) / 3)


def test_logloss_of_logits_is_that_of_their_probabilities() -> None:
    generator = np.random.default_rng(3)
    labels, logits = generator.integers(0, 2, 100), generator.normal(0, 3, 100)
    of_probabilities = logloss(labels, 1 / (1 + np.exp(-logits)))
    assert logloss_of_logits(labels, logits) == pytest.approx(of_probabilities, rel=1e-9)
    # Far out there is no overflow and no floor.
    assert logloss_of_logits(np.array([0]), np.array([1000.0])) == 1000.0


def test_compute_names_the_metric_that_fails() -> None:
    labels, predictions = np.array([0, 1]), np.array([0.2, 0.7])

    def worst(labels: Any, predictions: Any) -> float:
        return float(np.abs(labels - predictions).max())

    values = compute({"a": "auc", "own": worst}, labels, predictions)
    assert values == {"a": 1.0, "own": pytest.approx(0.3)}
    with pytest.raises(InvalidRequest, match=r"metric 'area': .* both classes"):
        compute({"area": "auc"}, np.array([1, 1]), predictions)


@pytest.mark.parametrize("name", sorted(METRICS))
def test_every_metric_refuses_what_does_not_fit(name: str) -> None:
    with pytest.raises(InvalidRequest):
        METRICS[name](np.array([0, 1, 1]), np.array([0.5, 0.5]))
    with pytest.raises(InvalidRequest):
        METRICS[name](np.array([]), np.array([]))


def test_outputs_of_batches_judged_apart_are_those_judged_together() -> None:
    generator = np.random.default_rng(4)
    labels = generator.integers(0, 2, 300).astype(np.float32)
    predictions = generator.random(300).astype(np.float32)
    whole = Outputs()
    for begin in range(0, 300, 70):
        whole.add(predictions[begin : begin + 70, None], labels[begin : begin + 70, None])
    message = whole.message({"auc": "auc", "own": lambda a, b: float(a.sum())})
    assert message.records == 300
    assert message.metrics == {"auc": "auc"}
    assert message.values == {"own": float(labels.sum())}
    assert message.labels is not None
    assert message.predictions is not None
    assert auc(message.labels, message.predictions) == auc(labels, predictions)


def test_labels_must_fit_the_predictions() -> None:
    with pytest.raises(ConfigError, match="one label for each prediction"):
        Outputs().add(np.zeros(3), np.zeros(4))
    with pytest.raises(ConfigError, match="as one array"):
        Outputs().add(np.zeros(3), (np.zeros(3), np.zeros(3)))
