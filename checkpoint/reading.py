"""The rows of a checkpoint, put together from all that it builds on.

A part is checked against its checksum when the first row of it is wanted; nothing is believed
before. Imports the storage, the part reader, ``backstay.tables`` and ``backstay.errors``.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backstay._native import initial_rows, table_id
from backstay.checkpoint.chain import first_whole
from backstay.checkpoint.manifest import Manifest
from backstay.checkpoint.parts import PartReader, Rows, SlotMemory, read_part
from backstay.checkpoint.storage import CheckpointStorage
from backstay.errors import CheckpointDamaged, InvalidRequest
from backstay.tables import Dense, TableSpec

__all__ = ["CheckpointReader", "SlotRows", "block_count"]


@dataclass(frozen=True)
class SlotRows:
    """The rows of one table in one slot.

    Attributes:
        slot: Its number.
        keys: uint64 [n], each once, in no order.
        weights: float32 [n, elements].
        state: float32 [n, state], as the optimizer keeps it.
    """

    slot: int
    keys: NDArray[np.uint64]
    weights: NDArray[np.float32]
    state: NDArray[np.float32]


class CheckpointReader:
    """The state that a checkpoint stands for, without a cluster.

    Use it as a context manager, or ``close`` it: copies of parts of a storage that is not local
    are kept until then. Rows may be views of them. For one thread.

    Args:
        storage: Where it is.
        checkpoint_id: Which one.
        scratch: A folder for copies of its parts. Default: the system's temporary folder.

    Raises:
        CheckpointNotFound: There is no such checkpoint.
        CheckpointDamaged: Something that it builds on is missing or does not fit. So does
            every method that reads rows, when a part is damaged; the message names the file.
    """

    def __init__(
        self, storage: CheckpointStorage, checkpoint_id: str, *, scratch: Path | None = None
    ) -> None:
        self._storage = storage
        self._chain = storage.chain(checkpoint_id)
        self._folder = tempfile.TemporaryDirectory(dir=scratch, prefix="backstay-checkpoint-")
        self._open: dict[tuple[int, int], PartReader] = {}
        self._first = first_whole(self._chain)

    @property
    def manifest(self) -> Manifest:
        """The checkpoint's own manifest."""
        return self._chain[-1]

    @property
    def chain(self) -> Sequence[Manifest]:
        """The manifests of all that it is made of, the full one first, its own last."""
        return tuple(self._chain)

    def slot_memory(self, slot: int) -> SlotMemory:
        """Return which pushes a slot has applied."""
        return self._part(len(self._chain) - 1, slot).slot_memory(slot)

    def slot_rows(self, table: str, slot: int) -> SlotRows:
        """Return the rows of a table in one slot.

        Raises:
            InvalidRequest: The checkpoint has no such table or slot.
        """
        spec = self.manifest.table(table)
        if not 0 <= slot < self.manifest.slot_count:
            raise InvalidRequest(f"slot {slot} is not one of {self.manifest.slot_count}")
        layers = [
            self._part(link, slot).rows(table).of(slot)
            for link in range(int(self._first[slot]), len(self._chain))
            # A table may be younger than a checkpoint that this one builds on.
            if spec in self._chain[link].tables
        ]
        # Deleted keys say nothing to the oldest, which has all its rows.
        if len(layers) == 1:
            return SlotRows(slot, layers[0].keys, layers[0].weights, layers[0].state)
        return _merged(slot, layers)

    def rows(self, table: str) -> Iterator[SlotRows]:
        """Go through the rows of a table, slot by slot; slots without any are left out."""
        self.manifest.table(table)
        for slot in range(self.manifest.slot_count):
            rows = self.slot_rows(table, slot)
            if len(rows.keys):
                yield rows

    def row_count(self, table: str) -> int:
        """Return how many rows a table has."""
        return sum(len(rows.keys) for rows in self.rows(table))

    def dense(self, table: str, *, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """Return a dense table as the tensor that it is.

        Blocks that no trainer has set have their initial values.

        Args:
            table: Its name.
            out: Where to write it, of the table's shape, contiguous.

        Raises:
            InvalidRequest: It is not dense, or ``out`` does not fit.
            CheckpointDamaged: It has a block beyond the end.
        """
        spec = self.manifest.table(table)
        if not isinstance(spec.kind, Dense):
            raise InvalidRequest(f"table {table} is sparse: its rows have keys")
        tensor = np.empty(spec.kind.shape, np.float32) if out is None else out
        if tensor.shape != spec.kind.shape or tensor.dtype != np.float32:
            raise InvalidRequest(f"out is {tensor.dtype} {tensor.shape}, not {spec.kind.shape}")
        if not tensor.flags.c_contiguous:
            raise InvalidRequest("out is not contiguous")
        flat, size = tensor.reshape(-1), spec.row_elements
        missing = np.ones(block_count(spec), np.bool_)
        for rows in self.rows(table):
            for block, values in zip(_blocks_of(spec, rows.keys), rows.weights, strict=True):
                part = flat[block * size : (block + 1) * size]
                part[:] = values[: len(part)]
                missing[block] = False
        for block in np.flatnonzero(missing).tolist():
            part = flat[block * size : (block + 1) * size]
            key = np.array([(table_id(table) + block) % 2**64], np.uint64)
            part[:] = initial_rows(spec.to_json(), key)[0, : len(part)]
        return tensor

    def close(self) -> None:
        """Remove the copies. Rows that were handed out must not be used any more."""
        self._open.clear()
        self._folder.cleanup()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _part(self, link: int, slot: int) -> PartReader:
        manifest = self._chain[link]
        index = int(manifest.slots.part[slot])
        found = self._open.get((link, index))
        if found is None:
            into = Path(self._folder.name)
            found = self._open[link, index] = read_part(self._storage, manifest, index, into)
        return found


def block_count(spec: TableSpec) -> int:
    """Return into how many blocks a dense table is cut."""
    assert isinstance(spec.kind, Dense)
    return math.ceil(math.prod(spec.kind.shape) / spec.kind.block_elements)


def _blocks_of(spec: TableSpec, keys: NDArray[np.uint64]) -> list[int]:
    """Return the numbers of a dense table's blocks: a key is the table's id plus that."""
    blocks = keys - np.uint64(table_id(spec.name))
    if len(blocks) and int(blocks.max()) >= block_count(spec):
        raise CheckpointDamaged(
            f"table {spec.name}: block {int(blocks.max())} of {block_count(spec)}"
        )
    return [int(block) for block in blocks]


def _merged(slot: int, layers: Sequence[Rows]) -> SlotRows:
    """Apply changes in order: remove what was deleted, then put rows; the oldest layer first."""
    keys: list[NDArray[np.uint64]] = []
    places: list[NDArray[np.int64]] = []
    rows = 0
    for number, layer in enumerate(layers):
        if number:
            keys.append(layer.deleted)
            places.append(np.full(len(layer.deleted), -1))
        keys.append(layer.keys)
        places.append(np.arange(rows, rows + len(layer.keys)))
        rows += len(layer.keys)
    # What is said of a key last is what holds.
    _, last = np.unique(np.concatenate(keys)[::-1], return_index=True)
    chosen = np.concatenate(places)[::-1][last]
    chosen = chosen[chosen >= 0]

    def gathered(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate(arrays)[chosen]

    return SlotRows(
        slot,
        gathered([layer.keys for layer in layers]),
        gathered([layer.weights for layer in layers]),
        gathered([layer.state for layer in layers]),
    )
