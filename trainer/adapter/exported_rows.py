"""Rows of an export for a framework's inference layers, in numpy.

May import ``backstay.checkpoint`` and numpy; knows no framework and no client.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from backstay.checkpoint.lookup import ExportedTable, Unknown
from backstay.errors import ConfigError

__all__ = ["looked_up", "sorted_rows"]


def looked_up(
    table: ExportedTable, keys: NDArray[np.int64], padding: int | None, unknown: Unknown
) -> NDArray[np.float32]:
    """Return rows, float32 [*keys.shape, dim]; those of ``padding`` are 0 and are not looked for.

    Args:
        table: Where from.
        keys: Ids of any shape.
        padding: The id that means "nothing here".
        unknown: What an id gets that training has not met: see ``ExportedTable.lookup``.

    Raises:
        InvalidRequest: An id has no row, and ``unknown`` is "refuse".
    """
    if padding is None:
        return table.lookup(keys, unknown=unknown)
    rows = np.zeros((*keys.shape, table.dim), np.float32)
    present = keys != padding
    rows[present] = table.lookup(keys[present], unknown=unknown)
    return rows


def sorted_rows(
    table: ExportedTable, padding: int | None
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return all keys in rising order, int64 [n], and their rows, float32 [n + 1, dim].

    Frameworks do little with unsigned 64-bit numbers: keys are their bits, in the order of signed
    ones. The row of ``padding`` is 0, and so is the last, which stands for all ids that have none.

    Raises:
        ConfigError: The table has no rows.
    """
    if not len(table):
        raise ConfigError(f"table {table.spec.name!r} has no rows to be copied")
    keys, weights = table.to_numpy()
    signed = keys.view(np.int64)
    order = np.argsort(signed)
    if padding is not None:
        weights[signed == padding] = 0.0
    return signed[order], np.concatenate([weights[order], np.zeros((1, table.dim), np.float32)])
