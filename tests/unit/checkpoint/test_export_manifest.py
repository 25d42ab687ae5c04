"""Manifests of snapshots of an export, which are refused if they contradict themselves."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from backstay.checkpoint.documents import write_object
from backstay.checkpoint.manifest import Manifest, is_id, kind_of, new_id, number_of
from backstay.errors import CheckpointDamaged, InvalidRequest
from backstay.tables import SGD, TableSpec
from tests.unit.serving.elements import base, increment

SPEC = TableSpec.sparse("t", dim=2, optimizer=SGD(0.1))


def changed(change: dict[str, Any]) -> Manifest:
    """Read a manifest after a change by somebody who makes the checksum right again."""
    document = json.loads(base().to_json())
    del document["checksum"]
    slots = {name: change.pop(name) for name in list(change) if name in document["slots"]}
    document["slots"] |= slots
    return Manifest.from_json(write_object({**document, **change}), "there")


def test_what_is_written_is_read() -> None:
    for one in (base(), increment(8, [5, 5], since=[3, 0], left_out=[1])):
        assert Manifest.from_json(one.to_json(), "there") == one
        assert one.tables == (SPEC,)
    assert (base().kind, increment(8, [5, 5]).kind) == ("full", "delta")


def test_what_is_damaged_is_named() -> None:
    text = base().to_json()
    for wrong in (text[:-20], text.replace('"begun":100.0', '"begun":101.0'), "{}", ""):
        with pytest.raises(CheckpointDamaged, match="there"):
            Manifest.from_json(wrong, "there")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"id": "base-7-3fa9c1"}, "no export id"),
        ({"id": "../../etc"}, "no export id"),
        ({"id": "ckpt-000007-3fa9c1"}, "no export id"),
        ({"chain": "inc-000002-3fa9c1"}, "no full snapshot"),
        ({"format": 2}, "format: 2; this version reads format 1 only"),
        ({"specs": []}, "specs"),
        ({"left_out": [-1]}, "left_out"),
        ({"left_out": [2]}, "left_out"),
        ({"begun": -1.0}, "begun"),
        ({"parts": [{"file": "../x", "bytes": 1, "sha256": "0"}]}, "no part's name"),
        ({"part": [0, 2]}, "names 2"),
        ({"part": [0, -2]}, "names -2"),
        ({"whole": [1, 0]}, "not whole"),
        ({"position": [1, 2, 3]}, "one entry for each slot"),
        ({name: [] for name in ("part", "position", "since", "epoch", "whole", "rows")}, "power"),
    ],
)
def test_what_contradicts_itself_is_refused(change: dict[str, Any], what: str) -> None:
    with pytest.raises(CheckpointDamaged, match=f"there: .*{what}"):
        changed(change)


def test_a_delta_is_no_full_snapshot() -> None:
    document = json.loads(increment(8, [5, 5]).to_json())
    del document["checksum"]
    document |= {"id": "base-000008-3fa9c1", "base": "base-000008-3fa9c1"}
    with pytest.raises(CheckpointDamaged, match="not whole"):
        Manifest.from_json(write_object(document))


def test_ids_are_names_of_folders_and_nothing_else() -> None:
    assert new_id(7, "3fa9c1", "base") == "base-000007-3fa9c1"
    assert new_id(1_234_567, "3fa9c1", "inc") == "inc-1234567-3fa9c1"
    assert number_of("inc-1234567-3fa9c1") == 1_234_567
    assert kind_of("inc-000007-3fa9c1") == "delta"
    for wrong in ("inc-0000007-3fa9c1", "inc-7-3fa9c1", "ckpt-000007-3fa9c1", "inc-000007-3fa9c1/"):
        assert kind_of(wrong) is None
        assert not is_id(wrong, "export")
    with pytest.raises(InvalidRequest):
        new_id(7, "x", "base")


def test_slots_of_an_export_say_since_when() -> None:
    with pytest.raises(InvalidRequest, match="one entry for each slot"):
        increment(8, [5, 5], since=np.array([3]).tolist())
