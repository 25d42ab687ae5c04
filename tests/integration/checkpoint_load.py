"""What the tests of faults around checkpoints share: a load that counts, and checkpoints asked for.

Every push adds 1 to each of the same keys, so a restored table tells how many pushes it has. The
load writes down when each was acknowledged; none may be refused.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from backstay import rpc
from backstay._proto.v1 import cluster_pb2, cluster_pb2_grpc
from backstay.checkpoint import remote
from backstay.checkpoint.remote import CheckpointInfo
from backstay.checkpoint.storage import CheckpointStorage
from backstay.checkpoint.verification import verify
from backstay.config import ClientConfig, SecurityConfig
from backstay.errors import BackstayError, CheckpointRefused, CheckpointUnavailable
from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import SGD, Adagrad, TableSpec, Zeros
from backstay.trainer import Client
from tests.waiting import wait_until

__all__ = [
    "KEYS",
    "SLOTS",
    "Load",
    "Saving",
    "ask_cluster",
    "check_all",
    "counted",
    "ended_ids",
    "fill",
    "is_healthy",
    "loading",
    "pushing",
    "save_when_free",
    "settings",
    "wait_for_file",
]

SLOTS = 64
KEYS = np.arange(500, dtype=np.uint64)
# Of the table that is there to make files large enough to be written slowly.
FILLING = np.arange(4000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
LIMIT_S = 120.0


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    """Return the settings of a cluster that notices losses soon."""
    own = {"slot_count": SLOTS, "checkpoint_url": str(folder), "lease_ttl_ms": 1000}
    return {**own, "read_lease_ms": 300, **more}


def fill(client: Client) -> None:
    """Make the table that counts, and one of 160 KB."""
    spec = TableSpec.sparse("count", dim=1, optimizer=SGD(1.0), initializer=Zeros())
    client.create_table(spec)
    wide = client.create_table(TableSpec.sparse("wide", dim=4, optimizer=Adagrad(0.1)))
    client.push(wide, FILLING, np.sin(np.outer(np.arange(len(FILLING)), [1, 2, 3, 4])))


@dataclass
class Load:
    """A trainer that counts.

    Attributes:
        acknowledged: Pushes of which it was told that they are applied.
        slowest_s: The longest that one took.
    """

    acknowledged: int = 0
    slowest_s: float = 0.0
    _stop: threading.Event = field(default_factory=threading.Event)
    _failed: list[BaseException] = field(default_factory=list)

    def run(self, endpoints: list[str]) -> None:
        """Push until told to stop; what fails is raised where the load ends."""
        try:
            with Client(endpoints, config=ClientConfig(deadline_ms=60_000)) as client:
                ones = np.full((len(KEYS), 1), -1.0, dtype=np.float32)
                while not self._stop.is_set():
                    begun_s = time.monotonic()
                    client.push("count", KEYS, ones)
                    self.slowest_s = max(self.slowest_s, time.monotonic() - begun_s)
                    self.acknowledged += 1
        except BaseException as error:  # noqa: BLE001 (raised in the test's own thread)
            self._failed.append(error)

    def wait_for(self, more: int) -> None:
        """Wait until so many more pushes are acknowledged."""
        wanted = self.acknowledged + more
        wait_until(lambda: self.acknowledged >= wanted or bool(self._failed), "pushes go on")
        self.check()

    def check(self) -> None:
        """Raise what the load met."""
        if self._failed:
            raise self._failed[0]

    def stop(self) -> None:
        """Let it end after the push under way."""
        self._stop.set()


@contextmanager
def pushing(endpoints: list[str]) -> Iterator[Load]:
    """Push all the while; at the end not one push may have been refused."""
    load = Load()
    thread = threading.Thread(target=load.run, args=(endpoints,))
    thread.start()
    try:
        load.wait_for(5)
        yield load
    finally:
        load.stop()
        thread.join()
    load.check()


class Saving:
    """A checkpoint that one node was asked for, while the test goes on.

    It may have any count between what was acknowledged before it was asked for and what was
    pushed by its end.
    """

    def __init__(self, endpoint: str, load: Load | None = None, **more: Any) -> None:
        """Ask for it."""
        self._load = load
        self.floor = load.acknowledged if load is not None else 0
        self.ceiling = 0
        self._saved: CheckpointInfo | None = None
        self._failed: BackstayError | None = None
        self._thread = threading.Thread(target=self._run, args=(endpoint, more))
        self._thread.start()

    def _run(self, endpoint: str, more: dict[str, Any]) -> None:
        try:
            with (
                rpc.open_channel(endpoint, SecurityConfig()) as channel,
                rpc.mapped_errors(endpoint),
            ):
                self._saved = remote.save(channel, timeout_s=LIMIT_S, **more)
        except BackstayError as error:
            self._failed = error
        # One may be under way.
        self.ceiling = self._load.acknowledged + 1 if self._load is not None else 0

    def result(self) -> CheckpointInfo:
        """Wait for it."""
        self._thread.join()
        if self._failed is not None:
            raise self._failed
        assert self._saved is not None
        return self._saved

    def failure(self) -> BackstayError:
        """Wait for it to fail."""
        self._thread.join()
        assert self._failed is not None, f"{self._saved} was written"
        return self._failed


def save_when_free(endpoint: str, load: Load | None = None, **more: Any) -> CheckpointInfo:
    """Save; ask again as long as a lost writer keeps its turn, or the node registers anew."""
    refusals: list[BackstayError] = []

    def saved() -> CheckpointInfo | None:
        try:
            return Saving(endpoint, load, **more).result()
        except (CheckpointRefused, CheckpointUnavailable) as error:
            refusals.append(error)
            return None

    return wait_until(saved, lambda: refusals[-1], limit_s=LIMIT_S, pause_s=0.1)


def wait_for_file(folder: Path, pattern: str) -> Path:
    """Wait until a file is there, and return it."""
    wait_until(lambda: bool(list(folder.glob(pattern))), f"{pattern} in {folder}")
    return next(iter(folder.glob(pattern)))


def ended_ids(folder: Path) -> list[str]:
    """Return the ids of the finished checkpoints; each must be whole."""
    storage = CheckpointStorage(folder)
    for each in storage.ids():
        found = verify(storage, each)
        assert found.ok, found.complaints
    return storage.ids()


def check_all(folder: Path) -> None:
    """Everything there is finished and whole; nothing is left of what was not."""
    ids = ended_ids(folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(ids)


def counted(client: Client) -> list[int]:
    """Return the different counts of the keys."""
    return sorted(set(client.pull("count", KEYS)[:, 0].astype(int).tolist()))


@contextmanager
def loading(folder: Path, checkpoint_id: str, servers: int = 1) -> Iterator[Client]:
    """Begin another cluster with a checkpoint."""
    with (
        LocalCluster(servers, settings=settings(folder, restore=checkpoint_id)) as cluster,
        Client(cluster.endpoints) as client,
    ):
        yield client


def ask_cluster(endpoint: str) -> cluster_pb2.GetClusterResponse:
    """Return what a node says of its cluster."""
    with rpc.open_channel(endpoint, SecurityConfig()) as channel:
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        with rpc.mapped_errors(endpoint):
            return stub.GetCluster(cluster_pb2.GetClusterRequest(), timeout=30)


def is_healthy(endpoint: str) -> bool:
    """Return whether a node says that all is well; one that does not answer does not."""
    try:
        return ask_cluster(endpoint).health == cluster_pb2.CLUSTER_HEALTH_OK
    except BackstayError:
        return False
