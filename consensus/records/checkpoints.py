"""The records about checkpoints: the newest one, one being written, one being restored; losses.

Values, strict about their JSON form, like those of ``consensus.records``. What a checkpoint holds
is in its own manifest; here is only what the nodes of a cluster must agree on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from backstay.errors import InvalidRequest
from backstay.json_record import Count, JsonRecord

__all__ = [
    "CheckpointRecord",
    "LossAcceptance",
    "RestorePlan",
    "RestoreState",
    "SaveRecord",
    "loss_in_words",
]

RestoreState = Literal["requested", "loading", "done"]
RESTORE_STATES: tuple[RestoreState, ...] = get_args(RestoreState)


@dataclass(frozen=True)
class CheckpointRecord(JsonRecord, what="checkpoint record"):
    """``checkpoint``: the newest whole checkpoint of the cluster.

    Attributes:
        url: The folder that it is in.
        id: Its id.
        created: When it was begun, ISO 8601.
    """

    url: str
    id: str
    created: str


@dataclass(frozen=True)
class SaveRecord(JsonRecord, what="save record"):
    """``plans/save``: a checkpoint is being written; bound to the writer's lease.

    Attributes:
        id: Its id.
        node: Id of the node that was asked for it.
        instance: Its process.
        started: ISO 8601, for people.
    """

    id: str
    node: str
    instance: int
    started: str


@dataclass(frozen=True)
class RestorePlan(JsonRecord, what="restore plan", added=("created", "lost")):
    """``plans/restore``: slots are to take their content from a checkpoint.

    Attributes:
        url: The folder that the checkpoint is in.
        checkpoint: Its id.
        slots: Which slots; empty: all.
        state: ``requested``; ``loading`` once the routing table says so; ``done``.
        version: The routing version at which it became ``loading``; 0 before.
        generation: That of the rows when it became ``done``; 0 before. A greater one since then:
            slots lost all their copies.
        created: When the checkpoint was begun, ISO 8601; empty if that is not known.
        lost: Slots that had lost all their copies, which is why; 0: an operator asked for it.
    """

    url: str
    checkpoint: str
    slots: tuple[Count, ...] = ()
    state: RestoreState = "requested"
    version: int = 0
    generation: int = 0
    created: str = ""
    lost: int = 0

    def __post_init__(self) -> None:
        """Refuse a state that is none."""
        if self.state not in RESTORE_STATES:
            raise InvalidRequest(f"restore plan: unknown state {self.state!r}")


@dataclass(frozen=True)
class LossAcceptance(JsonRecord, what="loss record"):
    """``plans/loss``: an operator has accepted that slots lost their content.

    Attributes:
        version: Of the routing table that the operator saw: what was lost later is not accepted.
        slots: How many waited for the decision then.
        time: ISO 8601, for people.
    """

    version: int
    slots: int
    time: str


def loss_in_words(slots: int) -> str:
    """Return what is to be said of slots that lost all their copies and wait for a decision."""
    which = "1 slot" if slots == 1 else f"{slots} slots"
    return (
        f"{which} lost all copies and wait for a decision: restore a checkpoint "
        "(pserverctl checkpoint restore), or accept the loss (pserverctl slots accept-loss)"
    )
