"""Sync mode, who does what in a step: the leader's book of followers, pieces and what has come.

Pure: no socket, clock or thread; ``leading`` drives it. May import ``gathering`` only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from backstay.errors import LimitExceeded
from backstay.trainer.modes.gathering import Gradient, Piece, cut

__all__ = ["Contribution", "Patience", "StepBook"]

FOLLOWERS_MAX = 255
# A follower that takes so many times as long as the leader loses its place, but not before ...
PATIENCE_FACTOR = 5.0
# ... so long.
PATIENCE_MIN_S = 2.0
SEEN_MAX = 10_000


@dataclass
class Contribution:
    """What one follower has sent of its piece.

    Attributes:
        piece: Its part of the batch.
        gradients: So far.
        is_whole: Whether that is all.
        loss: Mean over the piece.
        predictions: What the model answered, first axis the records; None: it was not told.
    """

    piece: Piece
    gradients: list[Gradient] = field(default_factory=list)
    is_whole: bool = False
    loss: float = 0.0
    predictions: NDArray[Any] | None = None


class StepBook:
    """One task's steps as its leader keeps them."""

    def __init__(self) -> None:
        """Begin without followers."""
        self._followers: list[int] = []
        self._batch = -1
        self._contributions: dict[int, Contribution] = {}

    @property
    def followers(self) -> Sequence[int]:
        """Who takes part in the next step, in the order in which they came."""
        return tuple(self._followers)

    def join(self, follower: int) -> None:
        """Have it from the next step on.

        Raises:
            LimitExceeded: There are enough.
        """
        if follower not in self._followers and len(self._followers) >= FOLLOWERS_MAX:
            raise LimitExceeded(f"{FOLLOWERS_MAX} workers follow this task already, the limit")
        self.leave(follower)
        self._followers.append(follower)

    def leave(self, follower: int) -> None:
        """It is gone; a piece that it has not delivered whole falls to the leader."""
        if follower in self._followers:
            self._followers.remove(follower)

    def begin(self, batch: int, records: int) -> tuple[Piece, dict[int, Piece]]:
        """Cut a batch; return the leader's own piece and those of the followers."""
        own, *others = cut(records, 1 + len(self._followers))
        pieces = dict(zip(self._followers, others, strict=False))
        self._batch = batch
        self._contributions = {who: Contribution(piece) for who, piece in pieces.items()}
        return own, pieces

    def take(
        self,
        follower: int,
        batch: int,
        gradients: Sequence[Gradient],
        *,
        is_last: bool,
        loss: float,
        predictions: NDArray[Any] | None = None,
    ) -> bool:
        """Take a part of a piece; return whether it is wanted."""
        contribution = self._contributions.get(follower)
        is_here = follower in self._followers and batch == self._batch
        if contribution is None or not is_here or contribution.is_whole:
            return False
        contribution.gradients.extend(gradients)
        contribution.is_whole = is_last
        contribution.loss = loss
        contribution.predictions = predictions
        return True

    @property
    def partners(self) -> Sequence[int]:
        """Who has a piece of this step; empty between two steps."""
        return tuple(self._contributions)

    def awaited(self) -> Sequence[int]:
        """Return those whose piece is still to come."""
        return tuple(
            follower
            for follower, contribution in self._contributions.items()
            if not contribution.is_whole and follower in self._followers
        )

    def finish(self) -> tuple[list[Contribution], list[Piece]]:
        """End the step: return what has come whole, and the pieces that the leader must do."""
        all_of_them = list(self._contributions.values())
        self._contributions = {}
        whole = [one for one in all_of_them if one.is_whole]
        return whole, [one.piece for one in all_of_them if not one.is_whole]


class Patience:
    """How long a leader waits for the pieces of a step once its own is done.

    Args:
        limit_s: A follower's first step may take so long: its framework warms up.
        factor: Or so many times as long as the leader's own piece. No step may take longer than
            the longer one of the two.
    """

    def __init__(self, limit_s: float, factor: float) -> None:
        self._limit_s = limit_s
        self._factor = factor
        # Who has had a step: one that lost its place is no beginner when it is back.
        self._seen: set[int] = set()

    def of(self, partners: Sequence[int], own_s: float) -> float:
        """Return the seconds for a step.

        Args:
            partners: Who has a piece of it.
            own_s: How long the leader's own took.
        """
        most_s = max(self._limit_s, self._factor * own_s)
        if not self._seen.issuperset(partners):
            self._seen = {*partners, *(self._seen if len(self._seen) < SEEN_MAX else ())}
            return most_s
        return max(PATIENCE_MIN_S, min(PATIENCE_FACTOR * own_s, most_s))
