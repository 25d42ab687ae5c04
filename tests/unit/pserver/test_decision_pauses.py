"""When the controller and a master wait for more of the same: what is urgent, what is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstay.consensus import ClusterSnapshot
from backstay.consensus.records import CaughtUp, NodeReport, SlotReplicas
from backstay.pserver.leadership.controller_host import copies_under_way, is_urgent
from backstay.pserver.services.cluster import answered_alike
from tests.unit.controller_cluster import cluster, member, members, table, with_slots

HELD = [SlotReplicas(0, (1,), (2,))] * 2 + [SlotReplicas(1, (0,), (2,))] + [SlotReplicas(1, (0,))]
ROUTING = table(with_slots(cluster(nodes=3, slots=4), HELD))
NODES = members(*map(member, range(3)))
SNAPSHOT = ClusterSnapshot(members=NODES, routing=ROUTING)


def report(instance: int, version: int, *slots: int) -> NodeReport:
    caught_up = tuple(CaughtUp(slot, 1, 102) for slot in slots)
    return NodeReport(instance, version, caught_up=caught_up)


@pytest.mark.parametrize(
    ("reports", "left"),
    [
        ([], 3),
        ([report(100, ROUTING.version, 0)], 2),
        ([report(100, ROUTING.version, 0, 1), report(101, ROUTING.version, 2)], 0),
        # What is said of an earlier table counts for nothing.
        ([report(100, ROUTING.version - 1, 0, 1), report(101, ROUTING.version, 2)], 2),
    ],
)
def test_copies_are_under_way_until_their_masters_say_so(
    reports: list[NodeReport], left: int
) -> None:
    said = {one.instance: one for one in reports}
    assert copies_under_way(replace(SNAPSHOT, reports=said)) == left


def test_a_cluster_without_a_table_copies_nothing() -> None:
    assert copies_under_way(replace(SNAPSHOT, routing=None)) == 0


def test_processes_that_come_go_or_stop_are_urgent_and_copies_are_not() -> None:
    def changed(**values: object) -> ClusterSnapshot:
        return replace(SNAPSHOT, members={**NODES, "ps-2": member(2, **values)})  # type: ignore[arg-type]

    assert is_urgent(SNAPSHOT, changed(status="stopping"))
    assert is_urgent(SNAPSHOT, changed(instance=999))
    assert is_urgent(SNAPSHOT, replace(SNAPSHOT, members=members(*map(member, range(2)))))
    silent = replace(report(100, ROUTING.version), silent=(102,))
    assert is_urgent(SNAPSHOT, replace(SNAPSHOT, reports={100: silent}))
    # A node says of itself whether it is in sync, anew with each copy.
    assert not is_urgent(SNAPSHOT, changed(sync=False))
    copied = replace(SNAPSHOT, reports={100: report(100, ROUTING.version, 0)})
    assert not is_urgent(SNAPSHOT, copied)


def test_clients_are_told_anew_only_of_what_concerns_them() -> None:
    reported = replace(SNAPSHOT, revision=2, reports={100: report(100, ROUTING.version, 0)})
    assert answered_alike(SNAPSHOT, reported)
    stopping = {**NODES, "ps-2": member(2, status="stopping")}
    for other in (
        replace(SNAPSHOT, members=stopping),
        replace(SNAPSHOT, trouble="the store is away"),
        replace(SNAPSHOT, routing=replace(ROUTING, version=ROUTING.version + 1)),
    ):
        assert not answered_alike(SNAPSHOT, other)


def test_a_report_waits_for_further_copies_only_if_it_adds_nothing_else() -> None:
    written = report(100, 5, 0)
    assert report(100, 5, 0, 1).adds_copies_only(written)
    for other in (
        # Withdrawn; of another table; something that is urgent.
        report(100, 5),
        report(100, 5, 1),
        report(100, 6, 0, 1),
        replace(report(100, 5, 0, 1), silent=(102,)),
        replace(report(100, 5, 0, 1), full=(102,)),
    ):
        assert not other.adds_copies_only(written)
