"""Rows of an export for a framework's inference layers, in numpy.

May import ``backstay.checkpoint`` and numpy; knows no framework and no client.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from backstay.checkpoint.export_reader import RowsByKey, Unknown, pulled
from backstay.errors import ConfigError, InvalidRequest
from backstay.trainer.adapter.lookup import Bags, bag_of_each_key

__all__ = ["ExportedBags", "ExportedRows", "sorted_rows"]


class ExportedRows:
    """The rows of one layer; ``str`` of it is what ``print(model)`` shows of the layer."""

    def __init__(self, table: RowsByKey, padding: int | None, unknown: Unknown) -> None:
        """Prepare.

        Args:
            table: Where from.
            padding: The id that means "nothing here".
            unknown: What an id gets that training has not met: see ``ExportedTable.lookup``.
        """
        self.table = table
        self.padding = padding
        self.unknown = unknown

    def __str__(self) -> str:
        """Return what people see of it."""
        return f"table={self.table.spec.name!r}, rows={len(self.table)}, dim={self.table.dim}"

    def rows(self, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return rows, float32 [*keys.shape, dim]. The row of ``padding`` is 0 without a look.

        Args:
            keys: Ids of any shape.

        Raises:
            InvalidRequest: An id has no row, and ``unknown`` is "refuse".
        """
        if self.padding is None:
            return self.table.lookup(keys, unknown=self.unknown)
        rows = np.zeros((*keys.shape, self.table.dim), np.float32)
        present = keys != self.padding
        rows[present] = self.table.lookup(keys[present], unknown=self.unknown)
        return rows


class ExportedBags(ExportedRows):
    """The rows of one layer that sums or averages bags; ``padding`` does not count."""

    def __init__(
        self,
        table: RowsByKey,
        padding: int | None,
        unknown: Unknown,
        mode: Literal["sum", "mean"],
    ) -> None:
        """Prepare.

        Raises:
            ConfigError: The mode is neither "sum" nor "mean".
        """
        if mode not in ("sum", "mean"):
            raise ConfigError(f"mode is {mode!r}; it must be 'sum' or 'mean'")
        super().__init__(table, padding, unknown)
        self.mode = mode

    def __str__(self) -> str:
        """Return what people see of it."""
        return f"{super().__str__()}, mode={self.mode!r}"

    def bags(
        self,
        keys: NDArray[np.int64],
        starts: NDArray[np.int64] | None,
        weights: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        """Return one row a bag, float32 [bags, dim]; empty bags are 0.

        Args:
            keys: [bags, n]; or flat, with ``starts``.
            starts: Where each bag begins in the flat keys: [bags], from 0, never falling.
            weights: A factor for each key, of the shape of ``keys``.

        Raises:
            InvalidRequest: Shapes do not fit, or an id has no row and ``unknown`` is "refuse".
        """
        bag_of_key, bags = bag_of_each_key(keys, starts)
        if weights is not None and weights.shape != keys.shape:
            raise InvalidRequest(
                f"the weights have the shape {weights.shape}, the ids {keys.shape}"
            )
        keys = keys.reshape(-1)
        present = np.ones(keys.shape, np.bool_) if self.padding is None else keys != self.padding
        rows = self.table.lookup(keys[present], unknown=self.unknown)
        if weights is not None:
            rows = rows * weights.reshape(-1)[present][:, None]
        counts = np.bincount(bag_of_key[present], minlength=bags)
        return Bags(counts, self.mode == "mean").combine(rows)


def sorted_rows(
    table: RowsByKey, padding: int | None
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return all keys in rising order, int64 [n], and their rows, float32 [n + 1, dim].

    Frameworks do little with unsigned 64-bit numbers: keys are their bits, in the order of signed
    ones. The row of ``padding`` is 0, and so is the last, which stands for all ids that have none.

    Raises:
        ConfigError: The table has no rows.
    """
    if not len(table):
        raise ConfigError(f"table {table.spec.name!r} has no rows to be copied")
    keys, stored = table.to_numpy()
    weights = pulled(table.spec, stored)
    signed = keys.view(np.int64)
    order = np.argsort(signed)
    if padding is not None:
        weights[signed == padding] = 0.0
    return signed[order], np.concatenate([weights[order], np.zeros((1, table.dim), np.float32)])
