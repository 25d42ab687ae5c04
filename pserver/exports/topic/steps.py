"""Which element of an export a topic takes next: a follower's rules, for a topic. Pure.

The topic itself says only which element it has; the manifest of that element has the positions of
the slots. If the manifest is gone, the topic takes a whole base.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backstay.checkpoint.chain import Followed, Step, after_delta, after_full
from backstay.checkpoint.manifest import Manifest, kind_of, number_of
from backstay.errors import CheckpointDamaged, ExportRefused, text_of
from backstay.pserver.exports.topic.messages import TopicProgress

__all__ = ["TopicStep", "check_run", "followed", "next_step"]


@dataclass(frozen=True, eq=False)
class TopicStep:
    """An element that the topic takes.

    Attributes:
        element: The element.
        slots: The slots to take from it, ascending.
        replaced: Those of them of which it has all rows: what else the topic has of them goes.
        state: What the topic has afterwards.
    """

    element: Manifest
    slots: NDArray[np.int64]
    replaced: NDArray[np.int64]
    state: Followed

    @classmethod
    def of(cls, element: Manifest, step: Step) -> TopicStep:
        """Return what a follower's step is for a topic."""
        whole = element.slots.whole
        return cls(element, step.slots, step.slots[whole[step.slots]], step.state)


def check_run(known: TopicProgress | None, run: str, started: str) -> None:
    """Refuse to write to a topic that an export has which was started later.

    Raises:
        ExportRefused: It is so.
    """
    if known is not None and known.run != run and known.started > started:
        raise ExportRefused(
            f"the export {known.export} of the cluster {known.cluster}, started at "
            f"{known.started}, writes to it: choose another topic"
        )


def followed(
    known: TopicProgress | None, run: str, read: Callable[[str], Manifest | None]
) -> Followed | None:
    """Return what a topic has, by its own word; None: nothing to build on.

    Args:
        known: What the topic says.
        run: Of the export.
        read: Returns an element that is whole, or None.
    """
    if known is None or known.run != run:
        return None
    try:
        newest = read(known.element)
    except CheckpointDamaged:
        newest = None
    if newest is None or newest.run != run:
        return None
    as_of = np.full(newest.slot_count, newest.begun)
    return Followed(newest, newest.number, newest.slots.position, as_of)


def next_step(
    names: Sequence[str],
    read: Callable[[str], Manifest | None],
    state: Followed | None,
    run: str,
    *,
    not_before: float = 0.0,
) -> TopicStep | None:
    """Return what a topic takes next; None: nothing yet.

    Args:
        names: Of all elements, in their order.
        read: Returns an element that is whole, or None.
        state: What the topic has; None: nothing, or it is not known what.
        run: Of the export; elements of other runs are left alone.
        not_before: Unix time: with ``state`` None, a base that was begun before is not taken. It
            is when the element was begun that the topic has, in this run.

    Raises:
        CheckpointDamaged: An element that is needed is damaged or missing.
    """
    newest = _newest(names, read, run)
    if newest is None:
        return None
    if state is None or _begins_anew(state, newest):
        base = _newest_base(names, read, newest.chain, above=number_of(newest.chain) - 1)
        if base is None:
            raise CheckpointDamaged(f"{newest.chain} is missing, with which its chain begins")
        if state is None and base.begun < not_before:
            raise CheckpointDamaged(
                f"the element that the topic has is missing, and {base.id} may be older"
            )
        return TopicStep.of(base, after_full(None, base))
    for name in names:
        if kind_of(name) != "delta" or number_of(name) <= state.number:
            continue
        try:
            delta = read(name)
            if delta is None or delta.chain != state.chain:
                continue
            step = after_delta(state, delta)
            if not step.missing:
                return TopicStep.of(delta, step)
            missing = step.missing
        except CheckpointDamaged as error:
            missing = text_of(error)
        base = _newest_base(names, read, state.chain, above=state.number)
        if base is None:
            raise CheckpointDamaged(missing)
        return TopicStep.of(base, after_full(state, base))
    return None


def _newest(
    names: Sequence[str], read: Callable[[str], Manifest | None], run: str
) -> Manifest | None:
    """Return the newest element of a run. One that is damaged is passed over: another comes."""
    for name in reversed(names):
        try:
            found = read(name)
        except CheckpointDamaged:
            continue
        if found is not None and found.run == run:
            return found
    return None


def _newest_base(
    names: Sequence[str], read: Callable[[str], Manifest | None], chain: str, *, above: int
) -> Manifest | None:
    damaged: CheckpointDamaged | None = None
    for name in reversed(names):
        if number_of(name) <= above:
            break
        try:
            found = read(name) if kind_of(name) == "full" else None
        except CheckpointDamaged as error:
            damaged = damaged or error
            continue
        if found is not None and found.chain == chain:
            return found
    if damaged is not None:
        raise damaged
    return None


def _begins_anew(state: Followed, newest: Manifest) -> bool:
    """Return whether an element is of a chain that follows the topic's.

    A controller that was replaced may still end what it began before rows were restored.
    """
    later = number_of(newest.chain) > number_of(state.chain)
    return later and newest.generation >= state.newest.generation
