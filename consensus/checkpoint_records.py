"""The records about checkpoints: the newest one, one being written, one being restored; losses.

Values, strict about their JSON form, like those of ``consensus.records``. What a checkpoint holds
is in its own manifest; here is only what the nodes of a cluster must agree on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from backstay.consensus.json_fields import dump, parse_fields, whole_numbers_of
from backstay.errors import InvalidRequest

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
class CheckpointRecord:
    """``checkpoint``: the newest whole checkpoint of the cluster.

    Attributes:
        url: The folder that it is in.
        id: Its id.
        created: When it was begun, ISO 8601.
    """

    url: str
    id: str
    created: str

    def to_json(self) -> str:
        """Return the record as the text that the coordination store keeps."""
        return dump({"url": self.url, "id": self.id, "created": self.created})

    @classmethod
    def from_json(cls, text: str) -> CheckpointRecord:
        """Return the record that ``to_json`` gave.

        Raises:
            InvalidRequest: It is not such a text.
        """
        return cls(**parse_fields("checkpoint record", text, _CHECKPOINT_FIELDS))


@dataclass(frozen=True)
class SaveRecord:
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

    def to_json(self) -> str:
        """Return the record as the text that the coordination store keeps."""
        return dump(
            {"id": self.id, "node": self.node, "instance": self.instance, "started": self.started}
        )

    @classmethod
    def from_json(cls, text: str) -> SaveRecord:
        """Return the record that ``to_json`` gave.

        Raises:
            InvalidRequest: It is not such a text.
        """
        return cls(**parse_fields("save record", text, _SAVE_FIELDS))


@dataclass(frozen=True)
class RestorePlan:
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
        lost: Slots that had lost all their copies, which is why; 0: somebody asked for it.
    """

    url: str
    checkpoint: str
    slots: tuple[int, ...] = ()
    state: RestoreState = "requested"
    version: int = 0
    generation: int = 0
    created: str = ""
    lost: int = 0

    def __post_init__(self) -> None:
        """Refuse a state that is none."""
        if self.state not in RESTORE_STATES:
            raise InvalidRequest(f"restore plan: unknown state {self.state!r}")

    def to_json(self) -> str:
        """Return the record as the text that the coordination store keeps."""
        return dump(
            {
                "url": self.url,
                "checkpoint": self.checkpoint,
                "slots": list(self.slots),
                "state": self.state,
                "version": self.version,
                "generation": self.generation,
                "created": self.created,
                "lost": self.lost,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> RestorePlan:
        """Return the record that ``to_json`` gave.

        Raises:
            InvalidRequest: It is not such a text.
        """
        fields = parse_fields("restore plan", text, _RESTORE_FIELDS, {"created": "", "lost": 0})
        slots = whole_numbers_of("restore plan", "slots", fields.pop("slots"))
        return cls(slots=tuple(slots), **fields)


@dataclass(frozen=True)
class LossAcceptance:
    """``plans/loss``: an operator has accepted that slots lost their content.

    Attributes:
        version: Of the routing table that the operator saw: what was lost later is not accepted.
        slots: How many waited for the decision then.
        time: ISO 8601, for people.
    """

    version: int
    slots: int
    time: str

    def to_json(self) -> str:
        """Return the record as the text that the coordination store keeps."""
        return dump({"version": self.version, "slots": self.slots, "time": self.time})

    @classmethod
    def from_json(cls, text: str) -> LossAcceptance:
        """Return the record that ``to_json`` gave.

        Raises:
            InvalidRequest: It is not such a text.
        """
        return cls(**parse_fields("loss record", text, _LOSS_FIELDS))


def loss_in_words(slots: int) -> str:
    """Return what is to be said of slots that lost all their copies and wait for a decision."""
    which = "1 slot" if slots == 1 else f"{slots} slots"
    return (
        f"{which} lost all copies and wait for a decision: restore a checkpoint "
        "(pserverctl checkpoint restore), or accept the loss (pserverctl slots accept-loss)"
    )


_LOSS_FIELDS: Mapping[str, type] = {"version": int, "slots": int, "time": str}
_CHECKPOINT_FIELDS: Mapping[str, type] = {"url": str, "id": str, "created": str}
_SAVE_FIELDS: Mapping[str, type] = {"id": str, "node": str, "instance": int, "started": str}
_RESTORE_FIELDS: Mapping[str, type] = {
    "url": str,
    "checkpoint": str,
    "slots": list,
    "state": str,
    "version": int,
    "generation": int,
    "created": str,
    "lost": int,
}
