"""A node as the cluster knows it, as it registers itself, and what it reports to the controller.

A *process* is a node id and an instance: a node that comes back with another instance has lost
what it held in memory. This module imports ``backstay.errors``, ``backstay.addresses`` and
``json_record``; it knows no clock, no network and no randomness.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, get_args

from backstay.addresses import split_address
from backstay.errors import ConfigError, InvalidRequest
from backstay.json_record import NUMBER_MAX, Count, JsonRecord, check_times

__all__ = [
    "INSTANCE_MAX",
    "CaughtUp",
    "MemberRecord",
    "MemberStatus",
    "NodeRecord",
    "NodeReport",
    "NodeStatus",
]

NodeStatus = Literal["unknown", "starting", "serving", "stopping", "unreachable"]
MemberStatus = Literal["starting", "serving", "stopping"]
NODE_STATUSES: tuple[NodeStatus, ...] = get_args(NodeStatus)
MEMBER_STATUSES: tuple[MemberStatus, ...] = get_args(MemberStatus)
INSTANCE_MAX = 2**63 - 1


@dataclass(frozen=True)
class NodeRecord:
    """What the cluster knows about one node.

    Attributes:
        node_id: Unique in the cluster and the same after a restart.
        control_address: ``host:port`` of its gRPC services.
        data_address: ``host:port`` of its data plane; empty until another node has met it.
        instance: Random number of this run of the process; 0 until another node has met it.
            Another instance under the same id means that what it held in memory is gone.
        status: ``unknown`` (not met, or not told: the stored routing table holds no status),
            ``starting`` (does not serve yet), ``serving``, ``stopping`` or ``unreachable``
            (was met, does not answer now).
        host: The machine it runs on, as it names it itself; empty if not told. Copies of a
            slot go to distinct hosts where there are several.
    """

    node_id: str
    control_address: str
    data_address: str = ""
    instance: int = 0
    status: NodeStatus = "unknown"
    host: str = ""

    def __post_init__(self) -> None:
        """Refuse a record that contradicts itself."""
        if not self.node_id:
            raise InvalidRequest("node record: node_id is empty")
        if self.status not in NODE_STATUSES:
            raise InvalidRequest(f"node {self.node_id}: unknown status {self.status!r}")
        if not 0 <= self.instance <= INSTANCE_MAX:
            raise InvalidRequest(f"node {self.node_id}: instance {self.instance} is not 63 bits")
        known = self.instance != 0
        if known != (self.data_address != "") or (self.status != "unknown" and not known):
            raise InvalidRequest(
                f"node {self.node_id}: instance, data_address and status must be known together"
            )
        for name in ("control_address", "data_address"):
            address = getattr(self, name)
            if address or name == "control_address":
                _check_address(self.node_id, name, address)

    @property
    def is_known(self) -> bool:
        """Whether the node was ever met, so that its data address and instance are known."""
        return self.instance != 0


@dataclass(frozen=True)
class MemberRecord(
    JsonRecord,
    what="member record",
    names={"node_id": "id", "up": "status", "status": "node_status"},
):
    """``pservers/<id>``: a node as it registers itself, bound to its lease.

    Attributes:
        node_id: As in ``NodeRecord``; ``id`` in the JSON form.
        instance: As in ``NodeRecord``, never 0.
        incarnation: 1, 2, ...: how often this id has registered.
        up: Always ``up``: the lease is alive as long as the record is there; ``status`` in the
            JSON form.
        status: ``starting``, ``serving`` or ``stopping``; ``node_status`` in the JSON form.
        start_time: When the process began; seconds since the epoch, for people only.
        sync: Whether all its replicas are in sync.
        data_address: ``host:port`` of its data plane.
        control_address: ``host:port`` of its gRPC services.
        host: The machine it runs on, as it names it itself.
        lease: Id of the lease that the record is bound to.
        version: Version of the software it runs.
        keeps_store: Whether it is a member of the embedded coordination store, so that it must
            not go for good.
    """

    node_id: str
    instance: int
    incarnation: int
    up: Literal["up"] = field(default="up", kw_only=True)
    status: MemberStatus
    start_time: float
    sync: bool
    data_address: str
    control_address: str
    host: str
    lease: int
    version: str
    keeps_store: bool = False

    def __post_init__(self) -> None:
        """Refuse a record that contradicts itself."""
        if not self.node_id:
            raise InvalidRequest("member record: id is empty")
        if self.status not in MEMBER_STATUSES:
            raise InvalidRequest(f"member {self.node_id}: unknown status {self.status!r}")
        if not 1 <= self.instance <= INSTANCE_MAX:
            raise InvalidRequest(f"member {self.node_id}: instance {self.instance} is not 63 bits")
        if self.incarnation < 1:
            raise InvalidRequest(f"member {self.node_id}: incarnation {self.incarnation} is not 1+")
        if not 0 <= self.lease <= NUMBER_MAX:
            raise InvalidRequest(f"member {self.node_id}: lease {self.lease} is not 63 bits")
        check_times(f"member {self.node_id}", start_time=self.start_time)
        _check_address(self.node_id, "control_address", self.control_address)
        _check_address(self.node_id, "data_address", self.data_address)

    def node(self) -> NodeRecord:
        """Return the part that other processes need to reach it."""
        return NodeRecord(
            node_id=self.node_id,
            control_address=self.control_address,
            data_address=self.data_address,
            instance=self.instance,
            status=self.status,
            host=self.host,
        )


def _check_address(node_id: str, name: str, address: str) -> None:
    try:
        split_address(name, address)
    except ConfigError as error:
        raise InvalidRequest(f"node {node_id}: {error}") from error


class CaughtUp(NamedTuple):
    """A backup that has everything its master has committed, as that master says.

    Attributes:
        slot: The slot.
        term: The slot's term at which the master saw it.
        instance: The backup.
    """

    slot: Count
    term: Count
    instance: Count


@dataclass(frozen=True)
class NodeReport(JsonRecord, what="node report"):
    """``reports/<instance>``: what a process asks of the controller for the slots it masters.

    Attributes:
        instance: The process that reports.
        routing_version: The routing version that it had in force. A report counts at exactly
            this version.
        silent: Nodes that do not answer it: backups to take out of its in-sync sets, and those
            to give no copies.
        full: Nodes that had no room for a copy a short time ago.
        caught_up: Backups to take into them.
        loaded: (slot, its epoch): slots that have their content from a checkpoint now.
        load_trouble: Why slots cannot be loaded from a checkpoint; empty if they can.
    """

    instance: int
    routing_version: int
    silent: tuple[Count, ...] = ()
    full: tuple[Count, ...] = ()
    caught_up: tuple[CaughtUp, ...] = ()
    loaded: tuple[tuple[Count, Count], ...] = ()
    load_trouble: str = ""

    def is_news_after(self, written: NodeReport | None) -> bool:
        """Return whether the store should have this one in place of the one it has.

        Args:
            written: That one; None if it is not known, because an answer did not come.
        """
        if written is None:
            return True
        return (written.asks or self.asks) and self != written

    def adds_copies_only(self, written: NodeReport) -> bool:
        """Return whether it differs from that one in backups that have caught up meanwhile."""
        return set(self.caught_up) >= set(written.caught_up) and self == replace(
            written, caught_up=self.caught_up
        )

    @property
    def asks(self) -> bool:
        """Whether there is anything in it for the controller."""
        return bool(self.silent or self.full or self.caught_up or self.loaded or self.load_trouble)

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be."""
        if not 1 <= self.instance <= INSTANCE_MAX:
            raise InvalidRequest(f"node report: instance {self.instance} is not 63 bits")
        if not 0 <= self.routing_version <= NUMBER_MAX:
            raise InvalidRequest(f"node report: routing_version {self.routing_version}")
