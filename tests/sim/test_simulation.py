"""Simulated clusters: seeds that found a fault once, then a thousand others."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from backstay.consensus.records import RoutingTable
from backstay.consensus.records.plans import LeavingNode, ResizePlan
from backstay.consensus.store import Put, Txn
from tests.sim.cluster import UNLIMITED, Cluster, Options, simulate
from tests.sim.events import MS, S
from tests.sim.faults import depose
from tests.sim.network import STORE
from tests.sim.plans import PLAN, plan_of
from tests.sim.pserver import Pserver
from tests.sim.tasks import TABLES, TaskTrainer

REGRESSIONS = Path(__file__).with_name("regressions.txt")
# Other seeds than the ones that are looked at by hand from 0 on.
FIRST_SEED = 1_000_000
SEEDS = 1_000
# Of those, by `make test`; the others by `make test-slow`.
FEW_SEEDS = 100
RESTORED_SEEDS = 100
DELETING_SEEDS = 60
STALE_SEEDS = 30
CROWDED_SEEDS = 16
TASK_SEEDS = [range(30), pytest.param(range(30, 100), marks=pytest.mark.slow)]


def _run(seeds: list[int]) -> list[str]:
    outcomes = [simulate(seed) for seed in seeds]
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
    # The controller does not give a copy to a silent node and take it away again, on and on.
    changes = len(cluster.routings)
    cluster.queue.run_until(12 * S)
    assert len(cluster.routings) == changes


def _ask(cluster: Cluster, plan: ResizePlan) -> None:
    cluster.store.state.transact(Txn((), (Put(PLAN, plan.to_json()),)))
    cluster.store.changed()


def _run_to_the_end(cluster: Cluster) -> None:
    """Let trainers finish, and find everything counted once, everywhere."""
    for trainer in cluster.trainers:
        trainer.stopping = True
    limit = cluster.queue.now + cluster.options.healed_within
    while missing := cluster.missing():
        assert cluster.queue.now < limit, missing
        cluster.queue.run_until(cluster.queue.now + 50 * MS)
    cluster.check_end()


def _plain_cluster(replicas: int) -> Cluster:
    """Return a cluster of four nodes; only the test changes it."""
    for seed in range(200):
        cluster = Cluster(seed, trace=False)
        options = cluster.options
        if options.nodes == 4 and options.replicas == replicas:
            return cluster
    pytest.fail("no such seed")


SLOW_ROW = 60 * MS


@pytest.mark.parametrize("seed", range(5))
def test_copies_over_slow_links_take_the_time_of_their_rows_and_cost_nobody_else_his(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = Options.draw

    def on_slow_links(random: Random, seed: int) -> Options:
        return replace(
            draw(random, seed),
            nodes=4,
            replicas=2,
            slots=16,
            trainers=2,
            slow=300,
            slow_watch=2 * MS,
            slow_thought=1 * MS,
            copy_bytes_per_s=UNLIMITED,
            row_time=SLOW_ROW,
            copy_window=1,
        )

    monkeypatch.setattr(Options, "draw", on_slow_links)
    cluster = Cluster(seed, trace=False)
    cluster.queue.run_until(1 * S)
    victim = next(one for one in cluster.processes.values() if one.node_id == "ps-3")
    held = {
        slot: cluster.keys_of[slot]
        for slot, replicas in enumerate(cluster.routings[-1].replicas_of_slot)
        if victim
        in [cluster.processes[cluster.routings[-1].nodes[n].instance] for n in replicas.synced]
    }
    # A copy takes longer than a push may, if most of its rows are there.
    assert max(map(len, held.values())) * SLOW_ROW > cluster.options.prepare_timeout
    victim.die()
    cluster.queue.after(200 * MS, partial(cluster.start_process, "ps-3"))
    cluster.queue.run_until(cluster.queue.now + 500 * MS)
    rows = sum(map(len, held.values()))
    limit = cluster.queue.now + rows * SLOW_ROW + 1 * S
    while any(len(one.synced) < 2 for one in cluster.routings[-1].replicas_of_slot):
        # Every report is checked for nodes that are called silent.
        assert cluster.queue.now < limit
        cluster.queue.run_until(cluster.queue.now + 20 * MS)
    assert cluster.queue.counts["slots_lost"] == 0
    _run_to_the_end(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("victim", ["source", "target", "controller", "master"])
def test_a_drain_survives_a_death_at_each_of_its_steps(victim: str, replicas: int) -> None:
    steps = 0
    for step in range(12):
        cluster = _plain_cluster(replicas)
        cluster.queue.run_until(1 * S)
        first = len(cluster.routings)
        write = cluster.routing_written

        def written(
            routing: RoutingTable,
            reasons: list[str],
            *,
            at: int = first + step + 1,
            cluster: Cluster = cluster,
            write: Callable[[RoutingTable, list[str]], None] = write,
        ) -> None:
            write(routing, reasons)
            if routing.version == at:
                name = _victim(cluster, victim, routing)
                for process in list(cluster.processes.values()):
                    if process.is_alive and process.node_id == name:
                        process.die()
                        cluster.queue.after(
                            400 * MS, partial(cluster.start_process, process.node_id)
                        )

        cluster.routing_written = written  # type: ignore[method-assign]
        _ask(cluster, ResizePlan("p", "drain", 3, (LeavingNode("ps-3", 0),)))
        cluster.queue.run_until(cluster.queue.now + 2 * S)
        _run_to_the_end(cluster)
        plan = plan_of(cluster)
        assert plan is not None
        assert plan.state == "done"
        assert cluster.queue.counts["slots_lost"] == 0
        steps = max(steps, len(cluster.routings) - first)
    # Each step of the move was somebody's last.
    assert steps >= 3


def _victim(cluster: Cluster, which: str, routing: RoutingTable) -> str:
    if which == "source":
        return "ps-3"
    if which == "controller":
        leadership = cluster.store.state.get("controller")
        return leadership.value if leadership is not None else ""
    for held in routing.sets:
        if which == "target" and held.catching_up:
            return routing.nodes[held.catching_up[0]].node_id
        if which == "master" and held.catching_up:
            return routing.nodes[held.master].node_id
    return "ps-0"


def test_of_two_resizes_the_second_goes_on_from_where_the_first_was() -> None:
    cluster = _plain_cluster(2)
    cluster.queue.run_until(1 * S)
    _ask(cluster, ResizePlan("p", "resize", 3, stop=True, state="waiting_for_nodes"))
    while not any(held.catching_up for held in cluster.routings[-1].sets):
        cluster.queue.run_until(cluster.queue.now + 1 * MS)
    # The first is cancelled under way, and the second wants the contrary.
    _ask(cluster, ResizePlan("q", "resize", 5, wait_s=10, state="waiting_for_nodes"))
    cluster.start_process("ps-4")
    cluster.queue.run_until(cluster.queue.now + 2 * S)
    _run_to_the_end(cluster)
    plan = plan_of(cluster)
    assert plan is not None
    assert (plan.plan_id, plan.state) == ("q", "done")
    copies = {n for held in cluster.routings[-1].sets for n in held.synced}
    assert len(copies) == 5


def test_clusters_that_are_restored_at_any_moment_keep_every_rule() -> None:
    outcomes = [simulate(seed, checkpoints=True) for seed in [211, *range(RESTORED_SEEDS)]]
    assert [(one.seed, one.failure) for one in outcomes if one.failure] == []
    counts = sum((one.counts for one in outcomes), Counter())
    assert min(counts["checkpoints"], counts["restores"], counts["slots_loaded"]) > RESTORED_SEEDS


@pytest.mark.parametrize("checkpoints", [False, True])
def test_rows_that_are_deleted_at_any_moment_are_gone_once(checkpoints: bool) -> None:
    outcomes = [
        simulate(seed, deletes=True, checkpoints=checkpoints) for seed in range(DELETING_SEEDS)
    ]
    assert [(one.seed, one.failure) for one in outcomes if one.failure] == []
    counts = sum((one.counts for one in outcomes), Counter())
    assert min(counts["deletes"], counts["pushes_to_delete"]) > 5 * DELETING_SEEDS


@pytest.mark.parametrize("checkpoints", [False, True])
def test_rows_that_expire_at_any_moment_are_gone_on_every_replica(checkpoints: bool) -> None:
    outcomes = [
        simulate(seed, lifetimes=True, checkpoints=checkpoints) for seed in range(DELETING_SEEDS)
    ]
    assert [(one.seed, one.failure) for one in outcomes if one.failure] == []
    counts = sum((one.counts for one in outcomes), Counter())
    assert min(counts[what] for what in ("expires", "decays", "zeros", "deletes")) > DELETING_SEEDS


@pytest.mark.parametrize("checkpoints", [False, True])
def test_replicas_make_up_for_stale_gradients_alike(checkpoints: bool) -> None:
    outcomes = [simulate(seed, stale=True, checkpoints=checkpoints) for seed in range(STALE_SEEDS)]
    assert [(one.seed, one.failure) for one in outcomes if one.failure] == []
    counts = sum((one.counts for one in outcomes), Counter())
    for table in ("scaled", "delayed", "revised"):
        assert counts[f"pushes_{table}"] > 10 * STALE_SEEDS
    assert counts["deletes_stale"] > STALE_SEEDS
    # Many of them come late.
    assert counts["pushes_told"] > 30 * STALE_SEEDS
    assert counts["staleness"] > counts["pushes_told"] / 2
    # Nothing that was told was wrong.
    assert counts["refused_5"] == 0


@pytest.mark.parametrize("checkpoints", [False, True])
def test_replicas_admit_and_evict_the_same_rows(checkpoints: bool) -> None:
    outcomes = [
        simulate(seed, crowded=True, checkpoints=checkpoints) for seed in range(CROWDED_SEEDS)
    ]
    assert [(one.seed, one.failure) for one in outcomes if one.failure] == []
    counts = sum((one.counts for one in outcomes), Counter())
    assert counts["pushes_crowded"] > 50 * CROWDED_SEEDS
    assert counts["deletes_crowded"] > CROWDED_SEEDS
    assert counts["rows_crowded"] > 30 * CROWDED_SEEDS
    assert counts["keys_crowded_out"] > 20 * CROWDED_SEEDS


def test_a_backup_that_evicts_other_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Pserver.__init__

    def with_another_score(self: Pserver, cluster: Cluster, node_id: str, instance: int) -> None:
        assert cluster.crowd is not None
        known = cluster.crowd.table_json
        if node_id == "ps-1":
            spec = json.loads(known)
            # All rows rank alike, so those with the lowest keys go.
            spec["lifetime"]["score"] = {"nonclick_coefficient": 0.0}
            cluster.crowd.table_json = json.dumps(spec)
        begin(self, cluster, node_id, instance)
        cluster.crowd.table_json = known

    monkeypatch.setattr(Pserver, "__init__", with_another_score)
    found = [simulate(seed, crowded=True).failure for seed in range(10)]
    assert any("I4" in failure for failure in found)


def test_a_late_copy_of_a_delete_that_counts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    on_push = Pserver.on_push

    def as_new(self: Pserver, stream: Any, sequence: int, floor: int, *rest: Any) -> None:
        keys, values, *others = rest
        if not values and sequence not in self.cluster.trainers[stream[0] - 1].pushes:
            # No slot knows it again.
            stream, sequence, floor = (10_000 + self.cluster.next_token(), 0, 0), 0, 0
        on_push(self, stream, sequence, floor, keys, values, *others)

    monkeypatch.setattr(Pserver, "on_push", as_new)
    assert any("since its last delete" in simulate(n, deletes=True).failure for n in range(25))


def test_a_controller_cut_off_and_deposed_keeps_its_only_copies_while_its_lease_lasts() -> None:
    restored = 0
    for seed in range(60):
        cluster = Cluster(seed, trace=False, checkpoints=True)
        if cluster.options.replicas != 1:
            continue
        cluster.queue.run_until(1 * S)
        leadership = cluster.store.state.get("controller")
        assert leadership is not None
        cluster.network.block(leadership.value, STORE)
        cluster.network.block(STORE, leadership.value)
        depose(cluster)
        # I3 is looked at all the time, also while others take its slots from a checkpoint.
        cluster.queue.run_until(3 * S)
        restored += cluster.queue.counts["slots_loaded"] > 0
    assert restored > 5


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", TASK_SEEDS)
def test_batches_of_tasks_count_once_whoever_dies_and_whoever_comes_late(seeds: range) -> None:
    outcomes = [simulate(seed, tasks=True) for seed in seeds]
    assert [(one.seed, one.failure) for one in outcomes if one.failure] == []
    counts = sum((one.counts for one in outcomes), Counter())
    happened = ("tasks_done", "speculative", "worker_deaths", "revoked", "replays")
    assert min(counts[name] for name in happened) > len(seeds)
    assert counts["replays"] == counts["tasks_done"]


def test_a_floor_that_passes_what_is_under_way_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_high(self: TaskTrainer) -> int:
        return (self._batch - 1) * TABLES

    monkeypatch.setattr(TaskTrainer, "floor", property(too_high))
    assert any(simulate(seed, tasks=True).failure for seed in range(25))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "numbers", [range(FEW_SEEDS), pytest.param(range(FEW_SEEDS, SEEDS), marks=pytest.mark.slow)]
)
def test_a_thousand_clusters_keep_every_rule(numbers: range) -> None:
    assert _run([FIRST_SEED + number for number in numbers]) == []
