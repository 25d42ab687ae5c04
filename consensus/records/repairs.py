"""``plans/repair/<id>``: what was lost, and how the cluster got its copies back.

One record for one repair: from the decision that finds copies missing until every slot has all of
them again. Written by the controllers for people; nothing is decided by it. This module imports
``json_record`` and ``backstay.errors``; it knows no clock and no network.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from backstay.errors import InvalidRequest
from backstay.json_record import NUMBER_MAX, JsonRecord, check_times

__all__ = ["LOST_MAX", "LostNode", "RepairRecord", "RepairState"]

RepairState = Literal["copying", "done"]
REPAIR_STATES: tuple[RepairState, ...] = get_args(RepairState)
# Nodes that a record names; of more, the first.
LOST_MAX = 32
_COUNTS = ("repair_id", "slots_lost", "copies_total", "copies_left", "bytes_total", "bytes_left")


@dataclass(frozen=True)
class LostNode(JsonRecord, what="repair: lost"):
    """A node that lost copies.

    Attributes:
        node_id: Its id.
        reason: How it was lost, in words.
    """

    node_id: str
    reason: str


@dataclass(frozen=True)
class RepairRecord(JsonRecord, what="repair", names={"repair_id": "id"}):
    """A repair.

    Attributes:
        repair_id: Version of the routing table that began it; ``id`` in the JSON form.
        state: ``copying`` until every slot has all its copies, then ``done``.
        lost: The nodes that lost copies.
        slots_lost: Slots of which every copy was lost.
        copies_total: Copies that were lost.
        copies_left: Of these copies, how many are not in sync again yet. A slot that lost every
            copy counts until it is restored or begins anew.
        bytes_total: Size of those copies when the repair began; 0 while it is not known.
        bytes_left: Of it, what is not in sync yet.
        begun: When it began; seconds since the epoch.
        ended: When it was done; 0 before. Seconds since the epoch.
        begun_by: Id of the node that was the controller then.
        ended_by: Id of the node that was the controller at its end; empty before.
    """

    repair_id: int
    kind: Literal["repair"] = field(default="repair", kw_only=True)
    state: RepairState
    lost: tuple[LostNode, ...]
    slots_lost: int
    copies_total: int
    copies_left: int
    bytes_total: int
    bytes_left: int
    begun: float
    ended: float
    begun_by: str
    ended_by: str

    def __post_init__(self) -> None:
        """Refuse a record that cannot be."""
        if self.state not in REPAIR_STATES:
            raise InvalidRequest(f"repair: unknown state {self.state!r}")
        for name in _COUNTS:
            if not 0 <= getattr(self, name) <= NUMBER_MAX:
                raise InvalidRequest(f"repair: {name} {getattr(self, name)} is no count")
        check_times("repair", begun=self.begun, ended=self.ended)
