"""Operators: they ask for resizes, drains and rebalances, cancel them, and start the nodes.

What they want is drawn from a random generator of their own, so that a seed without plans is the
run that it was before there were any.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from backstay.consensus.records.nodes import MemberRecord
from backstay.consensus.records.plans import LeavingNode, ResizePlan
from backstay.consensus.store import Put, Txn
from tests.sim.events import MS, Micros

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster

__all__ = ["PLAN", "Operators", "plan_of"]

PLAN = "plans/resize"
BEGIN = 100 * MS
NODES_MAX = 6
# Another stream of numbers than the one that the rest of a run draws from.
SALT = 0x5EED


def plan_of(cluster: Cluster) -> ResizePlan | None:
    """Return the plan as the store has it."""
    found = cluster.store.state.get(PLAN)
    return None if found is None else ResizePlan.from_json(found.value)


class Operators:
    """What people ask of the cluster over some time; half of all seeds have any."""

    def __init__(self, cluster: Cluster, seed: int, end: Micros) -> None:
        self._cluster = cluster
        self._queue = cluster.queue
        self._random = Random(seed ^ SALT)
        self._asked = 0
        if self._random.random() < 0.5:
            return
        actions = [self._resize, self._resize, self._drain, self._rebalance, self._cancel]
        for _ in range(self._random.randrange(1, 6)):
            action = self._random.choice(actions)
            self._queue.at(self._random.randrange(BEGIN, end), partial(self._do, action.__name__))

    def _do(self, action: str) -> None:
        store = self._cluster.store
        if not store.is_up or not self._cluster.routings:
            return
        getattr(self, action)()
        store.changed()

    def _put(self, plan: ResizePlan) -> None:
        self._queue.counts[f"plan_{plan.kind}_{plan.state}"] += 1
        self._queue.log("operator", lambda: plan.to_json())
        self._cluster.store.state.transact(Txn((), (Put(PLAN, plan.to_json()),)))

    def _serving(self) -> list[str]:
        items = self._cluster.store.state.range("pservers/").items
        return [MemberRecord.from_json(one.value).node_id for one in items]

    def _ask(self, plan: ResizePlan) -> None:
        """Write a plan; one that is under way is in the way, as with the real one."""
        there = plan_of(self._cluster)
        if there is not None and there.is_under_way:
            self._queue.counts["plan_refused"] += 1
            return
        self._put(plan)

    def _next_id(self) -> str:
        self._asked += 1
        return str(self._asked)

    def _resize(self) -> None:
        nodes = self._random.randrange(self._cluster.options.replicas, NODES_MAX)
        nodes = min(nodes, self._cluster.options.slots)
        self._ask(
            ResizePlan(
                self._next_id(),
                "resize",
                nodes,
                stop=self._random.random() < 0.7,
                wait_s=self._random.choice((1, 1, 3)),
                state="waiting_for_nodes",
            )
        )
        # The operator starts what is missing, one after the other; sometimes nothing is started.
        if self._random.random() < 0.8:
            for number in range(nodes):
                delay = self._random.randrange(1 * MS, 300 * MS)
                self._queue.after(delay, partial(self._start, f"ps-{number}", nodes))

    def _start(self, node_id: str, nodes: int) -> None:
        alive = {one.node_id for one in self._cluster.processes.values() if one.is_alive}
        if len(alive) < nodes and node_id not in alive:
            self._cluster.start_process(node_id)

    def _drain(self) -> None:
        serving = self._serving()
        there = plan_of(self._cluster)
        drained: set[str] = set()
        if there is not None and there.state == "done" and not there.stop:
            drained = {one.node_id for one in there.leaving} & set(serving)
        stays = sorted(set(serving) - drained)
        if len(stays) <= self._cluster.options.replicas:
            return
        drained.add(self._random.choice(stays))
        leaving = tuple(LeavingNode(name, 0) for name in sorted(drained))
        stop = len(drained) == 1 and self._random.random() < 0.3
        self._ask(ResizePlan(self._next_id(), "drain", len(stays) - 1, leaving, stop=stop))

    def _rebalance(self) -> None:
        self._ask(ResizePlan(self._next_id(), "rebalance", max(1, len(self._serving()))))

    def _cancel(self) -> None:
        there = plan_of(self._cluster)
        if there is not None and there.is_under_way:
            self._put(replace(there, state="cancelled", leaving=()))
