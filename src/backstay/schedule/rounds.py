"""What a round is: one go over a list of tasks, of one kind.

Imports ``backstay.errors`` and the standard library.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from backstay.errors import InvalidRequest

__all__ = ["RoundId", "RoundKind", "data_of"]


class RoundKind(enum.Enum):
    """What is done with the records of a round."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    PREDICTION = "prediction"
    TRAIN_END = "train_end"


class RoundId(NamedTuple):
    """Which round of a job: the kind, and its number among those of the kind, from 1.

    The number of a training round is the pass.
    """

    kind: RoundKind
    number: int

    def __str__(self) -> str:
        """Return the string used in keys and messages, ``training-1``."""
        return f"{self.kind.value}-{self.number}"

    @staticmethod
    def parse(text: str) -> RoundId:
        """Return the round that ``str()`` wrote.

        Raises:
            InvalidRequest: It is no such string.
        """
        kind, _, number = text.rpartition("-")
        try:
            parsed = RoundId(RoundKind(kind), int(number))
        except ValueError as error:
            raise InvalidRequest(f"round {text!r}: expected a kind and a number") from error
        if parsed.number < 1 or str(parsed) != text:
            raise InvalidRequest(f"round {text!r}: expected a kind and a number from 1 on")
        return parsed


_DATA = {
    RoundKind.TRAINING: "training",
    RoundKind.TRAIN_END: "training",
    RoundKind.EVALUATION: "validation",
    RoundKind.PREDICTION: "prediction",
}


def data_of(kind: RoundKind) -> str:
    """Return which of a job's data a round of that kind goes over, by the name of its field."""
    return _DATA[kind]
