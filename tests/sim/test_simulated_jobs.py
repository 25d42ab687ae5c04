"""Simulated jobs: seeds that found a fault, then some others; more by ``tests.sim --jobs``."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.sim import jobs
from tests.sim.cluster import UNLIMITED, Outcome, simulate
from tests.sim.pserver import Pserver

# The first of them by `make test`, the others by `make test-slow`.
SEEDS = [range(40), pytest.param(range(40, 200), marks=pytest.mark.slow)]
RESTORED_SEEDS = [range(20), pytest.param(range(20, 100), marks=pytest.mark.slow)]
CUT_SEEDS = [range(12), pytest.param(range(12, 100), marks=pytest.mark.slow)]
# A worker was told to be first at a task that was then given out again; a master that was none any
# more was asked about a task that a later one had given.
REGRESSIONS = [998, 2126]
# Batches were lost: what was acknowledged or closed before a restore was taken for acknowledged
# after it.
RESTORED_REGRESSIONS = [
    10,
    11,
    14,
    15,
    17,
    18,
    21,
    27,
    35,
    37,
    58,
    60,
    79,
    108,
    109,
    113,
    127,
    134,
    173,
    308,
    346,
    31272,
    52426,
]

# Slots that were saved late had the closed streams of tasks that the progress had still to do.
CUT_REGRESSIONS = [1004, 1030, 1043, 1107, 1109, 1171, 1188]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Masters say much of tasks that come back."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def _run(seeds: Sequence[int], **ways: bool) -> tuple[list[Outcome], Counter[str]]:
    outcomes = [simulate(seed, job=True, **ways) for seed in seeds]
    return outcomes, sum((one.counts for one in outcomes), Counter())


def test_the_same_seed_is_the_same_run() -> None:
    assert simulate(17, job=True, checkpoints=True) == simulate(17, job=True, checkpoints=True)


@pytest.mark.parametrize("seeds", SEEDS)
def test_batches_of_jobs_count_once_whichever_masters_and_workers_die(seeds: range) -> None:
    outcomes, counts = _run([*REGRESSIONS, *seeds])
    assert [(one.seed, one.failure) for one in outcomes if one.failure] == []
    happened = ("masters_killed", "masters_paused", "workers_killed", "workers_paused", "revoked")
    assert min(counts[name] for name in happened) > len(seeds) / 2
    assert counts["masters_replaced"] > len(seeds) / 4
    assert counts["streams_closed"] > 5 * len(seeds)


@pytest.mark.parametrize("numbers", RESTORED_SEEDS)
def test_batches_of_jobs_count_once_when_the_cluster_is_restored_at_any_moment(
    numbers: range,
) -> None:
    seeds = [*RESTORED_REGRESSIONS, *numbers]
    outcomes, counts = _run(seeds, checkpoints=True)
    assert [(one.seed, one.failure) for one in outcomes if one.failure] == []
    assert min(counts["went_back"], counts["state_lost"]) > len(numbers)
    # Some cannot go on: slots were lost with every copy, or the checkpoint is of no use to them.
    assert counts["jobs_failed"] < len(seeds) / 2


@pytest.mark.parametrize("numbers", CUT_SEEDS)
def test_a_checkpoint_over_a_pass_that_is_cut_short_loses_no_batch(numbers: range) -> None:
    outcomes, counts = _run([*CUT_REGRESSIONS, *numbers], checkpoints=True, cuts=True)
    assert [(one.seed, one.failure) for one in outcomes if one.failure] == []
    assert counts["checkpoints_cut"] > len(numbers) / 10
    assert counts["went_back"] > len(numbers) / 2


def test_checkpoints_that_are_kept_though_a_pass_was_cut_short_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jobs, "jobs_cut_short", lambda *_progress: [])
    assert any(
        simulate(seed, job=True, checkpoints=True, cuts=True).failure for seed in CUT_REGRESSIONS
    )


def test_servers_that_take_what_was_sent_before_a_restore_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    push, close = Pserver.on_push, Pserver.on_close

    def on_push(self: Pserver, *request: Any) -> None:
        stream, sequence, floor, keys, values, _known_version, answer = request
        push(self, stream, sequence, floor, keys, values, UNLIMITED, answer)

    def on_close(self: Pserver, stream: Any, _known_version: int, answer: Any) -> None:
        close(self, stream, UNLIMITED, answer)

    monkeypatch.setattr(Pserver, "on_push", on_push)
    monkeypatch.setattr(Pserver, "on_close", on_close)
    seeds = RESTORED_REGRESSIONS
    assert any(simulate(seed, job=True, checkpoints=True).failure for seed in seeds)
