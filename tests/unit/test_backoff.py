"""The pauses between tries: pure, so no clock and no sleep."""

from __future__ import annotations

import math
from random import Random

import pytest

from backstay.backoff import Backoff


def test_pauses_double_up_to_the_longest_and_begin_anew_after_a_success() -> None:
    retries = Backoff(0.1, 0.5).begin()
    assert retries.pause_s == 0
    assert [retries.next_s() for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]
    assert retries.pause_s == 0.5
    retries.reset()
    assert retries.pause_s == 0
    assert retries.next_s() == 0.1


def test_no_failure_has_no_pause() -> None:
    assert Backoff(1, 2).pause_s(0) == 0
    assert Backoff(1, 2).pause_s(-1) == 0


def test_another_factor_and_a_fixed_pause() -> None:
    assert [Backoff(1, 100, factor=3).pause_s(n) for n in (1, 2, 3, 9)] == [1, 3, 9, 100]
    assert [Backoff(2, 2).pause_s(n) for n in (1, 2, 3)] == [2, 2, 2]
    assert Backoff(0, 5).pause_s(7) == 0


def test_a_failure_that_goes_on_for_ever_does_not_overflow() -> None:
    assert Backoff(0.5, 30).pause_s(1_000_000) == 30


def test_the_jitter_is_drawn_from_the_generator_that_is_passed() -> None:
    backoff = Backoff(1, 1, jitter=0.5)
    pauses = [backoff.begin(draw=Random(seed).random).next_s() for seed in range(100)]
    assert pauses == [backoff.begin(draw=Random(seed).random).next_s() for seed in range(100)]
    assert 0.5 <= min(pauses) < 0.6
    assert 0.9 < max(pauses) <= 1
    assert backoff.begin().next_s() == 1


def test_it_is_over_when_the_pause_would_reach_the_limit() -> None:
    retries = Backoff(1, 4).begin(until_s=10)
    retries.next_s()
    assert not retries.is_over(8.9)
    assert retries.is_over(9)
    retries.next_s()
    assert retries.is_over(8)
    assert not Backoff(1, 4).begin().is_over(math.nextafter(math.inf, 0))


@pytest.mark.parametrize(
    "wrong",
    [
        {"first_s": -1.0, "longest_s": 1.0},
        {"first_s": 2.0, "longest_s": 1.0},
        {"first_s": 1.0, "longest_s": 2.0, "factor": 0.5},
        {"first_s": 1.0, "longest_s": 2.0, "jitter": 1.5},
    ],
)
def test_pauses_that_shrink_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must hold"):
        Backoff(**wrong)
