"""Rows of an export, and the layers for inference that look them up.

A framework's class inherits a layer beside the framework's own and gives it its ``tensors``. May
import ``backstay.checkpoint`` and numpy; knows no framework and no client.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from backstay.checkpoint.export_reader import RowsByKey, Unknown, pulled
from backstay.errors import ConfigError, InvalidRequest
from backstay.trainer.adapter.framework import Tensor, Tensors
from backstay.trainer.adapter.lookup import Bags, Mode, bag_of_each_key, checked_mode

__all__ = ["CopiedEmbedding", "MappedEmbedding", "MappedEmbeddingBag", "sorted_rows"]


class MappedEmbedding:
    """Looks rows up in the file of an export, which stays where it is.

    Takes no memory of its own, and processes that serve the same model share what they read. Not
    for compilers of models (``torch.compile``, ``paddle.jit``): the lookup is not the framework's.

    Args:
        table: From ``backstay.checkpoint.export_reader``.
        padding_idx: The id that is answered with zeros.
        unknown: What an id gets that training has not met: see ``ExportedTable.lookup``.
    """

    tensors: ClassVar[Tensors]

    def __init__(
        self, table: RowsByKey, padding_idx: int | None = None, *, unknown: Unknown = "zeros"
    ) -> None:
        super().__init__()
        self._table = table
        self._padding = padding_idx
        self._unknown = unknown

    def forward(self, ids: Any) -> Tensor:
        """Return the rows of ``ids``, float32 [*ids.shape, dim], on their device.

        Raises:
            InvalidRequest: An id has no row, and ``unknown`` is "refuse".
        """
        keys = self.tensors.keys(ids)
        if self._padding is None:
            return self.tensors.sharing(self._table.lookup(keys, unknown=self._unknown), ids)
        rows = np.zeros((*keys.shape, self._table.dim), np.float32)
        present = keys != self._padding
        rows[present] = self._table.lookup(keys[present], unknown=self._unknown)
        return self.tensors.sharing(rows, ids)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows of this layer."""
        table = self._table
        return f"table={table.spec.name!r}, rows={len(table)}, dim={table.dim}"


class MappedEmbeddingBag(MappedEmbedding):
    """Sums or averages the rows of each bag, as the adapter's ``EmbeddingBag`` does.

    Args:
        table: From ``backstay.checkpoint.export_reader``.
        padding_idx: The id that does not count.
        mode: "sum" or "mean"; an empty bag gives zeros.
        include_last_offset: The last of the offsets is the number of ids and begins no bag.
        unknown: What an id gets that training has not met: see ``ExportedTable.lookup``.

    Raises:
        ConfigError: The mode is neither "sum" nor "mean".
    """

    def __init__(
        self,
        table: RowsByKey,
        padding_idx: int | None = None,
        *,
        mode: Mode = "mean",
        include_last_offset: bool = False,
        unknown: Unknown = "zeros",
    ) -> None:
        super().__init__(table, padding_idx, unknown=unknown)
        self.mode = checked_mode(mode)
        self.include_last_offset = include_last_offset

    def forward(
        self, ids: Any, offsets: Any = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Return one row a bag, float32 [bags, dim], on the device of ``ids``.

        Args:
            ids: [bags, n], short bags filled with ``padding_idx``; or flat with ``offsets``.
            offsets: Where each bag begins in the flat ids.
            per_sample_weights: A factor for each id, with mode "sum" only.

        Raises:
            InvalidRequest: Shapes and offsets do not fit, weights come with mode "mean", or an id
                has no row and ``unknown`` is "refuse".
        """
        keys = self.tensors.keys(ids)
        starts = None if offsets is None else self.tensors.keys(offsets)
        if starts is not None and self.include_last_offset:
            starts = starts[:-1]
        bag_of_key, bags = bag_of_each_key(keys, starts)
        present = np.ones(keys.shape, np.bool_) if self._padding is None else keys != self._padding
        rows = self._table.lookup(keys[present], unknown=self._unknown)
        if per_sample_weights is not None:
            rows = rows * self._weights(per_sample_weights, keys)[present][:, None]
        counts = np.bincount(bag_of_key[present.reshape(-1)], minlength=bags)
        return self.tensors.sharing(Bags(counts, self.mode == "mean").combine(rows), ids)

    def _weights(self, given: Tensor, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        if self.mode != "sum":
            raise InvalidRequest("per_sample_weights need mode='sum', as in PyTorch")
        weights = self.tensors.gradient(given)
        if weights.shape != keys.shape:
            raise InvalidRequest(
                f"the weights have the shape {weights.shape}, the ids {keys.shape}"
            )
        return weights

    def extra_repr(self) -> str:
        """What ``print(model)`` shows of this layer."""
        return f"{super().extra_repr()}, mode={self.mode!r}"


class CopiedEmbedding:
    """Holds all rows in tensors: on any device, in ``state_dict()``, for compilers of models.

    Ids that training has not met, and ``padding_idx``, are answered with zeros.

    Args:
        table: From ``backstay.checkpoint.export_reader``; not needed afterwards.
        padding_idx: The id that is answered with zeros.

    Raises:
        ConfigError: The table has no rows.
    """

    tensors: ClassVar[Tensors]
    register_buffer: Any
    keys: Tensor
    weight: Tensor

    def __init__(self, table: RowsByKey, padding_idx: int | None = None) -> None:
        super().__init__()
        keys, rows = sorted_rows(table, padding_idx)
        self.register_buffer("keys", self.tensors.of_any(keys))
        self.register_buffer("weight", self.tensors.of_any(rows))

    def extra_repr(self) -> str:
        """What ``print(model)`` shows of this layer."""
        return f"rows={self.keys.shape[0]}, dim={self.weight.shape[-1]}"


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
