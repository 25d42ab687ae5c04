"""Snapshots of an export for tests: a cluster of two slots, one table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backstay.checkpoint.manifest import ExportChoice, Manifest, Part, SlotEntries
from backstay.tables import SGD, TableSpec

__all__ = ["BASE", "base", "increment"]

BASE = "base-000007-3fa9c1"
SPEC = TableSpec.sparse("t", dim=2, optimizer=SGD(0.1))


def base(
    number: int = 7,
    position: Sequence[int] = (3, 3),
    *,
    chain: str = "",
    generation: int = 0,
    uid: str = "ab",
    begun: float = 100.0,
) -> Manifest:
    """Return a base; without ``chain`` one that begins a chain."""
    own = f"base-{number:06d}-3fa9c1"
    return _element(
        own,
        chain or own,
        own,
        generation,
        uid,
        begun,
        _entries(position, [0] * len(position), [1] * len(position)),
        (),
    )


def increment(
    number: int,
    position: Sequence[int],
    *,
    since: Sequence[int] = (3, 3),
    whole: Sequence[int] = (),
    left_out: Sequence[int] = (),
    chain: str = BASE,
    begun: float = 200.0,
) -> Manifest:
    """Return an increment of a chain."""
    own = f"inc-{number:06d}-3fa9c1"
    lists = _entries(position, since, whole or [0] * len(position))
    return _element(own, chain, chain, 0, "ab", begun, lists, tuple(left_out))


def _entries(position: Sequence[int], since: Sequence[int], whole: Sequence[int]) -> SlotEntries:
    count = len(position)
    return SlotEntries(
        part=np.zeros(count, np.int64),
        position=np.array(position, np.uint64),
        epoch=np.ones(count, np.uint64),
        whole=np.array(whole, np.bool_),
        rows=np.ones(count, np.uint64),
        since=np.array(since, np.uint64),
    )


def _element(
    own: str,
    chain: str,
    of_base: str,
    generation: int,
    uid: str,
    begun: float,
    slots: SlotEntries,
    left_out: tuple[int, ...],
) -> Manifest:
    return Manifest(
        id=own,
        run="r",
        chain=chain,
        base=None if of_base == own else of_base,
        reason="the export was started",
        cluster="c",
        cluster_uid=uid,
        generation=generation,
        begun=begun,
        every_s=1.0,
        choice=ExportChoice(("t",)),
        tables=(SPEC,),
        parts=(Part("part-a-0000.safetensors", 100, "0" * 64),),
        slots=slots,
        left_out=left_out,
        base_bytes=100,
        bytes_since_base=0,
    )
