"""The records as they travel between processes: to and from the generated messages.

Servers write them, servers and trainers read them; both use this one pair of functions per
record. This module imports ``consensus.records`` and the generated code only.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from backstay._proto.v1 import cluster_pb2
from backstay.consensus.records import NodeRecord, NodeStatus, RoutingTable
from backstay.errors import InvalidRequest, ProtocolError

__all__ = ["node_from_message", "node_to_message", "routing_from_message", "routing_to_message"]

_STATUS_TO_MESSAGE: Mapping[NodeStatus, cluster_pb2.NodeStatus.ValueType] = {
    "unknown": cluster_pb2.NODE_STATUS_UNKNOWN,
    "starting": cluster_pb2.NODE_STATUS_STARTING,
    "serving": cluster_pb2.NODE_STATUS_SERVING,
    "stopping": cluster_pb2.NODE_STATUS_STOPPING,
    "unreachable": cluster_pb2.NODE_STATUS_UNREACHABLE,
}
_STATUS_FROM_MESSAGE = {number: status for status, number in _STATUS_TO_MESSAGE.items()}


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


def routing_to_message(cluster_id: str, routing: RoutingTable) -> cluster_pb2.GetClusterResponse:
    """Return the answer to GetCluster."""
    return cluster_pb2.GetClusterResponse(
        cluster_id=cluster_id,
        slot_count=routing.slot_count,
        routing_version=routing.version,
        nodes=[node_to_message(node) for node in routing.nodes],
        master_of_slot=routing.master_of_slot.tolist(),
    )


def routing_from_message(message: cluster_pb2.GetClusterResponse) -> RoutingTable:
    """Return the routing table in an answer to GetCluster.

    Raises:
        ProtocolError: The answer contradicts itself.
    """
    try:
        return RoutingTable(
            version=message.routing_version,
            slot_count=message.slot_count,
            nodes=tuple(node_from_message(node) for node in message.nodes),
            master_of_slot=np.array(message.master_of_slot, dtype=np.int64),
        )
    except InvalidRequest as error:
        raise ProtocolError(str(error)) from error
