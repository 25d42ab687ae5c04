"""What this process says about itself, and of which cluster it is a node.

Plain values: the event loop writes them, and each is replaced whole, so any thread may read them.
Imports the records.
"""

from __future__ import annotations

from backstay.consensus import NodeRecord
from backstay.consensus.records import MemberRecord

__all__ = ["OwnNode"]


class OwnNode:
    """This node.

    Attributes:
        record: What it wants to be known about itself. Id, instance and addresses never change.
        cluster_uid: Of the cluster that it has joined; empty before.
    """

    def __init__(self, record: MemberRecord, cluster_uid: str = "") -> None:
        """Begin with what is known before it registers."""
        self.record = record
        self.cluster_uid = cluster_uid

    def node(self) -> NodeRecord:
        """Return the part that other processes need to reach it."""
        return self.record.node()
