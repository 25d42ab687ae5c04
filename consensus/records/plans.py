"""The plan of a resize, a drain or a rebalance: ``plans/resize``.

There is one at a time, and the last one stays, because a node that was drained must stay empty.
The node that was asked for it writes it. From then on only the controller does, except to cancel
it. This module imports ``json_record`` and ``backstay.errors``; it knows no clock and no
network, and it decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from backstay.errors import InvalidRequest
from backstay.json_record import NUMBER_MAX, JsonRecord

__all__ = [
    "PLAN_KINDS",
    "PLAN_STATES",
    "LeavingNode",
    "PlanKind",
    "PlanState",
    "ResizePlan",
]

PlanKind = Literal["resize", "drain", "rebalance"]
PlanState = Literal["waiting_for_nodes", "moving", "done", "cancelled", "failed"]
PLAN_KINDS: tuple[PlanKind, ...] = get_args(PlanKind)
PLAN_STATES: tuple[PlanState, ...] = get_args(PlanState)


class LeavingNode(NamedTuple):
    """A node that is to hold nothing.

    Attributes:
        node_id: Its id.
        instance: The process that the controller last met under that id; 0 for none yet.
    """

    node_id: str
    instance: int


@dataclass(frozen=True)
class ResizePlan(JsonRecord, what="plan", names={"plan_id": "id"}):
    """``plans/resize``: what the cluster is to become, and how far it is.

    Attributes:
        plan_id: Random text that tells it from others; ``id`` in the JSON form.
        kind: ``resize``, ``drain`` or ``rebalance``.
        nodes: Nodes that are to hold rows; what a resize waits for.
        leaving: Nodes that are to hold nothing. A drain names them; for a resize the controller
            chooses them.
        stop: Whether their processes are to end when the plan is done.
        pause: Whether trainers are to wait while copies move.
        wait_s: How long nodes that are missing are waited for.
        state: Where it stands; the last three are ends.
        reason: Why it stands there, in words.
        moves_total: Copies that it takes to move; grows if that turns out to be more.
        moves_left: Copies of them that are not in sync yet where they are to be.
        started: ISO 8601 text, for people only.
        numbered: Whether a resize lets go the nodes whose numbers are ``nodes`` or more.
    """

    plan_id: str
    kind: PlanKind
    nodes: int
    leaving: tuple[LeavingNode, ...] = ()
    stop: bool = False
    pause: bool = False
    wait_s: int = 600
    state: PlanState = "moving"
    reason: str = ""
    moves_total: int = 0
    moves_left: int = 0
    started: str = ""
    numbered: bool = False

    def __post_init__(self) -> None:
        """Refuse a plan that cannot be."""
        if not self.plan_id:
            raise InvalidRequest("plan: id is empty")
        if self.kind not in PLAN_KINDS:
            raise InvalidRequest(f"plan: unknown kind {self.kind!r}")
        if self.state not in PLAN_STATES:
            raise InvalidRequest(f"plan: unknown state {self.state!r}")
        if not 1 <= self.nodes <= NUMBER_MAX:
            raise InvalidRequest(f"plan: {self.nodes} nodes; at least 1")
        for name in ("wait_s", "moves_total", "moves_left"):
            if not 0 <= getattr(self, name) <= NUMBER_MAX:
                raise InvalidRequest(f"plan: {name} {getattr(self, name)} is negative")
        names = [one.node_id for one in self.leaving]
        if len(set(names)) != len(names) or "" in names:
            raise InvalidRequest("plan: leaving names a node twice, or one without a name")

    @property
    def is_under_way(self) -> bool:
        """Whether it has not come to an end."""
        return self.state in ("waiting_for_nodes", "moving")

    @property
    def pause_reason(self) -> str:
        """Why trainers are to wait now; empty if they are not to."""
        if not self.pause or self.state != "moving":
            return ""
        return f"a {self.kind} moves rows, and was asked to let trainers wait"

    def lets_go(self, node_id: str, instance: int) -> bool:
        """Return whether a process is to hold nothing.

        A drain stays in force when it is done, also for the next process of that node. One that
        was to stop is another matter: an operator who starts that node again wants it back.
        """
        if self.state in ("cancelled", "failed"):
            return False
        any_process = self.state != "done" or not self.stop
        return any(
            one.node_id == node_id and (any_process or one.instance == instance)
            for one in self.leaving
        )

    def dismisses(self, node_id: str, instance: int) -> bool:
        """Return whether a process has held what it had to and is to end."""
        return self.state == "done" and self.stop and self.lets_go(node_id, instance)
