"""Scores of tasks that several attempts worked on: each batch counts once."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from backstay.errors import InvalidRequest
from backstay.job.score_counts import Scores
from backstay.job_engine.round_scores import RoundScores, Scored, begun_scores

TASK = 3


def scores(*batches: int, attempt: int = 0) -> Scores:
    """Scores of batches of one record each; other attempts predict something else."""
    found = Scores()
    logits = np.array([batch + attempt / 10 for batch in batches])
    found.all.add(logits, np.ones(len(batches)), logits=True)
    return found


def packed(*batches: int, attempt: int = 0) -> bytes:
    return scores(*batches, attempt=attempt).to_bytes()


def assert_same(found: Scores, *parts: Scores) -> None:
    wanted = Scores()
    for part in parts:
        wanted.merge(part)
    assert found.all.figures() == pytest.approx(wanted.all.figures())


def test_a_task_that_one_attempt_did_has_its_scores() -> None:
    kept = RoundScores()
    kept.tell(TASK, 2, Scored(0, packed(0, 1)))
    kept.tell(TASK, 3, Scored(0, packed(0, 1, 2)))
    assert_same(kept.finish(TASK, 0, scores(0, 1, 2, 3)), scores(0, 1, 2, 3))
    assert list(kept.forget(TASK)) == []
    assert kept.batches(TASK) == 0


def test_the_next_attempt_goes_on_behind_the_batches_of_one_that_died() -> None:
    kept = RoundScores()
    assert kept.begin(TASK, 0) is None
    kept.tell(TASK, 2, Scored(0, packed(0, 1)))
    # Told again, and older news.
    kept.tell(TASK, 2, Scored(0, packed(0, 1)))
    kept.tell(TASK, 1, Scored(0, packed(0)))
    record = kept.begin(TASK, 2)
    assert record is not None
    recorded = begun_scores({f"begun/training-1/{TASK}/2": record}, "training-1", "")
    assert_same(Scores.from_bytes(recorded[TASK, 2]), scores(0, 1))
    assert begun_scores({f"begun/training-1/{TASK}/2": record}, "training-2", "") == {}
    assert kept.begin(TASK, 2) is None, "it is recorded"
    kept.tell(TASK, 3, Scored(2, packed(2, attempt=1)))
    assert kept.batches(TASK) == 3
    assert kept.begin(TASK, 3) is not None
    whole = kept.finish(TASK, 3, scores(3, attempt=2))
    assert_same(whole, scores(0, 1), scores(2, attempt=1), scores(3, attempt=2))
    assert sorted(kept.recorded()) == [(TASK, 2), (TASK, 3)]
    assert sorted(kept.forget(TASK)) == [2, 3]


def test_two_attempts_at_once_count_as_the_one_that_wins() -> None:
    for winner in (0, 1):
        kept = RoundScores()
        kept.tell(TASK, 2, Scored(0, packed(0, 1)))
        kept.begin(TASK, 2)
        # The slow one goes on, and so does the speculative one.
        kept.tell(TASK, 3, Scored(0, packed(0, 1, 2)))
        kept.tell(TASK, 4, Scored(2, packed(2, 3, attempt=1)))
        if winner == 0:
            whole = kept.finish(TASK, 0, scores(0, 1, 2, 3, 4))
            assert_same(whole, scores(0, 1, 2, 3, 4))
        else:
            whole = kept.finish(TASK, 2, scores(2, 3, 4, attempt=1))
            assert_same(whole, scores(0, 1), scores(2, 3, 4, attempt=1))


def test_a_new_job_master_knows_what_attempts_began_with() -> None:
    recorded = {(TASK, 2): packed(0, 1), (TASK, 3): packed(0, 1, 2, attempt=1), (5, 1): packed(0)}
    kept = RoundScores("", recorded)
    assert (kept.batches(TASK), kept.batches(5), kept.batches(6)) == (3, 1, 0)
    assert kept.begin(TASK, 3) is None, "it is recorded already"
    assert_same(
        kept.finish(TASK, 2, scores(2, 3, attempt=2)), scores(0, 1), scores(2, 3, attempt=2)
    )
    assert sorted(kept.recorded()) == [(TASK, 2), (TASK, 3), (5, 1)]


def test_scores_that_cannot_be_read_are_left_out_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept = RoundScores()
    kept.tell(TASK, 2, Scored(0, b"damaged"))
    with caplog.at_level(logging.ERROR):
        assert kept.begin(TASK, 2) is not None
    assert "predictions of some batches are not in the metrics" in caplog.text
    assert_same(kept.finish(TASK, 2, scores(2)), scores(2))


def test_values_of_another_column_are_not_taken_over() -> None:
    found = scores(0, 1)
    found.of("de").add(np.array([1.0]), np.array([1.0]), logits=True)
    kept = RoundScores("country")
    kept.tell(TASK, 2, Scored(0, found.to_bytes()))
    text = kept.begin(TASK, 2)
    assert text is not None
    recorded = {f"begun/training-1/{TASK}/2": text}
    for column, values in (("country", ["de"]), ("device", [])):
        packed = begun_scores(recorded, "training-1", column)[TASK, 2]
        assert list(Scores.from_bytes(packed).by) == values
    with pytest.raises(InvalidRequest, match="scores"):
        begun_scores({"begun/training-1/3/2": "{}"}, "training-1", "")
