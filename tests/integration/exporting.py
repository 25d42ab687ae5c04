"""What the tests of exports that go on share: an export of a local cluster, and its follower."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backstay import rpc
from backstay._native import slots_of
from backstay._proto.v1 import cluster_pb2, cluster_pb2_grpc
from backstay.checkpoint import remote_exports
from backstay.checkpoint.manifest import Manifest
from backstay.checkpoint.reading import CheckpointReader
from backstay.checkpoint.remote_exports import RunningExport
from backstay.checkpoint.storage import CheckpointStorage, ExportFolder
from backstay.config import SecurityConfig
from backstay.consensus.records.exports import export_spec
from backstay.consensus.records.messages import routing_from_message
from backstay.pserver.local_cluster import LocalCluster
from backstay.serving import Follower
from backstay.tables import SGD, Sparse, TableSpec, Zeros
from backstay.trainer import Client
from tests.waiting import wait_until

__all__ = [
    "COUNTED",
    "EVERY_S",
    "NAME",
    "controller_of",
    "counting",
    "elements_in",
    "exported",
    "exporting",
    "finished",
    "is_whole",
    "rows_of_checkpoint",
    "same_rows",
    "settled",
    "start_export",
    "stop_export",
]

NAME = "serve"
EVERY_S = 0.2
# Keys of the rows of ``counting``.
COUNTED = np.arange(300, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
CALL_S = 10.0


def start_export(cluster: LocalCluster, folder: Path | str, **more: Any) -> None:
    spec = export_spec({"url": str(folder), "every_s": EVERY_S, "tables": ["*"], **more})
    with _channel(cluster) as channel, rpc.mapped_errors("the cluster"):
        remote_exports.start(channel, NAME, spec, timeout_s=CALL_S)


def stop_export(cluster: LocalCluster, *, now: bool = False) -> None:
    with _channel(cluster) as channel, rpc.mapped_errors("the cluster"):
        remote_exports.stop(channel, NAME, now=now, timeout_s=CALL_S)
    wait_until(lambda: not exported(cluster), "the end of the export")


def exported(cluster: LocalCluster) -> tuple[RunningExport, ...]:
    with _channel(cluster) as channel, rpc.mapped_errors("the cluster"):
        return remote_exports.list_exports(channel, timeout_s=CALL_S)


@contextmanager
def exporting(cluster: LocalCluster, folder: Path, **more: Any) -> Iterator[Follower]:
    """Export a cluster to a folder, and follow that."""
    start_export(cluster, folder, **more)
    with Follower(folder, poll_s=0.05, wait_s=60.0) as follower:
        yield follower


@contextmanager
def counting(cluster: LocalCluster) -> Iterator[list[int]]:
    """Add 1 to each row, again and again; what is given counts the acknowledged pushes."""
    acknowledged, failed = [0], []
    stop = threading.Event()

    def work() -> None:
        try:
            with Client(cluster.endpoints) as client:
                spec = TableSpec.sparse("n", dim=1, optimizer=SGD(1.0), initializer=Zeros())
                table = client.create_table(spec)
                while not stop.is_set():
                    client.push(table, COUNTED, np.full((len(COUNTED), 1), -1.0, np.float32))
                    acknowledged[0] += 1
        except BaseException as error:  # noqa: BLE001 (raised below, in the test's own thread)
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield acknowledged
    finally:
        stop.set()
        thread.join()
    if failed:
        raise failed[0]


def controller_of(cluster: LocalCluster) -> int:
    """Return the number of the server that is the controller."""

    def look() -> str:
        return _cluster(cluster).controller

    return int(wait_until(look, "a controller").removeprefix("ps-"))


def is_whole(cluster: LocalCluster, nodes: int) -> bool:
    """Whether every slot has two copies in sync again, and this many nodes hold them."""
    routing = routing_from_message(_cluster(cluster))
    synced = [held.synced for held in routing.replicas_of_slot]
    return all(len(one) == 2 for one in synced) and len(set().union(*synced)) == nodes


def _cluster(cluster: LocalCluster) -> cluster_pb2.GetClusterResponse:
    with _channel(cluster) as channel:
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        answer: cluster_pb2.GetClusterResponse = stub.GetCluster(
            cluster_pb2.GetClusterRequest(), timeout=CALL_S
        )
        return answer


def _channel(cluster: LocalCluster) -> Any:
    running = next(server for server in cluster.servers if server.is_running)
    return rpc.open_channel(running.control_address, SecurityConfig())


def finished(folder: Path) -> list[str]:
    """Return the ids of the elements that are whole."""
    there = ExportFolder(folder)
    return [name for name in there.names() if there.is_finished(name)]


def elements_in(folder: Path) -> list[Manifest]:
    there = ExportFolder(folder)
    found = [there.read(name) for name in there.names()]
    return [one for one in found if one is not None]


def settled(follower: Follower) -> None:
    """Wait until a follower has what was acknowledged before this call."""
    now = time.time()
    wait_until(
        lambda: time.time() - follower.status.age_s > now,
        lambda: f"an element begun after the last push; {follower.status}",
    )


def same_rows(client: Client, follower: Follower, scratch: Path, *, is_over: bool = False) -> int:
    """Compare a follower's rows with a checkpoint's, row by row, in all slots of one position.

    Args:
        client: Of the cluster.
        follower: Of its export.
        scratch: A folder.
        is_over: The export is, and no row has changed since: all slots are compared. What a job
            does at its end, such as closing the streams of its tasks, moves positions alone.

    Returns:
        How many slots were compared: all, if nothing is pushed meanwhile.
    """
    saved = client.checkpoints.save(kind="full")
    positions = follower.positions
    with CheckpointReader(CheckpointStorage(saved.url), saved.id, scratch=scratch) as reader:
        at = reader.manifest.slots.position
        same = np.arange(len(at)) if is_over else np.flatnonzero(at == positions)
        for spec in follower.sparse:
            assert isinstance(spec.kind, Sparse)
            wanted: dict[int, bytes] = {}
            for rows in reader.rows(spec.name):
                if rows.slot in same:
                    wanted |= _bits(rows.keys, rows.weights)
            keys, weights = follower.table(spec.name).to_numpy()
            mine = np.isin(_slots(keys, len(at)), same)
            found = _bits(keys[mine], weights[mine])
            assert found.keys() == wanted.keys(), spec.name
            assert found == wanted, spec.name
        if len(same) == len(at):
            for spec in follower.dense_tables:
                assert np.array_equal(follower.dense(spec.name), reader.dense(spec.name))
    return len(same)


def rows_of_checkpoint(client: Client, table: str, scratch: Path) -> dict[int, bytes]:
    """Return the weights of a table as the servers have them now, by key."""
    saved = client.checkpoints.save(kind="full")
    found: dict[int, bytes] = {}
    with CheckpointReader(CheckpointStorage(saved.url), saved.id, scratch=scratch) as reader:
        for rows in reader.rows(table):
            found |= _bits(rows.keys, rows.weights)
    return found


def _bits(keys: NDArray[np.uint64], weights: NDArray[np.float32]) -> dict[int, bytes]:
    return {int(key): row.tobytes() for key, row in zip(keys, weights, strict=True)}


def _slots(keys: NDArray[np.uint64], slot_count: int) -> NDArray[np.uint32]:
    return slots_of(keys, slot_count)
