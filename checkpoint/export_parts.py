"""A part of an element of a running export: its rows, mapped, after its checksum was compared.

Followers read parts in Rust, into their tables; this is for whoever wants the rows one by one.
Imports ``checkpoint.element``, ``checkpoint.parts``, ``checkpoint.tensors``, ``checkpoint.roots``
and ``backstay.errors``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from backstay.checkpoint import tensors
from backstay.checkpoint.element import Element
from backstay.checkpoint.parts import TableRows, table_rows
from backstay.checkpoint.roots import sha256_of
from backstay.errors import CheckpointDamaged, InvalidRequest
from backstay.tables import TableSpec

__all__ = ["PART_FORMAT", "ExportPart", "statistics_in"]

PART_FORMAT = "backstay-export-part-1"
_SLOT_WORDS = 3


def statistics_in(element: Element, spec: TableSpec) -> tuple[str, ...]:
    """Return the statistics that an element has of each row of a table."""
    return tuple(spec.statistics) if element.choice.statistics else ()


class ExportPart:
    """A part, open and checked.

    Args:
        path: On this machine; must stay as it is while rows of it are in use.
        element: What it is of.
        index: Which of the element's parts it is.

    Raises:
        CheckpointDamaged: It is not what the manifest says.
        CheckpointUnavailable: It cannot be read.
    """

    def __init__(self, path: Path, element: Element, index: int) -> None:
        entry = element.parts[index]
        self.where = f"{element.id}/{entry.file}"
        try:
            size = path.stat().st_size
            said = sha256_of(path) if size == entry.bytes else ""
        except OSError as error:
            raise CheckpointDamaged(f"{self.where}: {error}") from error
        if size != entry.bytes:
            raise CheckpointDamaged(f"{self.where}: {size} bytes, the manifest says {entry.bytes}")
        if said != entry.sha256:
            raise CheckpointDamaged(f"{self.where}: its checksum is wrong")
        found = tensors.read(path, self.where)
        try:
            self._read(found, element, index)
        except InvalidRequest as error:
            raise CheckpointDamaged(f"{self.where}: {error}") from error

    def rows(self, table: str) -> TableRows:
        """Return the rows of a table; none if the part has none of it. ``state`` is statistics."""
        return self._tables[table]

    def _read(self, found: tensors.TensorFile, element: Element, index: int) -> None:
        for name, wanted in (("format", PART_FORMAT), ("checkpoint", element.id)):
            if found.metadata.get(name) != wanted:
                raise InvalidRequest(f"its {name} is {found.metadata.get(name)!r}, not {wanted!r}")
        left = dict(found.tensors)
        memory = left.pop("memory.slots", np.empty((0, 0), np.uint64))
        if memory.ndim != 2 or memory.shape[1] != _SLOT_WORDS or memory.dtype != np.uint64:
            raise InvalidRequest("it has no tensor memory.slots of three words a slot")
        memory = memory[np.argsort(memory[:, 0], kind="stable")]
        slots = np.flatnonzero(np.array(element.slots.part) == index)
        if not np.array_equal(memory[:, 0], slots.astype(np.uint64)):
            raise InvalidRequest("its slots are not those of the manifest")
        if not np.array_equal(memory[:, 1], element.position[slots]):
            raise InvalidRequest("a slot is not in it at its position")
        self._tables = {
            spec.name: table_rows(
                left,
                spec.name,
                (spec.row_elements, len(statistics_in(element, spec))),
                slots,
            )
            for spec in element.tables
        }
