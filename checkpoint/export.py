"""Exports for inference: weights alone, sorted by key, in files that need no backstay.

An export is a folder: a file for each sparse table with rows sorted by key, one for all dense
tables, and ``export.json``, which says what is in it. It is written aside and renamed. Imports the
reader, ``checkpoint.tensors``, ``json_record`` and ``backstay.errors``; pyarrow only for Parquet.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from backstay.checkpoint import tensors
from backstay.checkpoint.documents import FileEntry, write_object
from backstay.checkpoint.reading import CheckpointReader, SlotRows
from backstay.checkpoint.roots import sha256_of, sync_file, sync_folder
from backstay.checkpoint.statistics import scores_of, statistics_of
from backstay.checkpoint.storage import CheckpointStorage
from backstay.errors import CheckpointUnavailable, ConfigError, InvalidRequest
from backstay.json_record import JsonRecord
from backstay.tables import Sparse, TableSpec

__all__ = [
    "ALL_ROWS",
    "DENSE_FILE",
    "DENSE_FORMAT",
    "EXPORT_FILE",
    "EXPORT_FORMAT",
    "TABLE_FORMAT",
    "ExportIndex",
    "Format",
    "ModelEntry",
    "ModelLayer",
    "ModelPart",
    "RowChoice",
    "TableEntry",
    "export",
]

Format: TypeAlias = Literal["safetensors", "parquet"]
# Called with a table's name and the rows of it written so far.
Progress: TypeAlias = Callable[[str, int], None]

EXPORT_FORMAT = 2
EXPORT_FILE = "export.json"
DENSE_FILE = "dense.safetensors"
TABLE_FORMAT = "backstay-table-1"
DENSE_FORMAT = "backstay-dense-1"
STATISTICS_FORMAT = "backstay-statistics-1"
# Rows that a reader of Parquet has in memory at once.
ROW_GROUP_ROWS = 65_536
SLUG_LENGTH_MAX = 80


@dataclass(frozen=True)
class ModelLayer(JsonRecord):
    """An embedding of a model and the table that its rows are in.

    Attributes:
        path: Of the layer in the model.
        table: Its name.
        bag: How a bag's rows are combined, "sum" or "mean"; None: it is no bag.
        padding_idx: The id that is answered with zeros.
        include_last_offset: See PyTorch's ``EmbeddingBag``.
    """

    path: str
    table: str
    bag: Literal["sum", "mean"] | None = None
    padding_idx: int | None = None
    include_last_offset: bool = False


@dataclass(frozen=True)
class ModelPart:
    """What an export knows of a model.

    Attributes:
        framework: ``paddle`` or ``torch``.
        layers: Its embeddings whose rows are in tables.
        state: All else, by the names of ``state_dict()``.
    """

    framework: str
    layers: tuple[ModelLayer, ...]
    state: Mapping[str, NDArray[Any]] = field(repr=False)


@dataclass(frozen=True)
class TableEntry(JsonRecord):
    """A sparse table of an export: its description, its file and the number of its rows."""

    spec: dict[str, Any]
    file: str
    rows: int


@dataclass(frozen=True)
class DenseEntry(JsonRecord):
    """A dense table of an export: its description, the file, and its tensor's name there."""

    spec: dict[str, Any]
    file: str
    tensor: str


@dataclass(frozen=True)
class ModelEntry(JsonRecord):
    """The model of an export: framework, layers, and the names of its state."""

    framework: str
    layers: tuple[ModelLayer, ...]
    state: tuple[str, ...]


@dataclass(frozen=True)
class ExportIndex(JsonRecord, what="export"):
    """What ``export.json`` says, without its checksum."""

    format: int
    checkpoint: str
    cluster: str
    created: str
    tags: dict[str, Any]
    tables: tuple[TableEntry, ...]
    dense: tuple[DenseEntry, ...]
    model: ModelEntry | None
    files: tuple[FileEntry, ...]

    def __post_init__(self) -> None:
        """Refuse parts that do not fit together."""
        files = {entry.file for entry in self.files}
        for file in [*(each.file for each in self.tables), *(each.file for each in self.dense)]:
            if file not in files:
                raise InvalidRequest(f"{file!r} is not among its files")
        if any(each.file != DENSE_FILE for each in self.dense):
            raise InvalidRequest(f"a dense table is not in {DENSE_FILE}")


