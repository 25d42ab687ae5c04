"""Figures of the control plane, native histograms in seconds, and the endpoint's limits."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from backstay.consensus import ClusterSnapshot, RoutingTable
from backstay.consensus.records import NO_MASTER, MemberRecord
from backstay.consensus.records.nodes import NodeRecord
from backstay.consensus.records.plans import LeavingNode, ResizePlan
from backstay.consensus.records.routing import SlotReplicas
from backstay.errors import ListenError
from backstay.metrics_endpoint import REQUESTS_AT_ONCE_MAX, MetricsEndpoint
from backstay.pserver.client.inspection import slots_short_of_copies
from backstay.pserver.metrics.families import bucket_bounds_s
from backstay.pserver.metrics.figures import (
    ControlFigures,
    Durations,
    InSyncChanges,
    in_sync_changes,
)
from backstay.pserver.metrics.readiness import Readiness, slots_to_wait_for


class Empty(Collector):
    def collect(self) -> Iterable[Metric]:
        return []


def table(version: int, *replicas_of_slot: SlotReplicas) -> RoutingTable:
    ones = np.ones(len(replicas_of_slot), np.uint64)
    return RoutingTable(
        version=version,
        nodes=tuple(NodeRecord(f"ps-{n}", "h:1", "h:2", 10 + n, "serving", "h") for n in range(3)),
        replicas=2,
        replicas_of_slot=replicas_of_slot,
        term_of_slot=ones,
        epoch_of_slot=ones,
    )


OTHER = SlotReplicas(1, (2,))
BEFORE = table(1, SlotReplicas(0, (1,)), SlotReplicas(0, (1,)), OTHER, OTHER)
# ps-0 is lost; ps-1 goes on alone in two slots.
ALONE = SlotReplicas(1, (), (2,))
AFTER = table(2, ALONE, ALONE, OTHER, OTHER)


def member(number: int) -> MemberRecord:
    return MemberRecord(
        node_id=f"ps-{number}",
        instance=10 + number,
        incarnation=1,
        status="serving",
        start_time=0.0,
        sync=True,
        data_address="h:2",
        control_address="h:1",
        host="h",
        lease=1,
        version="0",
    )


def test_changes_of_in_sync_sets_are_counted_by_the_master_of_after() -> None:
    assert in_sync_changes(BEFORE, AFTER, 11) == InSyncChanges(added=0, removed=2)
    assert in_sync_changes(AFTER, BEFORE, 10) == InSyncChanges(added=2, removed=0)
    assert in_sync_changes(BEFORE, AFTER, 12) == InSyncChanges()


def test_a_failover_is_timed_from_the_first_notice_to_the_table_without_the_node() -> None:
    figures = ControlFigures()
    everybody = {f"ps-{n}": member(n) for n in range(3)}
    snapshot = ClusterSnapshot(members=everybody, routing=BEFORE)
    figures.notice(snapshot, 1.0)
    assert figures.lost() == {}
    less = replace(snapshot, members={name: everybody[name] for name in ("ps-1", "ps-2")})
    figures.notice(less, 2.0)
    figures.notice(less, 3.0)
    assert figures.lost() == {10: 2.0}
    # A table that still counts on it completes nothing.
    figures.routing_written(figures.lost(), BEFORE, table(2, *BEFORE.replicas_of_slot), 4.0)
    assert figures.failovers.total == 0
    figures.routing_written(figures.lost(), BEFORE, AFTER, 4.5)
    assert figures.failovers.total == 1
    assert figures.failovers.sum_s == 2.5
    assert figures.last_failover is not None
    assert figures.last_failover.to_object() == {
        "node_id": "ps-0",
        "routing_version": 2,
        "duration_ms": 2500.0,
    }
    figures.notice(replace(less, routing=AFTER), 5.0)
    assert figures.lost() == {}


def test_slots_with_fewer_copies_than_wanted() -> None:
    assert slots_short_of_copies(BEFORE) == 0
    assert slots_short_of_copies(AFTER) == 2
    assert slots_short_of_copies(table(3, SlotReplicas(NO_MASTER, (0, 1)), OTHER)) == 1


def test_a_duration_falls_into_the_first_bucket_that_holds_it() -> None:
    durations = Durations().with_one(0.005).with_one(0.3).with_one(100.0)
    assert durations.counts[0] == durations.counts[6] == durations.counts[-1] == 1
    assert durations.total == 3


def test_native_buckets_double_from_16_microseconds() -> None:
    bounds = bucket_bounds_s(20)
    assert len(bounds) == 19
    assert bounds[:3] == [0.000016, 0.000032, 0.000064]
    assert bounds[-1] == 4.194304


def test_an_address_that_is_taken_is_a_clear_error() -> None:
    with (
        MetricsEndpoint("127.0.0.1:0", Empty()) as first,
        pytest.raises(ListenError, match=r"^metrics: 127\.0\.0\.1:\d+: "),
    ):
        MetricsEndpoint(f"127.0.0.1:{first.port}", Empty())


def test_callers_that_say_nothing_cannot_take_more_than_the_places_there_are() -> None:
    with MetricsEndpoint("127.0.0.1:0", Empty()) as endpoint:
        address = ("127.0.0.1", endpoint.port)
        silent = [socket.create_connection(address) for _ in range(REQUESTS_AT_ONCE_MAX)]
        try:
            with pytest.raises((urllib.error.URLError, ConnectionError)):
                urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=5)
        finally:
            for one in silent:
                one.close()


def answer_of(endpoint: MetricsEndpoint, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}{path}", timeout=5) as answer:
            return int(answer.status), str(answer.read().decode())
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_check_answers_200_or_503_with_what_is_wrong() -> None:
    wrong = "the node is starting"
    with MetricsEndpoint("127.0.0.1:0", Empty(), {"/ready": lambda: wrong}) as endpoint:
        assert answer_of(endpoint, "/ready") == (503, "the node is starting\n")
        wrong = ""
        assert answer_of(endpoint, "/ready") == (200, "ok\n")
        assert answer_of(endpoint, "/other") == (404, "GET /metrics\nGET /ready\n")


def test_a_node_is_ready_once_every_slot_had_its_copies_and_then_while_it_serves() -> None:
    everybody = {f"ps-{n}": member(n) for n in range(3)}
    less = {name: everybody[name] for name in ("ps-1", "ps-2")}
    readiness = Readiness()
    assert readiness.why_not("starting", ClusterSnapshot()) == "the node is starting"
    assert "no routing table yet" in readiness.why_not("serving", ClusterSnapshot())
    short = ClusterSnapshot(members=less, routing=AFTER)
    readiness.notice(short)
    why = "slots with fewer copies in sync than wanted: 2"
    assert readiness.why_not("serving", short) == why
    readiness.notice(ClusterSnapshot(members=everybody, routing=BEFORE))
    # From now on the loss of another node does not take this one out of service.
    readiness.notice(short)
    assert readiness.why_not("serving", short) == ""
    assert readiness.why_not("stopping", short) == "the node is stopping"


def test_copies_of_a_process_that_was_started_again_do_not_count() -> None:
    everybody = [member(n) for n in range(3)]
    assert slots_to_wait_for(BEFORE, everybody) == 0
    again = replace(everybody[0], instance=99)
    assert slots_to_wait_for(BEFORE, [again, *everybody[1:]]) == 2


def test_a_node_alone_is_ready_with_the_one_copy_that_it_can_hold() -> None:
    alone = {"ps-1": member(1)}
    held = SlotReplicas(1, ())
    assert slots_to_wait_for(table(2, held, held), list(alone.values())) == 0
    assert slots_to_wait_for(table(3, SlotReplicas(NO_MASTER, ()), held), [*alone.values()]) == 1
    starting = replace(member(2), status="starting")
    assert slots_to_wait_for(table(2, held, held), [member(1), starting]) == 2
    stopping = replace(member(2), status="stopping")
    assert slots_to_wait_for(table(2, held, held), [member(1), stopping]) == 0


def test_a_node_that_is_drained_holds_no_copies_to_wait_for() -> None:
    leaving = (LeavingNode(member(2).node_id, member(2).instance),)
    drain = ResizePlan("p", "drain", 1, leaving, state="done")
    held, both = table(2, SlotReplicas(1, ())), {f"ps-{n}": member(n) for n in (1, 2)}
    readiness = Readiness()
    readiness.notice(ClusterSnapshot(members=both, routing=held))
    assert readiness.why_not("serving", ClusterSnapshot(members=both, routing=held))
    readiness.notice(ClusterSnapshot(members=both, routing=held, plan=drain))
    assert readiness.why_not("serving", ClusterSnapshot(members=both, routing=held)) == ""
