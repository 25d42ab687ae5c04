"""What a follower has of each slot, and which slots of an element it can take. Pure.

An increment's slot fits if it begins at or before what the follower has: see docs/adr/0018.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from backstay.checkpoint.element import Element, number_of
from backstay.tables import TableSpec

__all__ = ["Followed", "Step", "after_base", "after_increment", "begins_anew"]

NAMES_MAX = 8


@dataclass(frozen=True, eq=False)
class Followed:
    """What a follower has.

    Attributes:
        newest: The element that it has taken last.
        number: No element up to this number is wanted any more.
        position: Where each slot is, uint64.
        as_of: Unix time for each slot: it has every push that was acknowledged before; float64.
    """

    newest: Element
    number: int
    position: NDArray[np.uint64]
    as_of: NDArray[np.float64]

    @property
    def chain(self) -> str:
        """The base that its chain began with."""
        return self.newest.chain

    @property
    def specs(self) -> tuple[TableSpec, ...]:
        """Descriptions of its tables."""
        return self.newest.tables


@dataclass(frozen=True, eq=False)
class Step:
    """What a follower makes of an element.

    Attributes:
        state: What the follower has afterwards.
        slots: The slots to take from the element's parts, ascending.
        missing: Why it does not fit; empty if it does. The state is as before then.
    """

    state: Followed
    slots: NDArray[np.int64]
    missing: str = ""


def begins_anew(state: Followed | None, base: Element) -> bool:
    """Return whether a base begins a chain that is to be followed from now on."""
    if state is None:
        return True
    known = state.newest
    is_older = base.number < number_of(known.chain) and base.begun <= known.begun
    if base.chain == known.chain or is_older:
        return False
    # A controller that was replaced may still end what it began before rows were restored.
    return base.cluster_uid != known.cluster_uid or base.generation >= known.generation


def after_base(state: Followed | None, base: Element) -> Step:
    """Take what is newer in a base: all of it, if it begins a chain."""
    if state is None or state.chain != base.chain:
        slots = np.arange(base.slot_count)
        as_of = np.full(base.slot_count, base.begun)
        return Step(Followed(base, base.number, base.position, as_of), slots)
    newer = base.position > state.position
    after = replace(
        state,
        newest=base if base.number > state.number else state.newest,
        number=max(base.number, state.number),
        position=np.maximum(base.position, state.position),
        as_of=np.where(base.position >= state.position, base.begun, state.as_of).clip(state.as_of),
    )
    return Step(after, np.flatnonzero(newer))


def after_increment(state: Followed, increment: Element) -> Step:
    """Take an increment of the chain that is followed, if nothing is missing before it."""
    whole = np.array(increment.slots.whole, np.bool_)
    newer = increment.position > state.position
    gaps = np.flatnonzero(newer & ~whole & (increment.since > state.position))
    if len(gaps):
        some = ", ".join(map(str, gaps[:NAMES_MAX].tolist()))
        return Step(
            state,
            np.empty(0, np.int64),
            f"{increment.id} does not follow {state.newest.id}: changes of {len(gaps)} slots "
            f"({some}, ...) are missing between them",
        )
    told = np.ones(increment.slot_count, np.bool_)
    told[list(increment.left_out)] = False
    told &= increment.position >= state.position
    after = Followed(
        newest=increment,
        number=increment.number,
        position=np.maximum(increment.position, state.position),
        as_of=np.where(told, np.maximum(increment.begun, state.as_of), state.as_of),
    )
    return Step(after, np.flatnonzero(newer))
