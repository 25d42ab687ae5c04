"""What ``pserverctl`` asks a cluster: the calls, and the answers put together.

It takes the cluster from any node that answers, then asks each node for its own figures. The
results are plain objects, ready for JSON; showing them is the command's work.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from backstay import rpc
from backstay._proto.v1 import (
    cluster_pb2,
    cluster_pb2_grpc,
    tables_pb2,
    tables_pb2_grpc,
    trainers_pb2,
    trainers_pb2_grpc,
)
from backstay.consensus import NodeRecord, RoutingTable
from backstay.consensus.records import NO_MASTER, ClusterHealthRecord
from backstay.consensus.records.checkpoints import loss_in_words
from backstay.consensus.records.messages import health_from_message, routing_from_message
from backstay.errors import BackstayError, TransportError
from backstay.pserver.client.channels import ClusterChannels
from backstay.pserver.client.verification import HeldSlot, compare_replicas

# It waits until every living node has it.
SET_TABLE_S = 15.0

__all__ = ["ClusterInspection", "judged_health", "roles_of_nodes", "slots_short_of_copies"]


def roles_of_nodes(routing: RoutingTable) -> dict[str, dict[str, int]]:
    """Return for each node of how many slots it is master, in-sync backup, or catching up."""
    slots_of_set = np.bincount(routing.set_of_slot, minlength=len(routing.sets)).tolist()
    roles = {node.node_id: {"master": 0, "in_sync": 0, "catching_up": 0} for node in routing.nodes}
    for replicas, slots in zip(routing.sets, slots_of_set, strict=True):
        if replicas.master != NO_MASTER:
            roles[routing.nodes[replicas.master].node_id]["master"] += slots
        for index in replicas.in_sync:
            roles[routing.nodes[index].node_id]["in_sync"] += slots
        for index in replicas.catching_up:
            roles[routing.nodes[index].node_id]["catching_up"] += slots
    return roles


def slots_short_of_copies(routing: RoutingTable) -> int:
    """Return how many slots have fewer in-sync copies than the cluster wants."""
    slots_of_set = np.bincount(routing.set_of_slot, minlength=len(routing.sets)).tolist()
    return sum(
        slots
        for replicas, slots in zip(routing.sets, slots_of_set, strict=True)
        # Without a master the copies that there are cannot be reached.
        if replicas.master == NO_MASTER or len(replicas.synced) < routing.replicas
    )


def judged_health(
    health: ClusterHealthRecord,
    *,
    controller: str,
    routed: Mapping[str, int],
    living: Mapping[str, int],
    lost: int = 0,
    short: int = 0,
) -> ClusterHealthRecord:
    """Return how a cluster does: what its controller wrote last, unless that may be of the past.

    The record outlives its controller. After a restart of all nodes it tells how their former
    processes did, until a controller has judged the new ones. A node may also know a new routing
    before the record that was written with it.

    Args:
        health: What the controller wrote last.
        controller: The node that is the controller; empty: none.
        routed: Instances that the routing names, by node.
        living: Instances of the processes that answer, by node.
        lost: Slots of the routing that lost all their copies.
        short: Slots of the routing with too few copies in sync, the lost ones among them.
    """
    gone = sorted(node for node, now in living.items() if routed.get(node, now) != now)
    if not controller:
        reason = "no node is the controller, so the cluster's health is not known"
    elif gone and health.cluster_status == "OK":
        reason = f"started again since the controller looked: {', '.join(gone)}"
    elif lost and health.cluster_status == "OK":
        return replace(health, cluster_status="UNHEALTHY", reason=loss_in_words(lost))
    elif short and health.cluster_status == "OK":
        reason = f"{short} slots have too few copies in sync"
        return replace(health, cluster_status="UNHEALTHY", reason=reason)
    else:
        return health
    said = f"; before: {health.reason}" if health.reason else ""
    return replace(health, cluster_status="UNKNOWN", reason=reason + said)


def _store_reachable(nodes: Sequence[Mapping[str, Any]]) -> bool | None:
    """Return whether every node that answers reaches the store; None if none answers."""
    said = [node["control"]["store_reachable"] for node in nodes if node["control"] is not None]
    return all(said) if said else None


def _said(nodes: Sequence[Mapping[str, Any]], name: str) -> Any:
    """Return what the first node that answers says of something that all nodes see."""
    said = (node["control"].get(name) for node in nodes if node["control"] is not None)
    return next(said, None)


def _checkpoint_trouble(nodes: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why the last scheduled checkpoint could not be written; None: it was, or none is."""
    said = (
        node["control"].get("checkpoint_trouble") for node in nodes if node["control"] is not None
    )
    return next((one for one in said if one), None)


