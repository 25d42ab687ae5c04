"""The records of a cluster refuse what contradicts itself."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from backstay._proto.v1 import cluster_pb2
from backstay.consensus import NodeRecord, RoutingTable
from backstay.consensus.messages import (
    node_from_message,
    node_to_message,
    routing_from_message,
    routing_to_message,
)
from backstay.errors import InvalidRequest, ProtocolError

NODES = (
    NodeRecord("ps-0", "h:1", "h:2", 2**63 - 1, "serving"),
    NodeRecord("ps-1", "h:3", "h:4", 7, "unreachable"),
)


def routing(**changes: Any) -> RoutingTable:
    values: dict[str, Any] = {
        "version": 3,
        "slot_count": 4,
        "nodes": NODES,
        "master_of_slot": np.array([0, 1, 1, 0], dtype=np.uint16),
    }
    return RoutingTable(**values | changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"version": 0}, "version 0 is not at least 1"),
        ({"slot_count": 3}, "slot_count 3 is no power of two"),
        ({"slot_count": 8}, "masters for 8 slots"),
        ({"nodes": ()}, "0 nodes"),
        ({"nodes": (NODES[0], NODES[0])}, "a node id appears more than once"),
        ({"master_of_slot": np.array([0, 1, 2, 0])}, "master 0 to 2, but there are 2 nodes"),
        ({"master_of_slot": np.array([0, 1, -1, 0])}, "master -1 to 1"),
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
        ("ps-0", "h:1", "h:2", 5),
        ("ps-0", "h:1", "", 5, "serving"),
        ("ps-0", "h:1", "h:2", 2**63, "serving"),
        ("ps-0", "h:1", "h:2", 5, "asleep"),
    ],
)
def test_a_node_record_that_contradicts_itself_is_refused(values: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidRequest):
        NodeRecord(*values)


def test_the_masters_cannot_be_changed() -> None:
    masters = np.array([0, 1, 1, 0], dtype=np.uint16)
    table = routing(master_of_slot=masters)
    masters[0] = 1
    assert table.master_of_slot[0] == 0
    with pytest.raises(ValueError, match="read-only"):
        table.master_of_slot[0] = 1


def test_a_routing_table_answers_who_owns_what() -> None:
    table = routing()
    assert table.owned_by("ps-1").tolist() == [False, True, True, False]
    assert table.slots_per_node() == {"ps-0": 2, "ps-1": 2}
    with pytest.raises(InvalidRequest, match="no node 'ps-2'"):
        table.owned_by("ps-2")


def test_equal_content_is_equal() -> None:
    assert routing() == routing()
    assert hash(routing()) == hash(routing())
    assert routing() != routing(version=4)
    assert routing() != routing(master_of_slot=np.array([0, 1, 1, 1]))
    assert routing() != "routing"


def test_json_and_messages_lead_back() -> None:
    table = routing()
    assert RoutingTable.from_json(table.to_json()) == table
    message = routing_to_message("demo", table)
    again = cluster_pb2.GetClusterResponse.FromString(message.SerializeToString())
    assert routing_from_message(again) == table
    unknown = NodeRecord("ps-2", "h:5")
    assert node_from_message(node_to_message(unknown)) == unknown


def test_json_of_another_form_is_refused() -> None:
    good = json.loads(routing().to_json())
    for broken in (
        "",
        "[]",
        json.dumps({**good, "more": 1}),
        json.dumps({**good, "version": "3"}),
        json.dumps({**good, "master_of_slot": [0, 1, 1, 0.0]}),
        json.dumps({**good, "master_of_slot": [0, 1, 1, 70000]}),
        json.dumps({**good, "master_of_slot": [0, 1, 1, True]}),
        json.dumps({**good, "nodes": [{"node_id": "ps-0"}]}),
        json.dumps({**good, "nodes": "ps-0"}),
    ):
        with pytest.raises(InvalidRequest):
            RoutingTable.from_json(broken)


def test_a_message_of_a_later_version_is_a_protocol_error() -> None:
    message = node_to_message(NODES[0])
    message.status = 99  # type: ignore[assignment]
    with pytest.raises(ProtocolError, match="unknown status number 99"):
        node_from_message(message)
    with pytest.raises(ProtocolError):
        routing_from_message(cluster_pb2.GetClusterResponse(slot_count=3))
