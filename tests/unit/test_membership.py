"""The view of a fixed list of nodes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from backstay.consensus import ClusterView, NodeRecord, StaticCluster
from backstay.errors import InvalidRequest

LISTED = (NodeRecord("ps-0", "h:1"), NodeRecord("ps-1", "h:2"))
MET = tuple(
    replace(node, data_address=f"h:{index}", instance=index, status="serving")
    for index, node in enumerate(LISTED, start=11)
)


def static_cluster() -> StaticCluster:
    return StaticCluster("demo", LISTED, np.array([0, 1, 1, 0], dtype=np.uint16))


def test_there_is_no_routing_before_every_node_was_met() -> None:
    cluster = static_cluster()
    view: ClusterView = cluster
    assert view.snapshot().missing == LISTED
    cluster.meet(MET[1])
    assert view.snapshot().routing is None
    assert view.snapshot().missing == (LISTED[0],)
    cluster.meet(MET[0])
    routing = view.snapshot().routing
    assert routing is not None
    assert routing.nodes == MET
    assert routing.version == 1


def test_a_restart_shows_as_another_instance_in_the_same_routing() -> None:
    cluster = static_cluster()
    for node in MET:
        cluster.meet(node)
    back = replace(MET[1], instance=99, data_address="h:99", status="starting")
    cluster.meet(back)
    routing = cluster.snapshot().routing
    assert routing is not None
    assert routing.nodes == (MET[0], back)
    assert routing.version == 1


def test_a_node_that_is_lost_keeps_its_addresses() -> None:
    cluster = static_cluster()
    cluster.lose("ps-0")
    assert cluster.snapshot().nodes == LISTED
    for node in MET:
        cluster.meet(node)
    cluster.lose("ps-0")
    routing = cluster.snapshot().routing
    assert routing is not None
    assert routing.nodes[0] == replace(MET[0], status="unreachable")


def test_what_a_node_says_about_its_control_address_does_not_count() -> None:
    cluster = static_cluster()
    cluster.meet(replace(MET[0], control_address="0.0.0.0:1"))
    assert cluster.snapshot().nodes[0] == MET[0]


def test_strangers_are_refused() -> None:
    cluster = static_cluster()
    with pytest.raises(InvalidRequest, match="'ps-7' is not in the list"):
        cluster.meet(replace(MET[0], node_id="ps-7"))
    with pytest.raises(InvalidRequest, match="says nothing"):
        cluster.meet(LISTED[0])


def test_the_revision_grows_with_changes_only() -> None:
    cluster = static_cluster()
    cluster.meet(MET[0])
    before = cluster.snapshot()
    cluster.meet(MET[0])
    assert cluster.snapshot() == before
    cluster.lose("ps-0")
    assert cluster.snapshot().revision == before.revision + 1


def test_those_who_wait_see_each_newer_state() -> None:
    async def scenario() -> None:
        cluster = static_cluster()
        waiters = [asyncio.create_task(cluster.newer_than(0)) for _ in range(3)]
        late = asyncio.create_task(cluster.newer_than(1))
        await asyncio.sleep(0)
        assert not any(waiter.done() for waiter in waiters)
        cluster.meet(MET[0])
        seen = await asyncio.gather(*waiters)
        assert {snapshot.revision for snapshot in seen} == {1}
        assert not late.done()
        cluster.meet(MET[1])
        assert (await late).routing is not None
        # A state that is newer already needs no waiting.
        assert (await cluster.newer_than(0)).revision == 2

    asyncio.run(scenario())
