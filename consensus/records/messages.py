"""The records as they travel between processes: to and from the generated messages.

Servers write them, servers and trainers read them; both use this one pair of functions per
record. This module imports ``consensus.records`` and the generated code only.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from backstay._proto.v1 import cluster_pb2, resize_pb2
from backstay.consensus.records import (
    NO_MASTER,
    ClusterHealthRecord,
    ClusterStatus,
    NodeRecord,
    NodeStatus,
    RoutingTable,
    SlotReplicas,
)
from backstay.consensus.records.plans import (
    PLAN_KINDS,
    PLAN_STATES,
    LeavingNode,
    ResizePlan,
)
from backstay.consensus.records.repairs import RepairRecord
from backstay.errors import InvalidRequest, ProtocolError

__all__ = [
    "health_from_message",
    "node_from_message",
    "node_to_message",
    "plan_from_message",
    "plan_to_message",
    "repair_to_message",
    "routing_from_message",
    "routing_to_message",
]

_STATUS_TO_MESSAGE: Mapping[NodeStatus, cluster_pb2.NodeStatus.ValueType] = {
    "unknown": cluster_pb2.NODE_STATUS_UNKNOWN,
    "starting": cluster_pb2.NODE_STATUS_STARTING,
    "serving": cluster_pb2.NODE_STATUS_SERVING,
    "stopping": cluster_pb2.NODE_STATUS_STOPPING,
    "unreachable": cluster_pb2.NODE_STATUS_UNREACHABLE,
}
_STATUS_FROM_MESSAGE = {number: status for status, number in _STATUS_TO_MESSAGE.items()}
_HEALTH_TO_MESSAGE: Mapping[ClusterStatus, cluster_pb2.ClusterHealth.ValueType] = {
    "OK": cluster_pb2.CLUSTER_HEALTH_OK,
    "UNHEALTHY": cluster_pb2.CLUSTER_HEALTH_UNHEALTHY,
    "UNKNOWN": cluster_pb2.CLUSTER_HEALTH_UNKNOWN,
}
_HEALTH_FROM_MESSAGE = {number: status for status, number in _HEALTH_TO_MESSAGE.items()}
# How a slot without a master travels in master_of_slot.
_NO_MASTER = 2**32 - 1


def node_to_message(node: NodeRecord) -> cluster_pb2.Node:
    """Return the message for a node's record."""
    return cluster_pb2.Node(
        node_id=node.node_id,
        control_address=node.control_address,
        data_address=node.data_address,
        instance=node.instance,
        status=_STATUS_TO_MESSAGE[node.status],
    )


def node_from_message(message: cluster_pb2.Node) -> NodeRecord:
    """Return the record in a message.

    Raises:
        ProtocolError: The message contradicts itself or has a status of a later version.
    """
    status = _STATUS_FROM_MESSAGE.get(message.status)
    if status is None:
        raise ProtocolError(f"node {message.node_id!r}: unknown status number {message.status}")
    try:
        return NodeRecord(
            node_id=message.node_id,
            control_address=message.control_address,
            data_address=message.data_address,
            instance=message.instance,
            status=status,
        )
    except InvalidRequest as error:
        raise ProtocolError(str(error)) from error


def routing_to_message(
    cluster_id: str,
    routing: RoutingTable,
    *,
    cluster_uid: str = "",
    health: ClusterHealthRecord | None = None,
    controller: str = "",
    paused: str = "",
) -> cluster_pb2.GetClusterResponse:
    """Return the answer to GetCluster.

    Hosts, epochs and the processes that are gone stay behind: they concern servers only.

    Args:
        cluster_id: Name of the cluster.
        routing: Its routing table, with the nodes' status as the answering node sees it.
        cluster_uid: What tells it from others of that name.
        health: How the cluster does; None while that is not known.
        controller: Id of the controller, empty while there is none.
        paused: Why trainers are to begin nothing new; empty while they may.
    """
    masters = np.where(routing.master_of_slot == NO_MASTER, _NO_MASTER, routing.master_of_slot)
    return cluster_pb2.GetClusterResponse(
        cluster_id=cluster_id,
        slot_count=routing.slot_count,
        routing_version=routing.version,
        nodes=[node_to_message(node) for node in routing.nodes],
        master_of_slot=masters.tolist(),
        generation=routing.generation,
        replicas=routing.replicas,
        replica_sets=[
            cluster_pb2.ReplicaSet(
                master=held.master, in_sync=held.in_sync, catching_up=held.catching_up
            )
            for held in routing.sets
        ],
        set_of_slot=routing.set_of_slot.tolist(),
        term_of_slot=routing.term_of_slot.tolist(),
        health=_HEALTH_TO_MESSAGE[health.cluster_status if health else "UNKNOWN"],
        health_reason=health.reason if health else "",
        controller=controller,
        cluster_uid=cluster_uid,
        paused=paused,
        lost_slots=routing.lost,
        restoring=routing.restoring.checkpoint if routing.restoring.slots else "",
    )


