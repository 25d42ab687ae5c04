"""Simulated clusters: seeds that found a fault once, then a thousand others."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.sim.cluster import Cluster, simulate
from tests.sim.events import S

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


@pytest.mark.parametrize("seed", range(40, 60))
def test_two_nodes_that_do_not_reach_each_other_keep_no_slot_short_of_copies(seed: int) -> None:
    cluster = Cluster(seed, trace=False)
    wanted = min(cluster.options.replicas, cluster.options.nodes - 1)
    cluster.queue.run_until(1 * S)
    cluster.network.block("ps-0", "ps-1")
    cluster.network.block("ps-1", "ps-0")
    cluster.queue.run_until(8 * S)
    routing = cluster.routings[-1]
    apart = {n for n, node in enumerate(routing.nodes) if node.node_id in ("ps-0", "ps-1")}
    for slot, held in enumerate(routing.replicas_of_slot):
        assert len(held.synced) >= wanted, f"slot {slot}: {held}"
        assert held.master not in apart or not apart <= set(held.holders), f"slot {slot}: {held}"
    # Nobody gives a copy to a silent node and takes it away again, on and on.
    changes = len(cluster.routings)
    cluster.queue.run_until(12 * S)
    assert len(cluster.routings) == changes


@pytest.mark.timeout(600)
def test_a_thousand_clusters_keep_every_rule() -> None:
    assert _run(list(range(FIRST_SEED, FIRST_SEED + SEEDS))) == []
