"""The Python client in a cluster that changes.

The data servers are real; what each node's control plane says, the test writes, so that a node
may know more or less than the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import numpy as np
import pytest

from backstay import errors
from backstay._native import DataServer, table_id
from backstay._proto.v1 import (
    cluster_pb2,
    cluster_pb2_grpc,
    tables_pb2,
    tables_pb2_grpc,
)
from backstay.backoff import Backoff
from backstay.cluster import watch
from backstay.cluster.directory import Directory
from backstay.config import ClientConfig
from backstay.consensus import NodeRecord, RoutingTable
from backstay.consensus.records import NO_MASTER
from backstay.consensus.records.messages import routing_to_message
from backstay.consensus.records.routing import SlotReplicas
from backstay.errors import ClosedError
from backstay.tables import SGD, TableSpec, Zeros
from backstay.trainer import Client
from tests.waiting import wait_until

SLOTS = 64
DIM = 4
NOBODY = NO_MASTER
SPEC = TableSpec.sparse("t", DIM, optimizer=SGD(1.0), initializer=Zeros())
KEYS = np.arange(300)
GRADIENTS = np.full((300, DIM), -1.0, dtype=np.float32)


class Node(cluster_pb2_grpc.ClusterServiceServicer, tables_pb2_grpc.TablesServiceServicer):
    """One node: a real data server, and what it says about the cluster."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.data = DataServer(
            listen="127.0.0.1:0",
            cluster_id="c",
            node_id=f"ps-{number}",
            instance=number + 1,
            slot_count=SLOTS,
        )
        self.changed = threading.Condition()
        self.answer = cluster_pb2.GetClusterResponse()
        # What it says when it is asked; None: what its streams say.
        self.said_when_asked: cluster_pb2.GetClusterResponse | None = None
        self.streams = 0
        self.tokens: list[str] = []
        self.ended = False
        self.breaks = 0
        self.everybody = [self]
        control = grpc.server(ThreadPoolExecutor(8))
        cluster_pb2_grpc.add_ClusterServiceServicer_to_server(self, control)
        tables_pb2_grpc.add_TablesServiceServicer_to_server(self, control)
        self.port = control.add_insecure_port("127.0.0.1:0")
        control.start()
        self.control = control

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def record(self) -> NodeRecord:
        return NodeRecord(
            f"ps-{self.number}", self.address, self.data.address, self.number + 1, "serving"
        )

    def know(self, answer: cluster_pb2.GetClusterResponse) -> None:
        with self.changed:
            self.answer = answer
            self.changed.notify_all()

    def end_control(self) -> None:
        with self.changed:
            self.ended = True
            self.changed.notify_all()
        self.control.stop(0).wait()

    def break_streams(self) -> None:
        with self.changed:
            self.breaks += 1
            self.changed.notify_all()

    def GetCluster(self, request: Any, context: Any) -> cluster_pb2.GetClusterResponse:  # noqa: N802
        return self.answer if self.said_when_asked is None else self.said_when_asked

    def WatchCluster(  # noqa: N802
        self, request: cluster_pb2.WatchClusterRequest, context: grpc.ServicerContext
    ) -> Iterator[cluster_pb2.GetClusterResponse]:
        known = request.known_routing_version
        self.tokens += [str(v) for k, v in context.invocation_metadata() if k == "authorization"]
        with self.changed:
            self.streams += 1
            breaks = self.breaks
            self.changed.notify_all()
        while not self.ended and context.is_active():
            with self.changed:
                if self.answer.routing_version <= known and not self.ended:
                    self.changed.wait(timeout=0.2)
                answer = self.answer
                if self.breaks > breaks:
                    context.abort(grpc.StatusCode.UNAVAILABLE, "the stream breaks")
            if answer.routing_version > known and not self.ended:
                known = answer.routing_version
                yield answer

    def CreateTable(self, request: Any, context: Any) -> tables_pb2.CreateTableResponse:  # noqa: N802
        for node in self.everybody:
            node.data.create_table(request.spec_json)
        table = tables_pb2.Table(name="t", id=table_id("t"), spec_json=request.spec_json)
        return tables_pb2.CreateTableResponse(table=table)


