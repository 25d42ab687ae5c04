"""What an element is for a topic, from parts as masters write them: no broker, no server."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from backstay._native import initial_rows, slots_of, table_id
from backstay.checkpoint import tensors
from backstay.checkpoint.chain import after_full
from backstay.checkpoint.manifest import ExportChoice, Manifest, Part
from backstay.checkpoint.storage import ExportFolder
from backstay.errors import CheckpointDamaged
from backstay.pserver.exports.topic.element_rows import ElementRows
from backstay.pserver.exports.topic.messages import TABLES_KEY, Message, row_messages
from backstay.pserver.exports.topic.steps import TopicStep, followed, next_step
from backstay.tables import SGD, TableSpec, Uniform
from tests.unit.pserver.test_export_topics import progress
from tests.unit.serving.elements import base, increment

SLOTS = 2
PART = "part-ps0-0000.safetensors"
T = TableSpec.sparse("t", dim=2, optimizer=SGD(0.1))
W = TableSpec.dense(
    "w", shape=(3, 2), optimizer=SGD(0.1), initializer=Uniform(-1.0, 1.0), block_elements=4
)
KEYS = np.arange(8, dtype=np.uint64)
OF_SLOT = [KEYS[slots_of(KEYS, SLOTS) == slot] for slot in range(SLOTS)]


def by_slot(keys: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return keys in the order of their slots, and the runs."""
    slots = slots_of(keys, SLOTS).astype(np.int64)
    counts = np.bincount(slots, minlength=SLOTS)
    runs = [(slot, count) for slot, count in enumerate(counts.tolist()) if count]
    return keys[np.argsort(slots, kind="stable")], np.array(runs, np.uint64).reshape(-1, 2)


def written(
    folder: Path,
    element: Manifest,
    rows: dict[TableSpec, Sequence[int]],
    deleted: Sequence[int] = (),
) -> Manifest:
    """Write an element with a part: each row has its key as its weights; of ``t`` keys went."""
    specs = (T, W)
    slots = np.arange(SLOTS, dtype=np.uint64)
    content: dict[str, NDArray[np.generic]] = {
        "memory.slots": np.stack([slots, element.slots.position, element.slots.epoch], axis=1)
    }
    counts = np.zeros(SLOTS, np.int64)
    weights: dict[str, NDArray[np.generic]] = {}
    for spec, some in rows.items():
        first = table_id(spec.name) if spec is W else 0
        keys, runs = by_slot(np.array(some, np.uint64) + np.uint64(first))
        counts += np.bincount(slots_of(keys, SLOTS).astype(np.int64), minlength=SLOTS)
        content[f"table.{spec.name}.runs"] = runs
        content[f"table.{spec.name}.keys"] = keys
        values = (keys - np.uint64(first)).astype(np.float32)
        weights[f"table.{spec.name}.weights"] = np.repeat(values[:, None], spec.row_elements, 1)
    if len(deleted):
        keys, runs = by_slot(np.array(deleted, np.uint64))
        content["table.t.deleted"], content["table.t.deleted_runs"] = keys, runs
    there = ExportFolder(folder)
    there.create(element.id)
    path = there.part_path(element.id, PART)
    content |= weights
    kinds = {np.dtype(np.uint64): "U64", np.dtype(np.float32): "F32"}
    shapes = {name: (kinds[one.dtype], one.shape) for name, one in content.items()}
    arrays = tensors.create(
        path, shapes, {"format": "backstay-export-part-1", "checkpoint": element.id}
    )
    for name, one in content.items():
        arrays[name][...] = one
    del arrays
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    whole = replace(
        element,
        choice=ExportChoice(("t", "w")),
        tables=specs,
        parts=(Part(PART, path.stat().st_size, digest),),
        slots=replace(element.slots, rows=counts.astype(np.uint64)),
    )
    there.write_manifest(whole)
    return whole


def opened(folder: Path, step: TopicStep, topic: Sequence[tuple[bytes, bool]]) -> ElementRows:
    return ElementRows(ExportFolder(folder), step, lambda: [topic[:2], topic[2:]])