def routing_from_message(message: cluster_pb2.GetClusterResponse) -> RoutingTable:
    """Return the routing table in an answer to GetCluster.

    What does not travel is as in a new cluster: epochs are 1, no process is gone, hosts are empty.

    Raises:
        ProtocolError: The answer contradicts itself.
    """
    sets = [
        SlotReplicas(held.master, tuple(held.in_sync), tuple(held.catching_up))
        for held in message.replica_sets
    ]
    order = list(message.set_of_slot)
    if len(order) != message.slot_count or (order and max(order) >= len(sets)):
        raise ProtocolError(
            f"cluster answer: {len(order)} slots in {len(sets)} replica sets, "
            f"but slot_count is {message.slot_count}"
        )
    try:
        routing = RoutingTable(
            version=message.routing_version,
            nodes=tuple(node_from_message(node) for node in message.nodes),
            replicas=message.replicas,
            replicas_of_slot=tuple([sets[index] for index in order]),
            term_of_slot=np.array(message.term_of_slot, dtype=np.uint64),
            epoch_of_slot=np.ones(len(order), dtype=np.uint64),
            generation=message.generation,
            lost=tuple(message.lost_slots),
        )
    except InvalidRequest as error:
        raise ProtocolError(str(error)) from error
    masters = np.array(message.master_of_slot, dtype=np.int64)
    masters[masters == _NO_MASTER] = NO_MASTER
    if not np.array_equal(masters, routing.master_of_slot):
        raise ProtocolError("cluster answer: master_of_slot contradicts replica_sets")
    return routing


def health_from_message(message: cluster_pb2.GetClusterResponse) -> ClusterHealthRecord:
    """Return how the cluster does, by an answer to GetCluster.

    Raises:
        ProtocolError: The answer has a status of a later version.
    """
    status = _HEALTH_FROM_MESSAGE.get(message.health)
    if status is None:
        raise ProtocolError(f"cluster answer: unknown health number {message.health}")
    alive = tuple(
        node.node_id
        for node in message.nodes
        if node.status
        in (
            cluster_pb2.NODE_STATUS_STARTING,
            cluster_pb2.NODE_STATUS_SERVING,
            cluster_pb2.NODE_STATUS_STOPPING,
        )
    )
    return ClusterHealthRecord(status, message.health_reason, alive)


def repair_to_message(repair: RepairRecord) -> resize_pb2.Repair:
    """Return the message of a repair."""
    return resize_pb2.Repair(
        id=repair.repair_id,
        state=repair.state,
        lost=[resize_pb2.LostNode(node_id=one.node_id, reason=one.reason) for one in repair.lost],
        slots_lost=repair.slots_lost,
        copies_total=repair.copies_total,
        copies_left=repair.copies_left,
        bytes_total=repair.bytes_total,
        bytes_left=repair.bytes_left,
        begun=repair.begun,
        ended=repair.ended,
        begun_by=repair.begun_by,
        ended_by=repair.ended_by,
    )


def plan_to_message(plan: ResizePlan) -> resize_pb2.Plan:
    """Return the message for a plan; instances stay behind, they concern servers only."""
    return resize_pb2.Plan(
        plan_id=plan.plan_id,
        kind=plan.kind,
        nodes=plan.nodes,
        leaving=[one.node_id for one in plan.leaving],
        stop=plan.stop,
        pause=plan.pause,
        state=plan.state,
        reason=plan.reason,
        moves_total=plan.moves_total,
        moves_left=plan.moves_left,
        started=plan.started,
        wait_s=plan.wait_s,
    )


def plan_from_message(message: resize_pb2.Plan) -> ResizePlan:
    """Return the plan in a message.

    Raises:
        ProtocolError: It contradicts itself, or is of a later version.
    """
    kinds = [kind for kind in PLAN_KINDS if kind == message.kind]
    states = [state for state in PLAN_STATES if state == message.state]
    if not kinds or not states:
        raise ProtocolError(f"plan of the unknown kind {message.kind!r} or state {message.state!r}")
    try:
        return ResizePlan(
            plan_id=message.plan_id,
            kind=kinds[0],
            nodes=message.nodes,
            leaving=tuple(LeavingNode(name, 0) for name in message.leaving),
            stop=message.stop,
            pause=message.pause,
            wait_s=message.wait_s,
            state=states[0],
            reason=message.reason,
            moves_total=message.moves_total,
            moves_left=message.moves_left,
            started=message.started,
        )
    except InvalidRequest as error:
        raise ProtocolError(str(error)) from error
