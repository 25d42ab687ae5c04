"""Trained models in plain PyTorch: from a checkpoint or the files of an export, without a cluster.

May import torch, this package and what is neutral of the trainer.
"""

from __future__ import annotations

import torch

from backstay.trainer.adapter import exported_rows
from backstay.trainer.model.inference import Inference
from backstay.trainer.torch.framework import FRAMEWORK
from backstay.trainer.torch.tensors import TENSORS

__all__ = [
    "CopiedEmbedding",
    "MappedEmbedding",
    "MappedEmbeddingBag",
    "load_for_inference",
]


class MappedEmbedding(exported_rows.MappedEmbedding, torch.nn.Module):  # type: ignore[misc]
    """See ``backstay.trainer.adapter.exported_rows.MappedEmbedding``."""

    tensors = TENSORS


class MappedEmbeddingBag(exported_rows.MappedEmbeddingBag, torch.nn.Module):  # type: ignore[misc]
    """See ``backstay.trainer.adapter.exported_rows.MappedEmbeddingBag``."""

    tensors = TENSORS


class CopiedEmbedding(exported_rows.CopiedEmbedding, torch.nn.Module):  # type: ignore[misc]
    """See ``backstay.trainer.adapter.exported_rows.CopiedEmbedding``."""

    tensors = TENSORS

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``ids``, float32 [*ids.shape, dim]."""
        wanted = ids.to(torch.int64)
        last = self.keys.shape[0]
        places = torch.searchsorted(self.keys, wanted)
        found = self.keys[places.clamp(max=last - 1)]
        rows = torch.where(found == wanted, places, torch.full_like(places, last))
        return torch.nn.functional.embedding(rows, self.weight)


load_for_inference = Inference(FRAMEWORK, MappedEmbedding, MappedEmbeddingBag).load_for_inference