class Cluster:
    """Two nodes; a slot's master is the number of a node."""

    def __init__(self) -> None:
        # What no test calls is left to the generated base, which answers UNIMPLEMENTED.
        self.nodes = [Node(0), Node(1)]  # type: ignore[abstract]
        for node in self.nodes:
            node.everybody = self.nodes
        self.version = 0
        self.move(lambda slot: slot % 2)

    def move(
        self,
        master: Callable[[int], int],
        *,
        told: tuple[int, ...] = (0, 1),
        generation: int = 0,
        cluster_uid: str = "",
        paused: str = "",
    ) -> None:
        """Change every slot's master; only the nodes ``told`` know of it."""
        self.version += 1
        masters = [master(slot) for slot in range(SLOTS)]
        routing = RoutingTable(
            version=self.version,
            nodes=tuple(node.record() for node in self.nodes),
            replicas=1,
            replicas_of_slot=tuple(SlotReplicas(at, (), ()) for at in masters),
            term_of_slot=np.full(SLOTS, self.version, dtype=np.uint64),
            epoch_of_slot=np.ones(SLOTS, dtype=np.uint64),
            generation=generation,
        )
        for number, node in enumerate(self.nodes):
            node.data.set_routing(self.version, np.array(masters) == number)
            if number in told:
                node.know(routing_to_message("c", routing, cluster_uid=cluster_uid, paused=paused))

    def end_data(self, number: int) -> None:
        self.nodes[number].data.stop(1000)

    def close(self) -> None:
        for node in self.nodes:
            node.end_control()
            node.data.stop(1000)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()


@contextmanager
def pushing(client: Client, waits_s: float = 0.3) -> Iterator[Any]:
    """A push that waits for something, for so long at least."""
    with ThreadPoolExecutor(1) as pool:
        push = pool.submit(client.push, "t", KEYS, GRADIENTS)
        with pytest.raises(TimeoutError):
            push.result(timeout=waits_s)
        yield push


def wait_for_stream(node: Node) -> None:
    with node.changed:
        assert node.changed.wait_for(lambda: node.streams > 0, timeout=10)


