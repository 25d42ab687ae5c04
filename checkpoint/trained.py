"""Trained tables, wherever they are: in an export, or in a checkpoint itself.

Imports the reader, ``checkpoint.export_reader`` and the storage. Knows no framework and no cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from backstay.checkpoint.catalogue import catalogue
from backstay.checkpoint.export import EXPORT_FILE, ModelPart
from backstay.checkpoint.export_reader import Export, ExportedTable, RowsByKey
from backstay.checkpoint.reading import CheckpointReader
from backstay.checkpoint.storage import CheckpointStorage
from backstay.errors import CheckpointDamaged, CheckpointNotFound, InvalidRequest
from backstay.tables import Dense, Sparse, TableSpec

__all__ = ["CheckpointTables", "TrainedTables", "check_has", "find_checkpoint", "open_trained"]


class TrainedTables(Protocol):
    """What an export and a checkpoint have in common."""

    @property
    def where(self) -> str:
        """Their place, for messages."""

    @property
    def sparse(self) -> tuple[TableSpec, ...]:
        """Descriptions of the sparse tables."""

    @property
    def dense_tables(self) -> tuple[TableSpec, ...]:
        """Descriptions of the dense tables."""

    @property
    def model(self) -> ModelPart | None:
        """What is known of the model; of a checkpoint nothing."""

    def table(self, name: str) -> RowsByKey:
        """Open a sparse table."""

    def dense(self, name: str) -> NDArray[np.float32]:
        """Return a dense table."""


class CheckpointTables:
    """The tables of a checkpoint; a sparse one is read into memory when it is first opened.

    A context manager; the tables that it gave stay.

    Args:
        storage: Where it is.
        checkpoint_id: Which one.

    Raises:
        CheckpointNotFound: There is no such checkpoint.
        CheckpointDamaged: It is damaged; so does every method that reads rows.
    """

    model = None

    def __init__(self, storage: CheckpointStorage, checkpoint_id: str) -> None:
        self.storage = storage
        self.id = checkpoint_id
        self._reader = CheckpointReader(storage, checkpoint_id)
        self._opened: dict[str, ExportedTable] = {}

    def __enter__(self) -> CheckpointTables:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._reader.close()

    @property
    def where(self) -> str:
        """See ``TrainedTables``."""
        return f"{self.id} in {self.storage.url}"

    @property
    def sparse(self) -> tuple[TableSpec, ...]:
        """See ``TrainedTables``."""
        return tuple(one for one in self._reader.manifest.tables if isinstance(one.kind, Sparse))

    @property
    def dense_tables(self) -> tuple[TableSpec, ...]:
        """See ``TrainedTables``."""
        return tuple(one for one in self._reader.manifest.tables if isinstance(one.kind, Dense))

    def table(self, name: str) -> ExportedTable:
        """See ``TrainedTables``.

        Raises:
            InvalidRequest: There is none of that name.
        """
        spec = self._spec(name, self.sparse)
        if name not in self._opened:
            parts = list(self._reader.rows(name))
            keys = np.concatenate([np.empty(0, np.uint64), *(part.keys for part in parts)])
            none = np.empty((0, spec.row_elements), np.float32)
            weights = np.concatenate([none, *(part.weights for part in parts)])
            order = np.argsort(keys)
            self._opened[name] = ExportedTable(spec, keys[order], weights[order])
        return self._opened[name]

    def dense(self, name: str) -> NDArray[np.float32]:
        """See ``TrainedTables``.

        Raises:
            InvalidRequest: There is none of that name.
        """
        self._spec(name, self.dense_tables)
        return self._reader.dense(name)

    def _spec(self, name: str, specs: tuple[TableSpec, ...]) -> TableSpec:
        for spec in specs:
            if spec.name == name:
                return spec
        known = ", ".join(spec.name for spec in specs) or "none"
        raise InvalidRequest(f"{self.where} has no table {name!r}; it has: {known}")


def find_checkpoint(
    url: str | Path, checkpoint_id: str | None = None, options: dict[str, Any] | None = None
) -> tuple[CheckpointStorage, str]:
    """Return the storage at a place and a checkpoint there.

    Args:
        url: A folder or URL of checkpoints, or one checkpoint in it.
        checkpoint_id: Which one. Default: the newest.
        options: For fsspec's file system.

    Raises:
        CheckpointNotFound: There is none.
        CheckpointDamaged: The newest is damaged; an older one is taken by its id only.
        CheckpointUnavailable: The storage cannot be read.
    """
    place = str(url).rstrip("/")
    storage = CheckpointStorage(place, options)
    if checkpoint_id is not None:
        return storage, checkpoint_id
    for newest in catalogue(storage)[-1:]:
        if newest.problem:
            raise CheckpointDamaged(
                f"the newest checkpoint of {place}, {newest.id}, is damaged: {newest.problem}. To "
                "take an older one, name it"
            )
        return storage, newest.id
    parent, _, last = place.rpartition("/")
    if last.startswith("ckpt-"):
        above = CheckpointStorage(parent or ".", options)
        if last in above.ids():
            return above, last
    raise CheckpointNotFound(f"{place} is no checkpoint, and there is none in it")


@contextmanager
def open_trained(url: str | Path) -> Iterator[Export | CheckpointTables]:
    """Open an export, a checkpoint, or the newest checkpoint of a folder or URL.

    Tables that it gave stay when it is left.

    Raises:
        CheckpointNotFound: There is none of these.
        CheckpointDamaged: It is damaged.
        CheckpointUnavailable: It cannot be read.
    """
    if (Path(url) / EXPORT_FILE).is_file():
        yield Export.open(url)
        return
    with CheckpointTables(*find_checkpoint(url)) as tables:
        yield tables


def check_has(tables: TrainedTables, spec: TableSpec) -> TableSpec:
    """Return the trained table that a model's layer asks for.

    Raises:
        InvalidRequest: There is none of that name, or it is of another kind or size.
    """
    for found in (*tables.sparse, *tables.dense_tables):
        if found.name == spec.name:
            if found.kind != spec.kind:
                raise InvalidRequest(
                    f"the table {spec.name!r} of {tables.where} is {found.kind}, the model wants "
                    f"{spec.kind}: it was trained with another model, or other optimizers"
                )
            return found
    known = ", ".join(found.name for found in (*tables.sparse, *tables.dense_tables)) or "none"
    raise InvalidRequest(
        f"{tables.where} has no table {spec.name!r}; it has: {known}. Was it trained with this "
        "model, in a job of this name?"
    )
