"""Counts of scores: in whatever parts they come together, they say the same, to a known error."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics

from backstay.job.score_counts import ScoreCounts

RECORD = st.tuples(st.floats(-20, 20), st.booleans())
RECORDS = st.lists(RECORD, max_size=60)
Record = tuple[float, bool]


def counts_of(records: list[Record]) -> ScoreCounts:
    counts = ScoreCounts()
    scores = np.array([score for score, _ in records])
    labels = np.array([float(label) for _, label in records])
    counts.add(scores, labels, logits=True)
    return counts


def merged(*parts: ScoreCounts) -> ScoreCounts:
    whole = ScoreCounts()
    for part in parts:
        whole.merge(part)
    return whole


def same(one: ScoreCounts, other: ScoreCounts, rel: float = 1e-9) -> None:
    for name, value in one.figures().items():
        found = other.figures()[name]
        if value is None:
            assert found is None, name
        else:
            assert found == pytest.approx(value, rel=rel, abs=1e-9), name


@given(RECORDS, RECORDS, RECORDS)
def test_parts_may_be_merged_in_any_order(
    first: list[Record], second: list[Record], third: list[Record]
) -> None:
    a, b, c = counts_of(first), counts_of(second), counts_of(third)
    whole = counts_of([*first, *second, *third])
    same(merged(merged(a, b), c), whole)
    same(merged(a, merged(b, c)), whole)
    same(merged(c, a, b), whole)


@given(RECORDS, RECORDS, st.floats(0.01, 1.0))
def test_decay_before_a_merge_is_a_lower_weight(
    old: list[Record], new: list[Record], factor: float
) -> None:
    counts = counts_of(old)
    examples = counts.examples
    auc = counts.auc()
    counts.decay(factor)
    assert counts.examples == pytest.approx(factor * examples)
    # What all have in common changes no figure.
    if auc is not None:
        assert counts.auc() == pytest.approx(auc)
    counts.merge(counts_of(new))
    assert counts.examples == pytest.approx(factor * examples + len(new))
    scores = [score for score, _ in (*old, *new)]
    labels = [label for _, label in (*old, *new)]
    weights = [factor] * len(old) + [1.0] * len(new)
    if len(set(labels)) == 2:
        exact = metrics.roc_auc_score(labels, scores, sample_weight=weights)
        error = counts.auc_error_max()
        assert error is not None
        # Beyond the range of the buckets, all scores are ties.
        assert abs((counts.auc() or 0.0) - exact) <= error + 1e-9


@given(RECORDS)
def test_the_error_of_the_area_is_within_its_bound(records: list[Record]) -> None:
    counts = counts_of(records)
    labels = [label for _, label in records]
    if len(set(labels)) < 2:
        assert counts.auc() is None
        return
    exact = metrics.roc_auc_score(labels, [score for score, _ in records])
    error, auc = counts.auc_error_max(), counts.auc()
    assert error is not None
    assert auc is not None
    assert abs(auc - exact) <= error + 1e-9


@given(RECORDS, st.floats(0.01, 1.0))
def test_what_is_packed_comes_back(records: list[Record], factor: float) -> None:
    counts = counts_of(records)
    again = ScoreCounts.from_bytes(counts.to_bytes())
    assert again.figures() == counts.figures()
    counts.decay(factor)
    same(counts, ScoreCounts.from_bytes(counts.to_bytes()), rel=1e-5)
