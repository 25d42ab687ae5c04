"""The rules of a chain of snapshots: when a full one is due, what fits, what a reader takes. Pure.

A chain begins with a full snapshot; each delta has what changed since. In a checkpoint's chain each
delta adds to the one before as a whole. An export's is read slot by slot, by positions: see
docs/adr/0018. Imports the manifest, ``backstay.errors`` and ``backstay.tables``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from backstay.checkpoint.manifest import Manifest, number_of
from backstay.errors import CheckpointDamaged
from backstay.tables import TableSpec

__all__ = [
    "CHAIN_LENGTH_MAX",
    "EXPORT_RULE",
    "Followed",
    "FullRule",
    "Step",
    "after_delta",
    "after_full",
    "begins_anew",
    "check_chain",
    "first_whole",
    "full_is_due",
]

# Checkpoints that one restore reads; a full one is due long before.
CHAIN_LENGTH_MAX = 1_000
NAMES_MAX = 8


@dataclass(frozen=True)
class FullRule:
    """When a full snapshot is due.

    Attributes:
        deltas: After so many deltas, however small they are: a reader that begins reads them all.
        by_size_after: When the deltas are together as large as the full snapshot, but not before
            there are so many of them; None: their size does not count.
    """

    deltas: int
    by_size_after: int | None = None


EXPORT_RULE = FullRule(deltas=1_000, by_size_after=10)


def full_is_due(rule: FullRule, deltas: int, delta_bytes: int = 0, full_bytes: int = 0) -> bool:
    """Return whether the next snapshot is to be a full one.

    Args:
        rule: When it is.
        deltas: How many there are since the newest full one.
        delta_bytes: Of the parts of these.
        full_bytes: Of the parts of the full one.
    """
    if deltas >= rule.deltas:
        return True
    large = delta_bytes >= max(full_bytes, 1)
    return rule.by_size_after is not None and deltas >= rule.by_size_after and large


def check_chain(chain: Sequence[Manifest]) -> None:
    """Refuse checkpoints that do not build on each other, oldest first.

    Raises:
        CheckpointDamaged: The message names the one that does not fit.
    """
    if chain[0].base is not None:
        raise CheckpointDamaged(f"{chain[0].id} is not full, and nothing is before it")
    for older, newer in itertools.pairwise(chain):
        where = f"{newer.id}, which builds on {older.id},"
        if newer.base != older.id:
            raise CheckpointDamaged(f"{newer.id} does not build on {older.id}")
        if newer.slot_count != older.slot_count:
            raise CheckpointDamaged(f"{where} has {newer.slot_count} slots, not {older.slot_count}")
        if newer.cluster_uid != older.cluster_uid:
            raise CheckpointDamaged(f"{where} is of another cluster")
        specs = {spec.name: spec for spec in older.tables}
        for spec in newer.tables:
            if specs.get(spec.name, spec) != spec:
                raise CheckpointDamaged(f"{where} has other settings of table {spec.name!r}")
        added = ~newer.slots.whole
        same = newer.slots.epoch == older.slots.epoch
        grown = newer.slots.position >= older.slots.position
        if not (same & grown)[added].all():
            slot = int(np.flatnonzero(added & ~(same & grown))[0])
            raise CheckpointDamaged(f"{where} has changes of another epoch of slot {slot}")


def first_whole(chain: Sequence[Manifest]) -> NDArray[np.int64]:
    """Return, for each slot, where reading begins: at the newest of a chain that has it whole."""
    whole = np.array([manifest.slots.whole for manifest in chain])
    first: NDArray[np.int64] = len(chain) - 1 - np.argmax(whole[::-1], axis=0)
    return first


@dataclass(frozen=True, eq=False)
class Followed:
    """What a follower of an export has of each slot.

    Attributes:
        newest: The snapshot that it has taken last.
        number: No snapshot up to this number is wanted any more.
        position: Where each slot is, uint64.
        as_of: Unix time for each slot: it has every push that was acknowledged before; float64.
    """

    newest: Manifest
    number: int
    position: NDArray[np.uint64]
    as_of: NDArray[np.float64]

    @property
    def chain(self) -> str:
        """The full snapshot that its chain began with."""
        return self.newest.chain

    @property
    def specs(self) -> tuple[TableSpec, ...]:
        """Descriptions of its tables."""
        return self.newest.tables


@dataclass(frozen=True, eq=False)
class Step:
    """What a follower makes of a snapshot.

    Attributes:
        state: What the follower has afterwards.
        slots: The slots to take from the snapshot's parts, ascending.
        missing: Why it does not fit; empty if it does. The state is as before then.
    """

    state: Followed
    slots: NDArray[np.int64]
    missing: str = ""


def begins_anew(state: Followed | None, full: Manifest) -> bool:
    """Return whether a full snapshot begins a chain that is to be followed from now on."""
    if state is None:
        return True
    newest = state.newest
    is_older = full.number < number_of(newest.chain) and full.begun <= newest.begun
    if full.chain == newest.chain or is_older:
        return False
    # A controller that was replaced may still end what it began before rows were restored.
    return full.cluster_uid != newest.cluster_uid or full.generation >= newest.generation


def after_full(state: Followed | None, full: Manifest) -> Step:
    """Take what is newer in a full snapshot: all of it, if it begins a chain."""
    position = full.slots.position
    if state is None or state.chain != full.chain:
        slots = np.arange(full.slot_count)
        as_of = np.full(full.slot_count, full.begun)
        return Step(Followed(full, full.number, position, as_of), slots)
    newer = position > state.position
    after = replace(
        state,
        newest=full if full.number > state.number else state.newest,
        number=max(full.number, state.number),
        position=np.maximum(position, state.position),
        as_of=np.where(position >= state.position, full.begun, state.as_of).clip(state.as_of),
    )
    return Step(after, np.flatnonzero(newer))


def after_delta(state: Followed, delta: Manifest) -> Step:
    """Take a delta of the chain that is followed, if nothing is missing before it."""
    position, since = delta.slots.position, delta.slots.since
    assert since is not None, "an export's slots have it"
    newer = position > state.position
    gaps = np.flatnonzero(newer & ~delta.slots.whole & (since > state.position))
    if len(gaps):
        some = ", ".join(map(str, gaps[:NAMES_MAX].tolist()))
        return Step(
            state,
            np.empty(0, np.int64),
            f"{delta.id} does not follow {state.newest.id}: changes of {len(gaps)} slots "
            f"({some}, ...) are missing between them",
        )
    is_told = np.ones(delta.slot_count, np.bool_)
    is_told[list(delta.left_out)] = False
    is_told &= position >= state.position
    after = Followed(
        newest=delta,
        number=delta.number,
        position=np.maximum(position, state.position),
        as_of=np.where(is_told, np.maximum(delta.begun, state.as_of), state.as_of),
    )
    return Step(after, np.flatnonzero(newer))
