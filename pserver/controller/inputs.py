"""What the controller decides from, and what a decision is.

Only ``Absences`` depends on the time: who is missing, and who of them is still given time to come
back. The clock is the caller's, in any unit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from backstay.consensus.records import (
    ClusterConfig,
    ClusterHealthRecord,
    Event,
    MemberRecord,
    NodeReport,
    RoutingTable,
)
from backstay.consensus.records.checkpoints import CheckpointRecord, RestorePlan
from backstay.consensus.records.plans import ResizePlan

__all__ = ["STEP_SIZES", "Absences", "ClusterRecords", "Decision", "StepSizes", "living"]


@dataclass(frozen=True)
class StepSizes:
    """How many slots make a step worth what it holds up, and how many do not.

    Attributes:
        early_handovers_min: While copies still come, masters are handed over in such numbers at
            least.
        spared_max: Slots with a copy too many that wait, while others are copied, for one that is
            not the master.
    """

    early_handovers_min: int = 16
    spared_max: int = 8


STEP_SIZES = StepSizes()


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
        restore: A restore that was asked for, None if none ever was.
        on_loss: The checkpoint that the cluster goes back to when slots lost all their copies;
            None: such slots wait for a decision.
        lost_only: Whether only the slots that were lost go back to it.
        accepted: The routing version up to which an operator has accepted losses; 0: none.
        has_tables: Whether there are tables. Without, slots that lost all copies held nothing.
        plan: The resize, drain or rebalance that was asked for last; None before the first.
        plan_overdue: Whether the plan has waited for nodes for longer than it is to.
        bytes_of_slot: The size of each slot's rows, [slot_count]; None if it is not known. It
            decides only which slots move, never how many.
        moves_at_once: Slots that may be on the move at one time.
    """

    config: ClusterConfig
    members: Mapping[str, MemberRecord]
    routing: RoutingTable | None = None
    reports: Mapping[int, NodeReport] = field(default_factory=dict)
    gone: frozenset[int] = frozenset()
    waiting: frozenset[int] = frozenset()
    restore: RestorePlan | None = None
    on_loss: CheckpointRecord | None = None
    lost_only: bool = False
    accepted: int = 0
    has_tables: bool = True
    plan: ResizePlan | None = None
    plan_overdue: bool = False
    bytes_of_slot: NDArray[np.uint64] | None = None
    moves_at_once: int = 256


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
        restore: What the record of the restore is to say; None if it is right.
        plan: The plan as it stands now; None if it stands as it did. The transaction should
            compare the revision of its record.
    """

    routing: RoutingTable | None
    health: ClusterHealthRecord
    events: tuple[Event, ...] = ()
    relies_on: tuple[int, ...] = ()
    given_up: tuple[str, ...] = ()
    restore: RestorePlan | None = None
    plan: ResizePlan | None = None


def living(members: Mapping[str, MemberRecord], gone: Collection[int]) -> dict[str, MemberRecord]:
    """Return the members without evidence that they are gone."""
    return {name: member for name, member in members.items() if member.instance not in gone}


class Absences:
    """Processes of the routing table whose lease is over without evidence of their death."""

    def __init__(self, grace: float) -> None:
        """Begin with no node missing.

        Args:
            grace: How long a process may come back with its memory.
        """
        self._grace = grace
        self._missing_since: dict[int, float] = {}
        self._waited_for: frozenset[int] = frozenset()

    def forget(self) -> None:
        """Begin anew: what an earlier leadership noted says nothing about now."""
        self._missing_since = {}
        self._waited_for = frozenset()

    def note(
        self,
        now: float,
        routing: RoutingTable | None,
        members: Mapping[str, MemberRecord],
        gone: Collection[int],
    ) -> frozenset[int]:
        """Take note of who is missing now, and return who of them is waited for.

        A node that is found missing for the first time has been missing since now.
        """
        alive = {member.instance for member in members.values()}
        listed = {node.instance for node in routing.nodes} if routing is not None else set()
        missing = listed - alive - set(gone)
        self._missing_since = {one: self._missing_since.get(one, now) for one in missing}
        self._waited_for = frozenset(
            one for one, since in self._missing_since.items() if now < since + self._grace
        )
        return self._waited_for

    def next_end(self, now: float) -> float | None:
        """Return after how long the next process is given up, None if none is waited for.

        Of the processes that were waited for when last noted, also if their time is over.
        """
        ends = [self._missing_since[one] + self._grace for one in self._waited_for]
        return max(0.0, min(ends) - now) if ends else None
