"""Manifests of elements of an export, which are refused if they contradict themselves."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from backstay.checkpoint.documents import write_object
from backstay.checkpoint.element import (
    Element,
    SlotLists,
    base_is_due,
    element_id,
    kind_of,
    number_of,
    surplus,
)
from backstay.errors import CheckpointDamaged, InvalidRequest
from backstay.tables import SGD, TableSpec
from tests.unit.serving.elements import base, increment

SPEC = TableSpec.sparse("t", dim=2, optimizer=SGD(0.1))


def test_what_is_written_is_read() -> None:
    for one in (base(), increment(8, [5, 5], since=[3, 0], left_out=[1])):
        assert Element.from_text(one.text(), "there") == one
        assert one.tables == (SPEC,)


def test_what_is_damaged_is_named() -> None:
    text = base().text()
    for wrong in (text[:-20], text.replace('"begun":100.0', '"begun":101.0'), "{}", ""):
        with pytest.raises(CheckpointDamaged, match="there"):
            Element.from_text(wrong, "there")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"id": "base-7-3fa9c1"}, "no id"),
        ({"id": "../../etc"}, "no id"),
        ({"chain": "inc-000002-3fa9c1"}, "is an increment"),
        ({"format": 2}, "format"),
        ({"specs": []}, "specs"),
        ({"left_out": [-1]}, "left_out"),
        ({"parts": [{"file": "../x", "bytes": 1, "sha256": "0"}]}, "leads out"),
    ],
)
def test_what_contradicts_itself_is_refused(change: dict[str, Any], what: str) -> None:
    document = json.loads(base().text())
    del document["checksum"]
    with pytest.raises(CheckpointDamaged, match=what):
        Element.from_text(write_object({**document, **change}), "there")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"part": (0, 2)}, "names 2"),
        ({"part": (0, -2)}, "names -2"),
        ({"whole": (1, 0)}, "not whole"),
        ({"position": (1, 2, 3)}, "an entry for each slot"),
    ],
)
def test_lists_that_do_not_fit_are_refused(change: dict[str, Any], what: str) -> None:
    document = json.loads(base().text())
    del document["checksum"]
    document["slots"] |= {name: list(values) for name, values in change.items()}
    with pytest.raises(CheckpointDamaged, match=what):
        Element.from_text(write_object(document), "there")


def test_ids_are_names_of_folders_and_nothing_else() -> None:
    assert element_id("base", 7, "3fa9c1") == "base-000007-3fa9c1"
    assert element_id("increment", 1_234_567, "3fa9c1") == "inc-1234567-3fa9c1"
    assert number_of("inc-1234567-3fa9c1") == 1_234_567
    assert kind_of("inc-000007-3fa9c1") == "increment"
    for wrong in ("inc-0000007-3fa9c1", "inc-7-3fa9c1", "ckpt-000007-3fa9c1", "inc-000007-3fa9c1/"):
        assert kind_of(wrong) is None
    with pytest.raises(InvalidRequest):
        element_id("base", 7, "x")


def test_a_base_is_due_when_the_increments_are_large_or_many() -> None:
    def after(count: int, size: int) -> Element:
        return replace(increment(7 + count, [5, 5]), base_bytes=1000, bytes_since_base=size)

    assert not base_is_due(after(9, 5000))
    assert base_is_due(after(10, 1000))
    assert not base_is_due(after(999, 999))
    assert base_is_due(after(1000, 0))


def test_what_the_newest_bases_need_is_kept() -> None:
    def ids(*numbers: int) -> list[str]:
        kinds = {1: "base", 4: "base", 7: "base"}
        return [f"{kinds.get(one, 'inc')}-{one:06d}-3fa9c1" for one in numbers]

    everything = ids(1, 2, 3, 4, 5, 6, 7, 8)
    assert surplus(everything) == ids(1, 2, 3)
    assert surplus(everything[::-1]) == ids(1, 2, 3)
    assert surplus(ids(1, 2, 3, 4, 5)) == []
    assert surplus([]) == []


def test_lists_of_no_slot_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="an entry for each slot"):
        SlotLists((), (), (), (), (), ())
