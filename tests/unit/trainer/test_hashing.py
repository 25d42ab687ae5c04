"""Ids of categorical values: the same everywhere, apart where values differ."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay.errors import InvalidRequest
from backstay.trainer.hashing import hash_ids

# A NUL at the end is what numpy fills text up with.
WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


@given(st.lists(WORDS, min_size=1, max_size=8), WORDS)
def test_an_id_does_not_depend_on_the_rest_of_the_batch_nor_on_its_type(
    words: list[str], other: str
) -> None:
    column = np.array(words, object)
    alone = [hash_ids([word], field="f")[0] for word in words]
    assert hash_ids(column, field="f").tolist() == alone
    assert hash_ids([*words, other * 9], field="f")[:-1].tolist() == alone
    assert hash_ids(np.array(words, "U"), field="f").tolist() == alone
    assert hash_ids([word.encode() for word in words], field="f").tolist() == alone


@given(st.sets(st.tuples(WORDS, WORDS), min_size=2, max_size=8))
def test_different_combinations_have_different_ids(pairs: set[tuple[str, str]]) -> None:
    left, right = (np.array(column, object) for column in zip(*sorted(pairs), strict=True))
    assert len(set(hash_ids(left, right, field="f").tolist())) == len(pairs)


def test_integers_are_their_digits_and_none_is_nothing() -> None:
    numbers = np.array([-(1 << 63), -5, 0, 7, (1 << 63) - 1])
    expected = hash_ids([str(number) for number in numbers.tolist()], field="f")
    assert (hash_ids(numbers, field="f") == expected).all()
    assert (hash_ids(np.array(numbers.tolist(), object), field="f") == expected).all()
    assert hash_ids(np.array([None]), field="f") == hash_ids([""], field="f")


def test_fields_are_apart() -> None:
    assert hash_ids(["a"], field="f") != hash_ids(["a"], field="g")


def test_ids_fill_the_rows_evenly() -> None:
    ids = hash_ids(np.arange(100_000), field="f", rows=100)
    assert ids.min() == 0
    assert ids.max() == 99
    counts = np.bincount(ids)
    # Binomial: a mean of 1,000 and a deviation of 31.
    assert 850 < counts.min() <= counts.max() < 1_150


def test_ids_never_change() -> None:
    # Rows on the servers and in checkpoints are found by them.
    assert hash_ids(["é"], [12], field="f").tolist() == [8720212276534081070]


def test_no_records_have_no_ids() -> None:
    for empty in (np.empty(0, object), np.empty(0, "U4"), np.empty(0, np.int64)):
        assert hash_ids(empty, field="f").shape == (0,)


@pytest.mark.parametrize(
    ("columns", "rows", "message"),
    [
        ((), None, "at least one column"),
        ((["a"],), 0, "at least 1"),
        ((["a"], ["b", "c"]), None, r"\[1, 2\] values"),
        (([1.5],), None, "buckets"),
        (([[1, 2]],), None, "must be flat"),
        ((np.array(["a", 1.5], object),), None, "float, str"),
    ],
)
def test_what_cannot_be_hashed_is_refused(columns: object, rows: int | None, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        hash_ids(*columns, field="f", rows=rows)  # type: ignore[misc]
