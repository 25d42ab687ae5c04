"""Elements for tests: a cluster of two slots, one table."""

from __future__ import annotations

import json
from collections.abc import Sequence

from backstay.checkpoint.documents import FileEntry
from backstay.checkpoint.element import Element, ExportChoice, SlotLists
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
) -> Element:
    """Return a base; without ``chain`` one that begins a chain."""
    own = f"base-{number:06d}-3fa9c1"
    return _element(
        own,
        chain or own,
        own,
        generation,
        uid,
        begun,
        _lists(position, [0] * len(position), [1] * len(position)),
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
) -> Element:
    """Return an increment of a chain."""
    own = f"inc-{number:06d}-3fa9c1"
    lists = _lists(position, since, whole or [0] * len(position))
    return _element(own, chain, chain, 0, "ab", begun, lists, tuple(left_out))


def _lists(position: Sequence[int], since: Sequence[int], whole: Sequence[int]) -> SlotLists:
    count = len(position)
    return SlotLists(
        (0,) * count,
        tuple(position),
        tuple(since),
        (1,) * count,
        tuple(whole),  # type: ignore[arg-type]
        (1,) * count,
    )


def _element(
    own: str,
    chain: str,
    of_base: str,
    generation: int,
    uid: str,
    begun: float,
    slots: SlotLists,
    left_out: tuple[int, ...],
) -> Element:
    return Element(
        format=1,
        id=own,
        run="r",
        chain=chain,
        base=of_base,
        reason="the export was started",
        cluster="c",
        cluster_uid=uid,
        generation=generation,
        begun=begun,
        every_s=1.0,
        choice=ExportChoice(("t",)),
        specs=(json.loads(SPEC.to_json()),),
        parts=(FileEntry("part-a-0000.safetensors", 100, "0" * 64),),
        slots=slots,
        left_out=left_out,
        base_bytes=100,
        bytes_since_base=0,
    )
