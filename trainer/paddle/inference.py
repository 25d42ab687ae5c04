"""Trained embeddings in a plain Paddle model: from the files of an export, without a cluster.

May import paddle, ``backstay.checkpoint`` and what is neutral of both; knows no client.
"""

from __future__ import annotations

from typing import Any

import paddle

from backstay.checkpoint.lookup import ExportedTable, Unknown
from backstay.trainer.adapter.exported_rows import looked_up, sorted_rows
from backstay.trainer.paddle.lookup import as_keys, as_tensor

__all__ = ["CopiedEmbedding", "MappedEmbedding"]


class MappedEmbedding(paddle.nn.Layer):  # type: ignore[misc]
    """Looks rows up in the file of an export, which stays where it is.

    Takes no memory of its own, and processes that serve the same model share what they read. Not
    for ``paddle.jit``: the lookup is not Paddle's.

    Args:
        table: From ``backstay.checkpoint.lookup``.
        padding_idx: The id that is answered with zeros.
        unknown: What an id gets that training has not met: see ``ExportedTable.lookup``.
    """

    def __init__(
        self,
        table: ExportedTable,
        padding_idx: int | None = None,
        *,
        unknown: Unknown = "zeros",
    ) -> None:
        super().__init__()
        self._table = table
        self._padding = padding_idx
        self._unknown = unknown

    def forward(self, ids: Any) -> paddle.Tensor:
        """Return the rows of ``ids``, float32 [*ids.shape, dim]."""
        return as_tensor(looked_up(self._table, as_keys(ids), self._padding, self._unknown))

    def extra_repr(self) -> str:
        """What ``print(model)`` shows of this layer."""
        return f"table={self._table.spec.name!r}, rows={len(self._table)}, dim={self._table.dim}"


class CopiedEmbedding(paddle.nn.Layer):  # type: ignore[misc]
    """Holds all rows in tensors: on any device, in ``state_dict()``, for ``paddle.jit``.

    Ids that training has not met, and ``padding_idx``, are answered with zeros.

    Args:
        table: From ``backstay.checkpoint.lookup``; not needed afterwards.
        padding_idx: The id that is answered with zeros.

    Raises:
        ConfigError: The table has no rows.
    """

    def __init__(self, table: ExportedTable, padding_idx: int | None = None) -> None:
        super().__init__()
        keys, rows = sorted_rows(table, padding_idx)
        self.register_buffer("keys", paddle.to_tensor(keys))
        self.register_buffer("weight", paddle.to_tensor(rows))

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        """Return the rows of ``ids``, float32 [*ids.shape, dim]."""
        wanted = ids.astype("int64")
        last = self.keys.shape[0]
        places = paddle.searchsorted(self.keys, wanted)
        found = paddle.gather_nd(self.keys, paddle.clip(places, max=last - 1).unsqueeze(-1))
        rows = places + (last - places) * (found != wanted).astype("int64")
        return paddle.nn.functional.embedding(rows, self.weight)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows of this layer."""
        return f"rows={self.keys.shape[0]}, dim={self.weight.shape[-1]}"
