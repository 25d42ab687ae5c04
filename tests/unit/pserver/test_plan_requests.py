"""Requests for plans, as the node that is asked sees them: what is written, what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
import pytest

from backstay.config import SecurityConfig
from backstay.consensus import ClusterMirror
from backstay.consensus.records import MemberRecord, RoutingTable, SlotReplicas
from backstay.consensus.records.plans import LeavingNode, ResizePlan
from backstay.errors import ResizeRefused, ServerUnavailable
from backstay.pserver.membership.record_watch import RecordWatch
from backstay.pserver.peers import PeerCalls
from backstay.pserver.requests.plans import PlanRequests
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.member_records import member
from tests.unit.memory_nodes import KEYS, LIMIT_S

NODES = 4
# No process listens there: a node that does not answer has no rows and no limit.
NOBODY = "127.0.0.1:1"


def some(index: int) -> MemberRecord:
    return member(index, control_address=NOBODY, keeps_store=index == 0)


class Asked:
    """A node of a cluster of four whose records are in the store in memory."""

    def __init__(self, backend: MemoryBackend, *, numbered: bool = False) -> None:
        self.store = MemoryStore(backend)
        mirror = ClusterMirror(KEYS)
        self._watch = RecordWatch(self.store, KEYS, mirror)
        self.requests = PlanRequests(
            self.store,
            KEYS,
            mirror,
            PeerCalls(SecurityConfig(), deadline_ms=200),
            numbered=numbered,
        )

    async def see(self) -> None:
        await self._watch.read_all()

    async def plan(self) -> ResizePlan:
        found = await self.requests.current()
        assert found is not None
        return found

    async def put(self, plan: ResizePlan) -> None:
        await self.store.put(KEYS.plan, plan.to_json())


def routing(replicas: int) -> RoutingTable:
    ones = np.ones(8, dtype=np.uint64)
    return RoutingTable(
        version=1,
        nodes=tuple(replace(some(n).node(), status="unknown") for n in range(NODES)),
        replicas=replicas,
        replicas_of_slot=(SlotReplicas(0, (1,)), SlotReplicas(2, (3,))) * 4,
        term_of_slot=ones,
        epoch_of_slot=ones,
    )


def ask(
    scenario: Callable[[Asked], Awaitable[None]], replicas: int = 2, *, numbered: bool = False
) -> None:
    async def inside() -> None:
        asked = Asked(MemoryBackend(), numbered=numbered)
        await asked.store.put(KEYS.routing, routing(replicas).to_json())
        for number in range(NODES):
            await asked.store.put(KEYS.member(f"ps-{number}"), some(number).to_json())
        await asked.see()
        await asyncio.wait_for(scenario(asked), LIMIT_S)

    asyncio.run(inside())


def test_numbered_nodes_leave_by_number_and_something_else_ends_them() -> None:
    async def scenario(asked: Asked) -> None:
        plan = await asked.requests.resize(2, stop=True, pause=False)
        assert (plan.numbered, plan.stop) == (True, False)
        assert await asked.plan() == plan

    ask(scenario, numbered=True)


def test_a_plan_is_written_once_and_met_again() -> None:
    async def scenario(asked: Asked) -> None:
        assert await asked.requests.current() is None
        plan = await asked.requests.resize(5, stop=True, pause=False, wait_s=30)
        assert plan.started
        assert await asked.plan() == plan
        assert (plan.state, plan.nodes, plan.wait_s) == ("waiting_for_nodes", 5, 30)
        assert await asked.requests.resize(5, stop=True, pause=False) == plan
        for other in (
            asked.requests.resize(6, stop=True, pause=False),
            asked.requests.resize(5, stop=False, pause=False),
            asked.requests.drain("ps-1", stop=False, pause=False),
            asked.requests.rebalance(pause=False),
        ):
            with pytest.raises(ResizeRefused, match="a resize is under way"):
                await other
        # The next one is another, though it asks for the same.
        await asked.put(replace(plan, state="done"))
        assert (await asked.requests.resize(5, stop=True, pause=False)).plan_id != plan.plan_id

    ask(scenario)


def test_of_two_requests_at_once_one_is_refused() -> None:
    async def scenario(asked: Asked) -> None:
        outcomes = await asyncio.gather(
            asked.requests.resize(5, stop=True, pause=False),
            asked.requests.resize(6, stop=True, pause=False),
            return_exceptions=True,
        )
        assert sorted(type(one).__name__ for one in outcomes) == ["ResizePlan", "ResizeRefused"]
        assert await asked.plan() in outcomes

    ask(scenario)


def test_a_resize_that_cannot_be_is_refused() -> None:
    async def scenario(asked: Asked) -> None:
        for nodes, why in ((1, "2 copies of each slot"), (9, "8 slots")):
            with pytest.raises(ResizeRefused, match=why):
                await asked.requests.resize(nodes, stop=True, pause=False)
        await asked.store.put(KEYS.member("ps-1"), replace(some(1), keeps_store=True).to_json())
        await asked.store.put(KEYS.member("ps-2"), replace(some(2), keeps_store=True).to_json())
        await asked.see()
        with pytest.raises(ResizeRefused, match="ps-0, ps-1, ps-2 keep the cluster's store"):
            await asked.requests.resize(2, stop=True, pause=False)
        assert await asked.requests.current() is None

    ask(scenario)


def test_a_drain_takes_over_what_the_one_before_keeps_empty() -> None:
    async def scenario(asked: Asked) -> None:
        first = await asked.requests.drain("ps-1", stop=False, pause=False)
        assert (first.leaving, first.nodes) == ((LeavingNode("ps-1", 0),), 3)
        assert await asked.requests.drain("ps-1", stop=False, pause=False) == first
        await asked.put(replace(first, state="done"))
        with pytest.raises(ResizeRefused, match="ps-1, drained before, would end"):
            await asked.requests.drain("ps-2", stop=True, pause=False)
        second = await asked.requests.drain("ps-2", stop=False, pause=False)
        assert [one.node_id for one in second.leaving] == ["ps-1", "ps-2"]
        await asked.put(replace(second, state="done"))
        with pytest.raises(ResizeRefused, match="1 nodes would stay"):
            await asked.requests.drain("ps-3", stop=False, pause=False)
        everybody = await asked.requests.rebalance(pause=False)
        assert (everybody.nodes, everybody.leaving) == (4, ())

    ask(scenario)


def test_a_node_that_keeps_the_store_can_be_drained_and_goes_on() -> None:
    async def scenario(asked: Asked) -> None:
        with pytest.raises(ResizeRefused, match="keeps the cluster's store"):
            await asked.requests.drain("ps-0", stop=True, pause=False)
        assert (await asked.requests.drain("ps-0", stop=False, pause=True)).pause

    ask(scenario)


def test_only_what_is_under_way_is_cancelled() -> None:
    async def scenario(asked: Asked) -> None:
        with pytest.raises(ResizeRefused, match="there is no plan"):
            await asked.requests.cancel("")
        plan = await asked.requests.drain("ps-1", stop=False, pause=False)
        with pytest.raises(ResizeRefused, match="there is no plan nonsense"):
            await asked.requests.cancel("nonsense")
        await asked.put(replace(plan, moves_total=4, moves_left=3))
        cancelled = await asked.requests.cancel(plan.plan_id)
        assert cancelled.reason == "cancelled with 3 of 4 copies still to move"
        assert await asked.requests.cancel(plan.plan_id) == cancelled
        await asked.put(replace(plan, state="done", reason="4 copies moved"))
        with pytest.raises(ResizeRefused, match="done already: 4 copies moved"):
            await asked.requests.cancel("")

    ask(scenario)


def test_nothing_is_planned_before_there_is_a_routing() -> None:
    async def inside() -> None:
        asked = Asked(MemoryBackend())
        with pytest.raises(ServerUnavailable, match="no routing yet"):
            await asked.requests.resize(3, stop=True, pause=False)

    asyncio.run(inside())
