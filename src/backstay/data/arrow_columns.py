"""What Parquet and Arrow files have in common: parts with known numbers of rows, read by column.

Imports the readers' base and files; pyarrow when a reader is made.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

from backstay.data.base import BadRecords, Metadata, Shard, check_range
from backstay.data.batch import Batch, Column, Record, object_array
from backstay.data.files import DataFile, FileSet, KnownSizes
from backstay.data.options import check_options, optional_import, text_tuple
from backstay.errors import ConfigError, DataDamaged, DataUnavailable

__all__ = ["ColumnarReader", "PartedFile", "columns_of_table"]

# Decoded parts that are kept, because tasks are often smaller than a part.
CACHE_BYTES = 256 * 1024 * 1024
# A part's columns, or why it cannot be decoded.
Part: TypeAlias = "dict[str, Column] | str"
_OPTIONS: Mapping[str, type] = {"select": tuple, "cache_bytes": int, "storage": Mapping}


@dataclass(frozen=True)
class PartedFile:
    """What a file's footer says: its columns, and where its parts (row groups, batches) begin."""

    schema: Any
    # bounds[i] is the first row of part i; the last one is the number of rows.
    bounds: tuple[int, ...]

    @classmethod
    def of_lengths(cls, schema: Any, lengths: Sequence[int]) -> PartedFile:
        """Return the file with parts of these numbers of rows."""
        return cls(schema, tuple(accumulate(lengths, initial=0)))


