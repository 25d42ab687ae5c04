"""Counts of scores, held against scikit-learn's figures of the same records."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn import metrics

from backstay.errors import InvalidRequest
from backstay.job.score_counts import BUCKETS, GROUP_BUCKETS, ScoreCounts, Scores

Floats = NDArray[np.float64]


def clicks(records: int, seed: int, *, bias: float, spread: float) -> tuple[Floats, Floats]:
    """Logits as a trained model gives them, and labels that they foretell."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(bias, spread, records)
    labels = (generator.random(records) < 1 / (1 + np.exp(-logits))).astype(np.float64)
    return logits, labels


def counts_of(
    logits: Floats, labels: Floats, *, as_logits: bool, buckets: int = BUCKETS
) -> ScoreCounts:
    counts = ScoreCounts(buckets)
    given = logits if as_logits else 1 / (1 + np.exp(-logits))
    # As a worker does: batch by batch.
    for begin in range(0, len(labels), 1000):
        rows = slice(begin, begin + 1000)
        counts.add(given[rows], labels[rows], logits=as_logits)
    return counts


@pytest.mark.parametrize("as_logits", [False, True])
@pytest.mark.parametrize(
    ("bias", "spread"), [(-4.0, 1.5), (-1.0, 1.0), (0.0, 2.5), (-6.0, 2.0), (-3.0, 0.3)]
)
def test_figures_are_those_of_scikit_learn(bias: float, spread: float, as_logits: bool) -> None:
    logits, labels = clicks(200_000, 7, bias=bias, spread=spread)
    chances = 1 / (1 + np.exp(-logits))
    counts = counts_of(logits, labels, as_logits=as_logits)
    assert counts.examples == len(labels)
    assert counts.positives == labels.sum()
    assert counts.skipped == 0
    # In truth they differ by some millionths.
    assert counts.auc() == pytest.approx(metrics.roc_auc_score(labels, logits), abs=1e-4)
    assert counts.logloss() == pytest.approx(metrics.log_loss(labels, chances), rel=1e-9)
    assert counts.calibration() == pytest.approx(chances.mean() / labels.mean(), rel=1e-9)


@pytest.mark.parametrize(("bias", "spread"), [(-4.0, 1.5), (-1.0, 1.0), (0.0, 2.5)])
def test_figures_of_values_are_a_little_coarser(bias: float, spread: float) -> None:
    logits, labels = clicks(200_000, 8, bias=bias, spread=spread)
    counts = counts_of(logits, labels, as_logits=True, buckets=GROUP_BUCKETS)
    assert counts.auc() == pytest.approx(metrics.roc_auc_score(labels, logits), abs=3e-4)


def test_float32_of_a_framework_is_good_enough() -> None:
    logits, labels = clicks(50_000, 9, bias=-3.0, spread=2.0)
    chances = (1 / (1 + np.exp(-logits))).astype(np.float32)
    counts = ScoreCounts()
    counts.add(chances, labels.astype(np.float32))
    assert counts.auc() == pytest.approx(metrics.roc_auc_score(labels, chances), abs=1e-4)
    exact = metrics.log_loss(labels, chances.astype(np.float64))
    assert counts.logloss() == pytest.approx(exact, rel=1e-9)


def test_equal_scores_count_one_half_as_scikit_learn_has_it() -> None:
    scores = np.array([0.5, 0.5, 0.5, 0.9, 0.1])
    labels = np.array([1.0, 0.0, 1.0, 1.0, 0.0])
    counts = ScoreCounts()
    counts.add(scores, labels)
    assert counts.auc() == pytest.approx(metrics.roc_auc_score(labels, scores))
    # The one pair of equal scores is not an error, but it cannot be told from one.
    assert counts.auc_error_max() == pytest.approx(2 / (2 * 6))


@pytest.mark.parametrize("predictions", [[0.0, 1.0], [1.0, 0.0]])
def test_certain_predictions_have_finite_figures(predictions: list[float]) -> None:
    counts = ScoreCounts()
    labels = np.array([0.0, 1.0])
    counts.add(np.array(predictions), labels)
    assert counts.auc() == (1.0 if predictions == [0.0, 1.0] else 0.0)
    assert counts.logloss() is not None
    assert np.isfinite(counts.loss_sum)
    huge = ScoreCounts()
    huge.add(np.array([-1e300, 1e300]), labels, logits=True)
    assert (huge.auc(), huge.logloss(), huge.calibration()) == (1.0, 0.0, 1.0)


