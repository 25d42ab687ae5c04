"""Judges a run: values in, a verdict out; no clock, no socket, no randomness.

Every acknowledged push adds 1 to each of its keys. At the end, the table must hold exactly the
acknowledged pushes, plus those of the pushes whose outcome stayed unknown that were applied; such
a push counts 0 or 1 in each slot, the same for all its keys there. Anything else is a loss, a
duplicate, or a push that was cut in pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tests.chaos.history import History, Push, keys_of

__all__ = ["Copy", "SavedTable", "Verdict", "judge", "judge_checkpoints"]

# Choices of which pushes of unknown outcome a slot has, tried before giving up.
SEARCH_LIMIT = 200_000
EXAMPLES_MAX = 10


@dataclass(frozen=True)
class Copy:
    """What one node holds of a slot, after everything has come to rest."""

    node: str
    slot: int
    term: int
    position: int
    digest: int


@dataclass(frozen=True)
class SavedTable:
    """The counter table as a checkpoint has it.

    Attributes:
        id: The checkpoint's.
        begun_ns: When it was asked for.
        ended_ns: When its caller was told that it is whole.
        rows: Row of each key [universe, dim].
    """

    id: str
    begun_ns: int
    ended_ns: int
    rows: NDArray[np.float32]


@dataclass
class Verdict:
    """The judgement, with what it rests on.

    Attributes:
        verdict: true, false, or unknown where the evidence does not suffice for either.
        acknowledged: Pushes that their trainers were told are applied.
        unknown_outcome: Pushes whose trainers were killed or gave up before they knew.
        lost: Updates of single keys that are missing.
        duplicated: Updates of single keys that are there and may not be.
        torn: Slots that hold a part of a push of unknown outcome, rather than all or nothing.
        stale_reads: Pulls that showed less than their own trainer had acknowledged.
        unequal: Slots whose replicas differ.
        checkpoints: Checkpoints whose callers were told that they are whole.
        checkpoint_faults: What is wrong with finished checkpoints, and keys of which the last one
            has fewer updates than were acknowledged before it, or more than were begun by its end.
        reads: Pulls that were checked.
        why: The first findings, in words.
    """

    verdict: Literal["true", "false", "unknown"] = "unknown"
    acknowledged: int = 0
    unknown_outcome: int = 0
    lost: int = 0
    duplicated: int = 0
    torn: int = 0
    stale_reads: int = 0
    unequal: int = 0
    checkpoints: int = 0
    checkpoint_faults: int = 0
    reads: int = 0
    why: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        """Return it as JSON has it."""
        return asdict(self)


def judge(
    histories: Sequence[History],
    table: NDArray[np.float32] | None,
    slot_of_key: NDArray[np.uint32],
    copies: Mapping[int, Sequence[Copy]] | None,
    replicas: int,
) -> Verdict:
    """Judge a run.

    Args:
        histories: Those of all trainer processes.
        table: Row of each key at the end [universe, dim]; None if it could not be read.
        slot_of_key: [universe].
        copies: By slot; None if they could not be compared.
        replicas: How many copies each slot should have.
    """
    result = Verdict()
    pushes = [push for history in histories for push in history.pushes.values()]
    result.acknowledged = sum(push.outcome == "acknowledged" for push in pushes)
    result.unknown_outcome = sum(push.outcome == "unknown" for push in pushes)
    result.reads = sum(history.reads for history in histories)
    for history in histories:
        result.stale_reads += len(history.stale)
        result.why += history.stale
    undecided = False
    if table is None:
        undecided = True
        result.why.append("the table could not be read at the end")
    else:
        undecided |= not _judge_table(result, histories, table, slot_of_key)
    if copies is None:
        undecided = True
        result.why.append("the replicas could not be compared at the end")
    else:
        _judge_copies(result, copies, replicas)
    if result.acknowledged == 0:
        undecided = True
        result.why.append("not one push was acknowledged")
    found = result.lost + result.duplicated + result.torn + result.stale_reads + result.unequal
    result.why = result.why[:EXAMPLES_MAX]
    result.verdict = "false" if found else "unknown" if undecided else "true"
    return result


def judge_checkpoints(
    result: Verdict,
    histories: Sequence[History],
    complaints: Sequence[str],
    saved: SavedTable | None,
) -> None:
    """Add to a verdict what is to be said of the checkpoints.

    Args:
        result: The verdict on the rest.
        histories: Those of all trainer processes.
        complaints: What is wrong with the files.
        saved: The last checkpoint, restored; None if there is none.
    """
    result.checkpoint_faults = len(complaints)
    why = list(complaints)
    if saved is not None:
        least = np.zeros(len(saved.rows), dtype=np.int64)
        most = np.zeros(len(saved.rows), dtype=np.int64)
        for history in histories:
            for push in history.pushes.values():
                if push.begun_ns > saved.ended_ns or push.outcome == "not_applied":
                    continue
                keys = keys_of(history.shape, push.stream, push.sequence)
                most[keys] += 1
                if push.outcome == "acknowledged" and push.ended_ns <= saved.begun_ns:
                    least[keys] += 1
        low = saved.rows.min(axis=1) < least
        high = saved.rows.max(axis=1) > most
        for key in np.flatnonzero(low | high).tolist():
            result.checkpoint_faults += 1
            why.append(
                f"{saved.id}, key {key}: {saved.rows[key].tolist()}, "
                f"not {least[key]} to {most[key]}"
            )
    if result.checkpoint_faults:
        result.verdict = "false"
        result.why = (why + result.why)[:EXAMPLES_MAX]


def _judge_table(
    result: Verdict,
    histories: Sequence[History],
    table: NDArray[np.float32],
    slot_of_key: NDArray[np.uint32],
) -> bool:
    """Compare the table with the histories; return whether every slot could be decided."""
    expected = np.zeros(len(table), dtype=np.int64)
    unknown: list[tuple[Push, NDArray[np.uint64]]] = []
    for history in histories:
        for push in history.pushes.values():
            if push.outcome == "not_applied":
                continue
            keys = keys_of(history.shape, push.stream, push.sequence)
            if push.outcome == "acknowledged":
                expected[keys] += 1
            else:
                unknown.append((push, keys))
    # Doubled updates of a row are integers too; anything else is no sum of updates.
    ragged = np.flatnonzero((table != np.rint(table[:, :1])).any(axis=1))
    for key in ragged.tolist():
        result.torn += 1
        result.why.append(f"key {key}: not an integer number of updates: {table[key].tolist()}")
    surplus = np.rint(table[:, 0]).astype(np.int64) - expected
    decided = True
    order = np.argsort(slot_of_key, kind="stable")
    bounds = np.flatnonzero(np.diff(slot_of_key[order])) + 1
    for keys_of_slot in np.split(order, bounds):
        decided &= _judge_slot(result, keys_of_slot, surplus, unknown, slot_of_key)
    return decided


def _judge_slot(
    result: Verdict,
    keys_of_slot: NDArray[np.int64],
    surplus: NDArray[np.int64],
    unknown: Sequence[tuple[Push, NDArray[np.uint64]]],
    slot_of_key: NDArray[np.uint32],
) -> bool:
    here = surplus[keys_of_slot]
    slot = int(slot_of_key[keys_of_slot[0]])
    masks = [mask for _, keys in unknown if (mask := np.isin(keys_of_slot, keys)).any()]
    most = np.sum(masks, axis=0) if masks else np.zeros(len(here), dtype=np.int64)
    lost, doubled = np.minimum(here, 0), np.maximum(here - most, 0)
    result.lost -= int(lost.sum())
    result.duplicated += int(doubled.sum())
    for key, off, over in zip(keys_of_slot, lost, doubled, strict=True):
        if off or over:
            text = f"{-off} missing" if off else f"{over} too many"
            result.why.append(f"slot {slot}, key {key}: {text}")
    if lost.any() or doubled.any():
        return True
    found = _explained(here, masks)
    if found is False:
        result.torn += 1
        result.why.append(
            f"slot {slot}: no choice of whole pushes among {len(masks)} of unknown outcome gives "
            "what is there"
        )
    elif found is None:
        result.why.append(f"slot {slot}: too many pushes of unknown outcome to decide")
    return found is not None


def _explained(surplus: NDArray[np.int64], masks: list[NDArray[np.bool_]]) -> bool | None:
    """Whether some of the pushes add up to the surplus; None if that takes too long to find."""
    steps = 0

    def search(rest: NDArray[np.int64], open_: list[NDArray[np.bool_]]) -> bool | None:
        nonlocal steps
        while True:
            steps += 1
            if steps > SEARCH_LIMIT:
                return None
            if not open_:
                return not rest.any()
            most = np.sum(open_, axis=0)
            if (rest < 0).any() or (rest > most).any():
                return False
            # A key where all or none of them must count decides the pushes that have it.
            forced = np.flatnonzero((most > 0) & ((rest == 0) | (rest == most)))
            if not len(forced):
                break
            key = forced[0]
            if rest[key]:
                rest = rest - np.sum([mask for mask in open_ if mask[key]], axis=0)
            open_ = [mask for mask in open_ if not mask[key]]
        first, others = open_[0], open_[1:]
        for take in (first, np.zeros_like(first)):
            found = search(rest - take, others)
            if found or found is None:
                return found
        return False

    return search(surplus, masks)


def _judge_copies(result: Verdict, copies: Mapping[int, Sequence[Copy]], replicas: int) -> None:
    for slot, held in sorted(copies.items()):
        different = {(copy.term, copy.position, copy.digest) for copy in held}
        if len(held) != replicas or len(different) != 1:
            result.unequal += 1
            shown = ", ".join(
                f"{copy.node}: term {copy.term} position {copy.position} digest {copy.digest:x}"
                for copy in held
            )
            result.why.append(f"slot {slot}: {len(held)} of {replicas} copies ({shown})")
