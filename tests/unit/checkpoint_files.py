"""Small checkpoints for tests, their parts written by the safetensors library.

So two programs that share nothing meet in them: our reader, and the writer of others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from backstay._native import slots_of, table_id
from backstay.checkpoint.manifest import Manifest, Part, SlotEntries
from backstay.checkpoint.storage import CheckpointStorage
from backstay.tables import SGD, Adam, TableSpec

SLOT_COUNT = 8
# 2026-11-21T22:00:00Z
BEGUN = 1_795_298_400.0
ADS = TableSpec.sparse("ads/user", 3, optimizer=Adam(0.01))
LAYER = TableSpec.dense("layer.w", (5, 3), block_elements=4, optimizer=SGD(0.1))
FULL = "ckpt-000001-aaaaaa"
SECOND = "ckpt-000002-bbbbbb"
THIRD = "ckpt-000003-cccccc"

Arrays = dict[str, NDArray[Any]]
Tables = Mapping[TableSpec, Mapping[int, float]]


@dataclass(frozen=True)
class Content:
    """What to write: for each table the keys with the number that fills their rows."""

    rows: Tables = field(default_factory=dict)
    deleted: Mapping[TableSpec, Sequence[int]] = field(default_factory=dict)


def layer_key(block: int) -> int:
    """The key of a block of ``LAYER``."""
    return (table_id(LAYER.name) + block) % 2**64


def of_slots(keys: Sequence[int], slots: Sequence[int]) -> list[int]:
    """Those of the keys that are in the slots, by slot."""
    array = np.array(sorted(keys), np.uint64)
    found = slots_of(array, SLOT_COUNT)
    return [int(key) for slot in slots for key in array[found == slot]]


def part_tensors(slots: Sequence[int], content: Content, position: int) -> Arrays:
    """The tensors of a part that holds these slots."""
    arrays: Arrays = {
        "memory.slots": np.array([[slot, position, 1] for slot in slots], np.uint64).reshape(-1, 3),
        "memory.streams": np.array(
            [[slot, 77, 2**32 + 5, 3, 1, 2**63] for slot in slots], np.uint64
        ).reshape(-1, 6),
        "memory.closed": np.array([[slot, 77, 4] for slot in slots], np.uint64).reshape(-1, 3),
    }
    for spec, rows in content.rows.items():
        keys = of_slots(list(rows), slots)
        counts = [[slot, len(of_slots(list(rows), [slot]))] for slot in slots]
        prefix = f"table.{spec.name}."
        arrays[prefix + "runs"] = np.array(counts, np.uint64).reshape(-1, 2)
        arrays[prefix + "keys"] = np.array(keys, np.uint64)
        filler = np.array([rows[key] for key in keys], np.float32)[:, None]
        arrays[prefix + "weights"] = np.repeat(filler, spec.row_elements, axis=1)
        if spec.state_elements:
            arrays[prefix + "state"] = np.repeat(-filler, spec.state_elements, axis=1)
    for spec, gone in content.deleted.items():
        counts = [[slot, len(of_slots(gone, [slot]))] for slot in slots]
        prefix = f"table.{spec.name}."
        arrays[prefix + "deleted_runs"] = np.array(counts, np.uint64).reshape(-1, 2)
        arrays[prefix + "deleted"] = np.array(of_slots(gone, slots), np.uint64)
    return arrays


def save_part(path: Path, arrays: Arrays, checkpoint_id: str) -> None:
    """Write a part as the format page says."""
    save_file(
        {name: np.ascontiguousarray(array) for name, array in arrays.items()},
        path,
        metadata={"format": "backstay-part-1", "checkpoint": checkpoint_id},
    )


def seal(path: Path) -> Part:
    """The manifest's entry for a file as it is."""
    content = path.read_bytes()
    return Part(path.name, len(content), hashlib.sha256(content).hexdigest())


def make_checkpoint(
    storage: CheckpointStorage,
    folder: Path,
    checkpoint_id: str,
    content: Content,
    *,
    base: str | None = None,
    whole: Sequence[int] = (),
    tables: Sequence[TableSpec] = (ADS, LAYER),
    position: int | None = None,
    jobs: Sequence[str] = (),
) -> Manifest:
    """Write a checkpoint in two parts, one with the even slots and one with the odd ones.

    Args:
        storage: Where to.
        folder: For the parts before they are published.
        checkpoint_id: Its id.
        content: What is in it.
        base: What it adds to; None: a full one.
        whole: Slots of an incremental one that have all their rows in it.
        tables: All tables.
        position: Of all slots; default: from the number of the id.
        jobs: Whose progress is in it.
    """
    position = int(checkpoint_id[5:11]) * 10 if position is None else position
    storage.create(checkpoint_id)
    parts = []
    for index in range(2):
        path = folder / f"part-6b1f0c2a-{index:04d}.safetensors"
        slots = range(index, SLOT_COUNT, 2)
        save_part(path, part_tensors(slots, content, position), checkpoint_id)
        parts.append(seal(path))
        storage.publish(checkpoint_id, path, path.name)
    keys = [key for rows in content.rows.values() for key in rows]
    counts = np.bincount(slots_of(np.array(keys, np.uint64), SLOT_COUNT), minlength=SLOT_COUNT)
    manifest = Manifest(
        id=checkpoint_id,
        base=base,
        cluster="demo",
        cluster_uid="0badcafe",
        begun=BEGUN,
        routing_version=4,
        generation=1,
        tables=tuple(tables),
        parts=tuple(parts),
        slots=SlotEntries(
            part=np.arange(SLOT_COUNT) % 2,
            position=np.full(SLOT_COUNT, position, np.uint64),
            epoch=np.ones(SLOT_COUNT, np.uint64),
            whole=np.array([base is None or slot in whole for slot in range(SLOT_COUNT)]),
            rows=counts.astype(np.uint64),
        ),
        tags={"pass": 3, "note": "größer"},
        progress={
            "job": {"tasks": [1, 2]},
            **({"backstay_jobs": {"jobs": {name: {} for name in jobs}}} if jobs else {}),
        },
    )
    storage.write_manifest(manifest)
    return manifest


def full_content(count: int = 40) -> Content:
    """``count`` rows of ``ADS`` and all blocks of ``LAYER``."""
    return Content(
        {
            ADS: {key * 2**58 + key: float(key) for key in range(1, count + 1)},
            LAYER: {layer_key(block): float(block) for block in range(4)},
        }
    )


def change_part(
    storage: CheckpointStorage, manifest: Manifest, index: int, change: Callable[[Arrays], object]
) -> Manifest:
    """Rewrite a part of a local checkpoint, and return a manifest whose checksums fit it."""
    path = storage.part_path(manifest.id, manifest.parts[index].file)
    arrays = load_file(path)
    change(arrays)
    save_part(path, arrays, manifest.id)
    return resealed(storage, manifest, index)


def resealed(storage: CheckpointStorage, manifest: Manifest, index: int) -> Manifest:
    """A manifest that says of a part what is there now."""
    parts = list(manifest.parts)
    parts[index] = seal(storage.part_path(manifest.id, parts[index].file))
    return replace(manifest, parts=tuple(parts))
