"""The manifest as a value: there and back, and every way in which one may be wrong."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backstay.checkpoint.documents import write_object
from backstay.checkpoint.manifest import (
    Manifest,
    Part,
    SlotEntries,
    check_part_name,
    is_id,
    new_id,
    number_of,
)
from backstay.errors import CheckpointDamaged, InvalidRequest
from backstay.tables import Adam, TableSpec

Document = dict[str, Any]


def manifest(**changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "id": "ckpt-000007-3fa9c1",
        "base": "ckpt-000006-000000",
        "cluster": "demo",
        "cluster_uid": "00ff",
        "begun": 1_795_298_400.5,
        "routing_version": 12,
        "generation": 0,
        "tables": (TableSpec.sparse("ads", 4, optimizer=Adam()), TableSpec.dense("w", (2, 3))),
        "parts": (
            Part("part-6b1f0c2a-0000.safetensors", 100, "a" * 64),
            Part("part-90aa41d3-0000.safetensors", 200, "b" * 64),
        ),
        "slots": SlotEntries(
            part=np.array([0, 1, 1, 0]),
            position=np.array([5, 6, 7, 2**63 - 1], np.uint64),
            epoch=np.ones(4, np.uint64),
            whole=np.array([True, False, False, True]),
            rows=np.array([0, 1, 2, 3], np.uint64),
        ),
        "tags": {"pass": 3, "loss": 0.25, "name": "größer"},
        "progress": {"job": {"pass": 3, "tasks": [[1, 2], None]}},
    }
    return Manifest(**(values | changes))


def test_a_manifest_comes_back_as_it_was() -> None:
    text = manifest().to_json()
    back = Manifest.from_json(text)
    assert back == manifest()
    assert back.to_json() == text
    assert back.slots.position.dtype == np.uint64
    assert not back.slots.rows.flags.writeable
    assert (back.kind, back.number, back.slot_count, back.total_bytes) == ("delta", 7, 4, 300)
    assert (back.created, back.rows) == ("2026-11-21T22:00:00.500+00:00", 6)
    assert back.table("w") == manifest().tables[1]
    with pytest.raises(InvalidRequest, match="no table 'x'; it has: ads, w"):
        back.table("x")
    assert back != replace(back, generation=1)


def test_the_checksum_is_the_one_of_the_format_page() -> None:
    document = json.loads(manifest().to_json())
    said = document.pop("checksum")
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert said == hashlib.sha256(text.encode("utf-8")).hexdigest()
    assert "größer" in text


def test_a_manifest_is_read_whatever_its_spaces_and_order() -> None:
    document = json.loads(manifest().to_json())
    text = json.dumps(dict(reversed(document.items())), indent=3)
    assert Manifest.from_json(text) == manifest()


def test_ids() -> None:
    assert new_id(7, "3fa9c1") == "ckpt-000007-3fa9c1"
    assert new_id(10**12 - 1, "000000") == "ckpt-999999999999-000000"
    assert number_of("ckpt-1234567-abcdef") == 1234567
    for number, digits in ((-1, "000000"), (10**12, "000000"), (1, "00000"), (1, "00000G")):
        with pytest.raises(InvalidRequest, match="checkpoint id"):
            new_id(number, digits)
    with pytest.raises(InvalidRequest, match="no checkpoint id"):
        number_of("ckpt-7-abcdef")


@pytest.mark.parametrize(
    "text",
    [
        "", "..", "ckpt-000007-3fa9c1/..", "../ckpt-000007-3fa9c1", "ckpt-000007-3fa9c1\n",
        "ckpt-0000007-3fa9c1", "ckpt-000007-3FA9C1", "x/ckpt-000007-3fa9c1",
        "ckpt-\u0660\u0660\u0660\u0660\u0660\u0667-3fa9c1", "ckpt-000007-3fa9c1.tmp",
    ],
)  # fmt: skip
def test_names_that_lead_elsewhere_are_no_ids(text: str) -> None:
    assert not is_id(text)


@pytest.mark.parametrize(
    "name",
    [
        "", "..", "/etc/passwd", "../part-6b1f0c2a-0000.safetensors", "a/../../b",
        "part-6b1f0c2a-0000.safetensors/..", "part-6b1f0c2a-0000.safetensors\0",
        "part-../../-0000.safetensors", "part-6b1f0c2a-0000.safetensors.tmp",
        "part-6b1f0c2a-0000.pickle", "manifest.json", "..\\part-6b1f0c2a-0000.safetensors",
    ],
)  # fmt: skip
def test_path_traversal_in_the_name_of_a_part_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="no part's name"):
        check_part_name(name)
    # And from a file, whose checksum the attacker has made right.
    with pytest.raises(CheckpointDamaged, match="no part's name"):
        read_changed(lambda document: document["parts"][0].update(file=name))


def read_changed(change: Callable[[Document], object]) -> Manifest:
    """Read a manifest after a change by somebody who makes the checksum right again."""
    document = json.loads(manifest().to_json())
    del document["checksum"]
    change(document)
    return Manifest.from_json(write_object(document), "the-file")


def set_to(*path: Any) -> Callable[[Document], None]:
    *steps, name, value = path

    def change(document: Document) -> None:
        for step in steps:
            document = document[step]
        document[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param(
            set_to("format", 3), "format: 3; this version reads format 2 only", id="newer"
        ),
        pytest.param(set_to("format", True), "format: ", id="format is true"),
        pytest.param(set_to("more", 1), "more: Unexpected", id="more fields"),
        pytest.param(lambda d: d.pop("tags"), "tags: Field required", id="fewer"),
        pytest.param(set_to("id", "../../etc"), "no checkpoint id", id="path traversal in id"),
        pytest.param(set_to("base", "../base"), "with the base", id="path traversal in base"),
        pytest.param(
            set_to("kind", "partial"), "kind: Input should be 'full' or 'incremental'", id="kind"
        ),
        pytest.param(set_to("kind", "full"), "kind 'full' with the base", id="full, base"),
        pytest.param(
            set_to("base", None), "kind 'incremental' with the base None", id="incremental, no base"
        ),
        pytest.param(lambda d: d.update(kind="full", base=None), "not whole", id="full, not whole"),
        pytest.param(set_to("base", "ckpt-000007-3fa9c1"), "is not before", id="its own base"),
        pytest.param(set_to("base", "ckpt-000008-000000"), "is not before", id="a cycle in bases"),
        pytest.param(set_to("cluster", ""), "cluster is not", id="no cluster"),
        pytest.param(set_to("cluster_uid", "xyz"), "not hexadecimal", id="uid"),
        pytest.param(set_to("created", "yesterday"), "no time", id="time"),
        pytest.param(set_to("created", "2026-11-21T22:00:00+01:00"), "no time", id="not UTC"),
        pytest.param(set_to("routing_version", -1), "routing_version: .* greater", id="version"),
        pytest.param(set_to("generation", 2**63), "generation: .* less", id="generation"),
        pytest.param(set_to("slot_count", 8), "has 4 entries, slot_count 8", id="missing slots"),
        pytest.param(set_to("slot_count", 2**40), "slot_count", id="many slots"),
        pytest.param(set_to("slot_count", 0), "has 4 entries, slot_count 0", id="no slots"),
        pytest.param(
            lambda d: [d["slots"][name].pop() for name in d["slots"]] and d.update(slot_count=3),
            "no power of two",
            id="three slots",
        ),
        pytest.param(
            lambda d: d["slots"]["rows"].pop(), "each slot must be there once", id="missing slot"
        ),
        pytest.param(
            lambda d: d["slots"]["part"].append(0), "each slot must be there once", id="slot more"
        ),
        pytest.param(
            set_to("slots", "part", 0, 2), "names 2, a part that is not", id="no such part"
        ),
        pytest.param(
            set_to("slots", "part", 0, -1),
            "names -1, a part that is not",
            id="part before the first",
        ),
        pytest.param(set_to("slots", "whole", 0, 2), "slots.whole.*0 or 1", id="more than whole"),
        pytest.param(set_to("slots", "rows", 0, 1.0), "slots.rows.*integer", id="fraction"),
        pytest.param(
            set_to("slots", "rows", 0, True), "slots.rows.*integer", id="true is no number"
        ),
        pytest.param(
            set_to("slots", "position", 0, 2**63), "slots.position.*less", id="position too high"
        ),
        pytest.param(set_to("slots", "epoch", 0, 10**400), "slots.epoch", id="epoch of 400 digits"),
        pytest.param(
            lambda d: d.update(parts=[], slots=d["slots"] | {"part": [-1] * 4}),
            "0 parts",
            id="no parts, a slot left out",
        ),
        pytest.param(set_to("parts", []), "0 parts", id="no parts"),
        pytest.param(set_to("parts", [[]]), "parts", id="part is a list"),
        pytest.param(
            lambda d: d["parts"].append(d["parts"][0]), "a part appears more", id="part twice"
        ),
        pytest.param(set_to("parts", 0, "bytes", 0), "bytes: .* greater", id="no bytes"),
        pytest.param(set_to("parts", 0, "sha256", "00"), "sha256 of part-6b1f0c2a", id="sha256"),
        pytest.param(
            lambda d: d["tables"].append(d["tables"][0]), "a table appears more", id="table twice"
        ),
        pytest.param(set_to("tables", 0, "id", 5), "is not that of table 'ads'", id="table's id"),
        pytest.param(
            set_to("tables", 0, "spec", "name", "a b"), 'name is "a b"', id="table's name"
        ),
        pytest.param(set_to("tables", 0, "spec", {}), "table description", id="no settings"),
        pytest.param(set_to("tags", "x", [1]), "tag 'x'", id="tag is a list"),
        pytest.param(set_to("tags", "x", "y" * 1001), "tag 'x'", id="long tag"),
        pytest.param(set_to("tags", "", 1), "a tag's name", id="tag without a name"),
        pytest.param(set_to("progress", []), "progress: Input should be an object", id="progress"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused_by_name(
    change: Callable[[Document], object], reason: str
) -> None:
    with pytest.raises(CheckpointDamaged, match=f"the-file: .*{reason}"):
        read_changed(change)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param("", "not a JSON object", id="empty"),
        pytest.param(manifest().to_json()[:-1], "not a JSON object", id="truncated"),
        pytest.param("[]", "not a JSON object", id="a list"),
        pytest.param("{}", "checksum is wrong", id="nothing in it"),
        pytest.param("[" * 100_000, "not a JSON object", id="nested without end"),
        pytest.param('{"a":' * 100_000, "not a JSON object", id="objects without end"),
        pytest.param(manifest().to_json() * 2, "not a JSON object", id="two manifests in a file"),
        pytest.param(
            '{"id":"ckpt-000001-000000",' + manifest().to_json()[1:],
            "a name appears twice",
            id="two ids",
        ),
        pytest.param(
            manifest().to_json().replace('"pass":3', '"pass":4'), "checksum is wrong", id="edited"
        ),
        pytest.param(
            manifest().to_json().replace("0.25", "NaN"), "NaN is not JSON", id="NaN in a tag"
        ),
        pytest.param(
            manifest().to_json().replace("0.25", "1e999"), "written as JSON", id="infinity in a tag"
        ),
        pytest.param(
            manifest().to_json().replace("demo", "\\ud800"), "written as JSON", id="half a letter"
        ),
        pytest.param(
            manifest().to_json().replace(":12,", ":" + "9" * 5000 + ","), "digits", id="long number"
        ),
        pytest.param(b"\xff\xfe\x00", "not a JSON object", id="not UTF-8"),
    ],
)
def test_a_damaged_manifest_is_refused_by_name(text: str | bytes, reason: str) -> None:
    with pytest.raises(CheckpointDamaged, match=f"the-file: .*{reason}"):
        Manifest.from_json(text, "the-file")


def test_every_flipped_bit_of_a_manifest_is_noticed() -> None:
    content = bytearray(manifest().to_json().encode())
    for place in range(len(content)):
        content[place] ^= 1 << (place % 8)
        with pytest.raises(CheckpointDamaged):
            Manifest.from_json(bytes(content))
        content[place] ^= 1 << (place % 8)


def test_a_manifest_that_is_made_wrong_is_refused_too() -> None:
    with pytest.raises(InvalidRequest, match="is not before"):
        manifest(base="ckpt-000009-000000")
    with pytest.raises(InvalidRequest, match="one entry for each slot"):
        replace(manifest().slots, rows=np.zeros(3, np.uint64))
    with pytest.raises(InvalidRequest, match="written as JSON"):
        manifest(progress={"job": object()}).to_json()


def test_a_large_cluster_fits_into_the_limit() -> None:
    count = 2**17  # an eighth of the most: the whole takes a while
    slots = SlotEntries(
        part=np.arange(count) % 2,
        position=np.full(count, 2**63 - 1, np.uint64),
        epoch=np.full(count, 2**63 - 1, np.uint64),
        whole=np.ones(count, np.bool_),
        rows=np.full(count, 2**40, np.uint64),
    )
    text = manifest(slots=slots).to_json()
    assert len(text) * 8 < 256 * 2**20
    assert Manifest.from_json(text).slots == slots
