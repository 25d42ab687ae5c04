"""Two data servers in this process, one the backup of the other: the end of a client's stream."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from backstay._native import DataClient, DataServer, PushRequest, table_id
from backstay.consensus.clock import clock_s
from backstay.consensus.records import NodeRecord, RoutingTable, SlotReplicas
from backstay.errors import BackstayError
from backstay.tables import SGD, TableSpec, Zeros

SLOTS = 64
KEYS = 64
DEADLINE_MS = 5_000
TABLE = table_id("t")


@contextmanager
def master_and_backup(
    *, memory_limit_bytes: int = 0, backup_limit_bytes: int | None = None, in_sync: bool = True
) -> Iterator[list[DataServer]]:
    """The first server is master of all slots, the second its backup; both know all of it."""
    limits = [memory_limit_bytes, memory_limit_bytes]
    if backup_limit_bytes is not None:
        limits[1] = backup_limit_bytes
    servers = [
        DataServer(
            listen="127.0.0.1:0",
            cluster_id="c",
            node_id=f"ps-{number}",
            instance=number + 1,
            slot_count=SLOTS,
            memory_limit_bytes=limits[number],
        )
        for number in range(2)
    ]
    routing = routing_of(servers, 1, SlotReplicas(0, (1,)) if in_sync else SlotReplicas(0))
    table = TableSpec.sparse("t", 1, optimizer=SGD(1.0), initializer=Zeros())
    try:
        for server in servers:
            server.create_table(table.to_json())
            server.set_routing_json(routing.to_json())
            server.hold_lease_until(clock_s() + 600)
        yield servers
    finally:
        for server in servers:
            server.stop(1_000)


def routing_of(servers: list[DataServer], version: int, held: SlotReplicas) -> RoutingTable:
    ones = np.ones(SLOTS, dtype=np.uint64)
    return RoutingTable(
        version=version,
        nodes=tuple(
            NodeRecord(f"ps-{number}", "127.0.0.1:1", server.address, number + 1)
            for number, server in enumerate(servers)
        ),
        replicas=2,
        replicas_of_slot=(held,) * SLOTS,
        term_of_slot=ones,
        epoch_of_slot=ones.copy(),
        generation=0,
        gone=(),
    )


def client_of(servers: list[DataServer], job: int) -> DataClient:
    client = DataClient(cluster_id="c", client_name="test", stream_job=job)
    known = [(f"ps-{number}", one.address, number + 1) for number, one in enumerate(servers)]
    client.set_routing(1, known, np.zeros(SLOTS, dtype=np.uint32))
    client.connect(DEADLINE_MS)
    return client


def push(client: DataClient, first: int) -> None:
    plan = client.plan(np.arange(first, first + KEYS, dtype=np.uint64))
    values = np.full(KEYS, -1, dtype=np.float32)
    client.push(
        PushRequest(
            table=TABLE,
            row_elements=1,
            plan=plan,
            values=values,
            kind="update",
            learning_rate_scale=1.0,
            require_finite=True,
            deadline_ms=DEADLINE_MS,
        )
    )


def rows(client: DataClient, first: int) -> list[float]:
    out = np.full(KEYS, np.nan, dtype=np.float32)
    keys = np.arange(first, first + KEYS, dtype=np.uint64)
    client.pull(TABLE, 1, client.plan(keys), out, DEADLINE_MS)
    return out.tolist()


def test_a_stream_ends_under_a_memory_limit() -> None:
    with master_and_backup(memory_limit_bytes=1 << 30) as servers:
        client = client_of(servers, 1)
        push(client, 0)
        client.close(DEADLINE_MS)
        done = json.loads(servers[0].stats_json())["replication"]
        refused = json.loads(servers[1].stats_json())["replication"]["refused_to_others"]
    # The push, and the end of its stream.
    assert (done["prepared"], done["rolled_back"], refused) == (2, 0, 0)


def report_of(server: DataServer) -> dict[str, list[object]]:
    said: dict[str, list[object]] = json.loads(server.wait_report(0, 1)[1])
    return said


@pytest.mark.parametrize("has_room", [True, False])
def test_a_copy_that_does_not_fit_is_refused_and_said(
    has_room: bool, eventually: Callable[[Callable[[], bool]], None]
) -> None:
    limit = 0 if has_room else 200_000
    with master_and_backup(backup_limit_bytes=limit, in_sync=False) as servers:
        client = client_of(servers, 1)
        for first in range(0, 20_000, KEYS):
            push(client, first)
        routing = routing_of(servers, 2, SlotReplicas(0, (), (1,)))
        for server in servers:
            server.set_routing_json(routing.to_json())
        if has_room:
            eventually(lambda: len(report_of(servers[0])["caught_up"]) == SLOTS)
            assert report_of(servers[0])["full"] == []
        else:
            eventually(lambda: report_of(servers[0])["full"] == [2])
            assert json.loads(servers[1].stats_json())["row_bytes"] <= limit
        client.close(DEADLINE_MS)


def test_what_is_acknowledged_while_the_client_closes_is_applied(
    eventually: Callable[[Callable[[], bool]], None],
) -> None:
    """A push that left behind the end of its stream would be skipped, unapplied."""
    with master_and_backup() as servers:
        reader = client_of(servers, 1_000_000)
        for trial in range(60):
            client, first = client_of(servers, trial + 1), trial * KEYS
            acknowledged = [0, 0, 0]

            def work(who: int, client: DataClient, first: int, count: list[int]) -> None:
                while True:
                    try:
                        push(client, first)
                    except BackstayError:
                        return
                    count[who] += 1

            threads = [
                threading.Thread(target=work, args=(who, client, first, acknowledged))
                for who in range(len(acknowledged))
            ]
            for thread in threads:
                thread.start()
            eventually(lambda: sum(acknowledged) > 2)  # noqa: B023
            client.close(DEADLINE_MS)
            for thread in threads:
                thread.join()
            assert rows(reader, first) == [float(sum(acknowledged))] * KEYS
        reader.close(DEADLINE_MS)


def test_a_lease_that_is_over_when_it_is_told_allows_nothing() -> None:
    """A process is stopped between the renewal of its lease and telling the data plane of it."""
    with master_and_backup(in_sync=False) as servers:
        client = client_of(servers, 1)
        push(client, 0)
        renewed_s = clock_s()
        # What a stop of two seconds looks like to the native side.
        servers[0].hold_lease_until(renewed_s - 2.0 + 1.5)
        out = np.full(KEYS, np.nan, dtype=np.float32)
        plan = client.plan(np.arange(KEYS, dtype=np.uint64))
        with pytest.raises(BackstayError, match="lease is over"):
            client.pull(TABLE, 1, plan, out, 300)
        servers[0].hold_lease_until(renewed_s + 600)
        assert rows(client, 0) == [1.0] * KEYS
