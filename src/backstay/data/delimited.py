"""CSV and TSV files, plain or gzip, here or behind a URL.

What it costs: ``shards()`` is one pass over each file to find line ends; reading a range, a pass up
to its end the first time a process sees the file, and from then on the range itself
(``backstay.data.text_files``). Imports the readers' text modules; pyarrow only if it is there.
"""

from __future__ import annotations

import csv
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from backstay.data.base import BadRecords, Metadata, NoHeader, Shard
from backstay.data.batch import Batch, Column, Record
from backstay.data.files import DataFile, FileSet
from backstay.data.options import check_options, text_tuple
from backstay.data.splitting import Piece, Quoting
from backstay.data.streams import BYTE_ORDER_MARK, ContentStream
from backstay.data.text_files import TextFile, TextFiles, first_record
from backstay.data.typed_text import (
    TYPES,
    column_of,
    empty_column,
    parse_with_arrow,
)
from backstay.errors import ConfigError, DataDamaged

__all__ = ["DelimitedOptions", "DelimitedReader"]

# Parsed into columns in one go.
GROUP_BYTES = 8 * 1024 * 1024
SKIPPED_BYTES_MAX = 16 * 1024 * 1024
_OPTIONS: Mapping[str, type] = {
    "delimiter": str,
    "quote": str,
    "header": bool,
    "columns": tuple,
    "select": tuple,
    "types": Mapping,
    "skip_lines": int,
    "strip": bool,
    "storage": Mapping,
}


@dataclass(frozen=True)
class DelimitedOptions:
    """What a delimited file looks like.

    Attributes:
        delimiter: One ASCII character between values.
        quote: One ASCII character around values that hold delimiters or line ends; empty: none.
        header: Whether each file begins with a record of column names.
        columns: The names where there is no header, or instead of it.
        select: Only these columns, in this order; empty: all.
        types: Column to ``text`` (as without), ``float32``, ``float64``, ``int32`` or ``int64``. A
            value that is none makes its record a damaged one; empty is NaN as a float.
        skip_lines: Lines at the beginning of each file that are no data, before the header.
        strip: Take spaces and tabs off both ends of each value.
        storage: Options of fsspec's file system.
    """

    delimiter: str = ","
    quote: str = '"'
    header: bool = True
    columns: tuple[str, ...] = ()
    select: tuple[str, ...] = ()
    types: Mapping[str, str] = field(default_factory=dict)
    skip_lines: int = 0
    strip: bool = False
    storage: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, allowed in (("delimiter", (1,)), ("quote", (0, 1))):
            value = getattr(self, name)
            if len(value) not in allowed or not value.isascii() or value in ("\n", "\r", "\0"):
                raise ConfigError(f"options.{name}: is {value!r}; one ASCII character is expected")
        if self.delimiter == self.quote:
            raise ConfigError(f"options: {self.quote!r} is the delimiter and the quote")
        if not self.header and not self.columns:
            raise ConfigError("options.columns: name the columns of files without a header")
        if self.skip_lines < 0:
            raise ConfigError(f"options.skip_lines: is {self.skip_lines}; at least 0")
        for name, kind in self.types.items():
            if kind not in TYPES:
                raise ConfigError(f"options.types.{name}: is {kind!r}; one of {TYPES} is expected")

    @classmethod
    def from_mapping(cls, kind: str, options: Mapping[str, Any]) -> DelimitedOptions:
        """Return the options of a DataSpec of the kind csv or tsv.

        Raises:
            ConfigError: An option is unknown or wrong; the message names it.
        """
        check_options(kind, options, _OPTIONS)
        values = dict(options)
        for name in ("columns", "select"):
            if name in values:
                values[name] = text_tuple(name, values[name])
        # Column names and a header that is there are both to be said.
        values.setdefault("header", "columns" not in values)
        values.setdefault("delimiter", "\t" if kind == "tsv" else ",")
        return cls(**values)

    @property
    def quoting(self) -> Quoting | None:
        """What records are split by."""
        if not self.quote:
            return None
        return Quoting(self.quote.encode(), self.delimiter.encode(), self.strip)


@dataclass(frozen=True)
class _Table:
    """A file and the names of its columns."""

    text: TextFile
    names: tuple[str, ...]


