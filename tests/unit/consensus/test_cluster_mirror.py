"""The mirror of the cluster's records: what it takes over, what it never forgets."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from backstay.config import ServerConfig
from backstay.consensus import ClusterMirror, ClusterView, NodeRecord
from backstay.consensus.cluster_mirror import DeathRecord, seen_routing
from backstay.consensus.records import (
    ClusterConfig,
    ClusterHealthRecord,
    ControllerRecord,
    MemberRecord,
    NodeReport,
    RoutingTable,
    SlotReplicas,
    TableRecord,
)
from backstay.consensus.records.keys import Keys
from backstay.consensus.records.plans import LeavingNode, ResizePlan
from backstay.consensus.store import KeyValue, RangeResult
from backstay.errors import ConfigError, InvalidRequest
from backstay.pserver.client.inspection import roles_of_nodes
from backstay.pserver.membership.cluster_config import check_fits
from backstay.pserver.membership.departures import can_judge, peers_to_watch
from backstay.pserver.membership.handover import all_in_sync, is_dismissed, slots_to_hand_over
from backstay.pserver.membership.reporting import NativeReport
from tests.unit.member_records import member

KEYS = Keys("demo")
NODES = tuple(
    NodeRecord(f"ps-{index}", f"127.0.0.1:{7000 + index}", f"127.0.0.1:{7100 + index}", 11 + index)
    for index in range(3)
)
# Slots 0 and 1 on ps-0 with ps-1; slot 2 on ps-1 with ps-2 catching up; slot 3 has no master.
SETS = (
    SlotReplicas(0, (1,)),
    SlotReplicas(0, (1,)),
    SlotReplicas(1, (), (2,)),
    SlotReplicas(-1, (2,)),
)
ROUTING = RoutingTable(
    version=1,
    nodes=NODES,
    replicas=2,
    replicas_of_slot=SETS,
    term_of_slot=np.ones(4, dtype=np.uint64),
    epoch_of_slot=np.ones(4, dtype=np.uint64),
)


def found(revision: int, **values: str) -> RangeResult:
    """All keys of a prefix, each last written at that revision."""
    items = [KeyValue(key, value, 1, revision, 1) for key, value in sorted(values.items())]
    return RangeResult(tuple(items), revision)


def members(*records: MemberRecord) -> dict[str, str]:
    return {KEYS.member(record.node_id): record.to_json() for record in records}


def test_every_kind_of_record_is_taken_over() -> None:
    mirror = ClusterMirror(KEYS)
    view: ClusterView = mirror
    report = NodeReport(11, 1, silent=(12,))
    death = DeathRecord(13, "ps-2", "ps-0", "refused", "2026-11-21")
    health = ClusterHealthRecord("OK", "", ("ps-0",))
    mirror.load(KEYS.routing, found(7, routing=ROUTING.to_json()))
    mirror.load(KEYS.members, found(8, **members(member(0))))
    mirror.load(KEYS.reports, found(8, **{KEYS.report(11): report.to_json()}))
    mirror.load(KEYS.deaths, found(8, **{KEYS.death(13): death.to_json()}))
    mirror.load(KEYS.status, found(8, **{KEYS.status: health.to_json()}))
    mirror.load(KEYS.controller, found(8, controller=ControllerRecord("ps-0", 11).to_json()))
    mirror.load(KEYS.tables, found(8, **{KEYS.table("a/b"): TableRecord("{}", 1).to_json()}))
    snapshot = view.snapshot()
    assert snapshot.routing == ROUTING
    assert snapshot.routing_revision == 7
    assert dict(snapshot.members) == {"ps-0": member(0)}
    assert snapshot.member_of(11) == member(0)
    assert snapshot.member_of(12) is None
    assert dict(snapshot.reports) == {11: report}
    assert dict(snapshot.deaths) == {13: death}
    assert snapshot.health == health
    assert snapshot.controller == ControllerRecord("ps-0", 11)
    assert dict(snapshot.tables) == {"a/b": TableRecord("{}", 1)}
    assert mirror.revision_of(KEYS.report(11)) == 8
    mirror.load(KEYS.reports, RangeResult((), 9))
    mirror.load(KEYS.controller, RangeResult((), 9))
    assert not mirror.snapshot().reports
    assert mirror.snapshot().controller is None


def test_a_reader_that_is_behind_changes_nothing() -> None:
    mirror = ClusterMirror(KEYS)
    mirror.load(KEYS.members, found(9, **members(member(0), member(1))))
    mirror.load(KEYS.members, found(8, **members(member(0))))
    assert set(mirror.snapshot().members) == {"ps-0", "ps-1"}


def test_what_cannot_be_read_is_not_taken_for_absent() -> None:
    mirror = ClusterMirror(KEYS)
    mirror.load(KEYS.routing, found(3, routing=ROUTING.to_json()))
    mirror.load(KEYS.routing, found(4, routing='{"format":1}'))
    snapshot = mirror.snapshot()
    assert snapshot.routing == ROUTING
    assert "routing" in snapshot.unreadable
    mirror.load(KEYS.routing, RangeResult((), 5))
    assert mirror.snapshot().routing == ROUTING
    assert "removed" in mirror.snapshot().unreadable["routing"]
    mirror.load(KEYS.members, found(5, **{KEYS.member("ps-9"): member(0).to_json()}))
    assert "under another key" in mirror.snapshot().unreadable["pservers/ps-9"]
    mirror.load(KEYS.routing, found(6, routing=ROUTING.to_json()))
    mirror.load(KEYS.members, RangeResult((), 6))
    assert not mirror.snapshot().unreadable


def test_a_store_that_is_away_makes_the_health_unknown() -> None:
    mirror = ClusterMirror(KEYS)
    mirror.load(KEYS.members, found(2, **members(member(0))))
    mirror.set_trouble("not reachable since noon")
    health = mirror.snapshot().health
    assert health == ClusterHealthRecord("UNKNOWN", "not reachable since noon", ("ps-0",))
    mirror.set_trouble("")
    assert mirror.snapshot().health.reason == "no controller has said anything yet"


def test_waiting_ends_with_the_next_change_only() -> None:
    async def scenario() -> None:
        mirror = ClusterMirror(KEYS)
        waiting = asyncio.ensure_future(mirror.newer_than(0))
        await asyncio.sleep(0)
        mirror.load(KEYS.members, RangeResult((), 1))
        await asyncio.sleep(0)
        assert not waiting.done()
        mirror.load(KEYS.members, found(2, **members(member(0))))
        assert (await waiting).revision == 1

    asyncio.run(scenario())


def test_processes_without_a_living_registration_are_unreachable() -> None:
    mirror = ClusterMirror(KEYS)
    assert seen_routing(mirror.snapshot()) is None
    mirror.load(KEYS.routing, found(3, routing=ROUTING.to_json()))
    back = member(1, instance=99)
    spare = member(7, status="starting")
    mirror.load(KEYS.members, found(4, **members(member(0), back, spare)))
    routing = seen_routing(mirror.snapshot())
    assert routing is not None
    assert [(node.node_id, node.status) for node in routing.nodes] == [
        ("ps-0", "serving"),
        ("ps-1", "unreachable"),
        ("ps-2", "unreachable"),
        ("ps-7", "starting"),
    ]


def test_a_stop_waits_for_slots_that_another_serving_node_has_in_sync() -> None:
    alive = {f"ps-{index}": member(index) for index in range(3)}
    assert slots_to_hand_over(ROUTING, alive, 11) == 2
    # The backup of slot 2 has not caught up.
    assert slots_to_hand_over(ROUTING, alive, 12) == 0
    assert slots_to_hand_over(ROUTING, {**alive, "ps-1": member(1, status="stopping")}, 11) == 0
    assert slots_to_hand_over(ROUTING, {"ps-0": member(0)}, 11) == 0
    assert slots_to_hand_over(None, alive, 11) == 0


def test_a_node_is_in_sync_unless_a_copy_on_it_catches_up() -> None:
    assert [all_in_sync(ROUTING, instance) for instance in (11, 12, 13)] == [True, True, False]
    assert all_in_sync(None, 11)


def test_roles_are_counted_in_slots() -> None:
    assert roles_of_nodes(ROUTING) == {
        "ps-0": {"master": 2, "in_sync": 0, "catching_up": 0},
        "ps-1": {"master": 1, "in_sync": 2, "catching_up": 0},
        "ps-2": {"master": 0, "in_sync": 1, "catching_up": 1},
    }


def test_each_node_watches_the_next_ones_in_the_ring() -> None:
    ids = [f"ps-{index}" for index in range(5)]
    assert peers_to_watch("ps-3", ids, 2) == ["ps-4", "ps-0"]
    assert peers_to_watch("ps-9", ids, 8) == ids
    watched = [peer for node_id in ids for peer in peers_to_watch(node_id, ids, 2)]
    assert {watched.count(node_id) for node_id in ids} == {2}
    assert peers_to_watch("ps-0", ["ps-0"]) == []


def test_a_loopback_address_says_nothing_about_another_machine() -> None:
    assert can_judge("here", "here", ["127.0.0.1:1"])
    assert not can_judge("here", "there", ["127.0.0.1:1", "10.0.0.1:2"])
    assert can_judge("here", "there", ["10.0.0.1:1", "10.0.0.1:2"])


def test_the_data_planes_report_is_put_in_order() -> None:
    said = NativeReport.from_json(
        7,
        '{"routing_version":3,"silent":[9,8],"full":[6],"caught_up":[[2,1,8],[1,4,9]],"refused":[9],'
        '"loaded":[[4,2],[3,2]]}',
    )
    assert said.report.silent == (8, 9)
    assert said.report.full == (6,)
    assert [one.slot for one in said.report.caught_up] == [1, 2]
    assert said.report.loaded == ((3, 2), (4, 2))
    assert said.refused == (9,)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"slot_count": 64}, r"slot_count: 64 here, .*'/demo/', with 1024"),
        ({"replicas": 3}, "replicas: 3 here, .* with 2"),
        ({"initial_nodes": 5}, "initial_nodes: 5 here, .* with 3"),
    ],
)
def test_a_node_that_does_not_fit_the_cluster_is_told_in_what(
    settings: dict[str, int], says: str
) -> None:
    config = ClusterConfig("demo", 1024, 2, 3, "ab")
    check_fits(config, ServerConfig(cluster="demo"))
    with pytest.raises(ConfigError, match=says):
        check_fits(config, ServerConfig(cluster="demo", **settings))  # type: ignore[arg-type]


def test_a_death_record_is_read_strictly() -> None:
    death = DeathRecord(13, "ps-2", "ps-0", "refused", "2026-11-21")
    assert DeathRecord.from_json(death.to_json()) == death
    with pytest.raises(InvalidRequest, match="death record"):
        DeathRecord.from_json('{"instance":13}')


def test_the_mirror_knows_the_plan_and_its_revision() -> None:
    plan = ResizePlan("p", "resize", 3)
    mirror = ClusterMirror(KEYS)
    mirror.load("plans/", found(7, **{"plans/resize": plan.to_json()}))
    assert (mirror.snapshot().plan, mirror.snapshot().plan_revision) == (plan, 7)
    mirror.load("plans/", found(8, **{"plans/resize": "{}"}))
    # One that cannot be read is not taken for one that is not there.
    assert mirror.snapshot().plan == plan
    assert "plans/resize" in mirror.snapshot().unreadable
    mirror.load("plans/", found(9))
    assert (mirror.snapshot().plan, mirror.snapshot().plan_revision) == (None, 0)


def test_a_process_is_dismissed_when_its_plan_is_done_and_it_holds_nothing() -> None:
    empty = replace(ROUTING, replicas_of_slot=(SlotReplicas(0, (1,)),) * 4)
    done = ResizePlan("p", "drain", 2, (LeavingNode("ps-2", 13),), stop=True, state="done")
    assert is_dismissed(done, empty, "ps-2", 13)
    assert not is_dismissed(done, ROUTING, "ps-2", 13)
    assert not is_dismissed(done, None, "ps-2", 13)
    assert not is_dismissed(None, empty, "ps-2", 13)
    assert not is_dismissed(done, empty, "ps-2", 14)
    assert not is_dismissed(done, empty, "ps-1", 12)
    assert not is_dismissed(replace(done, state="moving"), empty, "ps-2", 13)
    assert not is_dismissed(replace(done, stop=False), empty, "ps-2", 13)
