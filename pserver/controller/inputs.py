"""What the controller decides from, and what a decision is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from backstay.consensus.records import (
    ClusterConfig,
    ClusterHealthRecord,
    Event,
    MemberRecord,
    NodeReport,
    RoutingTable,
)

__all__ = ["ClusterRecords", "Decision"]


@dataclass(frozen=True)
class ClusterRecords:
    """The records of the coordination store, as of one revision.

    All must be of one revision: members that are older than the routing table could make a
    process look replaced by the one that it replaced.

    Attributes:
        config: What is fixed for the cluster.
        members: The registered nodes by id; their leases are alive.
        routing: The routing table, None before the first.
        reports: The masters' reports by instance.
        gone: Instances for whose death there is sure evidence.
        waiting: Instances whose lease is over without such evidence, and which are still
            given time to come back with their memory. It delays nothing but the declaration
            of a slot as lost; empty means that a lease that is over is enough for that.
    """

    config: ClusterConfig
    members: Mapping[str, MemberRecord]
    routing: RoutingTable | None = None
    reports: Mapping[int, NodeReport] = field(default_factory=dict)
    gone: frozenset[int] = frozenset()
    waiting: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Decision:
    """What is to be written.

    Attributes:
        routing: The new routing table, None if nothing is to change.
        health: How the cluster does with that routing.
        events: What was decided and why: one for each kind, node and reason.
        relies_on: Instances whose ``caught_up`` reports went into the routing. The
            transaction that writes it should compare the revisions of these reports, so that
            a master that has withdrawn one can rely on that.
        given_up: Ids of nodes without a lease whose content the routing declares lost. The
            transaction should compare the revisions of their registrations: one that has come
            back meanwhile serves by the old table.
    """

    routing: RoutingTable | None
    health: ClusterHealthRecord
    events: tuple[Event, ...] = ()
    relies_on: tuple[int, ...] = ()
    given_up: tuple[str, ...] = ()
