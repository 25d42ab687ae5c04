"""Text of CSV files to columns: by pyarrow where it can, else by Python, with the same result.

Python's rules are the ones that count: whatever pyarrow refuses, or would take differently, goes
through Python. Imports numpy; pyarrow only if it is there.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from backstay.data.batch import Column, object_array
from backstay.data.splitting import Piece

__all__ = ["TYPES", "column_of", "empty_column", "parse_with_arrow"]

TYPES = ("text", "float32", "float64", "int32", "int64")
# Python's csv module refuses longer fields; a record that may hold one goes there.
FIELD_CHARACTERS_MAX = 131_072


def column_of(values: Sequence[str], kind: str) -> tuple[Column, dict[int, str]]:
    """Return values as a column, and which of them are not of that type, with the reason.

    An empty value is NaN as a float and wrong as an integer.
    """
    if kind == "text":
        return object_array(values), {}
    dtype = np.dtype(kind)
    parse: Callable[[str], float] = float if dtype.kind == "f" else int
    try:
        return _cast(np.array(list(map(parse, values)), _wide(dtype)), dtype), {}
    except (ValueError, OverflowError):
        pass
    wrong: dict[int, str] = {}
    parsed: list[float] = []
    for position, value in enumerate(values):
        number = _float(value) if dtype.kind == "f" else _integer(value, dtype)
        if number is None:
            wrong[position] = f"{value[:40]!r} is not {kind}"
        parsed.append(number or 0)
    return _cast(np.array(parsed, _wide(dtype)), dtype), wrong


def empty_column(kind: str) -> Column:
    """Return a column of no values."""
    return np.empty(0, dtype=object if kind == "text" else np.dtype(kind))


def parse_with_arrow(
    pieces: Sequence[Piece],
    names: Sequence[str],
    kinds: Mapping[str, str],
    *,
    delimiter: str,
    quote: str,
    strip: bool,
) -> dict[str, Column] | None:
    """Return the columns ``kinds`` of these records, or None if that is a matter for Python.

    Args:
        pieces: Records, adjacent in the file.
        names: The columns as they are in the file.
        kinds: The columns to return and their types.
        delimiter: One character.
        quote: One character, or empty where quotes mean nothing.
        strip: Take spaces and tabs off both ends of each text.
    """
    arrow = _arrow()
    if arrow is None or any(piece.bad or not piece.clean for piece in pieces):
        return None
    if any(len(each) and (each.ends - each.starts).max() > FIELD_CHARACTERS_MAX for each in pieces):
        return None
    parts = [piece.content[int(piece.starts[0]) : int(piece.ends[-1])] for piece in pieces]
    data = b"\n".join(parts)
    if data.count(b"\r") != data.count(b"\r\n"):
        return None
    try:
        data.decode()
        table = _arrow_table(arrow, data, names, kinds, delimiter, quote)
    except (UnicodeDecodeError, arrow.ArrowInvalid, arrow.ArrowKeyError):
        return None
    if table.num_rows != sum(map(len, pieces)):
        return None
    columns = {}
    for name, kind in kinds.items():
        column = table.column(name)
        if kind.startswith("int") and column.null_count:
            return None
        if kind == "text" and strip:
            column = importlib.import_module("pyarrow.compute").utf8_trim(column, " \t")
        columns[name] = column.to_numpy()
        if kind != "text":
            columns[name] = _cast(columns[name], np.dtype(kind))
    return columns


def _arrow_table(
    arrow: Any,
    data: bytes,
    names: Sequence[str],
    kinds: Mapping[str, str],
    delimiter: str,
    quote: str,
) -> Any:
    types = {"text": arrow.string(), "float32": arrow.float64(), "float64": arrow.float64()}
    types |= {"int32": arrow.int32(), "int64": arrow.int64()}
    csv = importlib.import_module("pyarrow.csv")
    return csv.read_csv(
        arrow.BufferReader(data),
        csv.ReadOptions(
            use_threads=False, column_names=list(names), block_size=max(len(data) + 1, 1 << 16)
        ),
        csv.ParseOptions(
            delimiter=delimiter, quote_char=quote or False, newlines_in_values=bool(quote)
        ),
        csv.ConvertOptions(
            column_types={name: types[kind] for name, kind in kinds.items()},
            include_columns=list(kinds),
            null_values=[""],
            strings_can_be_null=False,
            auto_dict_encode=False,
        ),
    )


@cache
def _arrow() -> Any:
    return importlib.import_module("pyarrow") if importlib.util.find_spec("pyarrow") else None


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    # float32 is rounded from float64 here and with pyarrow alike; int32 is checked when made.
    return np.dtype(np.float64) if dtype.kind == "f" else dtype


def _cast(column: Column, dtype: np.dtype[Any]) -> Column:
    # A number too large for float32 is infinite.
    with np.errstate(over="ignore"):
        return column.astype(dtype, copy=False)


def _float(value: str) -> float | None:
    try:
        return float(value) if value.strip() else math.nan
    except ValueError:
        return None


def _integer(value: str, dtype: np.dtype[Any]) -> int | None:
    try:
        # The same as pyarrow.
        number = int(value, 16) if value.strip()[:2].lower() == "0x" else int(value)
    except ValueError:
        return None
    return number if np.iinfo(dtype).min <= number <= np.iinfo(dtype).max else None
