"""Trained models in plain Paddle: from a checkpoint or the files of an export, without a cluster.

May import paddle, this package and what is neutral of the trainer.
"""

from __future__ import annotations

import paddle

from backstay.trainer.adapter import exported_rows
from backstay.trainer.model.inference import Inference
from backstay.trainer.paddle.framework import FRAMEWORK
from backstay.trainer.paddle.tensors import TENSORS

__all__ = [
    "CopiedEmbedding",
    "MappedEmbedding",
    "MappedEmbeddingBag",
    "load_for_inference",
]


class MappedEmbedding(exported_rows.MappedEmbedding, paddle.nn.Layer):  # type: ignore[misc]
    """See ``backstay.trainer.adapter.exported_rows.MappedEmbedding``."""

    tensors = TENSORS


class MappedEmbeddingBag(exported_rows.MappedEmbeddingBag, paddle.nn.Layer):  # type: ignore[misc]
    """See ``backstay.trainer.adapter.exported_rows.MappedEmbeddingBag``."""

    tensors = TENSORS


class CopiedEmbedding(exported_rows.CopiedEmbedding, paddle.nn.Layer):  # type: ignore[misc]
    """See ``backstay.trainer.adapter.exported_rows.CopiedEmbedding``."""

    tensors = TENSORS

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        """Return the rows of ``ids``, float32 [*ids.shape, dim]."""
        wanted = ids.astype("int64")
        last = self.keys.shape[0]
        places = paddle.searchsorted(self.keys, wanted)
        found = paddle.gather_nd(self.keys, paddle.clip(places, max=last - 1).unsqueeze(-1))
        rows = places + (last - places) * (found != wanted).astype("int64")
        return paddle.nn.functional.embedding(rows, self.weight)


load_for_inference = Inference(FRAMEWORK, MappedEmbedding, MappedEmbeddingBag).load_for_inference
