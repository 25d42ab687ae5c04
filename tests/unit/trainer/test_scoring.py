"""What a worker counts of its predictions: up to the batches that are acknowledged, not further."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from backstay.errors import ConfigError
from backstay.job.messages import Acknowledged, Task
from backstay.job.score_counts import OTHER, ScoreCounts, Scores
from backstay.job_spec import ProgressiveSpec
from backstay.trainer.modes.gathering import Piece, predictions_together
from backstay.trainer.worker.leased_work import LeasedWork
from backstay.trainer.worker.scoring import (
    AttemptScores,
    Groups,
    Predicted,
    Scorer,
    answers_logits,
    groups_of,
)

SPEC = ProgressiveSpec()


def batch(number: int, groups: Groups | None = None) -> Predicted:
    """Two records, of which one is positive."""
    return Predicted(np.array([0.1 * number, 0.5]), np.array([0.0, 1.0]), groups)


def attempt(first: int = 0, **more: Any) -> AttemptScores:
    return Scorer(ProgressiveSpec(predictions="probabilities", **more), {}).begin(first)


def assert_has(packed: bytes, *numbers: int) -> None:
    wanted = ScoreCounts()
    for number in numbers:
        wanted.add(*batch(number)[:2])
    assert Scores.from_bytes(packed).all.figures() == pytest.approx(wanted.figures())


def test_scores_are_told_of_acknowledged_batches_only() -> None:
    scores = attempt(first=2)
    assert scores.up_to(2) == (2, b"")
    for number in (2, 3, 4):
        scores.add(batch(number))
    assert scores.up_to(2) == (2, b"")
    told, packed = scores.up_to(4)
    assert told == 4
    assert_has(packed, 2, 3)
    # Pushes of a batch may be acknowledged before it is added.
    told, packed = scores.up_to(9)
    assert told == 5
    assert_has(packed, 2, 3, 4)
    # Whoever asks with an older number gets what was told.
    assert scores.up_to(3) == (5, packed)
    assert scores.all().all.examples == 6


def test_the_link_is_told_no_further_than_the_scores() -> None:
    class Stream:
        acknowledged = 3

        def lease_until(self, monotonic_s: float) -> None:
            """Nothing waits for it here."""

    class Feed:
        known_batches = 10

    task = Task("training", 1, 0, 1, "shard", 0, 100, 0, 0, 0.0)
    scores = attempt()
    work: Any = LeasedWork(task, scores=scores)
    work.feed = Feed()
    work.attach(Stream())
    assert work.told() == Acknowledged(0, b"")
    scores.add(batch(0))
    scores.add(batch(1))
    told = work.told()
    assert told.batches == 2
    assert_has(told.scores, 0, 1)
    for number in (2, 3):
        scores.add(batch(number))
    assert work.told().batches == 3, "what is acknowledged"
    assert_has(work.all_scores(), 0, 1, 2, 3)
    plain: Any = LeasedWork(task)
    plain.feed = Feed()
    plain.attach(Stream())
    assert plain.told() == Acknowledged(3, b"")
    assert plain.all_scores() == b""


def test_scores_are_asked_for_from_another_thread() -> None:
    scores = attempt()
    found: list[tuple[int, bytes]] = []

    def ask() -> None:
        while not found or found[-1][0] < 500:
            found.append(scores.up_to(500))

    thread = threading.Thread(target=ask)
    thread.start()
    for number in range(500):
        scores.add(batch(number % 7))
    thread.join()
    told, packed = found[-1]
    assert told == 500
    assert Scores.from_bytes(packed).all.examples == 1000


def test_values_of_a_column_are_counted_as_far_as_there_is_room() -> None:
    spec = ProgressiveSpec(predictions="probabilities", by="country", by_values_max=2)
    scores = Scorer(spec, {}).begin(0, ["fr"])
    scores.add(batch(0, groups_of(np.array(["de", "fr"], object))))
    scores.add(batch(1, groups_of(np.array(["fr", "it"], object))))
    scores.add(batch(2, groups_of(np.array(["de", "other"], object))))
    by = scores.all().by
    assert {name: counts.examples for name, counts in by.items()} == {"de": 2, "fr": 2, OTHER: 2}
    assert by["de"].positives == 0
    assert by[OTHER].positives == 2


@pytest.mark.parametrize(
    ("column", "texts"),
    [
        (np.array([3, 1, 3]), ["3", "1", "3"]),
        (np.array(["b", "a", "b"], object), ["b", "a", "b"]),
        (np.array([b"b", b"a", b"b"]), ["b", "a", "b"]),
        (np.array([None, "a", None], object), ["None", "a", "None"]),
        (np.array([True, False, True]), ["True", "False", "True"]),
        (np.array([[1, 2], [0, 0], [1, 2]]), ["[1 2]", "[0 0]", "[1 2]"]),
    ],
    ids=str,
)
def test_values_are_text(column: Any, texts: list[str]) -> None:
    groups = groups_of(column)
    assert sorted(groups.names) == sorted(set(texts))
    assert [groups.names[code] for code in groups.codes] == texts


def test_values_without_a_text_of_their_own_can_be_recorded() -> None:
    groups = groups_of(np.array(["", "\ud800", "de"], object))
    assert groups.names[groups.codes[0]] == "(empty)", "figures of all records have no name"
    scores = attempt(by="country")
    scores.add(Predicted(np.full(3, 0.5), np.ones(3), groups))
    again = Scores.from_bytes(scores.all().to_bytes())
    assert sorted(again.by) == ["(empty)", "?", "de"]


def test_long_values_are_cut_and_may_become_equal() -> None:
    groups = groups_of(np.array(["x" * 64 + "a", "x" * 64 + "b", "y"], object))
    assert list(groups.names) == ["x" * 64, "y"]
    assert groups.codes.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("predictions", "metrics", "logits"),
    [
        ("auto", {"ll": "logloss_of_logits", "auc": "auc"}, True),
        ("auto", {"ll": "logloss"}, False),
        ("probabilities", {"ll": "logloss_of_logits"}, False),
        ("logits", {}, True),
    ],
)
def test_what_a_model_answers(predictions: str, metrics: dict[str, Any], logits: bool) -> None:
    assert answers_logits(ProgressiveSpec(predictions=predictions), metrics) == logits


@pytest.mark.parametrize(
    "metrics", [{}, {"auc": "auc"}, {"a": "logloss", "b": "logloss_of_logits"}, {"f": max}]
)
def test_a_model_that_does_not_say_is_refused(metrics: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"progressive\.predictions: set it to"):
        Scorer(SPEC, metrics)


@pytest.mark.parametrize(
    ("predictions", "labels", "message"),
    [
        (None, np.zeros(2), "must answer one tensor"),
        (np.zeros((2, 2)), np.zeros(2), r"answers \[2, 2\]: one number for each record"),
        (np.zeros(()), np.zeros(2), "one number for each record"),
        (np.zeros(2), np.zeros(3), "one label for each prediction"),
        (np.zeros(2), {"a": np.zeros(2)}, "labels are a dict: for progressive metrics"),
    ],
)
def test_answers_that_cannot_be_counted_are_refused(
    predictions: Any, labels: Any, message: str
) -> None:
    scorer = Scorer(ProgressiveSpec(predictions="logits"), {})
    with pytest.raises(ConfigError, match=message):
        scorer.of(predictions, labels, None)


def test_columns_of_one_number_are_taken() -> None:
    scorer = Scorer(ProgressiveSpec(predictions="logits"), {})
    predicted = scorer.of(np.zeros((2, 1), np.float32), np.ones((2, 1)), None)
    assert (predicted.predictions.shape, predicted.labels.shape) == ((2,), (2,))


def test_answers_of_pieces_are_put_in_the_order_of_the_batch() -> None:
    first, second = Piece(0, 2), Piece(2, 1)
    whole = predictions_together([(second, np.array([3.0])), (first, np.array([[1.0], [2.0]]))])
    assert whole is not None
    assert whole.reshape(-1).tolist() == [1.0, 2.0, 3.0]
    assert predictions_together([(first, np.zeros(2)), (second, None)]) is None
    assert predictions_together([(first, np.zeros(3)), (second, np.zeros(1))]) is None
    assert predictions_together([(first, np.zeros((2, 2))), (second, np.zeros(1))]) is None
