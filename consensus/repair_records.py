"""``plans/repair/<id>``: what was lost, and how the cluster got its copies back.

One record for one repair: from the decision that finds copies missing until every slot has all of
them again. Written by the controllers for people; nothing is decided by it. This module imports
``consensus.json_fields`` and ``backstay.errors``; it knows no clock and no network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from backstay.consensus.json_fields import NUMBER_MAX, check_times, dump, parse_fields
from backstay.errors import InvalidRequest

__all__ = ["LOST_MAX", "LostNode", "RepairRecord", "RepairState"]

RepairState = Literal["copying", "done"]
REPAIR_STATES: tuple[RepairState, ...] = get_args(RepairState)
# Nodes that a record names; of more, the first.
LOST_MAX = 32
_COUNTS = ("repair_id", "slots_lost", "copies_total", "copies_left", "bytes_total", "bytes_left")


class LostNode(NamedTuple):
    """A node that lost copies.

    Attributes:
        node_id: Its id.
        reason: How it was lost, in words.
    """

    node_id: str
    reason: str


@dataclass(frozen=True)
class RepairRecord:
    """A repair.

    Attributes:
        repair_id: Version of the routing table that began it; ``id`` in the JSON form.
        state: ``copying`` until every slot has all its copies, then ``done``.
        lost: The nodes that lost copies.
        slots_lost: Slots of which every copy was lost.
        copies_total: Copies that were lost.
        copies_left: Of them, those that are not in sync again yet; those of slots that lost every
            copy stay until these are restored or begin anew.
        bytes_total: Size of those copies when the repair began; 0 while it is not known.
        bytes_left: Of it, what is not in sync yet.
        begun: When it began; seconds since the epoch.
        ended: When it was done; 0 before. Seconds since the epoch.
        begun_by: Id of the node that was the controller then.
        ended_by: Id of the node that was the controller at its end; empty before.
    """

    repair_id: int
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

    def to_json(self) -> str:
        """Return the record as the text that the coordination store keeps."""
        return dump(
            {
                "id": self.repair_id,
                "kind": "repair",
                "state": self.state,
                "lost": [one._asdict() for one in self.lost],
                "slots_lost": self.slots_lost,
                "copies_total": self.copies_total,
                "copies_left": self.copies_left,
                "bytes_total": self.bytes_total,
                "bytes_left": self.bytes_left,
                "begun": self.begun,
                "ended": self.ended,
                "begun_by": self.begun_by,
                "ended_by": self.ended_by,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> RepairRecord:
        """Return the record that ``to_json`` gave.

        Raises:
            InvalidRequest: It is not such a text.
        """
        fields = parse_fields("repair", text, _FIELDS)
        if fields.pop("kind") != "repair":
            raise InvalidRequest("repair: kind is not 'repair'")
        lost = []
        for one in fields.pop("lost"):
            if not isinstance(one, dict) or set(one) != {"node_id", "reason"}:
                raise InvalidRequest("repair: lost is not of node_id and reason")
            lost.append(LostNode(str(one["node_id"]), str(one["reason"])))
        return cls(repair_id=fields.pop("id"), lost=tuple(lost), **fields)


_FIELDS: Mapping[str, type] = {
    "id": int,
    "kind": str,
    "state": str,
    "lost": list,
    "slots_lost": int,
    "copies_total": int,
    "copies_left": int,
    "bytes_total": int,
    "bytes_left": int,
    "begun": float,
    "ended": float,
    "begun_by": str,
    "ended_by": str,
}