def test_what_cannot_be_counted_is_skipped_and_counted_as_that() -> None:
    counts = ScoreCounts()
    nan, inf = float("nan"), float("inf")
    counts.add(
        np.array([nan, inf, -0.1, 1.1, 0.5, 0.5, 0.5, 0.4]), np.array([0, 1, 0, 1, 2, nan, -1, 1])
    )
    assert (counts.skipped, counts.examples) == (7, 1)
    counts.add(np.array([nan, inf, -inf, 3.0]), np.array([1, 1, 0, 0]), logits=True)
    assert (counts.skipped, counts.examples) == (10, 2)
    assert counts.auc() == 0.0


def test_figures_that_are_not_known_are_none() -> None:
    nothing = {"examples": 0, "skipped": 0, "auc": None, "logloss": None, "calibration": None}
    counts = ScoreCounts()
    assert counts.figures() == nothing
    counts.add(np.empty(0), np.empty(0))
    assert counts.figures() == nothing
    counts.add(np.array([0.25]), np.array([0.0]))
    figures = counts.figures()
    assert (figures["auc"], figures["calibration"]) == (None, None)
    assert figures["logloss"] == pytest.approx(-np.log(0.75))
    assert counts.auc_error_max() is None


def test_what_has_decayed_to_nothing_is_not_known() -> None:
    counts = ScoreCounts()
    counts.add(np.array([0.25, 0.75]), np.array([0.0, 1.0]))
    # A value of a column that does not come any more, for some hundred half-lives.
    for _ in range(700):
        counts.decay(0.5)
        counts.figures()
        counts.auc_error_max()
    figures = counts.figures()
    assert (figures["auc"], figures["logloss"], figures["calibration"]) == (None, None, None)
    # One class that comes alone for as long: an observed rate of nearly 0 would be divided by.
    for _ in range(700):
        counts.add(np.array([0.25]), np.array([0.0]))
        counts.decay(0.5)
    figures = counts.figures()
    assert (figures["auc"], figures["calibration"]) == (None, None)
    assert figures["logloss"] == pytest.approx(-np.log(0.75))


def test_counts_come_back_as_they_were_sent() -> None:
    logits, labels = clicks(5000, 3, bias=-2.0, spread=1.0)
    scores = Scores()
    scores.all.add(logits, labels, logits=True)
    scores.all.add(np.array([float("nan")]), np.array([1.0]))
    for value, rows in (("de", slice(0, 2000)), ("é" * 10, slice(2000, 5000))):
        scores.of(value).add(logits[rows], labels[rows], logits=True)
    packed = scores.to_bytes()
    assert len(packed) < 3 * 5000
    again = Scores.from_bytes(packed)
    assert again.to_bytes() == packed
    assert list(again.by) == ["de", "é" * 10]
    assert again.all.figures() == scores.all.figures()
    assert again.of("de").figures() == scores.of("de").figures()


def test_decayed_counts_come_back_to_float32() -> None:
    logits, labels = clicks(5000, 4, bias=-2.0, spread=1.0)
    counts = counts_of(logits, labels, as_logits=True)
    counts.decay(1 / 3)
    again = ScoreCounts.from_bytes(counts.to_bytes())
    assert again.examples == pytest.approx(5000 / 3, rel=1e-6)
    assert again.auc() == pytest.approx(counts.auc(), abs=1e-6)
    assert again.loss_sum == counts.loss_sum


def head(count: int, buckets: int = BUCKETS, loss: float = 0.0) -> bytes:
    return struct.pack("<H?dddI", buckets, True, loss, 0.0, 0.0, count)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"short",
        head(1) + b"not zlib",
        head(1) + zlib.compress(b"12345"),
        head(1) + zlib.compress(b"1234567"),
        head(1) + zlib.compress(b"123456") + b"more",
        head(2) + zlib.compress(bytes(12)),
        head(1) + zlib.compress(b"\xff\xff" + bytes(4)),
        head(0, buckets=7) + zlib.compress(b""),
        head(0, loss=float("nan")) + zlib.compress(b""),
        head(0, loss=-1.0) + zlib.compress(b""),
        head(2**31) + zlib.compress(b""),
        head(1) + zlib.compress(bytes(10_000_000)),
    ],
)
def test_bytes_that_are_no_counts_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="scores"):
        ScoreCounts.from_bytes(data)


def test_bytes_that_are_no_scores_are_refused() -> None:
    packed = Scores().to_bytes()
    other = ScoreCounts(GROUP_BUCKETS).to_bytes()
    for data in (
        b"",
        packed[:-1],
        packed + b"x",
        struct.pack("<HI", 0, len(other)) + other,
        struct.pack("<HI", 65_000, 1) + b"x",
    ):
        with pytest.raises(InvalidRequest, match="scores"):
            Scores.from_bytes(data)


def test_counts_of_other_buckets_are_not_merged() -> None:
    with pytest.raises(InvalidRequest, match="1024 buckets"):
        ScoreCounts().merge(ScoreCounts(GROUP_BUCKETS))
