"""The records of a cluster refuse what contradicts itself."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backstay._proto.v1 import cluster_pb2
from backstay.consensus.records import (
    NO_MASTER,
    NOT_RESTORING,
    CaughtUp,
    ClusterConfig,
    ClusterHealthRecord,
    ControllerRecord,
    DeclaredTable,
    Event,
    MemberRecord,
    NodeRecord,
    NodeReport,
    Restoring,
    RoutingTable,
    ShardRecord,
    SlotReplicas,
    TableRecord,
)
from backstay.consensus.records.messages import (
    health_from_message,
    node_from_message,
    node_to_message,
    routing_from_message,
    routing_to_message,
)
from backstay.consensus.records.plans import LeavingNode, ResizePlan
from backstay.errors import InvalidRequest, ProtocolError

NODES = (
    NodeRecord("ps-0", "h:1", "h:2", 2**63 - 1, host="one"),
    NodeRecord("ps-1", "h:3", "h:4", 7, host="two"),
    NodeRecord("ps-2", "h:5", "h:6", 8, host="two"),
)
SETS = (
    SlotReplicas(0, (1,)),
    SlotReplicas(1, (0,), (2,)),
    SlotReplicas(NO_MASTER, (2, 0)),
    SlotReplicas(0, (1,)),
)


def routing(**changes: Any) -> RoutingTable:
    values: dict[str, Any] = {
        "version": 7,
        "nodes": NODES,
        "replicas": 2,
        "replicas_of_slot": SETS,
        "term_of_slot": np.array([1, 2, 3, 4]),
        "epoch_of_slot": np.array([1, 1, 5, 1]),
        "generation": 1,
        "gone": (99, 3),
        "restoring": Restoring("/ckpt", "ckpt-000001-abcdef", (1, 3)),
    }
    return RoutingTable(**values | changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"version": 0}, "version 0 is not at least 1"),
        ({"generation": 7}, "generation 7 at version 7"),
        ({"replicas": 0}, "0 replicas"),
        ({"replicas": 4}, "4 replicas"),
        ({"replicas_of_slot": SETS[:3]}, "slot_count 3 is no power of two"),
        ({"replicas_of_slot": ()}, "slot_count 0"),
        ({"replicas_of_slot": SETS * 2}, "in term_of_slot for 8 slots"),
        ({"nodes": ()}, "0 nodes"),
        ({"nodes": (NODES[0], NODES[0])}, "a node id appears more than once"),
        ({"nodes": (NODES[0], replace(NODES[0], node_id="a"))}, "an instance appears more"),
        ({"nodes": (NODES[0], NodeRecord("ps-1", "h:3"))}, "no node has met node 'ps-1'"),
        ({"nodes": NODES[:2]}, "sets name nodes 0 to 2, but there are 2 nodes"),
        ({"replicas_of_slot": (*SETS[:3], SlotReplicas(-2))}, "sets name nodes -2 to 2"),
        ({"replicas_of_slot": (*SETS[:3], SlotReplicas(0, (0,)))}, "more than once in [0, 0]"),
        ({"replicas_of_slot": (*SETS[:3], SlotReplicas(0, (1,), (1,)))}, "more than once in"),
        ({"term_of_slot": np.array([0, 1, 1, 1])}, "term_of_slot holds a number outside"),
        ({"epoch_of_slot": np.array([8, 1, 1, 1])}, "epoch is after"),
        ({"gone": (5, 5)}, "one twice"),
        ({"gone": tuple(range(65))}, "over 64"),
        ({"restoring": Restoring("u", "c", (3, 1))}, "restoring names a slot twice"),
        ({"restoring": Restoring("u", "c", (1, 1))}, "restoring names a slot twice"),
        ({"restoring": Restoring("u", "c", (4,))}, "or one of 4 on"),
        ({"lost": (2, 0)}, "lost names a slot twice"),
        ({"lost": (4,)}, "or one that does not exist"),
        ({"lost": (1,)}, "both lost and restoring"),
        ({"lost": (0,)}, "a node holds a slot that is lost"),
        (
            {"lost": (0,), "replicas_of_slot": (SlotReplicas(NO_MASTER, (1,)), *SETS[1:])},
            "a node holds a slot that is lost",
        ),
    ],
)
def test_a_routing_table_that_contradicts_itself_is_refused(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        routing(**changes)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "values",
    [
        ("", "h:1"),
        ("ps-0", ""),
        ("ps-0", "h"),
        ("ps-0", "h:1", "h:2"),
        ("ps-0", "h:1", "", 5, "serving"),
        ("ps-0", "h:1", "h:2", 2**63, "serving"),
        ("ps-0", "h:1", "h:2", 5, "asleep"),
        ("ps-0", "h:1", "", 0, "serving"),
    ],
)
def test_a_node_record_that_contradicts_itself_is_refused(values: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidRequest):
        NodeRecord(*values)


def test_tables_that_differ_in_what_is_lost_differ() -> None:
    table = routing(replicas_of_slot=(SlotReplicas(NO_MASTER), *SETS[1:]))
    assert table != replace(table, lost=(0,))
    assert table == replace(table, lost=())


def test_the_arrays_cannot_be_changed() -> None:
    terms = np.array([1, 1, 1, 1])
    table = routing(term_of_slot=terms)
    terms[0] = 9
    assert table.term_of_slot[0] == 1
    for array in (table.term_of_slot, table.epoch_of_slot, table.master_of_slot):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_equal_sets_are_one_object() -> None:
    table = routing(replicas_of_slot=(*SETS[:3], SlotReplicas(0, (1,))))
    assert table.replicas_of_slot[0] is table.replicas_of_slot[3]
    assert table.sets == SETS[:3]
    assert table.set_of_slot.tolist() == [0, 1, 2, 0]


def test_a_set_tells_who_has_everything() -> None:
    assert SETS[1].synced == (1, 0)
    assert SETS[1].holders == (1, 0, 2)
    assert SETS[2].synced == (2, 0)


def test_a_routing_table_answers_who_owns_what() -> None:
    table = routing()
    assert table.slot_count == 4
    assert table.master_of_slot.tolist() == [0, 1, NO_MASTER, 0]
    assert table.slots_per_node() == {"ps-0": 2, "ps-1": 1, "ps-2": 0}


def test_equal_content_is_equal() -> None:
    assert routing() == routing()
    assert hash(routing()) == hash(routing())
    assert routing() != routing(version=8)
    assert routing() != routing(replicas_of_slot=(*SETS[:3], SlotReplicas(1)))
    assert routing() != routing(gone=())
    assert routing() != routing(restoring=NOT_RESTORING)
    assert routing() != "routing"


def test_the_stored_form_is_the_one_that_the_data_server_reads() -> None:
    document = json.loads(routing(nodes=NODES).to_json())
    assert document == {
        "format": 2,
        "version": 7,
        "generation": 1,
        "replicas": 2,
        "slot_count": 4,
        "nodes": [
            {
                "node_id": node.node_id,
                "instance": node.instance,
                "control_address": node.control_address,
                "data_address": node.data_address,
                "host": node.host,
            }
            for node in NODES
        ],
        "gone": [99, 3],
        "sets": [[0, [1], []], [1, [0], [2]], [-1, [2, 0], []]],
        "set_of_slot": [0, 1, 2, 0],
        "term_of_slot": [1, 2, 3, 4],
        "epoch_of_slot": [1, 1, 5, 1],
        "lost": [],
        "restoring": {"url": "/ckpt", "checkpoint": "ckpt-000001-abcdef", "slots": [1, 3]},
    }


def test_json_and_messages_lead_back() -> None:
    table = routing()
    assert RoutingTable.from_json(table.to_json()) == table
    sent = RoutingTable(
        version=7,
        nodes=tuple(replace(node, host="", status="serving") for node in NODES),
        replicas=2,
        replicas_of_slot=SETS,
        term_of_slot=table.term_of_slot,
        epoch_of_slot=np.ones(4, dtype=np.uint64),
        generation=1,
    )
    health = ClusterHealthRecord("UNHEALTHY", "slot 2 has no master", ("ps-0", "ps-1", "ps-2"))
    message = routing_to_message("demo", sent, health=health, controller="ps-1")
    again = cluster_pb2.GetClusterResponse.FromString(message.SerializeToString())
    assert routing_from_message(again) == sent
    assert list(again.master_of_slot) == [0, 1, 2**32 - 1, 0]
    assert health_from_message(again) == health
    assert again.controller == "ps-1"
    unknown = NodeRecord("ps-2", "h:5")
    assert node_from_message(node_to_message(unknown)) == unknown


def test_a_table_of_another_format_is_refused_by_its_format() -> None:
    older = json.loads(routing().to_json()) | {"format": 1}
    older["birth_of_slot"] = older.pop("epoch_of_slot")
    with pytest.raises(InvalidRequest, match=r"format: 1; this version reads format 2 only$"):
        RoutingTable.from_json(json.dumps(older))


def test_json_of_another_form_is_refused() -> None:
    good = json.loads(routing().to_json())
    for broken in (
        "",
        "[]",
        json.dumps({**good, "more": 1}),
        json.dumps({**good, "format": 1}),
        json.dumps({**good, "version": "7"}),
        json.dumps({**good, "slot_count": 8}),
        json.dumps({**good, "set_of_slot": [0, 1, 2, 0.0]}),
        json.dumps({**good, "set_of_slot": [0, 1, 2, 3]}),
        json.dumps({**good, "set_of_slot": [0, 1, 1, 0]}),
        json.dumps({**good, "set_of_slot": [0, 1, 2, True]}),
        json.dumps({**good, "term_of_slot": [0, 1, 1, 1]}),
        json.dumps({**good, "term_of_slot": [2**63, 1, 1, 1]}),
        json.dumps({**good, "sets": [[0, [1]], *good["sets"][1:]]}),
        json.dumps({**good, "sets": [[0, [-1], []], *good["sets"][1:]]}),
        json.dumps({**good, "sets": [*good["sets"][:2], good["sets"][0]]}),
        json.dumps({**good, "gone": [-1]}),
        json.dumps({**good, "restoring": {"url": "", "checkpoint": ""}}),
        json.dumps({**good, "restoring": {"url": "", "checkpoint": "", "slots": ["1"]}}),
        json.dumps({**good, "nodes": [{"node_id": "ps-0"}]}),
        json.dumps({**good, "nodes": "ps-0"}),
    ):
        with pytest.raises(InvalidRequest):
            RoutingTable.from_json(broken)


def test_a_message_that_contradicts_itself_is_a_protocol_error() -> None:
    message = node_to_message(NODES[0])
    message.status = 99  # type: ignore[assignment]
    with pytest.raises(ProtocolError, match="unknown status number 99"):
        node_from_message(message)
    with pytest.raises(ProtocolError):
        routing_from_message(cluster_pb2.GetClusterResponse(slot_count=3))
    answer = routing_to_message("demo", routing())
    answer.master_of_slot[0] = 1
    with pytest.raises(ProtocolError, match="master_of_slot contradicts"):
        routing_from_message(answer)
    answer = routing_to_message("demo", routing())
    answer.set_of_slot[0] = 3
    with pytest.raises(ProtocolError, match="replica sets"):
        routing_from_message(answer)


MEMBER = MemberRecord(
    node_id="ps-0",
    instance=5,
    incarnation=2,
    status="serving",
    start_time=1490184573.25,
    sync=True,
    data_address="h:2",
    control_address="h:1",
    host="one",
    lease=77,
    version="0.3.0",
)
PLAN = ResizePlan(
    "ab",
    "resize",
    3,
    leaving=(LeavingNode("ps-3", 7),),
    stop=True,
    wait_s=60,
    state="moving",
    reason="2 of 3 copies are still to move",
    moves_total=3,
    moves_left=2,
    started="2026-11-21T10:00:00Z",
)
SHARD = ShardRecord(
    slot=3,
    replica=1,
    node="ps-1",
    instance=5,
    status="in_sync",
    created=1490184573.25,
    modified=1490184574.0,
    routing_version=4,
)
RECORDS: tuple[Any, ...] = (
    MEMBER,
    PLAN,
    ClusterConfig("demo", 1024, 2, 3, "0af1"),
    ControllerRecord("ps-0", 5),
    NodeReport(5, 7, silent=(6,), caught_up=(CaughtUp(3, 2, 8),)),
    NodeReport(5, 7),
    ClusterHealthRecord("OK", "", ("ps-0",)),
    Event(8, "promoted", "ps-1", 40, (0, 2, 9), "because"),
    SHARD,
    TableRecord('{"name":"t","dim":8}', 2**64 - 1),
    TableRecord('{"name":"t"}', 1, 7, DeclaredTable(2**64 - 1, 3, '{"name":"t"}')),
)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_each_record_is_strict_about_its_json(record: Any) -> None:
    text = record.to_json()
    assert type(record).from_json(text) == record
    good = json.loads(text)
    broken = ["", "null", json.dumps({**good, "more": 1})]
    for name in good:
        rest = {key: value for key, value in good.items() if key != name}
        broken += [json.dumps(rest), json.dumps({**rest, name: None})]
    for one in broken:
        with pytest.raises(InvalidRequest):
            type(record).from_json(one)


def test_records_have_the_fields_of_the_design() -> None:
    assert list(json.loads(MEMBER.to_json())) == [
        "id",
        "instance",
        "incarnation",
        "status",
        "node_status",
        "start_time",
        "sync",
        "data_address",
        "control_address",
        "host",
        "lease",
        "version",
        "keeps_store",
    ]
    assert list(json.loads(SHARD.to_json())) == [
        *("id", "shardid", "node", "instance", "created", "modified", "status"),
        "routing_version",
    ]
    assert json.loads(MEMBER.to_json())["status"] == "up"
    assert json.loads(MEMBER.to_json())["start_time"] == 1490184573.25
    assert json.loads(SHARD.to_json()) == {
        "id": 1,
        "shardid": 3,
        "node": "ps-1",
        "instance": 5,
        "created": 1490184573.25,
        "modified": 1490184574.0,
        "status": "in_sync",
        "routing_version": 4,
    }
    report = NodeReport(
        5, 7, silent=(6,), full=(9,), caught_up=(CaughtUp(3, 2, 8),), loaded=((3, 4),)
    )
    assert json.loads(report.to_json()) == {
        "instance": 5,
        "routing_version": 7,
        "silent": [6],
        "full": [9],
        "caught_up": [[3, 2, 8]],
        "loaded": [[3, 4]],
        "load_trouble": "",
    }
    assert MEMBER.node() == NodeRecord("ps-0", "h:1", "h:2", 5, "serving", "one")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: replace(MEMBER, node_id=""), "id is empty"),
        (lambda: replace(MEMBER, status="unknown"), "unknown status"),  # type: ignore[arg-type]
        (lambda: replace(MEMBER, instance=0), "instance 0"),
        (lambda: replace(MEMBER, incarnation=0), "incarnation 0"),
        (lambda: replace(MEMBER, lease=-1), "lease -1"),
        (lambda: replace(MEMBER, data_address=""), "data_address"),
        (lambda: ClusterConfig("", 4, 1, 1, "a"), "cluster is empty"),
        (lambda: ClusterConfig("demo", 5, 1, 1, "a"), "slot_count 5 is no power of two"),
        (lambda: ClusterConfig("demo", 4, 4, 1, "a"), "replicas 4"),
        (lambda: ClusterConfig("demo", 4, 1, 5, "a"), "initial_nodes 5"),
        (lambda: ClusterConfig("demo", 4, 1, 1, "x"), "'x' is not hex"),
        (lambda: NodeReport(0, 1), "instance 0"),
        (lambda: NodeReport(1, -1), "routing_version -1"),
        (lambda: Event(1, "other", "", 0, (), ""), "unknown kind"),  # type: ignore[arg-type]
        (lambda: ClusterHealthRecord("FINE", "", ()), "unknown status"),  # type: ignore[arg-type]
    ],
)
def test_records_refuse_what_cannot_be(make: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        make()


@pytest.mark.parametrize("time", ["NaN", "Infinity", "-1.0"])
def test_a_time_that_is_none_is_refused(time: str) -> None:
    shard = replace(SHARD, created=7.5, modified=8.5).to_json()
    for record, text, value in (
        (MemberRecord, MEMBER.to_json(), "1490184573.25"),
        (ShardRecord, shard, "7.5"),
        (ShardRecord, shard, "8.5"),
    ):
        with pytest.raises(InvalidRequest, match="seconds since 1970"):
            record.from_json(text.replace(value, time))
