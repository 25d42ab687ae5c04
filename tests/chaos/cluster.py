"""A cluster of real nodes for a run: each on its own host, with the store of the run's kind.

It starts, kills, pauses and restarts them, asks them for routing and health, and says which of
them has which role now. What a node is asked may fail at any time: then the next one is asked.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from backstay import rpc
from backstay._proto.v1 import cluster_pb2, cluster_pb2_grpc
from backstay.config import ClientConfig, SecurityConfig
from backstay.consensus.records import RoutingTable
from backstay.consensus.records.messages import routing_from_message
from backstay.errors import BackstayError
from backstay.pserver.client.inspection import ClusterInspection
from backstay.pserver.free_ports import free_ports
from tests.chaos.network import Host, Network
from tests.chaos.processes import NodeProcess
from tests.chaos.store_hosts import EtcdHosts
from tests.chaos.verdict import Copy

__all__ = ["ChaosCluster", "NotYet", "Plan", "StoreKind"]

StoreKind = Literal["etcd", "embedded"]
T = TypeVar("T")
CONTROL_PORT, DATA_PORT, RAFT_PORT = 7000, 7100, 7200
STORE_MEMBERS = 3
ASK_LIMIT_S = 1.5
POLL_PAUSE_S = 0.02
IN_SYNC_LIMIT_S = 60.0
DIGEST_ROUNDS = 20
SECRET = "a-secret-of-this-run-only"


class NotYet(Exception):
    """A condition did not come true in time; the message says what was seen last."""


@dataclass(frozen=True)
class Plan:
    """What a cluster is made of."""

    store: StoreKind
    nodes: int = 4
    replicas: int = 2
    slots: int = 64
    lease_ttl_ms: int = 3000
    etcd_members: int = 1


class ChaosCluster:
    """The nodes and the store of one run."""

    def __init__(self, plan: Plan, network: Network, folder: Path) -> None:
        """Make hosts and settings; ``start`` starts the processes."""
        self.plan = plan
        self.network = network
        self.etcd = EtcdHosts(network, folder, plan.etcd_members) if plan.store == "etcd" else None
        self.hosts = [network.add_host(f"ps-{n}") for n in range(plan.nodes)]
        ports = [[CONTROL_PORT, DATA_PORT, RAFT_PORT] for _ in self.hosts]
        if not network.has_faults:
            free = free_ports(3 * plan.nodes)
            ports = [free[3 * n : 3 * n + 3] for n in range(plan.nodes)]
        self.endpoints = [
            f"{host.address}:{own[0]}" for host, own in zip(self.hosts, ports, strict=True)
        ]
        self.checkpoint_folder = folder / "checkpoints"
        # Nodes that a fault of the network keeps from answering.
        self.cut_off: set[int] = set()
        self.nodes: list[NodeProcess] = []
        for number, host in enumerate(self.hosts):
            config = folder / f"ps-{number}.toml"
            settings = self._settings(number, host, ports, folder)
            lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
            config.write_text("[server]\n" + "\n".join(lines) + "\n", encoding="utf-8")
            self.nodes.append(NodeProcess(host, config, folder / f"ps-{number}.log"))

    def _settings(
        self, number: int, host: Host, ports: list[list[int]], folder: Path
    ) -> dict[str, object]:
        control, data, _ = ports[number]
        settings: dict[str, object] = {
            "cluster": "chaos",
            "node_id": f"ps-{number}",
            "host": f"host-{number}",
            "listen_control": f"{host.address}:{control}",
            "listen_data": f"{host.address}:{data}",
            "initial_nodes": self.plan.nodes,
            "replicas": self.plan.replicas,
            "slot_count": self.plan.slots,
            "lease_ttl_ms": self.plan.lease_ttl_ms,
            "checkpoint_url": str(self.checkpoint_folder),
            # The network is inside this machine.
            "insecure": True,
        }
        if not self.network.has_faults:
            # A refusal of a loopback address is evidence on the same host only.
            del settings["host"]
        if self.etcd is not None:
            return {**settings, "store": "etcd", "store_endpoints": self.etcd.endpoints}
        keepers = self.keepers
        if number not in keepers:
            return {**settings, "store_endpoints": [self.endpoints[n] for n in keepers]}
        members = [f"ps-{n}={self.hosts[n].address}:{ports[n][2]}" for n in keepers]
        return {
            **settings,
            "store_members": members,
            "store_data_dir": str(folder / f"ps-{number}.store"),
            "store_secret": SECRET,
        }

    @property
    def keepers(self) -> list[int]:
        """The nodes that keep the embedded store; none if it is etcd."""
        if self.etcd is not None:
            return []
        return list(range(STORE_MEMBERS if self.plan.nodes >= STORE_MEMBERS else 1))

    def start(self) -> None:
        """Start everything and wait until all serve, each slot with all its copies."""
        if self.etcd is not None:
            self.etcd.start()
        for node in self.nodes:
            node.start()
        for node in self.nodes:
            node.wait_ready()
        self.wait_in_sync()

    def stop(self) -> None:
        """End every process at once."""
        for node in self.nodes:
            if node.is_running:
                node.kill()
        if self.etcd is not None:
            self.etcd.stop()

    # -- questions ------------------------------------------------------------------------

    def ask(self, number: int) -> cluster_pb2.GetClusterResponse:
        """Return what one node says of the cluster."""
        address = self.endpoints[number]
        with rpc.open_channel(address, SecurityConfig()) as channel:
            stub = cluster_pb2_grpc.ClusterServiceStub(channel)
            with rpc.mapped_errors(address):
                return stub.GetCluster(cluster_pb2.GetClusterRequest(), timeout=ASK_LIMIT_S)

    def newest(self) -> cluster_pb2.GetClusterResponse:
        """Return what the node with the newest routing says.

        Raises:
            NotYet: No node answers.
        """
        answers, failures = [], []
        for number, node in enumerate(self.nodes):
            if node.is_running and not node.paused and number not in self.cut_off:
                try:
                    answers.append(self.ask(number))
                except BackstayError as error:
                    failures.append(str(error))
        if not answers:
            raise NotYet("; ".join(failures) or "no node runs")
        return max(answers, key=lambda answer: (answer.routing_version, bool(answer.controller)))

    def routing(self) -> RoutingTable:
        """Return the newest routing table."""
        return routing_from_message(self.newest())

    def controller(self) -> int | None:
        """Return the node that is the controller, if there is one."""
        name = self.newest().controller
        return int(name.removeprefix("ps-")) if name else None

    def masters(self) -> Mapping[int, int]:
        """Return of how many slots each node is master."""
        routing = self.routing()
        counts = routing.slots_per_node()
        return {int(name.removeprefix("ps-")): slots for name, slots in counts.items()}

    def in_sync_problem(self) -> str:
        """Return what keeps the cluster from being whole; empty if nothing does."""
        answer = self.newest()
        if answer.health != cluster_pb2.CLUSTER_HEALTH_OK:
            return answer.health_reason or "not healthy, without a reason"
        routing = routing_from_message(answer)
        running = {f"ps-{n}" for n, node in enumerate(self.nodes) if node.is_running}
        absent = running - {node.node_id for node in routing.nodes}
        if absent:
            return f"not in the routing: {', '.join(sorted(absent))}"
        copying = sum(1 for held in routing.replicas_of_slot if held.catching_up)
        thin = sum(
            1 for held in routing.replicas_of_slot if 1 + len(held.in_sync) < self.plan.replicas
        )
        return f"{copying} slots catch up, {thin} lack a copy" if copying or thin else ""

    def wait_in_sync(self, limit_s: float = IN_SYNC_LIMIT_S) -> None:
        """Wait until every running node serves and each slot has all its copies.

        Raises:
            NotYet: It did not come to that in time.
        """
        self.wait_until(lambda: self.in_sync_problem(), limit_s)

    def accept_loss(self) -> None:
        """Wait until slots have lost all their copies, and accept that, as an operator does.

        Raises:
            NotYet: None has in time.
        """

        def problem() -> str:
            routing = self.routing()
            if not routing.lost:
                return "rows are gone, and no slot waits for a decision"
            with ClusterInspection(",".join(self.endpoints), ClientConfig()) as inspection:
                inspection.accept_loss(routing.version)
            return ""

        self.wait_until(problem, IN_SYNC_LIMIT_S)

    def wait_until(self, problem: Callable[[], str], limit_s: float) -> None:
        """Wait until a function returns an empty text.

        Raises:
            NotYet: It did not in time.
        """
        deadline_s = time.monotonic() + limit_s
        while True:
            try:
                seen = problem()
            except NotYet as error:
                seen = str(error)
            if not seen:
                return
            if time.monotonic() > deadline_s:
                raise NotYet(f"after {limit_s:g} s: {seen}")
            time.sleep(POLL_PAUSE_S)

    def copies(self) -> dict[int, list[Copy]]:
        """Return each slot's copies, read until all are at the same position.

        Copies that stay different are returned as they are.
        """
        routing = self.routing()
        held: dict[int, list[Copy]] = {}
        for _ in range(DIGEST_ROUNDS):
            everything = [
                copy for n, node in enumerate(self.nodes) if node.is_running for copy in self._of(n)
            ]
            held = {slot: [] for slot in range(routing.slot_count)}
            for copy in everything:
                if copy.node in _holders(routing, copy.slot):
                    held[copy.slot].append(copy)
            if all(len({copy.position for copy in copies}) == 1 for copies in held.values()):
                break
            time.sleep(0.1)
        return held

    def _of(self, number: int) -> list[Copy]:
        address = self.endpoints[number]
        with rpc.open_channel(address, SecurityConfig()) as channel:
            stub = cluster_pb2_grpc.ClusterServiceStub(channel)
            with rpc.mapped_errors(address):
                answer = stub.GetSlotDigests(cluster_pb2.GetSlotDigestsRequest(), timeout=30)
        return [
            Copy(f"ps-{number}", one.slot, one.term, one.position, one.digest)
            for one in answer.slots
        ]


def _holders(routing: RoutingTable, slot: int) -> set[str]:
    held = routing.replicas_of_slot[slot]
    return {routing.nodes[index].node_id for index in (held.master, *held.in_sync) if index >= 0}
