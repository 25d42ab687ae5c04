"""The arithmetic of the modes: pieces of a batch, sums of gradients, local rows, clocks."""

from __future__ import annotations

import numpy as np
import pytest

from backstay.errors import InvalidRequest, LimitExceeded
from backstay.trainer.arrays import sum_by_key
from backstay.trainer.modes.gathering import Gradient, Piece, cut, put_together
from backstay.trainer.modes.geo import LocalRows
from backstay.trainer.modes.leading import gradients_of, parts_of
from backstay.trainer.modes.staleness import clock_of, row_of
from backstay.trainer.modes.step_book import FOLLOWERS_MAX, Patience, StepBook


def keys_of(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint64)


@pytest.mark.parametrize(("records", "workers"), [(1, 1), (1, 5), (7, 3), (64, 64), (100, 7)])
def test_pieces_cover_a_batch_once_and_none_is_empty(records: int, workers: int) -> None:
    pieces = cut(records, workers)
    covered = [at for piece in pieces for at in range(piece.first, piece.first + piece.count)]
    assert covered == list(range(records))
    assert len(pieces) <= workers
    sizes = [piece.count for piece in pieces]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1


def test_pieces_put_together_are_the_mean_gradient_of_the_batch() -> None:
    generator = np.random.default_rng(1)
    records, dim = 10, 3
    ids = generator.integers(0, 4, records).astype(np.uint64)
    each = generator.normal(size=(records, dim)).astype(np.float32)
    dense = generator.normal(size=(records, 5)).astype(np.float32)
    parts = []
    for piece in cut(records, 3):
        own = slice(piece.first, piece.first + piece.count)
        rows = Gradient("rows", ids[own], each[own] / np.float32(piece.count), 0.5)
        tensor = Gradient("dense", None, dense[own].mean(axis=0), 0.5)
        parts.append((piece.count, [rows, tensor]))
    whole = {gradient.table: gradient for gradient in put_together(parts)}
    assert whole["rows"].keys is not None
    keys, sums = sum_by_key(whole["rows"].keys, whole["rows"].values)
    wanted_keys, wanted = sum_by_key(ids, each / np.float32(records))
    assert keys.tolist() == wanted_keys.tolist()
    np.testing.assert_allclose(sums, wanted, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(whole["dense"].values, dense.mean(axis=0), rtol=1e-6, atol=1e-7)
    assert whole["rows"].scale == 0.5


def test_a_table_that_only_one_piece_touches_keeps_its_weight() -> None:
    only = Gradient("rare", keys_of(7), np.ones((1, 2), np.float32), 1.0)
    [whole] = put_together([(3, []), (1, [only])])
    np.testing.assert_array_equal(whole.values, np.full((1, 2), 0.25, np.float32))


def test_workers_with_different_models_are_refused() -> None:
    one = Gradient("dense", None, np.zeros(3, np.float32), 1.0)
    other = Gradient("dense", None, np.zeros(4, np.float32), 1.0)
    with pytest.raises(InvalidRequest, match="do not run the same model"):
        put_together([(1, [one]), (1, [other])])


@pytest.mark.parametrize("elements", [1, 5_000_000])
def test_gradients_travel_in_parts_that_add_up(elements: int) -> None:
    generator = np.random.default_rng(2)
    dense = Gradient("dense", None, generator.normal(size=elements).astype(np.float32), 2.0)
    rows = generator.normal(size=(elements // 2 + 1, 3)).astype(np.float32)
    sparse = Gradient("rows", np.arange(len(rows), dtype=np.uint64), rows, 1.0)
    parts = list(parts_of([dense, sparse]))
    if elements > 1:
        assert len(parts) > 1
        assert all(sum(part.ByteSize() for part in one) < 2**25 for one in parts)
    [again_dense, again_rows] = put_together([(1, [g for p in parts for g in gradients_of(p)])])
    np.testing.assert_array_equal(again_dense.values, dense.values)
    np.testing.assert_array_equal(again_rows.keys, sparse.keys)
    np.testing.assert_array_equal(again_rows.values, rows)


def test_nothing_to_send_is_still_a_part() -> None:
    assert list(parts_of([])) == [[]]


def test_a_gradient_of_a_wrong_size_is_refused() -> None:
    [[message]] = parts_of([Gradient("t", keys_of(1, 2), np.zeros((2, 3), np.float32), 1.0)])
    message.keys = message.keys[:8]
    with pytest.raises(InvalidRequest, match="6 numbers for 1 rows of 3"):
        gradients_of([message])
    [[message]] = parts_of([Gradient("t", None, np.zeros(4, np.float32), 1.0)])
    message.elements = 2
    with pytest.raises(InvalidRequest, match="4 numbers at 0 of 2"):
        gradients_of([message])


def test_the_leader_does_what_nobody_delivers() -> None:
    book = StepBook()
    book.join(1)
    book.join(2)
    own, pieces = book.begin(0, 9)
    assert own == Piece(0, 3)
    assert pieces == {1: Piece(3, 3), 2: Piece(6, 3)}
    gradient = Gradient("t", keys_of(1), np.zeros((1, 1), np.float32), 1.0)
    assert book.take(1, 0, [gradient], is_last=False, loss=0.0)
    assert book.take(1, 0, [gradient], is_last=True, loss=0.5)
    assert not book.take(1, 0, [gradient], is_last=True, loss=0.5), "its piece was whole"
    assert book.awaited() == (2,)
    book.leave(2)
    assert book.awaited() == ()
    assert not book.take(2, 0, [gradient], is_last=True, loss=0.0), "it had left"
    whole, left = book.finish()
    assert [(one.piece, len(one.gradients), one.loss) for one in whole] == [(Piece(3, 3), 2, 0.5)]
    assert left == [Piece(6, 3)]
    assert not book.take(1, 0, [gradient], is_last=True, loss=0.0), "the step is over"


def test_who_comes_in_the_middle_of_a_step_has_a_piece_of_the_next() -> None:
    book = StepBook()
    assert book.begin(0, 4) == (Piece(0, 4), {})
    book.join(5)
    assert not book.take(5, 0, [], is_last=True, loss=0.0)
    assert book.finish() == ([], [])
    assert book.begin(1, 4) == (Piece(0, 2), {5: Piece(2, 2)})
    # It was cut off and came back: what it was to do falls to the leader.
    book.join(5)
    assert book.followers == (5,)
    for follower in range(10, 9 + FOLLOWERS_MAX):
        book.join(follower)
    with pytest.raises(LimitExceeded, match="the limit"):
        book.join(9)


def test_who_is_new_in_a_step_has_longer_once() -> None:
    patience = Patience(limit_s=30.0, factor=3.0)
    assert patience.of([], 0.01) == 2.0
    assert patience.of([1], 0.01) == 30.0
    assert patience.of([1], 0.01) == 2.0
    assert patience.of([1], 1.0) == 5.0
    # It lost its place, and is back: it hangs no longer than any other.
    assert patience.of([], 0.01) == 2.0
    assert patience.of([1], 0.01) == 2.0
    assert patience.of([1, 2], 0.01) == 30.0
    # With slow steps, five times as long would be out of all proportion.
    assert patience.of([1, 2], 8.0) == 30.0
    assert patience.of([1, 2], 100.0) == 300.0


def test_rows_step_as_sgd_does() -> None:
    local = LocalRows(dim=2, rate=0.5)
    assert local.missing(keys_of(3, 1, 3)).tolist() == [1, 3]
    local.add(keys_of(1, 3), np.array([[1, 1], [3, 3]], np.float32))
    assert local.missing(keys_of(0, 1, 2, 3, 4)).tolist() == [0, 2, 4]
    local.add(keys_of(2), np.array([[2, 2]], np.float32))
    gradients = np.array([[1, 0], [0, 1], [1, 0]], np.float32)
    local.step(keys_of(3, 1, 3), gradients, 2.0)
    rows = local.rows(keys_of(3, 2, 1, 3))
    assert rows.tolist() == [[1, 3], [2, 2], [1, 0], [1, 3]]
    assert local.keys[local.changed].tolist() == [1, 3]
    assert local.sums[local.changed].tolist() == [[0, 2], [4, 0]]


@pytest.mark.parametrize("clock", [0, 1, 2**24 - 1, 2**24, 2**24 + 1, 2**40 + 12345])
def test_a_clock_survives_float32(clock: int) -> None:
    assert clock_of(np.array(row_of(clock), np.float32)) == clock
