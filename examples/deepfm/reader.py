"""Click logs as arrays of keys: the Criteo format, and the Frappe log.

May import numpy and examples.common. Reads local files, plain or ending in .gz; never downloads.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from examples.common.dataset import Examples
from examples.common.hashing import hash_key

__all__ = ["FORMATS", "load"]

CRITEO_NUMBERS = 13
CRITEO_CATEGORIES = 26
CRITEO_COLUMNS = 1 + CRITEO_NUMBERS + CRITEO_CATEGORIES
# No hexadecimal category of 8 digits and no bucket reaches this.
MISSING = 1 << 32
FIELD_BITS = 33


def load(path: Path, form: str, rows: int | None = None) -> tuple[Examples, Examples, Examples]:
    """Return training, validation and test examples: the first 80 %, next 10 %, last 10 % of rows.

    In memory an example takes 8 bytes a field.

    Args:
        path: The file.
        form: One of ``FORMATS``.
        rows: Read only so many, from the beginning. None: all.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A line is not of the format; the message names file and line.
    """
    keys, labels = [], []
    for number, (label, line_keys) in enumerate(_parsed(path, FORMATS[form])):
        if number == rows:
            break
        labels.append(label)
        keys.append(line_keys)
    if len(labels) < 10:
        raise ValueError(f"{path}: {len(labels)} examples are too few to split")
    everything = Examples(
        np.array(keys, dtype=np.int64),
        np.zeros((len(labels), 0), dtype=np.float32),
        np.array(labels, dtype=np.float32),
    )
    first, second = len(labels) * 8 // 10, len(labels) * 9 // 10
    return everything[:first], everything[first:second], everything[second:]


Parser = Callable[[Sequence[str]], "tuple[float, list[int]] | None"]


def _parsed(path: Path, parse: Parser) -> Iterator[tuple[float, list[int]]]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                example = parse(line.rstrip("\n").split("\t"))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            if example is not None:
                yield example


def _parse_criteo(columns: Sequence[str]) -> tuple[float, list[int]]:
    """Label, 13 whole numbers, 26 categories of hexadecimal digits; any but the label may miss."""
    if len(columns) != CRITEO_COLUMNS:
        raise ValueError(f"{len(columns)} columns, {CRITEO_COLUMNS} expected")
    numbers = columns[1 : 1 + CRITEO_NUMBERS]
    categories = columns[1 + CRITEO_NUMBERS :]
    # The values are hashed already: field and value side by side are a key without collisions.
    keys = [field << FIELD_BITS | _bucket(text) for field, text in enumerate(numbers)]
    keys += [
        field << FIELD_BITS | (int(text, 16) & 0xFFFFFFFF if text else MISSING)
        for field, text in enumerate(categories, start=CRITEO_NUMBERS)
    ]
    return _label(columns[0]), keys


@lru_cache(maxsize=1 << 16)
def _bucket(text: str) -> int:
    """Small numbers are their own bucket; above 2, buckets widen as the square of the logarithm."""
    if not text:
        return MISSING
    number = int(text)
    if number > 2:
        return 16 + int(math.log(number) ** 2)
    return max(number, -8) + 8


def _parse_frappe(columns: Sequence[str]) -> tuple[float, list[int]] | None:
    """Label, user, app and eight columns of context; the first line names them."""
    if columns[0] == "label":
        return None
    if len(columns) != 1 + len(FRAPPE_FIELDS):
        raise ValueError(f"{len(columns)} columns, {1 + len(FRAPPE_FIELDS)} expected")
    keys = [hash_key(field, text) for field, text in zip(FRAPPE_FIELDS, columns[1:], strict=True)]
    return _label(columns[0]), keys


FRAPPE_FIELDS = (
    "user", "item", "daytime", "weekday", "isweekend", "homework", "cost", "weather", "country",
    "city",
)  # fmt: skip


def _label(text: str) -> float:
    if text not in ("0", "1"):
        raise ValueError(f"the label is {text!r}; it must be 0 or 1")
    return float(text)


FORMATS: dict[str, Parser] = {"criteo": _parse_criteo, "frappe": _parse_frappe}
