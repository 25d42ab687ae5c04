"""What may be deleted: by example, and for any history of full and incremental checkpoints."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay.checkpoint.manifest import Manifest, Part, SlotEntries, new_id, number_of
from backstay.checkpoint.retention import surplus, surplus_of_export
from backstay.errors import InvalidRequest


def manifest(number: int, base: int | None = None) -> Manifest:
    return Manifest(
        id=new_id(number, "0f0f0f"),
        base=None if base is None else new_id(base, "0f0f0f"),
        cluster="demo",
        cluster_uid="",
        begun=0.0,
        routing_version=1,
        generation=0,
        tables=(),
        parts=(Part("part-0-0000.safetensors", 1, "0" * 64),),
        slots=SlotEntries(
            part=np.zeros(1, np.int64),
            position=np.zeros(1, np.uint64),
            epoch=np.zeros(1, np.uint64),
            whole=np.array([base is None]),
            rows=np.zeros(1, np.uint64),
        ),
    )


def numbers(ids: list[str]) -> list[int]:
    return [number_of(each) for each in ids]


def test_the_newest_and_every_tenth_are_kept() -> None:
    history = [manifest(number) for number in range(1, 26)]
    assert numbers(surplus(history, 3, 10)) == [
        number for number in range(22, 0, -1) if number % 10
    ]
    assert numbers(surplus(history, 1)) == list(range(24, 0, -1))
    assert surplus(history, 100) == []
    assert surplus([], 1) == []


def test_what_a_kept_one_builds_on_is_kept() -> None:
    history = [manifest(1), manifest(2), manifest(3, 2), manifest(4, 3), manifest(5, 4)]
    assert numbers(surplus(history, 1)) == [1]
    assert numbers(surplus([*history, manifest(6)], 1)) == [5, 4, 3, 2, 1]
    assert numbers(surplus([*history, manifest(6)], 1, 3)) == [5, 4, 1]


def test_a_base_that_is_gone_hurts_nobody() -> None:
    assert surplus([manifest(3, 2), manifest(4, 3)], 1) == []


@pytest.mark.parametrize(("keep_last", "keep_every"), [(0, 0), (-1, 5), (1, -1)])
def test_numbers_that_would_delete_everything_are_refused(keep_last: int, keep_every: int) -> None:
    with pytest.raises(InvalidRequest, match="at least 1 and 0"):
        surplus([manifest(1)], keep_last, keep_every)


@st.composite
def histories(draw: st.DrawFn) -> list[Manifest]:
    """Checkpoints of growing numbers, each full or on any one before it."""
    steps = draw(st.lists(st.integers(1, 4), min_size=1, max_size=30))
    history: list[Manifest] = []
    for number in itertools.accumulate(steps):
        base = draw(st.sampled_from([None, *(each.number for each in history)]))
        history.append(manifest(number, base))
    return history


@given(histories(), st.integers(1, 8), st.integers(0, 6), st.randoms())
def test_any_history(history: list[Manifest], last: int, every: int, random: object) -> None:
    shuffled = list(history)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    gone = surplus(shuffled, last, every)
    by_id = {each.id: each for each in history}
    kept = by_id.keys() - set(gone)
    assert {each.id for each in history[-last:]} <= kept
    assert {each.id for each in history if every and each.number % every == 0} <= kept
    assert {each for id_ in kept if (each := by_id[id_].base) is not None} <= kept
    # Nothing is kept without a reason.
    needed = {by_id[id_].base for id_ in kept}
    for id_ in kept:
        wanted = by_id[id_] in history[-last:] or (every and by_id[id_].number % every == 0)
        assert wanted or id_ in needed
    # To delete them in this order leaves no checkpoint without its base.
    left = set(by_id)
    for id_ in gone:
        left.remove(id_)
        assert {each for other in left if (each := by_id[other].base) is not None} <= left


def test_what_the_newest_full_snapshots_of_an_export_need_is_kept() -> None:
    def ids(*numbers: int) -> list[str]:
        return [f"{'base' if one in (1, 4, 7) else 'inc'}-{one:06d}-3fa9c1" for one in numbers]

    everything = ids(1, 2, 3, 4, 5, 6, 7, 8)
    assert surplus_of_export(everything) == ids(1, 2, 3)
    assert surplus_of_export(everything[::-1]) == ids(1, 2, 3)
    assert surplus_of_export(ids(1, 2, 3, 4, 5)) == []
    assert surplus_of_export([]) == []


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 4))
def test_an_export_can_be_read_from_each_full_snapshot_that_is_kept(
    kinds: list[bool], keep: int
) -> None:
    ids = [f"{'base' if full else 'inc'}-{at:06d}-3fa9c1" for at, full in enumerate(kinds)]
    gone = surplus_of_export(ids, keep)
    kept = [one for one in ids if one not in gone]
    # What goes is the beginning: behind a full one that stays, every delta stays.
    assert gone + kept == ids
    assert sum(one.startswith("base") for one in kept) == min(keep, sum(kinds))
    assert not gone or kept[0].startswith("base")