class DelimitedReader:
    """Records as dicts of column to text, or to a number where ``types`` says so.

    ``shards()`` finds the line ends of every file. A first ``read`` in a process does so up to the
    range's end; later ones enter the file near the range.
    """

    def __init__(self, files: FileSet, options: DelimitedOptions) -> None:
        self._files = files
        self._options = options
        self._texts = TextFiles(options.quoting)
        self._tables: dict[str, _Table] = {}
        self._metadata: Metadata | None = None
        self._lock = threading.Lock()

    @property
    def metadata(self) -> Metadata:
        """See ``Reader``; reads the first file's header."""
        if self._metadata is None:
            first = self._files.files()[0]
            names = self._options.select or self._table(first).names
            self._metadata = Metadata(names)
        return self._metadata

    def shards(self) -> Iterator[Shard]:
        """See ``Reader``; one pass over each file."""
        for file in self._files.files():
            yield Shard(file.name, self._table(file).text.total())

    def read(self, shard: str, start: int, count: int, bad: BadRecords) -> Iterator[Record]:
        """See ``Reader``."""
        table = self._table(self._files.file(shard))
        kinds = self._kinds(table)
        for piece in table.text.read(start, count):
            if any(kind != "text" for kind in kinds.values()):
                yield from Batch.of_columns(self._columns(table, [piece], kinds, bad))
                continue
            rows = self._rows(table, piece, bad)[0]
            at = [table.names.index(name) for name in kinds]
            if at == list(range(len(table.names))):
                for row in rows:
                    yield dict(zip(table.names, row, strict=True))
            else:
                for row in rows:
                    yield {name: row[i] for name, i in zip(kinds, at, strict=True)}

    def read_columns(
        self, shard: str, start: int, count: int, bad: BadRecords | None = None
    ) -> Mapping[str, Column]:
        """See ``Reader``; text comes as arrays of objects. Fastest with pyarrow and ``types``."""
        bad = BadRecords(0) if bad is None else bad
        table = self._table(self._files.file(shard))
        kinds = self._kinds(table)
        groups = []
        group: list[Piece] = []
        for piece in table.text.read(start, count):
            group.append(piece)
            if group[-1].next_offset - group[0].offset >= GROUP_BYTES:
                groups.append(self._group(table, group, kinds, bad))
                group = []
        if group or not groups:
            groups.append(self._group(table, group, kinds, bad))
        if len(groups) == 1:
            return groups[0]
        return {name: np.concatenate([each[name] for each in groups]) for name in kinds}

    def _group(
        self, table: _Table, group: Sequence[Piece], kinds: Mapping[str, str], bad: BadRecords
    ) -> dict[str, Column]:
        options = self._options
        found = group and parse_with_arrow(
            group,
            table.names,
            kinds,
            delimiter=options.delimiter,
            quote=options.quote if any(piece.quoted for piece in group) else "",
            strip=options.strip,
        )
        return found or self._columns(table, group, kinds, bad)

    def _columns(
        self, table: _Table, group: Sequence[Piece], kinds: Mapping[str, str], bad: BadRecords
    ) -> dict[str, Column]:
        parts = [self._typed(table, piece, kinds, bad) for piece in group]
        if not parts:
            return {name: empty_column(kind) for name, kind in kinds.items()}
        return {name: np.concatenate([part[name] for part in parts]) for name in kinds}

    def _typed(
        self, table: _Table, piece: Piece, kinds: Mapping[str, str], bad: BadRecords
    ) -> dict[str, Column]:
        """Return one piece's good records as columns, those whose values fit their types."""
        wrong: dict[int, str] = {}
        rows, places = self._rows(table, piece, None, wrong)
        by_column = list(zip(*rows, strict=True)) or [()] * len(table.names)
        columns = {}
        misfits: dict[int, str] = {}
        for name, kind in kinds.items():
            columns[name], failed = column_of(by_column[table.names.index(name)], kind)
            for row, reason in failed.items():
                misfits.setdefault(row, f"column {name!r}: {reason}")
        wrong |= {places[row]: reason for row, reason in misfits.items()}
        _report(table, piece, wrong, bad)
        if misfits:
            good = np.ones(len(rows), dtype=bool)
            good[list(misfits)] = False
            columns = {name: column[good] for name, column in columns.items()}
        return columns

    def _rows(
        self,
        table: _Table,
        piece: Piece,
        bad: BadRecords | None,
        wrong: dict[int, str] | None = None,
    ) -> tuple[list[list[str]], Sequence[int]]:
        """Return the values of a piece's good records, and their numbers in the piece.

        What is wrong with others goes to ``bad`` if it is given, else into ``wrong``.
        """
        width = len(table.names)
        found = self._rows_at_once(piece, width)
        places: Sequence[int] = range(len(piece))
        if found is None:
            wrong = {} if wrong is None else wrong
            found = self._rows_one_by_one(piece, width, wrong)
            places = [record for record in places if record not in wrong]
            if bad is not None:
                _report(table, piece, wrong, bad)
        if self._options.strip:
            found = [[value.strip(" \t") for value in row] for row in found]
        return found, places

    def _rows_at_once(self, piece: Piece, width: int) -> list[list[str]] | None:
        """Return all rows of a piece without fault, or None if there is one."""
        if piece.bad or not len(piece):
            return None
        try:
            if piece.quoted:
                rows = list(self._csv([text.decode() for text in piece.texts()]))
            else:
                content = piece.content[int(piece.starts[0]) : int(piece.ends[-1])]
                rows = [row for row in self._csv(content.decode().split("\n")) if row]
        except (UnicodeDecodeError, csv.Error):
            return None
        if len(rows) != len(piece) or set(map(len, rows)) != {width}:
            return None
        return rows

    def _rows_one_by_one(self, piece: Piece, width: int, wrong: dict[int, str]) -> list[list[str]]:
        rows = []
        for record, text in enumerate(piece.texts()):
            if record in piece.bad:
                wrong[record] = piece.bad[record]
                continue
            try:
                row = next(iter(self._csv([text.decode()])))
            except UnicodeDecodeError as error:
                wrong[record] = f"not UTF-8: {error.reason} at byte {error.start} of the record"
            except csv.Error as error:
                wrong[record] = str(error)
            else:
                if len(row) == width:
                    rows.append(row)
                else:
                    wrong[record] = f"{len(row)} values, and there are {width} columns"
        return rows

    def _csv(self, texts: Sequence[str]) -> Iterator[list[str]]:
        options = self._options
        if not options.quote:
            return csv.reader(texts, delimiter=options.delimiter, quoting=csv.QUOTE_NONE)
        return csv.reader(
            texts,
            delimiter=options.delimiter,
            quotechar=options.quote,
            skipinitialspace=options.strip,
        )

    def _kinds(self, table: _Table) -> dict[str, str]:
        """Return the columns that are read and their types; the same ones for each file."""
        names = self.metadata.column_names
        missing = [name for name in (*names, *self._options.types) if name not in table.names]
        if missing or (not self._options.select and len(names) != len(table.names)):
            raise ConfigError(
                f"{table.text.name}: its columns are {list(table.names)}, and "
                f"{missing or list(names)} are expected"
            )
        return {name: self._options.types.get(name, "text") for name in names}

    def _table(self, file: DataFile) -> _Table:
        """Return a file with its columns; its header is read the first time."""
        text = self._texts.known(file)
        if text is None:
            names, offset = self._header(file)
            with self._lock:
                text = self._texts.add(file, offset)
                self._tables[file.name] = _Table(text, names)
        return self._tables[file.name]

    def _header(self, file: DataFile) -> tuple[tuple[str, ...], int]:
        options = self._options
        stream = self._texts.stream(file)
        offset = _data_offset(file.name, stream, options.skip_lines)
        if not options.header:
            return options.columns, offset
        piece, offset = first_record(file.name, stream, offset, options.quoting)
        if piece is None:
            # Nothing at all in it: no records, whatever its columns would have been.
            return options.columns or self._names_elsewhere(file), offset
        wrong: dict[int, str] = {}
        width = len(options.columns)
        found = self._rows_at_once(piece, width) if width else None
        if not width:
            try:
                found = list(self._csv([text.decode() for text in piece.texts()]))
            except (UnicodeDecodeError, csv.Error) as error:
                raise DataDamaged(f"{file.name}: its header cannot be read: {error}") from error
        if not found or piece.bad:
            wrong |= piece.bad
            raise DataDamaged(
                f"{file.name}: its header is not one of {width} columns {wrong or ''}"
            )
        names = tuple(name.strip() for name in options.columns or found[0])
        # One name may be empty: pandas writes its index so.
        double = sorted({name for name in names if names.count(name) > 1})
        if double:
            raise ConfigError(
                f"{file.name}: column names {double} are there more than once in its header; is "
                "there a header? If not, name the columns in options.columns"
            )
        return names, offset

    def _names_elsewhere(self, file: DataFile) -> tuple[str, ...]:
        """Return the columns of the first file that has any."""
        for other in self._files.files():
            if other.name == file.name:
                continue
            stream = self._texts.stream(other)
            offset = _data_offset(other.name, stream, self._options.skip_lines)
            if first_record(other.name, stream, offset, self._options.quoting)[0] is not None:
                return self._table(other).names
        raise NoHeader(f"{file.name}: is empty, not even a header; so is every other file")


def _report(table: _Table, piece: Piece, wrong: Mapping[int, str], bad: BadRecords) -> None:
    for record in sorted(wrong):
        bad.add(table.text.name, piece.offset_of(record), wrong[record])


def _data_offset(name: str, stream: ContentStream, skip_lines: int) -> int:
    """Return where the header or the first record begins: after a byte order mark and some lines.

    Raises:
        DataDamaged: The file has fewer lines.
    """
    content = b""
    for block in stream.blocks(0):
        content += block
        at = len(BYTE_ORDER_MARK) if content.startswith(BYTE_ORDER_MARK) else 0
        for _ in range(skip_lines):
            at = content.find(b"\n", at) + 1
            if at == 0:
                break
        else:
            return at
        if len(content) > SKIPPED_BYTES_MAX:
            break
    if not content:
        return 0
    raise DataDamaged(f"{name}: has fewer than the {skip_lines} lines of options.skip_lines")