def _last_failover(nodes: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the newest failover that a controller which still runs has carried out."""
    controls = (node["control"] for node in nodes if node["control"] is not None)
    known = [control["last_failover"] for control in controls if control["last_failover"]]
    return max(known, key=lambda one: one["routing_version"], default=None)


def _trainer(listed: trainers_pb2.ListedTrainer) -> dict[str, Any]:
    trainer = listed.trainer
    pushed = listed.HasField("last_push_age_s")
    return {
        "id": trainer.id,
        "host": trainer.host,
        "address": listed.address,
        "pid": trainer.pid,
        "job": trainer.job or None,
        "worker": trainer.worker or None,
        "start_time": trainer.start_time,
        "up_s": listed.up_s,
        "last_push_age_s": listed.last_push_age_s if pushed else None,
        "pushes": trainer.pushes,
        "node": listed.node_id,
    }


class ClusterInspection(ClusterChannels):
    """Questions to a cluster. A context manager; not thread-safe."""

    def status(self) -> dict[str, Any]:
        """Return the cluster and its nodes.

        It is ``healthy`` if there is a controller which says so of these processes, and every node
        serves.

        Raises:
            ServerUnavailable: None of the endpoints answers.
            Unauthenticated: The token is wrong.
        """
        answer, routing = self.cluster()
        roles = roles_of_nodes(routing)
        health = health_from_message(answer)
        nodes = [self._node_status(node, roles[node.node_id]) for node in routing.nodes]
        health = judged_health(
            health,
            controller=answer.controller,
            routed={node.node_id: node.instance for node in routing.nodes},
            living={
                node["node_id"]: node["instance"] for node in nodes if node["stats"] is not None
            },
            lost=len(routing.lost),
            short=slots_short_of_copies(routing),
        )
        serve = all(node["status"] == "serving" for node in nodes)
        return {
            "cluster": answer.cluster_id,
            "slot_count": routing.slot_count,
            "replicas": routing.replicas,
            "routing_version": routing.version,
            "generation": routing.generation,
            "term_max": int(routing.term_of_slot.max()),
            "slots_without_master": int((routing.master_of_slot == NO_MASTER).sum()),
            "slots_short_of_copies": slots_short_of_copies(routing),
            "slots_lost": len(routing.lost),
            "slots_catching_up": sum(node["catching_up_slots"] for node in nodes),
            "controller": answer.controller or None,
            "cluster_status": health.cluster_status,
            "reason": health.reason,
            "store_reachable": _store_reachable(nodes),
            "last_failover": _last_failover(nodes),
            "plan": _said(nodes, "plan"),
            "checkpoint": _said(nodes, "checkpoint"),
            "saving": _said(nodes, "saving"),
            "checkpoint_trouble": _checkpoint_trouble(nodes),
            "loss": _said(nodes, "loss"),
            "healthy": health.cluster_status == "OK" and serve,
            "nodes": nodes,
        }

    def routing(self) -> RoutingTable:
        """Return who holds what, with the nodes' status; epochs are not told.

        Raises:
            ServerUnavailable: None of the endpoints answers.
        """
        return self.cluster()[1]

    def slot(self, slot: int) -> dict[str, Any]:
        """Return one slot: its term, its epoch and its replicas.

        Raises:
            ConfigError: The cluster has no such slot.
            ServerUnavailable: None of the endpoints answers.
        """
        answer = self.first_answer(
            lambda channel: cluster_pb2_grpc.ClusterServiceStub(channel).GetSlot(
                cluster_pb2.GetSlotRequest(slot=slot), timeout=self.timeout_s
            )
        )
        synced = len(answer.in_sync) + (answer.master != "")
        return {
            "slot": slot,
            "routing_version": answer.routing_version,
            "term": answer.term,
            "epoch": answer.epoch,
            "master": answer.master or None,
            "in_sync": list(answer.in_sync),
            "catching_up": list(answer.catching_up),
            "copies_missing": max(0, answer.replicas - synced),
        }

    def events(self, newest: int) -> dict[str, Any]:
        """Return what the controllers decided, oldest first, at most the newest so many.

        Raises:
            ServerUnavailable: None of the endpoints answers, or none reaches the store.
        """
        answer = self.first_answer(
            lambda channel: cluster_pb2_grpc.ClusterServiceStub(channel).ListEvents(
                cluster_pb2.ListEventsRequest(newest=newest), timeout=self.timeout_s
            )
        )
        return {
            "events": [
                {
                    "routing_version": event.routing_version,
                    "kind": event.kind,
                    "node_id": event.node_id or None,
                    "slot_count": event.slot_count,
                    "slots": list(event.slots),
                    "reason": event.reason,
                }
                for event in answer.events
            ]
        }

    def trainers(self) -> dict[str, Any]:
        """Return the trainers that are alive, ordered by job and worker.

        Raises:
            ServerUnavailable: None of the endpoints answers, or none reaches the store.
        """
        answer = self.first_answer(
            lambda channel: trainers_pb2_grpc.TrainersServiceStub(channel).ListTrainers(
                trainers_pb2.ListTrainersRequest(), timeout=self.timeout_s
            )
        )
        return {"trainers": [_trainer(one) for one in answer.trainers]}

    def accept_loss(self, version: int) -> int:
        """Let slots begin anew, empty, that were lost up to a routing version; return how many.

        Raises:
            ServerUnavailable: None of the endpoints answers, or none reaches the store.
        """
        answer = self.first_answer(
            lambda channel: cluster_pb2_grpc.ClusterServiceStub(channel).AcceptLoss(
                cluster_pb2.AcceptLossRequest(routing_version=version), timeout=self.timeout_s
            )
        )
        return answer.slots

    def tables(self) -> dict[str, Any]:
        """Return the tables, with rows, their copies and bytes over the nodes that answer.

        ``rows`` counts each row once, at its slot's master; ``copies`` each copy of a row;
        ``counters`` each copy of an admission's counter.
        """
        routing = self.cluster()[1]
        tables: dict[str, dict[str, Any]] = {}
        silent = []
        for node in routing.nodes:
            try:
                held = self._tables_of(node.control_address)
            except TransportError:
                silent.append(node.node_id)
                continue
            for table in held:
                entry = tables.setdefault(
                    table.name,
                    {
                        "name": table.name,
                        "id": table.id,
                        "rows": 0,
                        "copies": 0,
                        "bytes": 0,
                        "counters": 0,
                        "counter_bytes": 0,
                        "row_bytes": table.row_bytes,
                        "stale_slots": 0,
                        "staleness_sum": 0,
                        "spec": json.loads(table.spec_json),
                        "revision": table.revision,
                    },
                )
                entry["rows"] += table.master_rows
                entry["copies"] += table.rows
                entry["bytes"] += table.bytes
                entry["counters"] += table.counters
                entry["counter_bytes"] += table.counter_bytes
                entry["stale_slots"] += table.stale_slots
                entry["staleness_sum"] += table.staleness_sum
        return {"tables": [tables[name] for name in sorted(tables)], "silent_nodes": silent}

    def set_table(
        self, name: str, settings: Mapping[str, Any], *, dry_run: bool = False
    ) -> dict[str, Any]:
        """Change settings of a table, on every living node; return what was changed.

        Args:
            name: The table's.
            settings: Those of its optimizer by name, ``non_finite``, and of its lifetime.
            dry_run: Only say what would change.

        Raises:
            UnknownTable: There is no such table.
            ConfigError: There is no such setting, or its value is out of range.
            TableConflict: It cannot change on a table that has rows.
            ServerUnavailable: None of the endpoints answers, or not all nodes have it yet.
        """
        request = tables_pb2.SetTableRequest(
            name=name, settings_json=json.dumps(settings), dry_run=dry_run
        )
        answer = self.first_answer(
            lambda channel: tables_pb2_grpc.TablesServiceStub(channel).SetTable(
                request, timeout=max(self.timeout_s, SET_TABLE_S)
            )
        )
        return {
            "table": name,
            "changed": list(answer.changed),
            "dry_run": dry_run,
            "revision": answer.table.revision,
            "spec": json.loads(answer.table.spec_json),
        }

    def verify(self) -> dict[str, Any]:
        """Compare the replicas of every slot, while the cluster works.

        Nodes that do not answer leave their slots undecided.
        """
        routing = self.cluster()[1]
        silent: set[str] = set()

        def ask() -> dict[str, dict[int, HeldSlot]]:
            found = {}
            silent.clear()
            for node in routing.nodes:
                try:
                    found[node.node_id] = self._slots_of(node.control_address)
                except TransportError:
                    silent.add(node.node_id)
            return found

        result = compare_replicas(routing, ask)
        return {**result.to_dict(), "silent_nodes": sorted(silent)}

    def _slots_of(self, address: str) -> dict[int, HeldSlot]:
        stub = cluster_pb2_grpc.ClusterServiceStub(self.channel(address))
        with rpc.mapped_errors(address):
            answer = stub.GetSlotDigests(
                cluster_pb2.GetSlotDigestsRequest(), timeout=self._config.deadline_ms / 1000
            )
        return {one.slot: HeldSlot(one.term, one.position, one.digest) for one in answer.slots}

    def cluster(self) -> tuple[cluster_pb2.GetClusterResponse, RoutingTable]:
        """Return the cluster as the first endpoint that answers sees it, with its routing.

        Raises:
            ServerUnavailable: None of the endpoints answers.
        """
        answer = self.first_answer(
            lambda channel: cluster_pb2_grpc.ClusterServiceStub(channel).GetCluster(
                cluster_pb2.GetClusterRequest(), timeout=self.timeout_s
            )
        )
        return answer, routing_from_message(answer)

    def _node_status(self, node: NodeRecord, roles: Mapping[str, int]) -> dict[str, Any]:
        """Return what is known about a node and, if it answers, its own figures."""
        status: dict[str, Any] = {
            "node_id": node.node_id,
            "status": node.status,
            "control_address": node.control_address,
            "data_address": node.data_address,
            "instance": node.instance,
            "master_slots": roles["master"],
            "in_sync_slots": roles["in_sync"],
            "catching_up_slots": roles["catching_up"],
            "tables": None,
            "rows": None,
            "bytes": None,
            "uptime_ms": None,
            "stats": None,
            "control": None,
            "error": None,
        }
        stub = cluster_pb2_grpc.ClusterServiceStub(self.channel(node.control_address))
        try:
            with rpc.mapped_errors(node.control_address):
                answer = stub.GetNodeStats(
                    cluster_pb2.GetNodeStatsRequest(), timeout=self.timeout_s
                )
            held = self._tables_of(node.control_address)
        except BackstayError as error:
            # Whatever the node that was asked first believes: it does not answer us.
            return {**status, "status": "unreachable", "error": str(error)}
        return {
            **status,
            "status": cluster_pb2.NodeStatus.Name(answer.node.status)
            .removeprefix("NODE_STATUS_")
            .lower(),
            "data_address": answer.node.data_address,
            "instance": answer.node.instance,
            "tables": answer.tables,
            "rows": sum(table.rows for table in held),
            "bytes": sum(table.bytes for table in held),
            "uptime_ms": answer.uptime_ms,
            "stats": json.loads(answer.data_plane_json),
            # An older node leaves this field empty.
            "control": json.loads(answer.control_plane_json or "null"),
        }

    def _tables_of(self, address: str) -> list[tables_pb2.Table]:
        stub = tables_pb2_grpc.TablesServiceStub(self.channel(address))
        with rpc.mapped_errors(address):
            response = stub.ListTables(tables_pb2.ListTablesRequest(), timeout=self.timeout_s)
        return list(response.tables)
