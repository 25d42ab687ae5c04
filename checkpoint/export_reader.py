"""Reads exports: tables in which rows are looked up by key, and dense tensors.

A table in a file of tensors is mapped: opening it reads nothing, and processes that serve the same
model share its pages. Imports ``checkpoint.export`` (names), ``checkpoint.tensors``,
``backstay.tables`` and ``backstay.errors``; pyarrow only for Parquet. Knows no framework.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from backstay._native import initial_rows, pulled_rows
from backstay.checkpoint import tensors
from backstay.checkpoint.documents import DOCUMENT_BYTES_MAX, FileEntry, parse_object
from backstay.checkpoint.export import (
    DENSE_FILE,
    EXPORT_FILE,
    EXPORT_FORMAT,
    TABLE_FORMAT,
    ExportIndex,
    ModelEntry,
    ModelPart,
    TableEntry,
)
from backstay.checkpoint.roots import sha256_of
from backstay.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    CheckpointUnavailable,
    ConfigError,
    InvalidRequest,
)
from backstay.tables import Dense, Sparse, TableSpec

__all__ = ["Export", "ExportedTable", "RowsByKey", "Unknown", "as_keys", "pulled", "with_unknown"]

# What a key gets that training has not met: zeros, the initial value that it would have on a
# server, or an error.
Unknown: TypeAlias = Literal["zeros", "initial", "refuse"]


class RowsByKey(Protocol):
    """The rows of a sparse table, wherever they are: what layers for inference need of them."""

    @property
    def spec(self) -> TableSpec:
        """The table's description."""

    @property
    def dim(self) -> int:
        """Elements of a row."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def lookup(self, keys: Any, *, unknown: Unknown = "zeros") -> NDArray[np.float32]:
        """Return the rows of keys, float32 [*keys.shape, dim]."""

    def to_numpy(self) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
        """Return keys and weights as arrays of their own, in memory."""


@dataclass(frozen=True, eq=False)
class ExportedTable:
    """The rows of one sparse table.

    Attributes:
        spec: The table's description.
        keys: uint64 [n], ascending, read-only.
        weights: float32 [n, dim], read-only; mapped, unless it comes from Parquet. As they are
            stored: what a pull makes of them, :meth:`lookup` gives.
    """

    spec: TableSpec
    keys: NDArray[np.uint64]
    weights: NDArray[np.float32]

    @classmethod
    def open(cls, path: str | Path) -> ExportedTable:
        """Open one table's file of an export, which stands beside its ``export.json``.

        Raises:
            CheckpointNotFound: There is no export.
            CheckpointDamaged: It is damaged, or the file is not one of its tables.
        """
        return Export.open(Path(path).parent).table_in(Path(path).name)

    @property
    def dim(self) -> int:
        """Elements of a row."""
        return self.spec.row_elements

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.keys)

    def lookup(self, keys: Any, *, unknown: Unknown = "zeros") -> NDArray[np.float32]:
        """Return what a pull of keys would give, float32 [*keys.shape, dim].

        Args:
            keys: Integers of any shape; signed ones keep their bits.
            unknown: What a key without a row gets: "zeros"; "initial", what a pull of it would
                give before its first push, at microseconds a key; "refuse".

        Raises:
            InvalidRequest: The keys are not integers; or one has no row, with "refuse".
        """
        wanted = as_keys(keys)
        flat = wanted.reshape(-1)
        rows = np.zeros((len(flat), self.dim), np.float32)
        places = np.searchsorted(self.keys, flat)
        known = places < len(self.keys)
        known[known] = self.keys[places[known]] == flat[known]
        rows[known] = self.weights[places[known]]
        return with_unknown(self.spec, flat, rows, known, unknown).reshape(*wanted.shape, self.dim)

    def to_numpy(self) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
        """Return keys and weights as arrays of their own, in memory; see :func:`pulled`."""
        return np.array(self.keys), np.array(self.weights)


@dataclass(frozen=True)
class Export:
    """A folder that ``checkpoint.export`` has made.

    Attributes:
        directory: The folder.
        checkpoint: The id of the checkpoint it was made of.
        tags: What was noted there.
        sparse: Descriptions of the sparse tables.
        dense_tables: Descriptions of the dense tables.
    """

    directory: Path
    checkpoint: str
    tags: Mapping[str, Any]
    sparse: tuple[TableSpec, ...]
    dense_tables: tuple[TableSpec, ...]
    _entries: tuple[TableEntry, ...]
    _files: tuple[FileEntry, ...]
    _model: ModelEntry | None = None

    @classmethod
    def open(cls, directory: str | Path) -> Export:
        """Open an export; of its files only the lengths are looked at.

        Raises:
            CheckpointNotFound: There is none.
            CheckpointDamaged: It is damaged; the message names the file.
            CheckpointUnavailable: It cannot be read.
        """
        folder = Path(directory)
        path = folder / EXPORT_FILE
        try:
            if path.stat().st_size > DOCUMENT_BYTES_MAX:
                raise CheckpointDamaged(f"{path}: over {DOCUMENT_BYTES_MAX} bytes")
            text = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointNotFound(f"{folder} holds no export: {path.name} is missing") from error
        except OSError as error:
            raise CheckpointUnavailable(f"{path}: {error}") from error
        try:
            opened = cls(folder, **_read_index(text))
        except (InvalidRequest, ConfigError) as error:
            raise CheckpointDamaged(f"{path}: {error}") from error
        opened._check_lengths()
        return opened

    @property
    def where(self) -> str:
        """The folder, for messages."""
        return str(self.directory)

    @property
    def model(self) -> ModelPart | None:
        """The model that was exported, its state mapped and read-only; None: tables alone.

        Raises:
            CheckpointDamaged: The file of its state is damaged.
        """
        if self._model is None:
            return None
        names, state = list(self._model.state), {}
        if names:
            path, kinds = self.directory / DENSE_FILE, tensors.STATE_DTYPES
            state = dict(tensors.read(path, DENSE_FILE, dtypes=kinds).tensors)
        if sorted(state) != names:
            raise CheckpointDamaged(f"{DENSE_FILE}: its tensors are not those of {EXPORT_FILE}")
        return ModelPart(self._model.framework, self._model.layers, state)

    def table(self, name: str) -> ExportedTable:
        """Open a sparse table.

        Raises:
            InvalidRequest: There is none of that name.
            CheckpointDamaged: Its file is damaged.
        """
        for spec, entry in zip(self.sparse, self._entries, strict=True):
            if spec.name == name:
                return self._open_table(spec, entry)
        known = ", ".join(spec.name for spec in self.sparse) or "none"
        raise InvalidRequest(f"{self.directory} has no sparse table {name!r}; it has: {known}")

    def table_in(self, file: str) -> ExportedTable:
        """Open the sparse table that is in a file.

        Raises:
            InvalidRequest: The file is not a table of this export.
        """
        for spec, entry in zip(self.sparse, self._entries, strict=True):
            if entry.file == file:
                return self._open_table(spec, entry)
        raise InvalidRequest(f"{self.directory / file} is not a table of the export there")

    def dense(self, name: str) -> NDArray[np.float32]:
        """Return a dense table, float32 of its shape, mapped and read-only.

        Raises:
            InvalidRequest: There is none of that name.
            CheckpointDamaged: The file is damaged.
        """
        for spec in self.dense_tables:
            if spec.name == name and isinstance(spec.kind, Dense):
                found = tensors.read(self.directory / DENSE_FILE, DENSE_FILE).tensors.get(name)
                if found is None or found.shape != spec.kind.shape or found.dtype != np.float32:
                    raise CheckpointDamaged(f"{DENSE_FILE}: no tensor {name} as its table says")
                return found
        known = ", ".join(spec.name for spec in self.dense_tables) or "none"
        raise InvalidRequest(f"{self.directory} has no dense table {name!r}; it has: {known}")

    def verify(self) -> None:
        """Read every file to its end and compare its checksum.

        Raises:
            CheckpointDamaged: One was changed; the message names it.
        """
        for entry in self._files:
            path = self.directory / entry.file
            if sha256_of(path) != entry.sha256:
                raise CheckpointDamaged(f"{path}: its checksum is wrong")

    def _check_lengths(self) -> None:
        for entry in self._files:
            path = self.directory / entry.file
            size = path.stat().st_size if path.is_file() else -1
            if size != entry.bytes:
                found = "missing" if size < 0 else f"{size} bytes"
                raise CheckpointDamaged(f"{path}: {found}, {EXPORT_FILE} says {entry.bytes}")

    def _open_table(self, spec: TableSpec, entry: TableEntry) -> ExportedTable:
        path = self.directory / entry.file
        if path.suffix == ".parquet":
            keys, weights = _read_parquet(path)
        else:
            found = tensors.read(path, str(path))
            if found.metadata.get("format") != TABLE_FORMAT:
                raise CheckpointDamaged(f"{path}: its format is not {TABLE_FORMAT}")
            if found.tensors.keys() != {"keys", "weights"}:
                raise CheckpointDamaged(f"{path}: it does not have keys and weights alone")
            keys, weights = found.tensors["keys"], found.tensors["weights"]
        shape = (entry.rows, spec.row_elements)
        if keys.shape != shape[:1] or weights.shape != shape:
            raise CheckpointDamaged(f"{path}: keys or weights are not as {EXPORT_FILE} says")
        if keys.dtype != np.uint64 or weights.dtype != np.float32:
            raise CheckpointDamaged(f"{path}: {keys.dtype} keys and {weights.dtype} weights")
        return ExportedTable(spec, keys, weights)


def pulled(spec: TableSpec, weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return what a pull makes of weights as they are stored.

    Args:
        spec: Of their table.
        weights: float32 [n, elements] of a sparse table; a dense one's in its shape.
    """
    if spec.pull is None or not weights.size:
        return weights
    # The last block of a dense table may reach beyond it: zeros, as a trainer that sets it sends.
    rows = -(-weights.size // spec.row_elements)
    blocks = np.zeros((rows, spec.row_elements), np.float32)
    blocks.reshape(-1)[: weights.size] = weights.reshape(-1)
    return pulled_rows(spec.to_json(), blocks).reshape(-1)[: weights.size].reshape(weights.shape)


def _read_index(text: bytes) -> dict[str, Any]:
    """Return the fields of :class:`Export` that ``export.json`` stands for."""
    document = parse_object(text)
    if document.get("format") != EXPORT_FORMAT:
        found = document.get("format")
        raise InvalidRequest(f"format {found}, this version reads {EXPORT_FORMAT} only")
    index = ExportIndex.from_json(json.dumps(document))
    specs = tuple(TableSpec.from_json(json.dumps(each.spec)) for each in index.tables)
    if not all(isinstance(spec.kind, Sparse) for spec in specs):
        raise InvalidRequest("a dense table among the sparse ones")
    names = {spec.name for spec in specs}
    for layer in () if index.model is None else index.model.layers:
        if layer.table not in names:
            raise InvalidRequest(f"the layer {layer.path!r} has no table")
    return {
        "_model": index.model,
        "checkpoint": index.checkpoint,
        "tags": index.tags,
        "sparse": specs,
        "dense_tables": tuple(TableSpec.from_json(json.dumps(one.spec)) for one in index.dense),
        "_entries": index.tables,
        "_files": index.files,
    }


def _read_parquet(path: Path) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError("Parquet needs pyarrow: pip install 'backstay[parquet]'") from error
    try:
        table = pyarrow.parquet.read_table(path, columns=["key", "weights"]).combine_chunks()
        keys = table["key"].to_numpy()
        rows = table["weights"].combine_chunks()
        weights = rows.flatten().to_numpy(zero_copy_only=False)
        weights = weights.reshape(len(keys), rows.type.list_size)
    except (pyarrow.ArrowException, OSError, ValueError, AttributeError) as error:
        raise CheckpointDamaged(f"{path}: {error}") from error
    for array in (keys, weights):
        array.setflags(write=False)
    return keys, weights


def with_unknown(
    spec: TableSpec,
    keys: NDArray[np.uint64],
    rows: NDArray[np.float32],
    known: NDArray[np.bool_],
    unknown: Unknown,
) -> NDArray[np.float32]:
    """Return rows [n, dim] as a pull gives them; those of keys without a row as wanted.

    Args:
        spec: Of their table.
        keys: [n].
        rows: As they are stored, zeros where there is none.
        known: Whether a key has a row.
        unknown: See ``ExportedTable.lookup``.

    Raises:
        InvalidRequest: There is such a key, and ``unknown`` is "refuse"; or no such word.
    """
    if unknown not in get_args(Unknown):
        raise InvalidRequest(f"unknown={unknown!r}; allowed: {', '.join(get_args(Unknown))}")
    missing = keys[~known]
    if len(missing) and unknown == "refuse":
        raise InvalidRequest(
            f"table {spec.name} has no row of {len(missing)} of {len(keys)} keys; "
            f"the first is {missing[0]}"
        )
    if len(missing) and unknown == "initial":
        rows[~known] = initial_rows(spec.to_json(), missing)
        known = np.ones_like(known)
    if spec.pull is not None:
        rows[known] = pulled(spec, rows[known])
    return rows


def as_keys(keys: Any) -> NDArray[np.uint64]:
    """Return keys as uint64 of the same shape; signed ones keep their bits.

    Raises:
        InvalidRequest: They are not integers.
    """
    array = np.asarray(keys)
    if array.size == 0 and array.dtype.kind == "f":
        array = array.astype(np.int64)  # an empty list, which has no numbers to be of a kind
    if array.dtype.kind not in "iu":
        raise InvalidRequest(f"keys must be integers, these are {array.dtype}")
    # Through int64, so that a narrow -1 is the same key as a wide one.
    wide = array if array.dtype.kind == "u" else array.astype(np.int64)
    return wide.astype(np.uint64, copy=False)
