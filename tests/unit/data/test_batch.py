"""Batches: records and columns, cut and reordered without copying what is not read."""

from __future__ import annotations

import numpy as np
import pytest

from backstay.data.batch import Batch
from backstay.errors import InvalidRequest

COLUMNS = {"a": np.arange(6), "s": np.array(list("uvwxyz"), dtype=object)}
RECORDS = [{"a": i, "s": letter} for i, letter in enumerate("uvwxyz")]


@pytest.fixture(params=["columns", "records"])
def batch(request: pytest.FixtureRequest) -> Batch:
    return Batch.of_columns(COLUMNS) if request.param == "columns" else Batch.of_records(RECORDS)


def test_records_and_columns_are_the_same_batch(batch: Batch) -> None:
    assert len(batch) == 6
    assert batch.columns == ("a", "s")
    assert list(batch) == RECORDS
    assert batch.column("a").tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.column("s").dtype == object
    assert batch[-1] == RECORDS[-1]
    with pytest.raises(IndexError):
        batch[6]


def test_parts_of_a_reordered_batch(batch: Batch) -> None:
    order = np.array([5, 0, 3, 3])
    taken = batch.take(order)
    assert list(taken) == [RECORDS[i] for i in order]
    assert list(taken[1:3]) == [RECORDS[0], RECORDS[3]]
    assert taken[1:].take([2, 0]).column("a").tolist() == [3, 0]
    assert list(batch[4:2]) == []
    assert list(batch[::-2]) == RECORDS[::-2]
    assert list(batch[2:5][1:].take([1])) == [RECORDS[4]]


def test_slices_of_columns_are_views() -> None:
    part = Batch.of_columns(COLUMNS)[2:][:3].column("a")
    assert np.shares_memory(part, COLUMNS["a"])
    assert part.tolist() == [2, 3, 4]


@pytest.mark.parametrize("positions", [[6], [-1], [[0]]])
def test_positions_that_are_not_there(batch: Batch, positions: list[int]) -> None:
    with pytest.raises(InvalidRequest):
        batch.take(positions)


def test_a_column_that_is_not_there(batch: Batch) -> None:
    with pytest.raises(InvalidRequest, match=r"'b'; there are \['a', 's'\]"):
        batch.column("b")


def test_a_record_without_the_column() -> None:
    with pytest.raises(InvalidRequest, match="no column 'b'"):
        Batch.of_records([{"a": 1, "b": 2}, {"a": 1}]).column("b")


def test_records_of_bytes_have_no_columns() -> None:
    batch = Batch.of_records([b"x", b"y"])
    assert batch.columns == ()
    assert list(batch.take([1])) == [b"y"]
    with pytest.raises(InvalidRequest):
        batch.column("a")


def test_arrays_of_what_records_hold() -> None:
    batch = Batch.of_records(
        [{"l": [1], "v": [1.0, 2.0], "n": None}, {"l": [], "v": [3, 4], "n": 1}]
    )
    assert batch.column("l").tolist() == [[1], []]
    assert batch.column("v").shape == (2, 2)
    assert batch.column("n").tolist() == [None, 1]


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="'a': 1, 'b': 2"):
        Batch.of_columns({"a": np.zeros(1), "b": np.zeros(2)})
