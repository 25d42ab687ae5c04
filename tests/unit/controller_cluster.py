"""Small clusters for the tests of the controller: their records, and decisions written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from backstay.consensus.records import (
    CaughtUp,
    ClusterConfig,
    MemberRecord,
    NodeReport,
    RoutingTable,
    SlotReplicas,
)
from backstay.pserver.controller import ClusterRecords, decide

SLOTS = 16


def member(number: int, instance: int | None = None, **changes: Any) -> MemberRecord:
    values: dict[str, Any] = {
        "node_id": f"ps-{number}",
        "instance": instance or 100 + number,
        "incarnation": 1,
        "status": "serving",
        "start_time": 0.0,
        "sync": True,
        "data_address": f"h{number}:1",
        "control_address": f"h{number}:2",
        "host": f"h{number}",
        "lease": 1,
        "version": "0",
    }
    return MemberRecord(**values | changes)


def members(*some: MemberRecord) -> Mapping[str, MemberRecord]:
    return {one.node_id: one for one in some}


def cluster(nodes: int = 3, replicas: int = 2, slots: int = SLOTS) -> ClusterRecords:
    """Return a cluster with its first routing table."""
    config = ClusterConfig("demo", slots, replicas, nodes, "0")
    records = ClusterRecords(config, members(*map(member, range(nodes))))
    return after(records)


def after(records: ClusterRecords) -> ClusterRecords:
    """Return the records with the decision written."""
    decision = decide(records)
    return replace(
        records,
        routing=decision.routing or records.routing,
        plan=decision.plan or records.plan,
    )


def table(records: ClusterRecords) -> RoutingTable:
    assert records.routing is not None
    return records.routing


def without(records: ClusterRecords, *numbers: int) -> ClusterRecords:
    names = {f"ps-{number}" for number in numbers}
    left = {name: one for name, one in records.members.items() if name not in names}
    return replace(records, members=left)


def with_slots(records: ClusterRecords, held: Iterable[SlotReplicas]) -> ClusterRecords:
    return replace(records, routing=replace(table(records), replicas_of_slot=tuple(held)))


def true_reports(records: ClusterRecords) -> ClusterRecords:
    """Let every master say that all its backups have caught up."""
    routing = table(records)
    entries: dict[int, list[CaughtUp]] = {}
    for slot, held in enumerate(routing.replicas_of_slot):
        for number in held.catching_up:
            entries.setdefault(routing.nodes[held.master].instance, []).append(
                CaughtUp(slot, int(routing.term_of_slot[slot]), routing.nodes[number].instance)
            )
    reports = {
        one: NodeReport(one, routing.version, caught_up=tuple(what))
        for one, what in entries.items()
    }
    return replace(records, reports=reports)


def settled(records: ClusterRecords) -> ClusterRecords:
    for _ in range(200):
        records = true_reports(records)
        if decide(records).routing is None:
            return records
        records = after(records)
    pytest.fail("decisions do not come to an end")


def names(routing: RoutingTable, numbers: Iterable[int]) -> list[str]:
    return [routing.nodes[number].node_id for number in numbers]


def kinds(records: ClusterRecords) -> list[tuple[str, str]]:
    return sorted({(event.kind, event.node) for event in decide(records).events})


def catching_up(records: ClusterRecords) -> int:
    return sum(len(held.catching_up) for held in table(records).replicas_of_slot)
