"""The reader of parts meets files of another writer, and files that want to fool it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from backstay.checkpoint import tensors
from backstay.checkpoint.manifest import Manifest
from backstay.checkpoint.parts import PartReader
from backstay.checkpoint.storage import CheckpointStorage
from backstay.errors import CheckpointDamaged, CheckpointUnavailable, InvalidRequest
from backstay.tables import (
    RMSProp,
    TableSpec,
    UserOptimizer,
    per_element,
    per_row,
)
from backstay.tables.part import kinds_of
from tests.unit.checkpoint_files import (
    ADS,
    FULL,
    LAYER,
    Arrays,
    Content,
    change_part,
    full_content,
    make_checkpoint,
    of_slots,
    resealed,
)

EVEN = [0, 2, 4, 6]
FILE = "part-6b1f0c2a-0000.safetensors"


class Checkpoint:
    """One full checkpoint on disk."""

    def __init__(self, folder: Path, content: Content) -> None:
        self.storage = CheckpointStorage(folder / "root")
        self.manifest = make_checkpoint(self.storage, folder, FULL, content)
        self.path = self.storage.part_path(FULL, FILE)

    def open(self, manifest: Manifest | None = None) -> PartReader:
        return PartReader(self.path, manifest or self.manifest, 0)

    def open_sealed(self) -> PartReader:
        """Open what is there now, as if the manifest had been written for it."""
        return self.open(resealed(self.storage, self.manifest, 0))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint(tmp_path, full_content())


def test_rows_and_memory_that_another_writer_wrote(checkpoint: Checkpoint) -> None:
    part = checkpoint.open()
    part.check_keys()
    assert part.slots.tolist() == EVEN
    expected = full_content().rows[ADS]
    for slot in EVEN:
        rows = part.rows("ads/user").of(slot)
        assert sorted(rows.keys.tolist()) == sorted(of_slots(list(expected), [slot]))
        for key, weights, state in zip(rows.keys, rows.weights, rows.state, strict=True):
            assert weights.tolist() == [expected[int(key)]] * 3
            assert state.tolist() == [-expected[int(key)]] * 7
        assert not len(rows.deleted)
    memory = part.slot_memory(4)
    assert (memory.position, memory.epoch) == (10, 1)
    assert memory.streams.tolist() == [[77, 2**32 + 5, 3, 1, 2**63]]
    assert memory.closed.tolist() == [[77, 4]]
    assert len(part.rows("ads/user").of(1).keys) == 0
    with pytest.raises(InvalidRequest, match="slot 1 is not in it"):
        part.slot_memory(1)
    with pytest.raises(InvalidRequest, match="no table 'none'"):
        part.rows("none")


def test_safetensors_alone_reads_what_the_format_page_promises(checkpoint: Checkpoint) -> None:
    arrays = load_file(checkpoint.path)
    runs, keys = arrays["table.ads/user.runs"], arrays["table.ads/user.keys"]
    assert runs[:, 1].sum() == len(keys) == len(arrays["table.ads/user.weights"])
    assert arrays["memory.slots"].dtype == np.uint64
    assert arrays["table.ads/user.state"].dtype == np.float32


def test_a_file_of_ours_is_read_by_safetensors(tmp_path: Path) -> None:
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "keys": ("U64", (3,)),
        "weights": ("F32", (3, 5)),
        "none": ("F32", (0, 5)),
    }
    made = tensors.create(tmp_path / "table.safetensors", shapes, {"format": "of a test"})
    made["keys"][:] = [1, 2, 2**64 - 1]
    made["weights"][:] = np.arange(15).reshape(3, 5)
    loaded = load_file(tmp_path / "table.safetensors")
    ours = tensors.read(tmp_path / "table.safetensors", "table")
    assert ours.metadata == {"format": "of a test"}
    for name, array in made.items():
        np.testing.assert_array_equal(loaded[name], array)
        np.testing.assert_array_equal(ours.tensors[name], array)


def test_numbers_that_do_not_lie_on_their_own_multiples(tmp_path: Path) -> None:
    path = tmp_path / "file"
    header = {
        "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "b": {"dtype": "U64", "shape": [2], "data_offsets": [4, 20]},
    }
    data = np.float32(1.5).tobytes() + np.array([7, 8], "<u8").tobytes()
    path.write_bytes(framed(json.dumps(header).encode()) + data)
    found = tensors.read(path, "file").tensors
    assert found["a"].tolist() == [1.5]
    assert found["b"].tolist() == [7, 8]
    assert found["b"].flags.aligned


# -- files that were damaged ---------------------------------------------------------------


def test_a_truncated_part_is_refused_by_name(checkpoint: Checkpoint) -> None:
    content = checkpoint.path.read_bytes()
    checkpoint.path.write_bytes(content[:-5])
    with pytest.raises(CheckpointDamaged, match=rf"{FULL}/{FILE}: {len(content) - 5} bytes"):
        checkpoint.open()


@pytest.mark.parametrize("length", [0, 7, 8, 100, 1000])
def test_a_truncated_part_is_refused_whatever_its_manifest_says(
    checkpoint: Checkpoint, length: int
) -> None:
    checkpoint.path.write_bytes(checkpoint.path.read_bytes()[:length] or b"\0")
    with pytest.raises(CheckpointDamaged, match=FILE):
        checkpoint.open_sealed()


def test_bytes_behind_the_last_tensor_are_refused(checkpoint: Checkpoint) -> None:
    checkpoint.path.write_bytes(checkpoint.path.read_bytes() + b"#!/bin/sh")
    with pytest.raises(CheckpointDamaged, match="not fully covered"):
        checkpoint.open_sealed()


def test_a_missing_part_is_refused_by_name(checkpoint: Checkpoint) -> None:
    checkpoint.path.unlink()
    with pytest.raises(CheckpointDamaged, match=FILE):
        checkpoint.open()


def test_a_folder_in_the_place_of_a_part_is_refused(checkpoint: Checkpoint) -> None:
    checkpoint.path.unlink()
    checkpoint.path.mkdir()
    size = checkpoint.path.stat().st_size
    parts = (replace(checkpoint.manifest.parts[0], bytes=size), checkpoint.manifest.parts[1])
    with pytest.raises((CheckpointDamaged, CheckpointUnavailable), match=FILE):
        checkpoint.open(replace(checkpoint.manifest, parts=parts))


def test_any_flipped_bit_of_the_header_is_noticed_or_harmless(checkpoint: Checkpoint) -> None:
    # The checksum finds every flip; the reader by itself must at least never fail otherwise.
    content = bytearray(checkpoint.path.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    refused = 0
    for place in range(0, begin, 3):
        for bit in (0, 3, 6):
            content[place] ^= 1 << bit
            checkpoint.path.write_bytes(content)
            content[place] ^= 1 << bit
            try:
                checkpoint.open()
            except CheckpointDamaged:
                refused += 1
    assert refused > begin / 2


# -- headers that were made up -------------------------------------------------------------


def framed(header: bytes, length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header


ENTRY = b'{"dtype":"U64","shape":[1],"data_offsets":[0,8]}'


def tensor(**changes: Any) -> bytes:
    entry = {"dtype": "U64", "shape": [1], "data_offsets": [0, 8]} | changes
    return framed(json.dumps({"x": entry}).encode()) + bytes(8)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(framed(b"{}", 2**64 - 1), "too large", id="huge header"),
        pytest.param(framed(b"{}", 100 * 2**20 + 1), "too large", id="over the limit"),
        pytest.param(framed(b"{}", 3), "header length", id="beyond the file"),
        pytest.param(framed(b"[" * 100_000), "invalid JSON", id="nested without end"),
        pytest.param(framed(b"[]"), "invalid JSON", id="no object"),
        pytest.param(framed(b"\xff\xfe{}"), "UTF-8", id="not UTF-8"),
        pytest.param(
            framed(b'{"x":%(x)b,"x":%(x)b}' % {b"x": ENTRY}) + bytes(8),
            "comes twice",
            id="name twice",
        ),
        pytest.param(
            framed(b'{"__metadata__":{"a":"1","a":"2"}}'), "comes twice", id="metadata twice"
        ),
        pytest.param(
            framed(b'{"x":["U64",[1],[0,8]]}') + bytes(8), "expected an object", id="list of fields"
        ),
        pytest.param(framed(b'{"__metadata__":null}'), "expected an object", id="no metadata"),
        pytest.param(framed(b'{"a":NaN}'), "invalid JSON", id="NaN"),
        pytest.param(framed(b'{"__metadata__":{"a":1}}'), "expected a string", id="metadata"),
        pytest.param(framed(b'{"x":[]}'), "invalid JSON", id="entry is a list"),
        pytest.param(tensor(dtype="BOOL", shape=[8]), "not U64 or F32", id="other dtype"),
        pytest.param(tensor(dtype=["U64"]), "invalid JSON", id="dtype is a list"),
        pytest.param(tensor(shape=[-1]), "expected usize", id="negative shape"),
        pytest.param(tensor(shape=[1.0]), "expected usize", id="fraction"),
        pytest.param(tensor(shape=[True]), "expected usize", id="true is no size"),
        pytest.param(tensor(shape=[2**61, 8]), "overflow", id="wraps around to nothing"),
        pytest.param(tensor(shape=[1] * 17), "17 dimensions", id="many dimensions"),
        pytest.param(tensor(data_offsets=[8, 0]), "invalid offset", id="backwards"),
        pytest.param(tensor(data_offsets=[8, 16]), "invalid offset", id="gap"),
        pytest.param(tensor(data_offsets=[0, 8, 16]), "invalid JSON", id="three offsets"),
        pytest.param(
            tensor(shape=[4], data_offsets=[0, 32]), "not fully covered", id="beyond the end"
        ),
        pytest.param(
            framed(
                json.dumps(
                    {
                        name: {"dtype": "U64", "shape": [1], "data_offsets": [0, 8]}
                        for name in ("x", "y")
                    }
                ).encode()
            )
            + bytes(8),
            "invalid offset",
            id="two tensors on the same bytes",
        ),
    ],
)
def test_a_made_up_header_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "hostile"
    path.write_bytes(content)
    with pytest.raises(CheckpointDamaged, match=f"the-name: .*{reason}"):
        tensors.read(path, "the-name")


# -- tensors that do not fit each other or the manifest ------------------------------------


def sort_last(arrays: Arrays) -> None:
    arrays["table.ads/user.runs"] = arrays["table.ads/user.runs"][::-1]


def set_to(name: str, place: Any, value: int) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        arrays[name][place] = value

    return change


def put(name: str, array: Any) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        arrays[name] = array(arrays) if callable(array) else array

    return change


def without(name: str) -> Callable[[Arrays], object]:
    return lambda arrays: arrays.pop(name)


def drop_slot(arrays: Arrays) -> None:
    """Leave slot 0 out, and do it well."""
    for name in ("memory.slots", "memory.streams", "memory.closed"):
        arrays[name] = arrays[name][arrays[name][:, 0] != 0]
    for table in ("ads/user", "layer.w"):
        runs = arrays[f"table.{table}.runs"]
        gone = int(runs[0, 1])
        assert runs[0, 0] == 0
        arrays[f"table.{table}.runs"] = runs[1:]
        for name in ("keys", "weights", "state"):
            if f"table.{table}.{name}" in arrays:
                arrays[f"table.{table}.{name}"] = arrays[f"table.{table}.{name}"][gone:]


ADS_RUNS, ADS_KEYS = "table.ads/user.runs", "table.ads/user.keys"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param(drop_slot, "its slots are not those of the manifest", id="missing slot"),
        pytest.param(set_to("memory.slots", (0, 0), 1), "its slots are not", id="other slot"),
        pytest.param(set_to("memory.slots", (0, 0), 2), "has a slot twice", id="slot twice"),
        pytest.param(set_to("memory.slots", (0, 0), 8), "has slot 8 of 8", id="slot too high"),
        pytest.param(set_to("memory.slots", (1, 1), 9), "position of slot 2", id="position"),
        pytest.param(set_to("memory.slots", (1, 2), 9), "epoch of slot 2", id="epoch"),
        pytest.param(set_to("memory.streams", (0, 0), 1), "not in this part", id="stream"),
        pytest.param(set_to("memory.closed", (0, 0), 2**63), "has slot", id="closed stream"),
        pytest.param(without("memory.slots"), "no tensor memory.slots", id="no memory"),
        pytest.param(without(ADS_RUNS), "no tensor table.ads/user.runs", id="no runs"),
        pytest.param(without("table.ads/user.state"), "no tensor", id="no state"),
        pytest.param(without(ADS_KEYS), "no tensor", id="no keys"),
        pytest.param(sort_last, "ascending order", id="runs in another order"),
        pytest.param(set_to(ADS_RUNS, (0, 1), 0), "speaks of", id="too few rows"),
        pytest.param(set_to(ADS_RUNS, (0, 1), 2**64 - 1), "speaks of", id="rows wrap around"),
        pytest.param(set_to(ADS_RUNS, (3, 0), 7), "not in this part", id="run of another slot"),
        pytest.param(
            put("table.ads/user.weights", lambda a: a["table.ads/user.weights"][:, :2].copy()),
            "weights is float32",
            id="narrow weights",
        ),
        pytest.param(
            put("table.ads/user.state", lambda a: a["table.ads/user.state"][:-1].copy()),
            "state is float32",
            id="a row without state",
        ),
        pytest.param(
            put(ADS_KEYS, lambda a: a[ADS_KEYS].astype(np.float32)),
            "keys is float32",
            id="keys are no integers",
        ),
        pytest.param(
            put("table.layer.w.state", np.zeros((4, 1), np.float32)),
            "unknown tensor table.layer.w.state",
            id="state that the optimizer does not have",
        ),
        pytest.param(
            put("table.others.keys", np.zeros(1, np.uint64)), "unknown tensor", id="other table"
        ),
        pytest.param(
            put("table.ads/user.deleted", np.zeros(1, np.uint64)),
            "must come together",
            id="deleted without runs",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    checkpoint: Checkpoint, change: Callable[[Arrays], object], reason: str
) -> None:
    manifest = change_part(checkpoint.storage, checkpoint.manifest, 0, change)
    with pytest.raises(CheckpointDamaged, match=f"{FULL}/{FILE}: .*{reason}"):
        checkpoint.open(manifest)


def test_rows_that_the_manifest_does_not_count_are_refused(checkpoint: Checkpoint) -> None:
    rows = np.array(checkpoint.manifest.slots.rows)
    rows[2] += 1
    slots = replace(checkpoint.manifest.slots, rows=rows)
    with pytest.raises(CheckpointDamaged, match="rows of slot 2 is"):
        checkpoint.open(replace(checkpoint.manifest, slots=slots))


def test_a_part_of_another_checkpoint_is_refused(checkpoint: Checkpoint) -> None:
    other = replace(checkpoint.manifest, id="ckpt-000009-aaaaaa")
    with pytest.raises(CheckpointDamaged, match=f"it is of checkpoint '{FULL}'"):
        checkpoint.open(other)


def test_a_key_under_another_slot_is_found(checkpoint: Checkpoint) -> None:
    odd = of_slots(list(full_content().rows[ADS]), [1, 3, 5, 7])[0]
    manifest = change_part(checkpoint.storage, checkpoint.manifest, 0, set_to(ADS_KEYS, 0, odd))
    part = checkpoint.open(manifest)
    with pytest.raises(CheckpointDamaged, match=r"table.ads/user.keys has keys under slots"):
        part.check_keys()


def test_a_key_that_comes_twice_is_found(checkpoint: Checkpoint) -> None:
    def repeat(arrays: Arrays) -> None:
        # The first run has more than one row.
        arrays[ADS_KEYS][1] = arrays[ADS_KEYS][0]

    manifest = change_part(checkpoint.storage, checkpoint.manifest, 0, repeat)
    part = checkpoint.open(manifest)
    assert (
        part.rows("ads/user").of(0).keys.tolist()[:1] * 2
        == (part.rows("ads/user").of(0).keys.tolist()[:2])
    )
    with pytest.raises(CheckpointDamaged, match="has a key twice"):
        part.check_keys()


def test_a_table_may_have_nothing_but_deleted_keys(tmp_path: Path) -> None:
    gone = [key * 2**60 for key in range(1, 9)]
    checkpoint = Checkpoint(tmp_path, Content({}, {ADS: gone}))
    rows = checkpoint.open().rows("ads/user")
    assert [int(key) for slot in EVEN for key in rows.of(slot).deleted] == of_slots(gone, EVEN)
    assert rows.weights.shape == (0, 3)
    assert checkpoint.open().rows(LAYER.name).keys.shape == (0,)


KINDS: Mapping[str, Any] = kinds_of("optimizer")


def _counted(
    weights: Any,
    gradient: Any,
    total: Any = per_element(),
    count: Any = per_row(),
    *,
    learning_rate: Any,
) -> Any:
    return weights - learning_rate * gradient, total + gradient, count + 1.0


@pytest.mark.parametrize(
    "optimizer",
    [
        *(kind(learning_rate=0.1) for name, kind in KINDS.items() if name != "user"),
        UserOptimizer.of(_counted, learning_rate=0.1),
        RMSProp(momentum=0.5),
        RMSProp(centered=True, momentum=0.5),
    ],
    ids=repr,
)
def test_the_width_of_the_state_is_that_of_the_servers(optimizer: Any) -> None:
    from backstay._native import DataServer

    spec = TableSpec.sparse("t", 5, optimizer=optimizer)
    server = DataServer(listen="127.0.0.1:0", cluster_id="c", node_id="n", instance=1, slot_count=1)
    try:
        server.create_table(spec.to_json())
        rows = np.ones((1, 5), np.float32)
        state = np.ones((1, spec.state_elements), np.float32)
        server.import_slot("t", 0, np.array([3], np.uint64), rows, state)
        assert server.export_slot("t", 0)[2].shape == (1, spec.state_elements)
    finally:
        server.stop(0)
