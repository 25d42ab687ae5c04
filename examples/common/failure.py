"""Kills a pserver in the middle of training, watches the cluster repair itself, tells about it.

May import backstay's local cluster and client. What it tells comes from the cluster's routing, and
from a push of its own to every slot, which meets what a worker's push meets; every wait of it has
a limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from backstay._native import slots_of
from backstay.config import ClientConfig
from backstay.consensus import RoutingTable
from backstay.pserver.client.inspection import ClusterInspection, roles_of_nodes
from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import SGD, TableSpec, Zeros
from backstay.trainer import Client
from examples.common.launch import ProcessFailed

__all__ = ["Failure"]

# For each thing that must come back: new masters, the trainers' pushes, the copies.
WAIT_SECONDS = 30.0
LOOK_SECONDS = 0.01
# Of its fair share of copies; the exact numbers are the controller's affair.
SHARE = 0.8


class Failure:
    """One kill with all that follows. A context manager, inside that of the cluster.

    Attributes:
        node_id: Whom it kills.
        failover_ms: From the kill until a push to every slot, begun just after it, was
            acknowledged; None before that.
    """

    def __init__(self, cluster: LocalCluster, victim: int, tell: Callable[[str], None]) -> None:
        """Prepare.

        Args:
            cluster: Running.
            victim: Index of the server to kill.
            tell: Called with lines for people, from several threads.
        """
        self.node_id = cluster.servers[victim].node_id
        self.failover_ms: float | None = None
        self._cluster = cluster
        self._victim = victim
        self._tell = tell
        self._client = Client(cluster.endpoints)
        self._table = self._client.create_table(
            TableSpec.sparse("demo/probe", dim=1, optimizer=SGD(1.0), initializer=Zeros())
        )
        self._may_be_down: str | None = None
        self._kill_s: float | None = None
        self._cancelled = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="repair", daemon=True)

    @property
    def has_begun(self) -> bool:
        """Whether the server was killed."""
        return self._kill_s is not None

    @property
    def is_repaired(self) -> bool:
        """Whether the server was killed and everything is as it was before."""
        return self.has_begun and not self._thread.is_alive() and self._error is None

    @property
    def may_be_down(self) -> str | None:
        """The server that is killed, until there is a new one in its place."""
        return self._may_be_down

    def begin(self) -> None:
        """Kill the server, with a signal that nothing can catch, and return at once."""
        routing = self._client.cluster().routing
        roles = roles_of_nodes(routing)[self.node_id]
        with ClusterInspection(",".join(self._cluster.endpoints), ClientConfig.load()) as asked:
            decides = asked.status()["controller"] == self.node_id
        self._before = routing
        self._may_be_down = self.node_id
        self._kill_s = time.monotonic()
        self._cluster.kill(self._victim)
        self._tell(
            f"{self.node_id} is killed (SIGKILL): master of {roles['master']} slots, backup of "
            f"{roles['in_sync']}" + (", the cluster's controller" if decides else "")
        )
        self._thread.start()

    def check(self) -> None:
        """Fail if the repair has failed.

        Raises:
            ProcessFailed: It has.
        """
        if self._error is not None:
            raise ProcessFailed(str(self._error)) from self._error

    def finish(self) -> None:
        """Wait until the cluster is whole again.

        Raises:
            ProcessFailed: It is not, within the limit.
        """
        if not self.has_begun:
            raise ProcessFailed(f"training ended before {self.node_id} could be killed")
        # The steps have limits of their own.
        self._thread.join()
        self.check()

    def __enter__(self) -> Failure:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._cancelled.set()
        if self._thread.is_alive():
            self._thread.join(WAIT_SECONDS)
        self._client.close()

    def _run(self) -> None:
        try:
            self._probe()
            self._repair()
        except _CancelledError:
            return
        except Exception as error:  # noqa: BLE001
            # Whatever it is: ``check`` raises it in the main thread.
            self._error = error

    def _probe(self) -> None:
        """Push to every slot, and take the time until that is acknowledged."""
        keys = _one_key_in_each_slot(self._before.slot_count)
        self._client.push(self._table, keys, np.full((len(keys), 1), -1.0, np.float32))
        self.failover_ms = (time.monotonic() - (self._kill_s or 0.0)) * 1000
        self._tell(
            f"a push to all slots is acknowledged again, {self.failover_ms:,.0f} ms after the kill"
        )

    def _repair(self) -> None:
        """Follow the repair by the routing, and start the new server."""
        dead = self._instance(self._before)
        routing = self._wait_for("new masters", lambda now: _is_served_without(dead, now))
        gained = {
            name: count - self._before.slots_per_node().get(name, 0)
            for name, count in routing.slots_per_node().items()
        }
        heirs = ", ".join(f"{name} +{count}" for name, count in gained.items() if count > 0)
        waited_ms = (time.monotonic() - (self._kill_s or 0.0)) * 1000
        if routing.generation > self._before.generation:
            what = "some of its slots had no other copy and begin anew, empty"
        else:
            what = "backups are masters of its slots now"
        self._tell(
            f"routing version {self._before.version} -> {routing.version}, {waited_ms:,.0f} ms "
            f"after the kill: {what} ({heirs})"
        )
        self._cluster.restart(self._victim)
        self._may_be_down = None
        self._tell(f"a new {self.node_id} is started in its place, empty; it gets copies")
        routing = self._wait_for("restored copies", self._is_whole)
        roles = roles_of_nodes(routing)[self.node_id]
        self._tell(
            f"routing version {routing.version}: each of {routing.slot_count:,} slots has "
            f"{routing.replicas} copies in sync again; the new {self.node_id} is master of "
            f"{roles['master']}, backup of {roles['in_sync']}"
        )

    def _is_whole(self, routing: RoutingTable) -> bool:
        """Return whether all copies are there and in sync, and the new server has its share."""
        if self._instance(routing) in (0, self._instance(self._before)):
            return False
        wanted = min(routing.replicas, len(routing.nodes))
        if any(held.catching_up or len(held.synced) < wanted for held in routing.sets):
            return False
        held = roles_of_nodes(routing)[self.node_id]
        fair = routing.slot_count * wanted / len(routing.nodes)
        return held["master"] + held["in_sync"] >= SHARE * fair

    def _wait_for(self, what: str, is_there: Callable[[RoutingTable], bool]) -> RoutingTable:
        deadline_s = time.monotonic() + WAIT_SECONDS
        while not is_there(routing := self._routing()):
            if time.monotonic() > deadline_s:
                raise ProcessFailed(
                    f"{what}: not there {WAIT_SECONDS:.0f} s after {self.node_id} was "
                    f"{'started again' if self._may_be_down is None else 'killed'}; "
                    f"{_summary(routing)}"
                )
            if self._cancelled.wait(LOOK_SECONDS):
                raise _CancelledError
        return routing

    def _routing(self) -> RoutingTable:
        """Return the newest routing; the client watches it."""
        return self._client.cluster().routing

    def _instance(self, routing: RoutingTable) -> int:
        """Return which process the server to kill is in that routing; 0: it is in none."""
        return next((node.instance for node in routing.nodes if node.node_id == self.node_id), 0)


class _CancelledError(Exception):
    """The demo ends before the repair does."""


def _one_key_in_each_slot(slot_count: int) -> NDArray[np.uint64]:
    keys = np.arange(slot_count * 32, dtype=np.uint64)
    return keys[np.unique(slots_of(keys, slot_count), return_index=True)[1]]


def _is_served_without(instance: int, routing: RoutingTable) -> bool:
    """Return whether every slot has a master, and none of them is that process."""
    masters = np.unique(routing.master_of_slot)
    return bool(masters[0] >= 0) and all(
        routing.nodes[index].instance != instance for index in masters
    )


def _summary(routing: RoutingTable) -> str:
    """Return how the slots are spread, for an error."""
    roles = "; ".join(
        f"{name}: " + ", ".join(f"{count} {role}" for role, count in held.items())
        for name, held in roles_of_nodes(routing).items()
    )
    return (
        f"routing version {routing.version}, {int((routing.master_of_slot < 0).sum())} slots "
        f"without a master ({roles})"
    )
