"""Routing tables survive their JSON form and their messages, whatever is in them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from backstay._proto.v1 import cluster_pb2
from backstay.consensus import NodeRecord, RoutingTable
from backstay.consensus.messages import routing_from_message, routing_to_message

NAMES = st.text("abcdefghijklmnopqrstuvwxyz0123456789.-_", min_size=1, max_size=20)
ADDRESSES = st.builds(lambda name, port: f"h{name}x:{port}", NAMES, st.integers(0, 65535))
KNOWN = st.builds(
    NodeRecord,
    node_id=NAMES,
    control_address=ADDRESSES,
    data_address=ADDRESSES,
    instance=st.integers(1, 2**63 - 1),
    status=st.sampled_from(["starting", "serving", "stopping", "unreachable"]),
)
UNKNOWN = st.builds(NodeRecord, node_id=NAMES, control_address=ADDRESSES)


@st.composite
def routing_tables(draw: st.DrawFn) -> RoutingTable:
    nodes = draw(
        st.lists(KNOWN | UNKNOWN, min_size=1, max_size=5, unique_by=lambda node: node.node_id)
    )
    slot_count = 2 ** draw(st.integers(0, 6))
    masters = draw(
        st.lists(st.integers(0, len(nodes) - 1), min_size=slot_count, max_size=slot_count)
    )
    version = draw(st.integers(1, 2**63 - 1))
    return RoutingTable(version, slot_count, tuple(nodes), np.array(masters, dtype=np.uint16))


@given(routing_tables())
def test_json_leads_back(table: RoutingTable) -> None:
    assert RoutingTable.from_json(table.to_json()) == table


@given(routing_tables())
def test_messages_lead_back(table: RoutingTable) -> None:
    sent = routing_to_message("demo", table).SerializeToString()
    assert routing_from_message(cluster_pb2.GetClusterResponse.FromString(sent)) == table
