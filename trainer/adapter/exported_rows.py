"""Rows of an export for a framework's inference layers, in numpy.

May import ``backstay.checkpoint`` and numpy; knows no framework and no client.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from backstay.checkpoint.lookup import ExportedTable, Unknown
from backstay.errors import ConfigError, InvalidRequest
from backstay.trainer.adapter.lookup import Bags, bag_of_each_key

__all__ = ["looked_up", "looked_up_bags", "sorted_rows"]


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


def looked_up_bags(
    table: ExportedTable,
    keys: NDArray[np.int64],
    starts: NDArray[np.int64] | None,
    padding: int | None,
    unknown: Unknown,
    *,
    mean: bool,
    weights: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """Return one row a bag, float32 [bags, dim]; empty bags are 0.

    Args:
        table: Where from.
        keys: [bags, n]; or flat, with ``starts``.
        starts: Where each bag begins in the flat keys: [bags], from 0, never falling.
        padding: The id that does not count.
        unknown: What an id gets that training has not met.
        mean: Average instead of sum.
        weights: A factor for each key, of the shape of ``keys``.

    Raises:
        InvalidRequest: Shapes do not fit, or an id has no row and ``unknown`` is "refuse".
    """
    bag_of_key, bags = bag_of_each_key(keys, starts)
    if weights is not None and weights.shape != keys.shape:
        raise InvalidRequest(f"the weights have the shape {weights.shape}, the ids {keys.shape}")
    keys = keys.reshape(-1)
    present = np.ones(keys.shape, np.bool_) if padding is None else keys != padding
    rows = table.lookup(keys[present], unknown=unknown)
    if weights is not None:
        rows = rows * weights.reshape(-1)[present][:, None]
    counts = np.bincount(bag_of_key[present], minlength=bags)
    return Bags(counts, mean).combine(rows)
