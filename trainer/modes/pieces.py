"""Sync mode: a piece of what ``feed`` returned, cut along the records. Imports numpy and errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backstay.errors import ConfigError
from backstay.trainer.modes.gathering import Piece

__all__ = ["piece_of"]


def piece_of(value: Any, piece: Piece, records: int) -> Any:
    """Return the piece's records of features or labels.

    Args:
        value: An array, tensor or list with a row for each record, or tuples, lists and mappings
            of such; None stays None.
        piece: Which records.
        records: Of the whole batch.

    Raises:
        ConfigError: Something has another number of rows, so it cannot be cut by records.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {name: piece_of(one, piece, records) for name, one in value.items()}
    if isinstance(value, tuple):
        return tuple(piece_of(one, piece, records) for one in value)
    if isinstance(value, list) and not _is_rows(value, records):
        return [piece_of(one, piece, records) for one in value]
    shape = getattr(value, "shape", None)
    rows = len(value) if shape is None and hasattr(value, "__len__") else (shape or [0])[0]
    if rows != records:
        raise ConfigError(
            f"mode sync cuts batches by records, but feed returned a {type(value).__name__} with "
            f"{rows} rows for {records} records; return arrays with a row for each record"
        )
    return value[piece.first : piece.first + piece.count]


def _is_rows(value: list[Any], records: int) -> bool:
    """Return whether a list is a column, rather than several arguments of the model."""
    return len(value) == records and not any(hasattr(one, "shape") for one in value)
