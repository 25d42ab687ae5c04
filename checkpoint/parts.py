"""A part of a snapshot: rows of some slots, mapped and checked against its manifest.

Nothing in the file is believed: length, checksum, tensors, shapes, slots, counts and keys must be
what the format page (docs/reference/checkpoint-format.md) and the manifest say, or
``CheckpointDamaged`` names the file and what is wrong. ``read_part`` checks all of it, so whoever
wants rows calls that. Rows are views of the file. Imports the manifest, ``checkpoint.storage``,
``checkpoint.tensors``, ``backstay.tables`` and the native hash of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from backstay._native import slots_of
from backstay.checkpoint import tensors
from backstay.checkpoint.manifest import Manifest
from backstay.checkpoint.roots import sha256_of
from backstay.checkpoint.storage import SnapshotFolder
from backstay.errors import CheckpointDamaged, InvalidRequest
from backstay.tables import TableSpec

__all__ = [
    "PartReader",
    "PartReport",
    "Rows",
    "SlotMemory",
    "TableRows",
    "Verdict",
    "check_part",
    "read_part",
    "statistics_in",
]

Verdict: TypeAlias = Literal["ok", "missing", "wrong size", "wrong checksum", "unreadable"]

_FORMATS = {"checkpoint": "backstay-part-1", "export": "backstay-export-part-1"}
_STREAM_WORDS = 6
_CLOSED_WORDS = 3

Keys = NDArray[np.uint64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class SlotMemory:
    """Which pushes a slot has applied.

    Attributes:
        position: How many.
        epoch: The routing version at which the slot began.
        streams: uint64 [n, 5]: job, pass x 2^32 + task, floor, low and high half of the window.
        closed: uint64 [m, 2]: job, pass x 2^32 + task of each stream that is closed.
    """

    position: int
    epoch: int
    streams: NDArray[np.uint64]
    closed: NDArray[np.uint64]


@dataclass(frozen=True)
class Rows:
    """Rows of one table, of one slot.

    Attributes:
        keys: uint64 [n], in no order.
        weights: float32 [n, elements].
        state: float32 [n, state], as the optimizer keeps it; of an export the statistics alone.
        deleted: uint64 [d], keys that were deleted since the base.
    """

    keys: Keys
    weights: Floats
    state: Floats
    deleted: Keys


@dataclass(frozen=True)
class TableRows:
    """Rows of one table, of all slots of a part.

    Attributes:
        slots: int64 [r], ascending.
        ends: int64 [r + 1]: the rows of ``slots[i]`` are those from ``ends[i]`` to ``ends[i + 1]``.
        keys: uint64 [n].
        weights: float32 [n, elements].
        state: float32 [n, state].
        deleted_slots: As ``slots``, for the deleted keys.
        deleted_ends: As ``ends``.
        deleted: uint64 [d].
    """

    slots: NDArray[np.int64]
    ends: NDArray[np.int64]
    keys: Keys
    weights: Floats
    state: Floats
    deleted_slots: NDArray[np.int64]
    deleted_ends: NDArray[np.int64]
    deleted: Keys

    def of(self, slot: int) -> Rows:
        """Return the rows of one slot; none if the part has none of it."""
        rows = _run(self.slots, self.ends, slot)
        deleted = _run(self.deleted_slots, self.deleted_ends, slot)
        return Rows(self.keys[rows], self.weights[rows], self.state[rows], self.deleted[deleted])


class PartReport(NamedTuple):
    """What a part is found to be.

    Attributes:
        verdict: "ok", or what is wrong.
        detail: More about what is wrong; empty if nothing is.
        part: The part, open, if nothing is wrong.
    """

    verdict: Verdict
    detail: str = ""
    part: PartReader | None = None


def check_part(
    folder: SnapshotFolder, manifest: Manifest, index: int, into_dir: Path
) -> PartReport:
    """Fetch a part and compare all of it with its manifest.

    Args:
        folder: Where the snapshot is.
        manifest: Of the snapshot.
        index: Which of the manifest's parts it is.
        into_dir: For a copy, if the folder is not local.

    Raises:
        CheckpointUnavailable: The storage cannot be read.
    """
    part = manifest.parts[index]
    try:
        size = folder.size_of(manifest.id, part.file)
        if size != part.bytes:
            return PartReport("wrong size", f"{size} bytes, the manifest says {part.bytes}")
        path = folder.fetch(manifest.id, part.file, into_dir)
    except CheckpointDamaged as error:
        return PartReport("missing", str(error))
    if (checksum := sha256_of(path)) != part.sha256:
        return PartReport("wrong checksum", f"{checksum}, the manifest says {part.sha256}")
    try:
        reader = PartReader(path, manifest, index)
        reader.check_keys()
    except CheckpointDamaged as error:
        return PartReport("unreadable", str(error))
    return PartReport("ok", part=reader)


def read_part(folder: SnapshotFolder, manifest: Manifest, index: int, into_dir: Path) -> PartReader:
    """Return a part, open, whose every byte is what its manifest says; see ``check_part``.

    Raises:
        CheckpointDamaged: It is not; the message names the file.
        CheckpointUnavailable: The storage cannot be read.
    """
    report = check_part(folder, manifest, index, into_dir)
    if report.part is None:
        where = f"{manifest.id}/{manifest.parts[index].file}: "
        is_changed = "its checksum is wrong: " if report.verdict == "wrong checksum" else ""
        raise CheckpointDamaged(where + is_changed + report.detail.removeprefix(where))
    return report.part


def statistics_in(manifest: Manifest, spec: TableSpec) -> tuple[str, ...]:
    """Return the statistics that a snapshot has of each row of a table."""
    choice = manifest.choice
    return tuple(spec.statistics) if choice is None or choice.statistics else ()


class PartReader:
    """A part, open; its rows are read as they are wanted, its keys are not checked yet.

    Args:
        path: On this machine; must stay as it is while rows of it are in use.
        manifest: Of its snapshot.
        index: Which of the manifest's parts it is.

    Raises:
        CheckpointDamaged: It is not what the manifest says.
        CheckpointUnavailable: It cannot be read.
    """

    def __init__(self, path: Path, manifest: Manifest, index: int) -> None:
        self.where = f"{manifest.id}/{manifest.parts[index].file}"
        self._slot_count = manifest.slot_count
        try:
            size = path.stat().st_size
        except OSError as error:
            raise CheckpointDamaged(f"{self.where}: {error}") from error
        if size != manifest.parts[index].bytes:
            raise CheckpointDamaged(
                f"{self.where}: {size} bytes, the manifest says {manifest.parts[index].bytes}"
            )
        found = tensors.read(path, self.where)
        try:
            self._read(found, manifest, index)
        except InvalidRequest as error:
            raise CheckpointDamaged(f"{self.where}: {error}") from error

    @property
    def slots(self) -> NDArray[np.int64]:
        """The slots in it, int64 [s], ascending."""
        return self._slots

    def slot_memory(self, slot: int) -> SlotMemory:
        """Return which pushes a slot has applied.

        Raises:
            InvalidRequest: The slot is not in this part.
        """
        place = int(np.searchsorted(self._slots, slot))
        if place == len(self._slots) or self._slots[place] != slot:
            raise InvalidRequest(f"{self.where}: slot {slot} is not in it")
        row = self._memory[place]
        return SlotMemory(
            position=int(row[1]),
            epoch=int(row[2]),
            streams=self._streams[self._streams[:, 0] == slot, 1:],
            closed=self._closed[self._closed[:, 0] == slot, 1:],
        )

    def rows(self, table: str) -> TableRows:
        """Return the rows of a table; none if the part has none of it.

        Raises:
            InvalidRequest: The checkpoint has no such table.
        """
        if table not in self._tables:
            raise InvalidRequest(f"{self.where}: the checkpoint has no table {table!r}")
        return self._tables[table]

    def check_keys(self) -> None:
        """Read all keys: each must be of the slot that it stands under, and there once.

        Raises:
            CheckpointDamaged: One is not.
        """
        for name, table in self._tables.items():
            for what, slots, ends, keys in (
                ("keys", table.slots, table.ends, table.keys),
                ("deleted", table.deleted_slots, table.deleted_ends, table.deleted),
            ):
                said = np.repeat(slots, np.diff(ends))
                if not np.array_equal(slots_of(keys, self._slot_count), said):
                    raise CheckpointDamaged(
                        f"{self.where}: table.{name}.{what} has keys under slots of others"
                    )
                if len(np.unique(keys)) != len(keys):
                    raise CheckpointDamaged(f"{self.where}: table.{name}.{what} has a key twice")

    def _read(self, found: tensors.TensorFile, manifest: Manifest, index: int) -> None:
        wanted = _FORMATS[manifest.series]
        if found.metadata.get("format") != wanted:
            raise InvalidRequest(f"its format is not {wanted}")
        if found.metadata.get("checkpoint") != manifest.id:
            raise InvalidRequest(f"it is of checkpoint {found.metadata.get('checkpoint')!r}")
        left = dict(found.tensors)
        self._read_memory(left, manifest, index)
        self._tables = {
            name: _table_rows(left, name, shape, self._slots)
            for spec in manifest.tables
            for name, shape in _contents(manifest, spec)
        }
        if left:
            raise InvalidRequest(f"it has the unknown tensor {min(left)}")
        counts = np.zeros(self._slot_count, np.int64)
        for table in self._tables.values():
            counts[table.slots] += np.diff(table.ends)
        _same("rows", self._slots, counts[self._slots], manifest.slots.rows[self._slots])

    def _read_memory(self, left: dict[str, tensors.Array], manifest: Manifest, index: int) -> None:
        memory = _take(left, "memory.slots", np.uint64, (None, 3))
        self._memory = memory[np.argsort(memory[:, 0], kind="stable")]
        self._slots = _slots_in("memory.slots", self._memory[:, 0], self._slot_count)
        if len(self._slots) and not (np.diff(self._slots) > 0).all():
            raise InvalidRequest("memory.slots has a slot twice")
        said = np.flatnonzero(manifest.slots.part == index)
        if not np.array_equal(self._slots, said):
            wrong = np.setxor1d(self._slots, said)
            raise InvalidRequest(
                f"its slots are not those of the manifest: {len(wrong)} differ, first {wrong[0]}"
            )
        _same("position", self._slots, self._memory[:, 1], manifest.slots.position[self._slots])
        _same("epoch", self._slots, self._memory[:, 2], manifest.slots.epoch[self._slots])
        self._streams = np.empty((0, _STREAM_WORDS), np.uint64)
        self._closed = np.empty((0, _CLOSED_WORDS), np.uint64)
        if manifest.series == "export":
            return
        self._streams = _take(left, "memory.streams", np.uint64, (None, _STREAM_WORDS))
        self._closed = _take(left, "memory.closed", np.uint64, (None, _CLOSED_WORDS))
        if "memory.times" in left:
            times = _take(left, "memory.times", np.uint64, (None, 2))
            _slots_in("memory.times", times[:, 0], self._slot_count)
        for name, rows in (("memory.streams", self._streams), ("memory.closed", self._closed)):
            slots = _slots_in(name, rows[:, 0], self._slot_count)
            if not np.isin(slots, self._slots).all():
                raise InvalidRequest(f"{name} has slots that are not in this part")


def _contents(manifest: Manifest, spec: TableSpec) -> list[tuple[str, tuple[int, int]]]:
    """Return the name of a table and of its companion, each with weights and state of a row."""
    if manifest.series == "export":
        return [(spec.name, (spec.row_elements, len(statistics_in(manifest, spec))))]
    contents = [(spec.name, (spec.row_elements, spec.state_elements))]
    companion = spec.companion_shape
    if companion is not None:
        contents.append((f"{spec.name}@admission", companion))
    return contents


def _table_rows(
    left: dict[str, tensors.Array], name: str, shape: tuple[int, int], known: NDArray[np.int64]
) -> TableRows:
    """Take the tensors of one table out of ``left``, and check them.

    ``shape`` is weights and state of a row.
    """
    prefix = f"table.{name}."
    row_elements, state_elements = shape
    # All of these, or none: a table may have nothing but deleted keys to say.
    if not any(prefix + name in left for name in ("runs", "keys", "weights", "state")):
        for what, array in _nothing(row_elements, state_elements).items():
            left[prefix + what] = array
    runs = _take(left, prefix + "runs", np.uint64, (None, 2))
    keys = _take(left, prefix + "keys", np.uint64, (None,))
    weights = _take(left, prefix + "weights", np.float32, (len(keys), row_elements))
    if state_elements:
        state = _take(left, prefix + "state", np.float32, (len(keys), state_elements))
    else:
        state = np.empty((len(keys), 0), np.float32)
    if (prefix + "deleted" in left) != (prefix + "deleted_runs" in left):
        raise InvalidRequest(f"{prefix}deleted and {prefix}deleted_runs must come together")
    deleted_runs, deleted = np.empty((0, 2), np.uint64), np.empty(0, np.uint64)
    if prefix + "deleted" in left:
        deleted_runs = _take(left, prefix + "deleted_runs", np.uint64, (None, 2))
        deleted = _take(left, prefix + "deleted", np.uint64, (None,))
    return TableRows(
        *_ends_of(prefix + "runs", runs, len(keys), known),
        keys,
        weights,
        state,
        *_ends_of(prefix + "deleted_runs", deleted_runs, len(deleted), known),
        deleted,
    )


def _nothing(row_elements: int, state_elements: int) -> dict[str, tensors.Array]:
    empty: dict[str, tensors.Array] = {
        "runs": np.empty((0, 2), np.uint64),
        "keys": np.empty(0, np.uint64),
        "weights": np.empty((0, row_elements), np.float32),
    }
    if state_elements:
        empty["state"] = np.empty((0, state_elements), np.float32)
    return empty


def _take(
    left: dict[str, tensors.Array],
    name: str,
    dtype: type[np.generic],
    shape: tuple[int | None, ...],
) -> NDArray[Any]:
    """Remove a tensor from ``left`` and return it; None in ``shape`` stands for any size."""
    array = left.pop(name, None)
    if array is None:
        raise InvalidRequest(f"it has no tensor {name}")
    fits = len(array.shape) == len(shape) and all(
        expected in (None, size) for expected, size in zip(shape, array.shape, strict=True)
    )
    if array.dtype != dtype or not fits:
        text = ", ".join("any" if size is None else str(size) for size in shape)
        raise InvalidRequest(
            f"{name} is {array.dtype} {list(array.shape)}, not {np.dtype(dtype)} [{text}]"
        )
    return array


def _slots_in(name: str, values: NDArray[np.uint64], slot_count: int) -> NDArray[np.int64]:
    if len(values) and int(values.max()) >= slot_count:
        raise InvalidRequest(f"{name} has slot {int(values.max())} of {slot_count}")
    return values.astype(np.int64)


def _ends_of(
    name: str, runs: NDArray[np.uint64], count: int, known: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return slots and ends of the runs, which must cover ``count`` rows."""
    if not (runs[1:, 0] > runs[:-1, 0]).all():
        raise InvalidRequest(f"{name} does not have its slots in ascending order, each once")
    if not np.isin(runs[:, 0], known.astype(np.uint64)).all():
        raise InvalidRequest(f"{name} has slots that are not in this part")
    # Python's integers: 64-bit ones could wrap around to the right sum.
    if (said := sum(runs[:, 1].tolist())) != count:
        raise InvalidRequest(f"{name} speaks of {said} rows, there are {count}")
    ends = np.zeros(len(runs) + 1, np.int64)
    np.cumsum(runs[:, 1].astype(np.int64), out=ends[1:])
    return runs[:, 0].astype(np.int64), ends


def _run(slots: NDArray[np.int64], ends: NDArray[np.int64], slot: int) -> slice:
    place = int(np.searchsorted(slots, slot))
    if place == len(slots) or slots[place] != slot:
        return slice(0, 0)
    return slice(int(ends[place]), int(ends[place + 1]))


def _same(name: str, slots: NDArray[np.int64], found: Any, said: Any) -> None:
    wrong = np.flatnonzero(found.astype(np.uint64) != said)
    if len(wrong):
        place = int(wrong[0])
        raise InvalidRequest(
            f"{name} of slot {slots[place]} is {found[place]}, the manifest says {said[place]}"
        )