@dataclass(frozen=True)
class RowChoice:
    """What of the rows of tables with a lifetime is exported; of others, all weights are.

    Attributes:
        statistics: Also write the statistics of rows, to a file of their own for each table.
        score_at_least: Leave rows out whose score was lower when the checkpoint was begun, in
            tables whose lifetime uses a score.
    """

    statistics: bool = False
    score_at_least: float | None = None

    def of(self, spec: TableSpec, rows: SlotRows, created: str) -> SlotRows:
        """Return those of the rows that are exported, of a checkpoint that was begun then."""
        if self.score_at_least is None or not spec.has_score:
            return rows
        began = datetime.fromisoformat(created[:19]).replace(tzinfo=timezone.utc)
        chosen = scores_of(spec, rows.state, int(began.timestamp())) >= self.score_at_least
        return SlotRows(rows.slot, rows.keys[chosen], rows.weights[chosen], rows.state[chosen])


ALL_ROWS = RowChoice()


def _is_kept_out(table: str) -> bool:
    """Return whether a table is of backstay's own, such as the audit's: no part of a model."""
    return table.rpartition("/")[2].startswith("__")


def export(
    storage: CheckpointStorage,
    checkpoint_id: str,
    directory: str | Path,
    format: Format = "safetensors",  # noqa: A002  # the word that users know
    *,
    model: ModelPart | None = None,
    rows: RowChoice = ALL_ROWS,
    scratch: Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write the weights of a checkpoint to a folder of this machine.

    Keys of a table are kept in memory meanwhile, 8 bytes a row; weights are not.

    Args:
        storage: Where the checkpoint is.
        checkpoint_id: Which one.
        directory: The folder to make; must not exist.
        format: Of the sparse tables: "safetensors", which can be looked up mapped, or "parquet".
            Dense tables are tensors, and always in a file of tensors.
        model: Export this model: the tables of its layers, and its state in the place of dense
            tables. None: all tables, but for those of backstay's own.
        rows: Which rows of tables with a lifetime, and whether their statistics.
        scratch: A folder for copies of parts, if the storage is not local.
        progress: Called after each slot.

    Returns:
        The folder.

    Raises:
        CheckpointNotFound: There is no such checkpoint.
        CheckpointDamaged: It is damaged; nothing is left of the export.
        CheckpointUnavailable: The storage cannot be read, or the folder not written.
        ConfigError: Parquet needs a package that is missing.
        InvalidRequest: The folder exists, or there is no such format.
    """
    target = Path(directory).absolute()
    if format not in get_args(Format):
        raise InvalidRequest(f"format {format!r}; allowed: {', '.join(get_args(Format))}")
    if target.exists():
        raise InvalidRequest(f"{target} exists already: an export makes its own folder")
    if format == "parquet":
        _parquet()
    aside = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    with CheckpointReader(storage, checkpoint_id, scratch=scratch) as reader:
        try:
            aside.mkdir(parents=True)
            _write(reader, aside, format, model, rows, progress)
            sync_folder(aside)
            aside.rename(target)
            sync_folder(target.parent)
        except OSError as error:
            # Some of backstay's own errors are OSErrors too.
            if isinstance(error, CheckpointUnavailable):
                raise
            raise CheckpointUnavailable(f"{target}: {error}") from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return target


def _write(
    reader: CheckpointReader,
    folder: Path,
    kind: Format,
    model: ModelPart | None,
    chosen: RowChoice,
    progress: Progress | None,
) -> None:
    manifest = reader.manifest
    tables, dense = [], []
    wanted = None if model is None else {layer.table for layer in model.layers}
    for number, spec in enumerate(manifest.tables):
        if _is_kept_out(spec.name) if wanted is None else spec.name not in wanted:
            continue
        if not isinstance(spec.kind, Sparse):
            dense.append(spec)
            continue
        slug = re.sub(r"[^A-Za-z0-9_-]", "_", spec.name)[:SLUG_LENGTH_MAX]
        name = f"table-{number:04d}-{slug}.{kind}"
        count = _write_table(reader, spec, folder / name, kind, chosen, progress)
        tables.append(TableEntry(json.loads(spec.to_json()), name, count))
    if model is not None and model.state:
        _write_state(model.state, folder / DENSE_FILE, manifest.id)
    if dense:
        _write_dense(reader, dense, folder / DENSE_FILE)
    files = []
    for path in sorted(folder.iterdir()):
        sync_file(path)
        files.append(FileEntry(path.name, path.stat().st_size, sha256_of(path)))
    index = ExportIndex(
        EXPORT_FORMAT,
        checkpoint=manifest.id,
        cluster=manifest.cluster,
        created=manifest.created,
        tags=dict(manifest.tags),
        tables=tuple(tables),
        dense=tuple(
            DenseEntry(json.loads(spec.to_json()), DENSE_FILE, spec.name) for spec in dense
        ),
        model=None if model is None else _model_entry(model),
        files=tuple(files),
    )
    path = folder / EXPORT_FILE
    path.write_text(write_object(asdict(index)), encoding="utf-8")
    sync_file(path)


def _write_table(
    reader: CheckpointReader,
    spec: TableSpec,
    path: Path,
    kind: Format,
    chosen: RowChoice,
    progress: Progress | None,
) -> int:
    """Write a table's rows sorted by key and return how many they are."""

    def all_rows() -> Iterator[SlotRows]:
        created = reader.manifest.created
        return (chosen.of(spec, rows, created) for rows in reader.rows(spec.name))

    keys = np.sort(np.concatenate([_none(), *(rows.keys for rows in all_rows())]))
    # Parquet is written in order too, so its rows are sorted in a file that is removed again.
    sorted_file = path if kind == "safetensors" else path.with_name(path.name + ".sorted")
    arrays = tensors.create(
        sorted_file,
        {"keys": ("U64", (len(keys),)), "weights": ("F32", (len(keys), spec.row_elements))},
        {"format": TABLE_FORMAT, "table": spec.name, "checkpoint": reader.manifest.id},
    )
    arrays["keys"][:] = keys
    kept: Mapping[str, NDArray[Any]] = {}
    if chosen.statistics and spec.statistics:
        kept = _statistics_file(path, spec, len(keys), reader.manifest.id)
        kept["keys"][:] = keys
    done = 0
    for rows in all_rows():
        places = np.searchsorted(keys, rows.keys)
        arrays["weights"][places] = rows.weights
        for name, column in statistics_of(spec, rows.state).items() if kept else ():
            kept[name][places] = column
        done += len(rows.keys)
        if progress is not None:
            progress(spec.name, done)
    if kind == "parquet":
        _write_parquet(path, spec, arrays["keys"], arrays["weights"])
        sorted_file.unlink()
    return len(keys)


def _statistics_file(
    path: Path, spec: TableSpec, rows: int, checkpoint: str
) -> dict[str, NDArray[Any]]:
    """Make the file of a table's statistics, beside the table's: a tensor each, and the keys."""
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {"keys": ("U64", (rows,))}
    empty = statistics_of(spec, np.empty((0, spec.state_elements), np.float32))
    for name, column in empty.items():
        kinds[name] = "I64" if column.dtype == np.uint32 else "F32", (rows,)
    metadata = {"format": STATISTICS_FORMAT, "table": spec.name, "checkpoint": checkpoint}
    return tensors.create(path.with_name(f"{path.stem}.statistics.safetensors"), kinds, metadata)


def _write_dense(reader: CheckpointReader, specs: list[TableSpec], path: Path) -> None:
    shapes = {spec.name: ("F32", _shape_of(spec)) for spec in specs}
    metadata = {"format": DENSE_FORMAT, "checkpoint": reader.manifest.id}
    for name, array in tensors.create(path, shapes, metadata).items():
        reader.dense(name, out=array)


def _model_entry(model: ModelPart) -> ModelEntry:
    return ModelEntry(model.framework, model.layers, tuple(sorted(model.state)))


def _write_state(state: Mapping[str, NDArray[Any]], path: Path, checkpoint: str) -> None:
    """Write a model's state: each tensor under its name, in its shape."""
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name in sorted(state, key=lambda name: (-state[name].itemsize, name)):
        kind = tensors.kind_of(state[name])
        if kind is None:
            raise InvalidRequest(f"{name} of the model is {state[name].dtype}: not to be exported")
        kinds[name] = kind, state[name].shape
    metadata = {"format": DENSE_FORMAT, "checkpoint": checkpoint}
    for name, array in tensors.create(path, kinds, metadata).items():
        array[...] = state[name]


def _shape_of(spec: TableSpec) -> tuple[int, ...]:
    assert not isinstance(spec.kind, Sparse)
    return spec.kind.shape


def _write_parquet(
    path: Path, spec: TableSpec, keys: NDArray[np.uint64], weights: NDArray[np.float32]
) -> None:
    arrow, parquet = _parquet()
    row = arrow.list_(arrow.float32(), spec.row_elements)
    schema = arrow.schema(
        [
            arrow.field("key", arrow.uint64(), nullable=False),
            arrow.field("weights", row, nullable=False),
        ],
        metadata={"format": TABLE_FORMAT, "table": spec.name},
    )
    with parquet.ParquetWriter(path, schema) as writer:
        for part in _slices(len(keys)):
            flat = arrow.array(weights[part].reshape(-1))
            rows = arrow.FixedSizeListArray.from_arrays(flat, spec.row_elements)
            writer.write_table(
                arrow.Table.from_arrays([arrow.array(keys[part]), rows], schema=schema)
            )


def _slices(count: int) -> Iterator[slice]:
    for begin in range(0, count, ROW_GROUP_ROWS):
        yield slice(begin, min(begin + ROW_GROUP_ROWS, count))


def _none() -> NDArray[np.uint64]:
    return np.empty(0, np.uint64)


def _parquet() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError("Parquet needs pyarrow: pip install 'backstay[parquet]'") from error
    return pyarrow, pyarrow.parquet
