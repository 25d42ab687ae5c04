"""Shows and clicks on their way to a push: from examples to keys, and through each mode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from backstay.errors import InvalidRequest
from backstay.trainer.adapter.lookup import Bags, Lookup
from backstay.trainer.arrays import as_counts, clicks_of_examples
from backstay.trainer.modes.forwarding import counts_of
from backstay.trainer.modes.gathering import Gradient, put_together
from backstay.trainer.modes.geo import LocalRows
from backstay.trainer.modes.leading import gradients_of, parts_of

CLICKS = np.array([1, 0, 0.5], np.float32)


def by_key(lookup: Lookup) -> dict[int, tuple[float, float]]:
    """Shows and clicks of each key, summed as a push sums them."""
    told = lookup.shows_and_clicks(CLICKS)
    keys = lookup.keys.reshape(-1)
    return {int(key): tuple(told[keys == key].sum(axis=0).tolist()) for key in np.unique(keys)}


def test_each_example_shows_each_of_its_keys_once() -> None:
    keys = np.array([[7, 8, 7], [7, 9, 9], [9, 9, 9]])
    assert by_key(Lookup(keys, None)) == {7: (2, 1), 8: (1, 1), 9: (2, 0.5)}


def test_one_key_an_example_needs_no_second_axis() -> None:
    assert by_key(Lookup(np.array([7, 7, 8]), None)) == {7: (2, 1), 8: (1, 0.5)}


def test_padding_is_not_shown() -> None:
    present = np.array([[True, False], [False, False], [True, True]])
    lookup = Lookup(np.array([7, 7, 8]), None, present)
    assert by_key(lookup) == {7: (2, 1.5), 8: (1, 0.5)}


def test_bags_are_examples() -> None:
    bags = Bags(np.array([2, 0, 3]), mean=True)
    lookup = Lookup(np.array([7, 7, 8, 7, 8]), None, bags=bags)
    assert by_key(lookup) == {7: (2, 1.5), 8: (1, 0.5)}
    flat = Lookup(lookup.keys, None, examples=bags.counts)
    assert by_key(flat) == by_key(lookup)


def test_another_number_of_examples_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="clicks of 3 examples, and ids of 2"):
        Lookup(np.array([[1], [2]]), None).shows_and_clicks(CLICKS)


@pytest.mark.parametrize(
    ("clicks", "says"),
    [
        (np.zeros((2, 2)), "one number for each example"),
        (np.array([1.0, np.nan]), "clicks have the number nan: must be 0 or more"),
        (np.array([1.0, -1.0]), "-1.0"),
        (np.array([1e39]), "1e\\+39"),
        (np.array(["a"]), "dtype"),
    ],
)
def test_clicks_that_are_none_are_refused(clicks: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        clicks_of_examples(clicks)


@pytest.mark.parametrize("labels", [[1, 0, 1], [[1], [0], [1]], np.array([True, False, True])])
def test_labels_are_clicks(labels: Any) -> None:
    clicks = clicks_of_examples(labels)
    assert clicks is not None
    assert clicks.dtype == np.float32
    assert clicks.tolist() == [1, 0, 1]


def test_counts_have_the_shape_of_the_keys() -> None:
    with pytest.raises(InvalidRequest, match=r"shows have shape \(2,\), must be \(3,\)"):
        as_counts(np.ones(2), (3,), "shows")


def test_one_of_the_two_alone_is_enough() -> None:
    keys = (2,)
    assert counts_of(None, None, keys) is None
    only_clicks = counts_of(None, np.array([1, 0]), keys)
    only_shows = counts_of(np.array([3, 4]), None, keys)
    assert only_clicks is not None
    assert only_shows is not None
    assert only_clicks.tolist() == [[1, 1], [1, 0]]
    assert only_shows.tolist() == [[3, 0], [4, 0]]


def gradient(*keys: int, counts: np.ndarray | None = None) -> Gradient:
    return Gradient(
        "rows", np.array(keys, np.uint64), np.ones((len(keys), 2), np.float32), 1.0, counts=counts
    )


def test_a_step_of_several_workers_counts_the_examples_of_all() -> None:
    counts = np.array([[1, 1], [2, 0]], np.float32)
    [whole] = put_together(
        [(3, [gradient(7, 8, counts=counts)]), (1, [gradient(7, counts=counts[:1])])]
    )
    assert whole.counts is not None
    # Gradients are weighted by the examples of a piece; what counts examples is not.
    assert whole.counts.tolist() == [[1, 1], [2, 0], [1, 1]]


def test_counts_travel_between_workers() -> None:
    rng = np.random.default_rng(3)
    keys = rng.integers(0, 1000, 300_000).astype(np.uint64)
    counts = rng.integers(0, 5, (len(keys), 2)).astype(np.float32)
    sent = Gradient("rows", keys, np.ones((len(keys), 16), np.float32), 0.5, counts=counts)
    parts = list(parts_of([sent, gradient(5)]))
    assert len(parts) > 1
    got = [one for part in parts for one in gradients_of(part)]
    told = [one.counts for one in got[:-1] if one.counts is not None]
    np.testing.assert_array_equal(np.concatenate(told), counts)
    assert got[-1].counts is None


def test_counts_that_do_not_fit_the_keys_are_refused() -> None:
    [[message]] = parts_of([gradient(5, 6, counts=np.ones((2, 2), np.float32))])
    message.counts = message.counts[:-4]
    with pytest.raises(InvalidRequest, match="3 shows and clicks for 2 keys"):
        gradients_of([message])


def test_geo_sums_them_until_the_exchange() -> None:
    rows = LocalRows(2, 0.1)
    keys = np.array([3, 5], np.uint64)
    rows.add(keys, np.zeros((2, 2), np.float32))
    rows.count(np.array([5, 3, 5], np.uint64), np.array([[1, 1], [1, 0], [1, 0]], np.float32))
    rows.add(np.array([4], np.uint64), np.zeros((1, 2), np.float32))
    assert rows.keys.tolist() == [3, 4, 5]
    assert rows.counts.tolist() == [[1, 0], [0, 0], [2, 1]]


@pytest.mark.parametrize("mean", [False, True])
def test_bags_with_empty_ones(mean: bool) -> None:
    rows = np.arange(10, dtype=np.float32).reshape(5, 2)
    bags = Bags(np.array([0, 2, 0, 3, 0]), mean)
    total = np.array([[0, 0], [2, 4], [0, 0], [18, 21], [0, 0]], np.float32)
    divisors = np.array([[1], [2], [1], [3], [1]], np.float32) if mean else 1.0
    np.testing.assert_allclose(bags.combine(rows), total / divisors)
    spread = bags.spread(total)
    np.testing.assert_allclose(spread, np.repeat(total / divisors, bags.counts, axis=0))


def test_bags_all_empty() -> None:
    bags = Bags(np.zeros(3, np.int64), mean=True)
    assert not bags.combine(np.zeros((0, 2), np.float32)).any()
