"""Simulated jobs under restores of some slots only: each is exact, or says that it is not."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from backstay.job_engine.events.restores import RestoreEvents
from tests.sim.cluster import Outcome, simulate

# A checkpoint newer than what the other slots had been restored to: batches were never pushed to
# them, and the job is done without them.
NEWER = [121, 156]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Masters say much of tasks that come back."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def _run(seed: int) -> Outcome:
    return simulate(seed, job=True, checkpoints=True, inexact=True)


def test_a_job_whose_slots_are_restored_in_part_says_that_it_is_not_exact() -> None:
    outcomes = [_run(seed) for seed in [*NEWER, *range(10)]]
    assert [(one.seed, one.failure) for one in outcomes if one.failure] == []
    assert all(one.counts["inexact_copies"] for one in outcomes[: len(NEWER)])
    # Others went back with all slots since, and are judged as ever.
    assert any(one.counts["restores"] and not one.counts["inexact_copies"] for one in outcomes)


@pytest.mark.parametrize("seed", NEWER)
def test_one_that_does_not_say_so_is_found(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RestoreEvents, "note_inexact", lambda _self, _why, _unix_s: None)
    assert "job: " in _run(seed).failure
