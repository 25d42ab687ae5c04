"""The records that the coordination store keeps, one module for each kind.

All are values: frozen, checked when made, and strict about their JSON form. ``keys`` says where
each record stands. The records of the cluster itself can be imported from here. A module in this
folder imports only its siblings and ``backstay.errors``; it knows no clock, no network and no
randomness.
"""

from backstay.consensus.records.cluster import (
    CLUSTER_STATUSES,
    ClusterConfig,
    ClusterHealthRecord,
    ClusterStatus,
    ControllerRecord,
    DeclaredTable,
    Event,
    EventKind,
    ReplicaStatus,
    ShardRecord,
    TableRecord,
)
from backstay.consensus.records.nodes import (
    CaughtUp,
    MemberRecord,
    MemberStatus,
    NodeRecord,
    NodeReport,
    NodeStatus,
)
from backstay.consensus.records.routing import (
    GONE_MAX,
    NO_MASTER,
    NOBODY,
    NOT_RESTORING,
    REPLICAS_MAX,
    SLOT_COUNT_MAX,
    Restoring,
    RoutingTable,
    SlotReplicas,
)

__all__ = [
    "CLUSTER_STATUSES",
    "GONE_MAX",
    "NOBODY",
    "NOT_RESTORING",
    "NO_MASTER",
    "REPLICAS_MAX",
    "SLOT_COUNT_MAX",
    "CaughtUp",
    "ClusterConfig",
    "ClusterHealthRecord",
    "ClusterStatus",
    "ControllerRecord",
    "DeclaredTable",
    "Event",
    "EventKind",
    "MemberRecord",
    "MemberStatus",
    "NodeRecord",
    "NodeReport",
    "NodeStatus",
    "ReplicaStatus",
    "Restoring",
    "RoutingTable",
    "ShardRecord",
    "SlotReplicas",
    "TableRecord",
]
