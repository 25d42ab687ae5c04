"""The data plane's vectors: a second implementation from the specification, and the native one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backstay import _native
from tests.unit import wire_v2 as wire
from tools import make_wire_vectors

ROOT = Path(__file__).resolve().parents[2]
VECTORS = ROOT / "proto" / "vectors"


def load(name: str) -> Any:
    return json.loads((VECTORS / name).read_text(encoding="utf-8"))


FRAMES = load("frames.json")
HASHES = load("hashes.json")


@pytest.mark.parametrize("name", ["frames.json", "hostile.json", "hashes.json"])
def test_the_files_are_what_the_second_implementation_writes(name: str) -> None:
    assert load(name) == make_wire_vectors.vectors()[name]


@pytest.mark.parametrize("vector", FRAMES, ids=lambda vector: vector["name"])
def test_a_frame_encodes_and_decodes(vector: dict[str, Any]) -> None:
    body = bytes.fromhex(vector["body"])
    frame = wire.Frame(
        vector["kind"], vector["flags"], vector["request_id"], vector["fields"], body
    )
    data = bytes.fromhex(vector["hex"])
    assert wire.encode(frame) == data
    assert wire.decode(data) == frame


def test_every_kind_of_frame_has_a_vector() -> None:
    assert {vector["kind"] for vector in FRAMES} == set(wire.OPCODES)
    assert any(vector["flags"] == wire.CHECKSUM for vector in FRAMES)


def test_the_checksum_is_castagnolis() -> None:
    # The check value of RFC 3720's polynomial, and its all-zeros example.
    assert wire.crc32c(b"123456789") == 0xE3069283
    assert wire.crc32c(bytes(32)) == 0x8A9136AA


def test_the_native_module_speaks_this_version() -> None:
    assert _native.PROTOCOL_VERSION == wire.VERSION


@pytest.mark.parametrize("vector", HASHES["table_ids"], ids=lambda vector: vector["name"][:20])
def test_the_native_table_id(vector: dict[str, Any]) -> None:
    assert _native.table_id(vector["name"]) == vector["id"]


@pytest.mark.parametrize("slot_count", [1, 2, 64, 1024, 65536])
def test_the_native_slots(slot_count: int) -> None:
    rows = [row for row in HASHES["slots"] if row["slot_count"] == slot_count]
    assert rows
    keys = np.array([row["key"] for row in rows], dtype=np.uint64)
    slots = _native.slots_of(keys, slot_count)
    assert slots.tolist() == [row["slot"] for row in rows]


def test_the_slots_are_the_top_bits() -> None:
    for row in HASHES["slots"]:
        bits = row["slot_count"].bit_length() - 1
        assert row["slot"] == wire.mix64(row["key"]) >> 64 - bits


def test_error_codes_of_the_specification() -> None:
    """Each refusal's code and retry safety stand in the table of the specification."""
    page = (ROOT / "proto" / "data_plane.md").read_text(encoding="utf-8")
    text = page[page.index("## Errors") : page.index("## Limits")]
    source = (ROOT / "crates" / "backstay-core" / "src" / "error.rs").read_text(encoding="utf-8")
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ")]
    codes = {int(row[1]): row[2].strip() for row in rows if row[1].strip().isdigit()}
    assert sorted(codes) == list(range(1, 15))
    for code, name in codes.items():
        constant = re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper()
        assert f"pub const {constant}: u16 = {code};" in source
        assert re.search(rf"Self::{name}\b.* => code::{constant},", source)
