"""Folders that release 0.1 wrote (``tests/vectors/snapshots``) are read bit for bit.

Two servers wrote them: pushes, deleted keys, a dense table, statistics; a full checkpoint and an
incremental one; an export of a base and three increments, the last of which has no parts.
``expected.json`` is what the readers of that release made of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from backstay.checkpoint.manifest import Manifest
from backstay.checkpoint.parts import read_part
from backstay.checkpoint.reading import CheckpointReader
from backstay.checkpoint.storage import CheckpointStorage, ExportFolder
from backstay.checkpoint.verification import verify
from backstay.serving import Follower

STORED = Path(__file__).parents[2] / "vectors" / "snapshots"
CHECKPOINTS, EXPORT = STORED / "checkpoints", STORED / "export"
EXPECTED: dict[str, Any] = json.loads((STORED / "expected.json").read_text(encoding="utf-8"))
SPARSE = ("scored", "wide")


def bits(keys: NDArray[np.uint64], rows: NDArray[np.float32]) -> dict[str, str]:
    return {
        str(key): row.astype("<f4").tobytes().hex()
        for key, row in zip(keys.tolist(), rows, strict=True)
    }


def joined(some: Iterable[dict[str, str]]) -> dict[str, str]:
    return {key: row for one in some for key, row in one.items()}


@pytest.mark.parametrize("checkpoint", sorted(EXPECTED["checkpoints"]))
def test_a_stored_checkpoint_is_read_bit_for_bit(checkpoint: str) -> None:
    wanted = EXPECTED["checkpoints"][checkpoint]
    storage = CheckpointStorage(CHECKPOINTS)
    assert verify(storage, checkpoint).ok
    with CheckpointReader(storage, checkpoint) as reader:
        manifest = reader.manifest
        kind = {"full": "full", "incremental": "delta"}[wanted["kind"]]
        assert (manifest.kind, manifest.base) == (kind, wanted["base"])
        assert (dict(manifest.tags), dict(manifest.progress)) == (
            wanted["tags"],
            wanted["progress"],
        )
        assert manifest.slots.position.tolist() == wanted["position"]
        for name in SPARSE:
            rows = list(reader.rows(name))
            assert joined(bits(one.keys, one.weights) for one in rows) == wanted["tables"][name]
            assert joined(bits(one.keys, one.state) for one in rows) == wanted["state"][name]
        assert reader.dense("w").astype("<f4").tobytes().hex() == wanted["dense"]["w"]
        for slot, streams in wanted["streams"].items():
            assert reader.slot_memory(int(slot)).streams.tolist() == streams


def test_a_stored_export_is_followed_bit_for_bit() -> None:
    wanted = EXPECTED["export"]
    with Follower(EXPORT) as follower:
        assert follower.positions.tolist() == wanted["position"]
        for name in SPARSE:
            assert bits(*follower.table(name).to_numpy()) == wanted["tables"][name]
        assert follower.dense("w").astype("<f4").tobytes().hex() == wanted["dense"]["w"]


def test_the_parts_of_a_stored_export_add_up_to_what_is_followed() -> None:
    folder = ExportFolder(EXPORT)
    found: dict[str, dict[str, str]] = {name: {} for name in SPARSE}
    for name in folder.names():
        manifest = folder.read_manifest(name)
        for index in range(len(manifest.parts)):
            opened = read_part(folder, manifest, index, Path("nowhere"))
            for table, rows in found.items():
                for key in opened.rows(table).deleted.tolist():
                    rows.pop(str(key), None)
                rows |= bits(opened.rows(table).keys, opened.rows(table).weights)
    assert found == EXPECTED["export"]["tables"]


def test_stored_manifests_are_written_as_they_were() -> None:
    stored = sorted(STORED.glob("*/*/manifest.json"))
    assert len(stored) == 6
    for path in stored:
        text = path.read_text(encoding="utf-8")
        assert Manifest.from_json(text).to_json() == text