def told(messages: Sequence[Message]) -> dict[bytes, list[float] | None]:
    return {
        one.key: None if one.value is None else np.frombuffer(one.value, "<f4").tolist()
        for one in messages
        if one.key != TABLES_KEY
    }


def rows_of(table: str, keys: Sequence[int]) -> list[bytes]:
    return [one.key for one in row_messages(table.encode(), np.array(keys, np.uint64), None, 1)]


def test_a_base_removes_what_the_topic_has_besides(tmp_path: Path) -> None:
    first = written(tmp_path, base(), {T: [0, 1, 2], W: [1]})
    topic = [
        *((key, True) for key in rows_of("t", [2, 3, 4])),
        # It went already: nothing is to be told.
        *((key, False) for key in rows_of("t", [4])),
        *((key, True) for key in rows_of("gone table", [5])),
        *((key, True) for key in rows_of("w", [0, 1, 99])),
        (b"progress", True),
    ]
    step = TopicStep.of(first, after_full(None, first))
    with opened(tmp_path, step, topic) as rows:
        messages = list(rows.messages(1))
        assert (rows.written.rows, rows.written.gone) == (3 + 2, 3)
    # A block without a row has what a pull gives.
    block = initial_rows(W.to_json(), np.array([table_id("w")], np.uint64))[0].tolist()
    gone = [*rows_of("t", [3]), *rows_of("gone table", [5]), *rows_of("w", [99])]
    there = {rows_of("t", [key])[0]: [float(key)] * 2 for key in range(3)}
    blocks = dict(zip(rows_of("w", [0, 1]), (block, [1.0] * 4), strict=True))
    assert told(messages) == {**there, **dict.fromkeys(gone), **blocks}
    assert messages[-1].key == TABLES_KEY


def test_a_slot_that_is_whole_is_replaced_and_the_others_stay(tmp_path: Path) -> None:
    first = written(tmp_path, base(), {T: KEYS.tolist()})
    kept, lost = OF_SLOT[1][:1].tolist(), OF_SLOT[1][1:].tolist()
    some, gone = OF_SLOT[0][:1].tolist(), OF_SLOT[0][1:2].tolist()
    second = written(
        tmp_path,
        increment(8, [4, 5], since=[3, 0], whole=[0, 1]),
        {T: [*some, *kept]},
        deleted=gone,
    )
    state = followed(progress(first), first.run, ExportFolder(tmp_path).read)
    names = [first.id, second.id]
    step = next_step(names, ExportFolder(tmp_path).read, state, first.run)
    assert step is not None
    topic = [(key, True) for key in rows_of("t", KEYS.tolist())]
    with opened(tmp_path, step, topic) as rows:
        found = told(list(rows.messages(1)))
    assert {key for key, value in found.items() if value is None} == set(
        rows_of("t", [*gone, *lost])
    )
    left = {key for key, value in found.items() if value is not None and key[8:] == b"t"}
    assert left == set(rows_of("t", [*some, *kept]))


def test_of_a_base_beside_increments_slots_that_are_not_newer_are_left_alone(
    tmp_path: Path,
) -> None:
    first = written(tmp_path, base(7, [3, 9]), {T: KEYS.tolist()})
    beside = written(tmp_path, base(9, [5, 9], chain=first.chain), {T: []})
    state = after_full(None, first).state
    step = TopicStep.of(beside, after_full(state, beside))
    topic = [(key, True) for key in rows_of("t", KEYS.tolist())]
    with opened(tmp_path, step, topic) as rows:
        found = told(list(rows.messages(1)))
    gone = {key for key, value in found.items() if value is None}
    assert gone == set(rows_of("t", OF_SLOT[0].tolist()))


@pytest.mark.parametrize("at", [-1, 300])
def test_a_damaged_part_is_named_before_anything_is_written(tmp_path: Path, at: int) -> None:
    first = written(tmp_path, base(), {T: [0, 1, 2]})
    path = tmp_path / first.id / PART
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    step = TopicStep.of(first, after_full(None, first))
    with pytest.raises(CheckpointDamaged, match=f"{first.id}/{PART}: its checksum is wrong"):
        opened(tmp_path, step, [])
