"""Files of JSON objects, one a line, plain or gzip, here or behind a URL.

What it costs is said in ``backstay.data.delimited``. Imports the readers' text modules.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

from backstay.data.base import BadRecords, Metadata, Shard
from backstay.data.batch import Record
from backstay.data.files import DataFile, FileSet
from backstay.data.json_objects import json_object
from backstay.data.options import check_options, text_tuple
from backstay.data.splitting import Piece
from backstay.data.streams import after_byte_order_mark
from backstay.data.text_files import TextFile, TextFiles
from backstay.errors import DataDamaged

__all__ = ["JsonLinesReader"]

_OPTIONS: Mapping[str, type] = {"columns": tuple, "storage": Mapping}
# Damaged records at a file's beginning, among which a first good one is looked for.
LOOKED_AT_MAX = 1000


class JsonLinesReader:
    """Records as dicts; a line that is no JSON object is damaged, a blank one is no record.

    Args:
        files: The files.
        options: ``columns``: the names for ``metadata`` (otherwise those of the first record),
            which each record must have; ``storage``: of fsspec's file system.

    Raises:
        ConfigError: An option is unknown or wrong.
    """

    def __init__(self, files: FileSet, options: Mapping[str, Any]) -> None:
        check_options("jsonl", options, _OPTIONS)
        self._files = files
        self._columns = text_tuple("columns", options["columns"]) if "columns" in options else ()
        self._texts = TextFiles(None)
        self._metadata: Metadata | None = None
        self._lock = threading.Lock()

    @property
    def metadata(self) -> Metadata:
        """See ``Reader``; reads the beginning of the first file unless columns are named."""
        if self._metadata is None:
            self._metadata = Metadata(self._columns or self._first_keys())
        return self._metadata

    def shards(self) -> Iterator[Shard]:
        """See ``Reader``; one pass over each file."""
        for file in self._files.files():
            yield Shard(file.name, self._text(file).total())

    def read(self, shard: str, start: int, count: int, bad: BadRecords) -> Iterator[Record]:
        """See ``Reader``."""
        text = self._text(self._files.file(shard))
        for piece in text.read(start, count):
            yield from self._records(text.name, piece, bad)

    def read_columns(
        self, shard: str, start: int, count: int, bad: BadRecords | None = None
    ) -> None:
        """See ``Reader``: JSON has no columns."""
        del shard, start, count, bad

    def _records(self, name: str, piece: Piece, bad: BadRecords) -> Iterator[Record]:
        for number, line in enumerate(piece.texts()):
            reason = piece.bad.get(number, "")
            if not reason:
                record, reason = json_object(line, self._columns)
            if reason:
                bad.add(name, piece.offset_of(number), reason)
            else:
                yield record

    def _text(self, file: DataFile) -> TextFile:
        known = self._texts.known(file)
        return known or self._texts.add(file, after_byte_order_mark(self._texts.stream(file)))

    def _first_keys(self) -> tuple[str, ...]:
        unlimited = BadRecords(LOOKED_AT_MAX, kept=0)
        for file in self._files.files():
            text = self._text(file)
            # It reads to the first good record, not to the file's end.
            for piece in text.pieces():
                for record in self._records(text.name, piece, unlimited):
                    return tuple(record)
        raise DataDamaged("no JSON object is in any of the files")
