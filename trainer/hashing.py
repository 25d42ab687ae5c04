"""Ids for categorical values: the same in every process, on every machine, in every run.

May import numpy and ``backstay.errors``. Never keeps a vocabulary, and never uses Python's
``hash``, which differs from process to process.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backstay.errors import InvalidRequest

__all__ = ["hash_ids"]

WORD_BYTES = 8
# Constants of SplitMix64's last step: every bit of the result depends on every bit before.
FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
SECOND_FACTOR = np.uint64(0x94D049BB133111EB)
BETWEEN_COLUMNS = np.uint64(0x9E3779B97F4A7C15)


def hash_ids(*columns: Any, field: str, rows: int | None = None) -> NDArray[np.int64]:
    """Return one id for each record, from its value in ``columns``, int64 [records].

    Several columns give the id of their combination: a feature cross. A string, its UTF-8 bytes and
    integers with the same digits have the same id, so that a model may train on CSV and
    predict on Parquet; None is the empty string.

    Args:
        columns: Each of shape [records]: strings, bytes or integers.
        field: Keeps values of one field apart from equal values of another.
        rows: Ids are in [0, rows), as a layer with a weight matrix needs them; two values then
            share a row with a chance of 1 in ``rows``. None: any 64 bits, for the layers of
            ``backstay.trainer.paddle`` and ``backstay.trainer.torch``.

    Raises:
        InvalidRequest: No columns, columns of different lengths, or values that are none of these.
    """
    if not columns or (rows is not None and rows < 1):
        raise InvalidRequest("hash_ids needs at least one column, and rows of at least 1")
    tables = [_words(column, field) for column in columns]
    if len({len(words) for words in tables}) > 1:
        raise InvalidRequest(
            f"the columns of {field!r} have {[len(words) for words in tables]} values"
        )
    seed = int.from_bytes(blake2b(field.encode(), digest_size=WORD_BYTES).digest(), "little")
    state = np.full(len(tables[0]), seed, np.uint64)
    for words in tables:
        for word in words.T:
            # A word of a string is zero only if it fills it up to the longest of its column,
            # and those must not count: a batch's longest value is chance.
            state = np.where(word != 0, _mixed(state ^ word), state)
        # Otherwise ("ab", "c") would be ("a", "bc").
        state = _mixed(state + BETWEEN_COLUMNS)
    return (state if rows is None else state % np.uint64(rows)).view(np.int64)


def _mixed(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * FIRST_FACTOR
    state = (state ^ (state >> np.uint64(27))) * SECOND_FACTOR
    return state ^ (state >> np.uint64(31))


def _words(column: Any, field: str) -> NDArray[np.uint64]:
    """The bytes of each value, filled up with zeros, as whole words [records, words]."""
    values = _as_bytes(np.asarray(column), field)
    count, width = len(values), values.dtype.itemsize
    filled = np.zeros((count, -(-width // WORD_BYTES) * WORD_BYTES), np.uint8)
    filled[:, :width] = np.ascontiguousarray(values).view(np.uint8).reshape(count, width)
    return filled.view("<u8").astype(np.uint64, copy=False)


def _as_bytes(values: NDArray[Any], field: str) -> NDArray[np.bytes_]:
    if values.ndim != 1:
        raise InvalidRequest(f"a column of {field!r} has shape {values.shape}; it must be flat")
    if values.dtype.kind in "OT":
        kinds = {type(value) for value in values}
        if not kinds <= {str, bytes, int, type(None)}:
            raise InvalidRequest(
                f"{field!r} holds {', '.join(sorted(kind.__name__ for kind in kinds))}; ids are "
                "made of strings, bytes or integers: put other numbers into buckets first"
            )
        texts = [
            value if isinstance(value, bytes) else b"" if value is None else str(value).encode()
            for value in values
        ]
        return np.array(texts, "S") if texts else np.empty(0, "S1")
    if values.dtype.kind in "iu":
        return values.astype("S21")
    if values.dtype.kind == "U":
        try:
            return values.astype("S") if values.size else np.empty(0, "S1")
        except UnicodeEncodeError:
            return np.char.encode(values, "utf-8")
    if values.dtype.kind == "S":
        return values
    raise InvalidRequest(
        f"{field!r} holds {values.dtype}; ids are made of strings, bytes or integers: put other "
        "numbers into buckets first"
    )