class Said:
    """What a client says while its calls wait, in order."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._changed = threading.Condition()

    def __call__(self, line: str) -> None:
        with self._changed:
            self._lines.append(line)
            self._changed.notify_all()

    def wait_for(self, words: str) -> None:
        """Wait until the last line has these words."""
        with self._changed:
            assert self._changed.wait_for(lambda: words in "".join(self._lines[-1:]), 10), (
                self._lines
            )


def wait_for_routing(client: Client, version: int) -> None:
    wait_until(lambda: client.cluster().routing.version >= version, client.cluster, pause_s=0.001)


def test_a_new_routing_from_the_stream_lets_a_push_go_on(cluster: Cluster) -> None:
    with Client(cluster.nodes[0].address) as client:
        client.create_table(SPEC)
        wait_for_stream(cluster.nodes[0])
        cluster.end_data(1)
        # Only the stream brings the new routing.
        for node in cluster.nodes:
            node.said_when_asked = node.answer
        with pushing(client) as push:
            cluster.move(lambda _: 0)
            push.result(timeout=10)
        assert client.cluster().routing.version == 2
        stats = client.stats()
        assert stats.failovers > 0
        assert stats.waits > 0


def test_a_client_does_not_follow_another_cluster_of_the_same_name(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    with Client(cluster.nodes[0].address) as client:
        client.create_table(SPEC)
        wait_for_stream(cluster.nodes[0])
        # Its store was emptied, and a node started again made another cluster of it.
        cluster.move(lambda _: 0, cluster_uid="abcd")
        wait_until(lambda: "belongs to another cluster named 'c'" in caplog.text)
        assert client.cluster().routing.version == 1


def test_a_dense_plan_follows_the_routing(cluster: Cluster) -> None:
    with Client(cluster.nodes[0].address) as client:
        spec = TableSpec.dense("t", (40, 300), optimizer=SGD(1.0))
        client.create_table(spec)
        values = np.ones((40, 300), dtype=np.float32)
        wait_for_stream(cluster.nodes[0])
        cluster.move(lambda _: 0)
        client.init_dense("t", values)
        assert np.array_equal(client.pull_dense("t"), values)


def test_the_stream_goes_on_at_another_node(cluster: Cluster) -> None:
    with Client([node.address for node in cluster.nodes]) as client:
        client.create_table(SPEC)
        wait_for_stream(cluster.nodes[0])
        cluster.nodes[0].end_control()
        wait_for_stream(cluster.nodes[1])
        cluster.end_data(0)
        with pushing(client) as push:
            cluster.move(lambda _: 1, told=(1,))
            push.result(timeout=10)
        assert client.cluster().routing.version == 2
        assert (client.pull("t", KEYS) == 1).all()
        # Creating a table needs no particular node either.
        client.create_table(SPEC)


def test_another_node_is_asked_when_the_watched_one_tells_nothing(cluster: Cluster) -> None:
    with Client(cluster.nodes[0].address) as client:
        client.create_table(SPEC)
        wait_for_stream(cluster.nodes[0])
        cluster.end_data(0)
        with pushing(client) as push:
            # As if the watched node hung: it keeps its stream open and knows nothing new.
            cluster.move(lambda _: 1, told=(1,))
            push.result(timeout=10)
            assert client.cluster().routing.version == 2
        wait_for_stream(cluster.nodes[1])


def test_streams_that_broke_long_ago_delay_no_later_one(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A pause before a stream would be longer than this test waits for one.
    monkeypatch.setattr(watch, "_RETRY", Backoff(3600.0, 3600.0))
    with Client([node.address for node in cluster.nodes]) as client:
        client.create_table(SPEC)
        first, second = cluster.nodes
        for _ in range(15):
            for watched, other in ((first, second), (second, first)):
                wait_for_stream(watched)
                cluster.move(odd_and_even)
                wait_for_routing(client, cluster.version)
                with other.changed:
                    other.streams = 0
                watched.break_streams()
                wait_for_stream(other)


def test_a_wait_is_said_and_its_end_too(cluster: Cluster) -> None:
    said = Said()

    def progress(line: str) -> None:
        said(line)
        raise RuntimeError("a hook that fails must not end the watch")

    with Client(cluster.nodes[0].address, progress=progress) as client:
        client.create_table(SPEC)
        wait_for_stream(cluster.nodes[0])
        cluster.move(lambda slot: NOBODY if slot < 8 else 0)
        with pushing(client) as push:
            said.wait_for("slots without a master; waiting for routing newer than 2")
            cluster.move(lambda _: 0)
            push.result(timeout=10)
            said.wait_for("going on after")


def test_slots_that_nobody_masters_are_named_at_the_deadline(cluster: Cluster) -> None:
    config = ClientConfig(deadline_ms=1000)
    with Client(cluster.nodes[0].address, config=config) as client:
        client.create_table(SPEC)
        wait_for_stream(cluster.nodes[0])
        cluster.move(lambda _: NOBODY)
        # A request that left before the client knew of it is told as well.
        with pytest.raises(errors.ServerUnavailable, match=r"waited .*no master as of routing"):
            client.pull("t", KEYS)
        cluster.move(lambda _: 0)
        client.push("t", KEYS, GRADIENTS)


def test_rows_lost_with_all_their_copies_end_the_job(cluster: Cluster) -> None:
    with Client(cluster.nodes[0].address) as client:
        client.create_table(SPEC)
        wait_for_stream(cluster.nodes[0])
        cluster.end_data(1)
        with pushing(client) as push:
            cluster.move(lambda _: 0, generation=1)
            with pytest.raises(errors.StateLost, match="generation 1, this client began with 0"):
                push.result(timeout=10)
        with pytest.raises(errors.StateLost):
            client.pull("t", KEYS)
        # One that begins now relies on what is there now.
        with Client(cluster.nodes[0].address) as fresh:
            fresh.create_table(SPEC)
            fresh.push("t", KEYS, GRADIENTS)


def test_the_stream_carries_the_token(cluster: Cluster) -> None:
    directory = Directory(cluster.nodes[0].address, ClientConfig(token="open-sesame"))
    stream = directory.open_stream(cluster.nodes[0].address, 0, "")
    assert next(directory.read_stream(cluster.nodes[0].address, stream)).routing.version == 1
    stream.cancel()
    directory.close()
    assert cluster.nodes[0].tokens == ["Bearer open-sesame"]


def odd_and_even(slot: int) -> int:
    return slot % 2


def test_calls_wait_while_the_cluster_is_paused_and_go_on_after_it(cluster: Cluster) -> None:
    said = Said()
    # The pause is longer than the deadline, which begins after it.
    config = ClientConfig(deadline_ms=1000)
    with Client(cluster.nodes[0].address, config=config, progress=said) as client:
        client.create_table(SPEC)
        client.push("t", KEYS, GRADIENTS)
        wait_for_stream(cluster.nodes[0])
        cluster.move(odd_and_even, paused="rows move")
        said.wait_for("waiting: rows move")
        with pushing(client, 1.3) as push, ThreadPoolExecutor(1) as pool:
            pull = pool.submit(client.pull, "t", KEYS)
            cluster.move(odd_and_even)
            push.result(timeout=10)
            assert pull.result(timeout=10).min() >= 1
        said.wait_for("going on: the cluster is not paused any more")
        assert (client.pull("t", KEYS) == 2).all()


def test_a_client_that_begins_in_a_pause_waits_as_well(cluster: Cluster) -> None:
    cluster.move(odd_and_even, paused="rows move")
    with Client(cluster.nodes[0].address) as client:
        client.create_table(SPEC)
        wait_for_stream(cluster.nodes[0])
        with pushing(client) as push:
            cluster.move(odd_and_even)
            push.result(timeout=10)
        assert (client.pull("t", KEYS) == 1).all()


def test_who_waits_in_a_pause_is_told_that_the_client_was_closed(cluster: Cluster) -> None:
    cluster.move(odd_and_even, paused="rows move")
    client = Client(cluster.nodes[0].address)
    client.create_table(SPEC)
    with pushing(client) as push:
        client.close()
        with pytest.raises(ClosedError, match="paused"):
            push.result(timeout=10)


def test_a_pause_does_not_outlive_those_who_could_end_it(cluster: Cluster) -> None:
    cluster.move(odd_and_even, paused="rows move")
    with Client(cluster.nodes[0].address) as client:
        client.create_table(SPEC)
        with pushing(client) as push:
            for node in cluster.nodes:
                node.end_control()
            push.result(timeout=10)
        assert (client.pull("t", KEYS) == 1).all()


@pytest.mark.slow
def test_no_stream_outlives_its_node() -> None:
    for _ in range(40):
        cluster = Cluster()
        directories = [Directory(cluster.nodes[0].address, ClientConfig()) for _ in range(16)]
        stopped = threading.Event()
        threads = [
            threading.Thread(
                target=follow_until,
                args=(stopped, directory, cluster.nodes[number % 2].address),
                daemon=True,
            )
            for number, directory in enumerate(directories)
        ]
        for thread in threads:
            thread.start()
        wait_for_stream(cluster.nodes[0])
        for node in cluster.nodes:
            node.end_control()
        stopped.set()
        for thread in threads:
            thread.join(timeout=20)
            assert not thread.is_alive(), "a stream of a stopped node is still being read"
        for directory in directories:
            directory.close()
        cluster.close()


def follow_until(stopped: threading.Event, directory: Directory, endpoint: str) -> None:
    """Read streams of one node, the next when one breaks, until ``stopped`` and two more broke."""
    after = 0
    while after < 3:
        after += stopped.is_set()
        with suppress(errors.BackstayError):
            for _ in directory.read_stream(endpoint, directory.open_stream(endpoint, 0, "")):
                pass
        stopped.wait(0.05)
