"""Simulated clusters: seeds that found a fault once, then a thousand others."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.sim.cluster import simulate

REGRESSIONS = Path(__file__).with_name("regressions.txt")
# Others than those that are looked at by hand from 0 on.
FIRST_SEED = 1_000_000
SEEDS = 1_000


def _run(seeds: list[int]) -> list[str]:
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        outcomes = list(pool.map(simulate, seeds, chunksize=5))
    assert sum(outcome.pushes for outcome in outcomes) > 50 * len(seeds)
    return [
        f"{outcome.failure}: make sim SEEDS=1 FIRST_SEED={outcome.seed} TRACE=1"
        for outcome in outcomes
        if outcome.failure
    ]


def test_seeds_that_found_a_fault_pass() -> None:
    lines = REGRESSIONS.read_text(encoding="utf-8").splitlines()
    assert _run([int(line) for line in lines if line and not line.startswith("#")]) == []


def test_the_same_seed_is_the_same_run() -> None:
    assert simulate(5) == simulate(5)


@pytest.mark.timeout(600)
def test_a_thousand_clusters_keep_every_rule() -> None:
    assert _run(list(range(FIRST_SEED, FIRST_SEED + SEEDS))) == []
