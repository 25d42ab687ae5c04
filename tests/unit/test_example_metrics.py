"""The judges of the examples, against values worked out by hand and against scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest

from examples.common.hashing import hash_key
from examples.common.metrics import auc, logloss


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


def test_against_scikit_learn() -> None:
    judge = pytest.importorskip("sklearn.metrics")
    generator = np.random.default_rng(6)
    labels = generator.integers(0, 2, 5000)
    chances = np.round(generator.random(5000), 2)
    assert auc(labels, chances) == pytest.approx(judge.roc_auc_score(labels, chances), abs=1e-12)
    inside = np.clip(chances, 0.01, 0.99)
    assert logloss(labels, inside) == pytest.approx(judge.log_loss(labels, inside), abs=1e-12)


@pytest.mark.parametrize(
    ("labels", "scores", "message"),
    [
        ([1, 1], [0.1, 0.2], "both classes"),
        ([1, 0], [0.1], "2 labels for 1"),
        ([2, 0], [0.1, 0.2], "0 or 1"),
        ([], [], "0 labels"),
    ],
)
def test_refused(labels: list[int], scores: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        auc(np.array(labels), np.array(scores))


def test_logloss_refuses_scores() -> None:
    with pytest.raises(ValueError, match=r"0\.\.1"):
        logloss(np.array([1]), np.array([1.5]))


def test_keys_do_not_change() -> None:
    # A changed key would lose the row of every model trained before.
    assert hash_key("education", "Bachelors") == -6719532821308882156
    assert hash_key("a", "bc") != hash_key("ab", "c")
