"""The records of the cluster itself: its config, its controller, status, events and tables.

Values, strict about their JSON form. This module imports ``routing``, ``json_record`` and
``backstay.errors``; it knows no clock, no network and no randomness.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from backstay.consensus.records.routing import (
    REPLICAS_MAX,
    SLOT_COUNT_MAX,
)
from backstay.errors import InvalidRequest
from backstay.json_record import Count, JsonRecord, check_times, dump

ClusterStatus = Literal["OK", "UNHEALTHY", "UNKNOWN"]
ReplicaStatus = Literal["master", "in_sync", "catching_up"]
EventKind = Literal[
    "created",
    "node_joined",
    "node_gone",
    "promoted",
    "backup_silent",
    "caught_up",
    "copy_added",
    "copy_dropped",
    "handed_over",
    "unavailable",
    "lost",
    "loss_accepted",
    "restoring",
    "restored",
]
CLUSTER_STATUSES: tuple[ClusterStatus, ...] = get_args(ClusterStatus)
REPLICA_STATUSES: tuple[ReplicaStatus, ...] = get_args(ReplicaStatus)
EVENT_KINDS: tuple[EventKind, ...] = get_args(EventKind)


@dataclass(frozen=True)
class ClusterConfig(JsonRecord, what="cluster config"):
    """``config``: what is fixed when the cluster is created.

    Attributes:
        cluster: Name of the cluster.
        slot_count: A power of two.
        replicas: Copies wanted of each slot, 1 to 3.
        initial_nodes: Nodes that must serve before the first routing is made.
        cluster_uid: Random hexadecimal string: another one is another cluster of the same name.
    """

    format: Literal[1] = field(default=1, kw_only=True)
    cluster: str
    slot_count: int
    replicas: int
    initial_nodes: int
    cluster_uid: str

    def __post_init__(self) -> None:
        """Refuse settings that cannot be."""
        if not self.cluster:
            raise InvalidRequest("cluster config: cluster is empty")
        count = self.slot_count
        if not 1 <= count <= SLOT_COUNT_MAX or count & (count - 1):
            raise InvalidRequest(f"cluster config: slot_count {count} is no power of two")
        if not 1 <= self.replicas <= REPLICAS_MAX:
            raise InvalidRequest(f"cluster config: replicas {self.replicas}; 1 to {REPLICAS_MAX}")
        if not 1 <= self.initial_nodes <= count:
            raise InvalidRequest(
                f"cluster config: initial_nodes {self.initial_nodes} for {count} slots; "
                "each node needs a slot at least"
            )
        if not self.cluster_uid or not set(self.cluster_uid) <= set("0123456789abcdef"):
            raise InvalidRequest(f"cluster config: cluster_uid {self.cluster_uid!r} is not hex")


@dataclass(frozen=True)
class ControllerRecord(JsonRecord, what="controller record", names={"node_id": "id"}):
    """``controller``: the process that holds the election key; ``id`` in the JSON form."""

    node_id: str
    instance: int


@dataclass(frozen=True)
class ClusterHealthRecord(JsonRecord, what="cluster status"):
    """``pserver_cluster_status``: how the cluster does, in one word and in words.

    Attributes:
        cluster_status: ``OK``, ``UNHEALTHY`` or ``UNKNOWN`` (there is no routing yet).
        reason: Why; empty while all is well.
        nodes: Ids of the nodes whose lease is alive.
    """

    cluster_status: ClusterStatus
    reason: str
    nodes: tuple[str, ...]

    def __post_init__(self) -> None:
        """Refuse a status that is none."""
        if self.cluster_status not in CLUSTER_STATUSES:
            raise InvalidRequest(f"cluster status: unknown status {self.cluster_status!r}")


@dataclass(frozen=True)
class Event(JsonRecord, what="event"):
    """``events/<number>``: one thing that the controller decided, and why.

    Attributes:
        routing_version: The routing version that the decision made.
        kind: What was decided.
        node: The node that it is about; empty if about none.
        slot_count: How many slots it concerns.
        slots: The first few of them.
        reason: The whole of it in words, with the reason.
    """

    routing_version: int
    kind: EventKind
    node: str
    slot_count: int
    slots: tuple[Count, ...]
    reason: str

    def __post_init__(self) -> None:
        """Refuse a kind that is none."""
        if self.kind not in EVENT_KINDS:
            raise InvalidRequest(f"event: unknown kind {self.kind!r}")


@dataclass(frozen=True, kw_only=True)
class ShardRecord(JsonRecord, what="shard record", names={"replica": "id", "slot": "shardid"}):
    """``pshards/<slot>/<replica>``: one replica of one slot, for people to read.

    A view of the routing table that may lag behind it; nothing is decided by it.

    Attributes:
        slot: The slot; ``shardid`` in the JSON form.
        replica: Number of the replica in its slot, from 0; ``id`` in the JSON form. It says
            nothing about the role: any replica may become master.
        node: Id of the node that holds the replica.
        instance: The process that holds it: another one has to copy the slot anew.
        status: ``master``, ``in_sync`` or ``catching_up``.
        created: When the replica came into the view; seconds since the epoch.
        modified: When its status or its number changed last; seconds since the epoch.
        routing_version: Version of the routing table that changed it last.
    """

    replica: int
    slot: int
    node: str
    instance: int
    created: float
    modified: float
    status: ReplicaStatus
    routing_version: int

    def __post_init__(self) -> None:
        """Refuse a record that cannot be."""
        if self.status not in REPLICA_STATUSES:
            raise InvalidRequest(f"shard record: unknown status {self.status!r}")
        if not 0 <= self.slot < SLOT_COUNT_MAX or self.replica < 0:
            raise InvalidRequest(
                f"shard record: there is no replica {self.replica} of slot {self.slot}"
            )
        check_times("shard record", created=self.created, modified=self.modified)


@dataclass(frozen=True)
class DeclaredTable:
    """What a job asked a table to be when it began or went on.

    Attributes:
        job: Number of the job's streams: its own, and new when it begins anew.
        start: Which of the job's starts it was.
        spec_json: The description that the first worker of that start declared.
    """

    job: int
    start: int
    spec_json: str


@dataclass(frozen=True)
class TableRecord:
    """``tables/<name>``: a table of the cluster.

    Attributes:
        spec_json: Its canonical description, as the native ``canonical_table`` gives it; an
            object, not a string, in the JSON form.
        table_id: The id under which it travels, as the native ``table_id`` gives it; ``id`` in
            the JSON form.
        revision: Which of its settings these are: 1 when it was made, and one more with each
            change of them.
        declared: What the newest start of a job asked for; None: no job did.
    """

    spec_json: str
    table_id: int
    revision: int = 1
    declared: DeclaredTable | None = None

    def to_json(self) -> str:
        """Return the record as the JSON that the coordination store keeps."""
        asked = self.declared
        declared = (
            {}
            if asked is None
            else _StoredDeclaration(
                asked.job, asked.start, json.loads(asked.spec_json)
            ).to_document()
        )
        return _StoredTable(
            json.loads(self.spec_json), self.table_id, self.revision, declared
        ).to_json()

    @classmethod
    def from_json(cls, text: str) -> TableRecord:
        """Return the record that ``to_json`` gave.

        The description is given as compact JSON: pass it through ``canonical_table`` before
        comparing it as a string.

        Raises:
            InvalidRequest: It is not of that form.
        """
        stored = _StoredTable.from_json(text)
        declared = None
        if stored.declared:
            asked = _StoredDeclaration.from_json(dump(stored.declared))
            declared = DeclaredTable(asked.job, asked.start, dump(asked.spec))
        return cls(dump(stored.spec), stored.id, stored.revision, declared)


@dataclass(frozen=True)
class _StoredTable(JsonRecord, what="table record"):
    """The JSON form of ``TableRecord``; ``declared`` has no fields if no job declared the table."""

    spec: dict[str, Any]
    id: int
    revision: int
    declared: dict[str, Any]


@dataclass(frozen=True)
class _StoredDeclaration(JsonRecord, what="table record: declared"):
    """The JSON form of ``DeclaredTable``."""

    job: int
    start: int
    spec: dict[str, Any]
