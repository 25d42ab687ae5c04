"""Values of messages to records: JSON objects, lines of CSV, rows of Arrow, or bytes as they are.

Pure. Imports the errors and the readers' helpers; pyarrow where values are Arrow.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from backstay.data.batch import Record
from backstay.data.json_objects import json_object
from backstay.data.options import optional_import, text_tuple
from backstay.data.typed_text import TYPES, column_of
from backstay.errors import ConfigError

__all__ = ["FORMATS", "ValueFormat"]

FORMATS = ("json", "csv", "arrow", "bytes")
ARROW_FILE = b"ARROW1"


@dataclass(frozen=True)
class ValueFormat:
    """How a message's value is a record.

    Attributes:
        kind: One of ``FORMATS``.
        names: Columns: what a JSON object or a row must have; the fields of a line, in order.
        types: Types of columns of CSV that are no text.
        delimiter: Between the fields of a line.
        arrow: pyarrow, where it is needed.
    """

    kind: str = "json"
    names: tuple[str, ...] = ()
    types: Mapping[str, str] = field(default_factory=dict)
    delimiter: str = ","
    arrow: Any = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> ValueFormat:
        """Read a reader's options.

        Raises:
            ConfigError: One is wrong, or is for another format.
        """
        kind = options.get("values", "json")
        if kind not in FORMATS:
            raise ConfigError(f"options.values: is {kind!r}; allowed: {', '.join(FORMATS)}")
        names = text_tuple("columns", options["columns"]) if "columns" in options else ()
        types, delimiter = dict(options.get("types", {})), options.get("delimiter", ",")
        if kind != "csv" and (types or "delimiter" in options):
            raise ConfigError("options: types and delimiter are for values: csv")
        if kind == "csv" and not names:
            raise ConfigError("options.columns: is missing; name the fields of a line in order")
        if kind == "bytes" and names:
            raise ConfigError("options.columns: values: bytes have none; leave it out")
        for name, one in types.items():
            if name not in names or one not in TYPES:
                raise ConfigError(
                    f"options.types: {name}: {one!r}; a column with one of {', '.join(TYPES)} is "
                    "expected"
                )
        if len(delimiter) != 1:
            raise ConfigError(f"options.delimiter: is {delimiter!r}; one character is expected")
        arrow = optional_import("pyarrow", "parquet", "values: arrow") if kind == "arrow" else None
        return cls(kind, names, types, delimiter, arrow)

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The columns of a record; None: only a record tells."""
        return None if self.kind in ("json", "arrow") and not self.names else self.names

    def decode(self, value: bytes | None) -> tuple[Record, str]:
        """Return the record in a value, and what is wrong; empty: nothing."""
        if value is None:
            return None, "the message has no value"
        if self.kind == "bytes":
            return value, ""
        if self.kind == "arrow":
            return self._row(value)
        return json_object(value, self.names) if self.kind == "json" else self._line(value)

    def _row(self, value: bytes) -> tuple[Record, str]:
        ipc = self.arrow.ipc
        try:
            opened = ipc.open_file if value.startswith(ARROW_FILE) else ipc.open_stream
            table = opened(value).read_all()
            # Damaged offsets could point anywhere.
            table.validate(full=True)
        except (self.arrow.ArrowException, OSError, ValueError) as error:
            return None, f"not Arrow IPC: {error}"
        if table.num_rows != 1:
            # A message is a record: offsets are what tasks and progress count.
            return None, f"{table.num_rows} rows; a message has one"
        record: dict[str, Any] = table.to_pylist()[0]
        lacking = [name for name in self.names if name not in record]
        return (None, f"no {lacking[0]!r}") if lacking else (record, "")

    def _line(self, value: bytes) -> tuple[Record, str]:
        try:
            rows = list(csv.reader([value.decode()], delimiter=self.delimiter, strict=True))
        except UnicodeDecodeError as error:
            return None, f"not UTF-8: {error.reason} at byte {error.start} of the record"
        except csv.Error as error:
            return None, f"not CSV: {error}"
        values = rows[0] if rows else []
        if len(values) != len(self.names):
            return None, f"{len(values)} fields; {len(self.names)} are expected"
        record: dict[str, Any] = dict(zip(self.names, values, strict=True))
        for name, kind in self.types.items():
            column, wrong = column_of([record[name]], kind)
            if wrong:
                return None, f"{name}: {wrong[0]}"
            record[name] = column[0]
        return record, ""
