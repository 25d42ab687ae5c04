"""Routing tables survive their JSON form and their messages, whatever is in them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from backstay._proto.v1 import cluster_pb2
from backstay.consensus.records import NodeRecord, NodeStatus, RoutingTable, SlotReplicas
from backstay.consensus.records.messages import routing_from_message, routing_to_message

NAMES = st.text("abcdefghijklmnopqrstuvwxyz0123456789.-_", min_size=1, max_size=20)
ADDRESSES = st.builds(lambda name, port: f"h{name}x:{port}", NAMES, st.integers(0, 65535))
NUMBERS = st.integers(1, 2**63 - 1)


@st.composite
def node_lists(draw: st.DrawFn) -> tuple[NodeRecord, ...]:
    names = draw(st.lists(NAMES, min_size=1, max_size=5, unique=True))
    instances = draw(st.lists(NUMBERS, min_size=len(names), max_size=len(names), unique=True))
    return tuple(
        NodeRecord(name, draw(ADDRESSES), draw(ADDRESSES), instance, host=draw(NAMES))
        for name, instance in zip(names, instances, strict=True)
    )


@st.composite
def routing_tables(draw: st.DrawFn) -> RoutingTable:
    nodes = draw(node_lists())
    slot_count = 2 ** draw(st.integers(0, 5))
    held = []
    for _ in range(slot_count):
        order = draw(st.permutations(range(len(nodes))))
        cuts = sorted(draw(st.tuples(*[st.integers(0, len(nodes))] * 2)))
        first, *in_sync = order[: cuts[0]] or [-1]
        held.append(SlotReplicas(first, tuple(in_sync), tuple(order[cuts[0] : cuts[1]])))
    version = draw(NUMBERS)
    terms = st.lists(NUMBERS, min_size=slot_count, max_size=slot_count)
    epochs = st.lists(st.integers(1, version), min_size=slot_count, max_size=slot_count)
    return RoutingTable(
        version=version,
        nodes=nodes,
        replicas=draw(st.integers(1, 3)),
        replicas_of_slot=tuple(held),
        term_of_slot=np.array(draw(terms), dtype=np.uint64),
        epoch_of_slot=np.array(draw(epochs), dtype=np.uint64),
        generation=draw(st.integers(0, version - 1)),
        gone=tuple(draw(st.lists(NUMBERS, max_size=4, unique=True))),
    )


@given(routing_tables())
def test_json_leads_back(table: RoutingTable) -> None:
    again = RoutingTable.from_json(table.to_json())
    assert again == table
    assert again.to_json() == table.to_json()


@given(routing_tables(), st.sampled_from(["starting", "serving", "unreachable"]))
def test_messages_lead_back(table: RoutingTable, status: NodeStatus) -> None:
    sent = replace(
        table,
        nodes=tuple(replace(node, host="", status=status) for node in table.nodes),
        epoch_of_slot=np.ones(table.slot_count, dtype=np.uint64),
        gone=(),
    )
    message = routing_to_message("demo", sent).SerializeToString()
    assert routing_from_message(cluster_pb2.GetClusterResponse.FromString(message)) == sent
