"""When a full snapshot is due, by example and in general."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backstay.checkpoint.chain import EXPORT_RULE, FullRule, full_is_due

COUNTS, SIZES = st.integers(0, 2_000), st.integers(0, 10**12)


def test_of_an_export_one_is_due_when_the_deltas_are_large_or_many() -> None:
    assert not full_is_due(EXPORT_RULE, 9, 5000, 1000)
    assert full_is_due(EXPORT_RULE, 10, 1000, 1000)
    assert not full_is_due(EXPORT_RULE, 999, 999, 1000)
    assert full_is_due(EXPORT_RULE, 1000, 0, 1000)
    # Deltas without rows are no reason to write none again.
    assert not full_is_due(EXPORT_RULE, 999, 0, 0)


@given(COUNTS, SIZES, SIZES)
def test_of_checkpoints_it_is_the_number_alone(deltas: int, delta: int, full: int) -> None:
    for every in (1, 2, 10, 1_000):
        assert full_is_due(FullRule(every - 1), deltas, delta, full) == (deltas + 1 >= every)


@given(COUNTS, SIZES, SIZES, st.integers(0, 100), SIZES)
def test_what_is_due_stays_due(deltas: int, delta: int, full: int, more: int, larger: int) -> None:
    if full_is_due(EXPORT_RULE, deltas, delta, full):
        assert full_is_due(EXPORT_RULE, deltas + more, delta + larger, full)


@given(st.integers(1, 1_000), SIZES, st.lists(SIZES, max_size=1_100))
def test_a_reader_that_begins_reads_a_bounded_number(
    every: int, full: int, sizes: list[int]
) -> None:
    rule, deltas = FullRule(every, by_size_after=10), 0
    for size in sizes:
        deltas = 0 if full_is_due(rule, deltas, size, full) else deltas + 1
        assert deltas <= every
