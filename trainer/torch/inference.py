"""Trained embeddings in a plain PyTorch model: from the files of an export, without a cluster.

May import torch, ``backstay.checkpoint`` and what is neutral of both; knows no client.
"""

from __future__ import annotations

from typing import Any

import torch

from backstay.checkpoint.lookup import ExportedTable, Unknown
from backstay.trainer.adapter.exported_rows import looked_up, sorted_rows
from backstay.trainer.torch.lookup import as_keys, as_tensor

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

    def forward(self, ids: Any) -> torch.Tensor:
        """Return the rows of ``ids``, float32 [*ids.shape, dim], on their device."""
        rows = looked_up(self._table, as_keys(ids), self._padding, self._unknown)
        return as_tensor(rows, ids.device if isinstance(ids, torch.Tensor) else torch.device("cpu"))

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
        keys, rows = sorted_rows(table, padding_idx)
        self.keys: Any
        self.weight: Any
        self.register_buffer("keys", torch.from_numpy(keys))
        self.register_buffer("weight", torch.from_numpy(rows))

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
