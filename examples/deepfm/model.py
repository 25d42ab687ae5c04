"""DeepFM: a factorisation machine and a network over the same embeddings.

H. Guo et al., "DeepFM: a factorization-machine based neural network for CTR prediction",
arXiv:1703.04247. May import paddle. The layer that holds the rows is an argument:
``paddle.nn.Embedding`` on one machine, ``backstay.trainer.paddle.Embedding`` on a cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import nn

__all__ = ["DeepFM"]

EMBEDDING_DIM = 16
HIDDEN = (128, 128)
DROPOUT = 0.2


class DeepFM(nn.Layer):  # type: ignore[misc]
    """Answers logits [batch] for keys [batch, fields]; numbers are keys here, as buckets.

    Args:
        embedding: The layer's class, called as ``paddle.nn.Embedding`` is.
        rows: How many different keys there are; None: unlimited.
        fields: Keys of one example.
    """

    def __init__(self, embedding: Callable[..., Any], rows: int | None, fields: int) -> None:
        super().__init__()
        initial = nn.initializer
        self.factors = embedding(
            rows, EMBEDDING_DIM, sparse=True, weight_attr=initial.Normal(0.0, 0.01), name="factors"
        )
        self.linear = embedding(
            rows, 1, sparse=True, weight_attr=initial.Constant(0.0), name="linear"
        )
        layers: list[nn.Layer] = []
        for inputs, outputs in pairwise((fields * EMBEDDING_DIM, *HIDDEN)):
            layers += [nn.Linear(inputs, outputs), nn.ReLU(), nn.Dropout(DROPOUT)]
        self.network = nn.Sequential(*layers, nn.Linear(HIDDEN[-1], 1))

    def forward(self, keys: paddle.Tensor, _: paddle.Tensor) -> paddle.Tensor:
        factors = self.factors(keys)
        # The sum over all pairs of fields, in linear time.
        total = factors.sum(axis=1)
        pairs = 0.5 * (total * total - (factors * factors).sum(axis=1)).sum(axis=1, keepdim=True)
        deep = self.network(factors.flatten(1))
        return (self.linear(keys).sum(axis=1) + pairs + deep).squeeze(1)

    def prefetch(self, keys: NDArray[np.int64]) -> None:
        """Begin to fetch the rows of a coming batch; only where they are on pservers."""
        self.factors.prefetch(keys)
        self.linear.prefetch(keys)