class ColumnarReader(ABC):
    """Reads columns of whole parts and cuts ranges out of them.

    ``shards()`` reads the footers. A range costs the parts in which it lies, in the selected
    columns; the latest parts are kept decoded, ``cache_bytes`` of them at most (256 MiB), so a
    part that several tasks share is not decoded for each if they come one after the other. Write
    files whose parts have about as many rows as a task.

    Args:
        files: The files.
        options: ``select``: only these columns, in this order; ``cache_bytes``; ``storage``: of
            fsspec's file system.

    Raises:
        ConfigError: pyarrow is missing, or an option is wrong.
    """

    kind: str
    part_name: str

    def __init__(self, files: FileSet, options: Mapping[str, Any]) -> None:
        check_options(self.kind, options, _OPTIONS)
        self.arrow = optional_import("pyarrow", "parquet", f"a {self.kind} file")
        self._files = files
        self._select = text_tuple("select", options["select"]) if "select" in options else ()
        self._cache_bytes = options.get("cache_bytes", CACHE_BYTES)
        self._cache: OrderedDict[tuple[str, int], Part] = OrderedDict()
        self._sizes = KnownSizes()
        self._footers: dict[str, PartedFile] = {}
        self._metadata: Metadata | None = None
        self._lock = threading.Lock()

    @abstractmethod
    def footer(self, source: Any) -> PartedFile:
        """Return what the footer of an open file says; ArrowInvalid where there is none."""

    @abstractmethod
    def part(self, source: Any, number: int, names: Sequence[str]) -> Any:
        """Return these columns of a part as a table."""

    @property
    def metadata(self) -> Metadata:
        """See ``Reader``; reads the first file's footer."""
        if self._metadata is None:
            first = self._footer(self._files.files()[0])
            self._metadata = Metadata(self._select or tuple(first.schema.names))
        return self._metadata

    def shards(self) -> Iterator[Shard]:
        """See ``Reader``; reads the files' footers."""
        for file in self._files.files():
            yield Shard(file.name, self._footer(file).bounds[-1])

    def read(self, shard: str, start: int, count: int, bad: BadRecords) -> Iterator[Record]:
        """See ``Reader``; the values are those of the columns."""
        yield from Batch.of_columns(self.read_columns(shard, start, count, bad))

    def read_columns(
        self, shard: str, start: int, count: int, bad: BadRecords | None = None
    ) -> Mapping[str, Column]:
        """See ``Reader``: text and lists come as objects, integers with nulls as floats with NaN.

        A part that cannot be decoded is one damaged record for each of its rows in the range.
        """
        bad = BadRecords(0) if bad is None else bad
        file = self._files.file(shard)
        footer = self._footer(file)
        check_range(shard, start, count, footer.bounds[-1])
        stop = start + count
        found: list[dict[str, Column]] = []
        number = bisect_right(footer.bounds, start) - 1
        while number < len(footer.bounds) - 1 and footer.bounds[number] < stop:
            first, after = footer.bounds[number : number + 2]
            a, b = max(start, first), min(stop, after)
            if a < b:
                part = self._cached_part(file, number, after - first)
                if isinstance(part, str):
                    reason = f"{self.part_name} {number} is damaged: {part}"
                    bad.add(shard, a, reason, unit="row", records=b - a)
                else:
                    found.append({name: part[name][a - first : b - first] for name in part})
            number += 1
        if not found:
            return columns_of_table(footer.schema.empty_table().select(self._names))
        return {name: _joined([each[name] for each in found]) for name in found[0]}

    @property
    def _names(self) -> list[str]:
        return list(self.metadata.column_names)

    def _footer(self, file: DataFile) -> PartedFile:
        """Return what a file's footer says; it is read the first time."""
        self._sizes.check(file)
        footer = self._footers.get(file.name)
        if footer is None:
            with file.open() as opened:
                try:
                    footer = self.footer(opened.raw)
                except DataUnavailable:
                    raise
                # pyarrow has OSError for much that is wrong with a file's content.
                except (self.arrow.ArrowException, OSError) as error:
                    raise DataDamaged(
                        f"{file.name}: is no {self.kind} file, or not a whole one: {_text(error)}"
                    ) from error
            self._footers[file.name] = footer
        wanted = self._metadata.column_names if self._metadata else self._select
        missing = [name for name in wanted if name not in footer.schema.names]
        if missing:
            raise ConfigError(
                f"{file.name}: has no column {missing}; it has {list(footer.schema.names)}"
            )
        return footer

    def _cached_part(self, file: DataFile, number: int, rows: int) -> Part:
        """Return a part's columns, or why it cannot be decoded."""
        key = (file.name, number)
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        part = self._decoded_part(file, number, rows)
        with self._lock:
            self._cache[key] = part
            used = sum(map(_bytes, self._cache.values()))
            while len(self._cache) > 1 and used > self._cache_bytes:
                used -= _bytes(self._cache.popitem(last=False)[1])
        return part

    def _decoded_part(self, file: DataFile, number: int, rows: int) -> Part:
        with file.open() as opened:
            try:
                table = self.part(opened.raw, number, self._names)
                if table.num_rows != rows:
                    return f"it has {table.num_rows} rows, and the footer says {rows}"
                return columns_of_table(table)
            except DataUnavailable:
                raise
            except (self.arrow.ArrowException, OSError, UnicodeDecodeError) as error:
                return _text(error)


def columns_of_table(table: Any) -> dict[str, Column]:
    """Return a pyarrow table's columns as arrays; lists of one fixed length as two dimensions."""
    return {name: _column(table.column(name)) for name in table.column_names}


def _column(column: Any) -> Column:
    kind = str(column.type)
    if kind.startswith("fixed_size_list") and not column.null_count:
        width = column.type.list_size
        flat = column.combine_chunks().flatten()
        return np.asarray(flat.to_numpy(zero_copy_only=False)).reshape(len(column), width)
    if kind.startswith(("dictionary", "run_end_encoded")):
        column = column.cast(column.type.value_type)
    array = np.asarray(column.to_numpy())
    if kind.startswith("decimal"):
        return object_array(column.to_pylist())
    # Shared by all who ask for this part.
    array.flags.writeable = False
    return array


def _joined(parts: Sequence[Column]) -> Column:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _bytes(part: Part) -> int:
    if isinstance(part, str):
        return 0
    # An object takes its pointer and, roughly, 64 bytes.
    return sum(c.nbytes * (9 if c.dtype.kind == "O" else 1) for c in part.values())


def _text(error: BaseException) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]
