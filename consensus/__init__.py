"""Who is in the cluster and which node is master of each slot.

``records`` holds what the coordination store keeps, ``store`` the store itself, and ``membership``
the interface through which a node sees the cluster. The package imports
``backstay.errors``, ``backstay.addresses``, ``backstay.settings`` and the generated messages,
nothing of a server or a trainer.
"""

if __name__ != "backstay.consensus":
    raise ImportError(f"import this package as backstay.consensus, not as {__name__}")

from backstay.consensus.cluster_mirror import ClusterMirror, ClusterSnapshot, ClusterView
from backstay.consensus.records import NodeRecord, NodeStatus, RoutingTable

__all__ = [
    "ClusterMirror",
    "ClusterSnapshot",
    "ClusterView",
    "NodeRecord",
    "NodeStatus",
    "RoutingTable",
]
