"""Trained embeddings in a plain PyTorch model: from the files of an export, without a cluster.

May import torch and ``backstay.checkpoint``; knows no client.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from backstay.checkpoint.lookup import ExportedTable, Unknown
from backstay.errors import ConfigError

__all__ = ["CopiedEmbedding", "MappedEmbedding"]


class MappedEmbedding(torch.nn.Module):  # type: ignore[misc]
    """Looks rows up in the file of an export, which stays where it is.

    Takes no memory of its own, and processes that serve the same model share what they read. Not
    for ``torch.compile`` or ``torch.export``: the lookup is not PyTorch's.

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

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``ids``, float32 [*ids.shape, dim], on their device."""
        keys = ids.detach().cpu().numpy()
        rows = np.zeros((*keys.shape, self._table.dim), np.float32)
        present = np.ones(keys.shape, np.bool_)
        if self._padding is not None:
            present = keys != self._padding
        rows[present] = self._table.lookup(keys[present], unknown=self._unknown)
        return torch.from_numpy(rows).to(ids.device)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows of this module."""
        return f"table={self._table.spec.name!r}, rows={len(self._table)}, dim={self._table.dim}"


class CopiedEmbedding(torch.nn.Module):  # type: ignore[misc]
    """Holds all rows in tensors: on any device, in ``state_dict()``, for ``torch.compile``.

    Ids that training has not met, and ``padding_idx``, are answered with zeros.

    Args:
        table: From ``backstay.checkpoint.lookup``; not needed afterwards.
        padding_idx: The id that is answered with zeros.

    Raises:
        ConfigError: The table has no rows.
    """

    def __init__(self, table: ExportedTable, padding_idx: int | None = None) -> None:
        super().__init__()
        if not len(table):
            raise ConfigError(f"table {table.spec.name!r} has no rows to be copied")
        keys, weights = table.to_numpy()
        # PyTorch does little with unsigned 64-bit numbers: their bits, in signed order.
        signed = keys.view(np.int64)
        order = np.argsort(signed)
        if padding_idx is not None:
            weights[signed == padding_idx] = 0.0
        zeros = np.zeros((1, table.dim), np.float32)
        self.keys: Any
        self.weight: Any
        self.register_buffer("keys", torch.from_numpy(signed[order]))
        # The last row stands for all ids that have none.
        self.register_buffer("weight", torch.from_numpy(np.concatenate([weights[order], zeros])))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``ids``, float32 [*ids.shape, dim]."""
        wanted = ids.to(torch.int64)
        last = self.keys.shape[0]
        places = torch.searchsorted(self.keys, wanted)
        found = self.keys[places.clamp(max=last - 1)]
        rows = torch.where(found == wanted, places, torch.full_like(places, last))
        return torch.nn.functional.embedding(rows, self.weight)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows of this module."""
        return f"rows={self.keys.shape[0]}, dim={self.weight.shape[1]}"
