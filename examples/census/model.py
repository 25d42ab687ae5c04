"""Wide & Deep: a linear model of categories and crosses, beside a small network.

H.-T. Cheng et al., "Wide & deep learning for recommender systems", arXiv:1606.07792.
May import paddle. The layer that holds the rows is an argument: ``paddle.nn.Embedding`` on one
machine, ``backstay.trainer.paddle.Embedding`` on a cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import nn

from examples.census.reader import DEEP_FIELDS, NUMBERS

__all__ = ["WideDeep"]

EMBEDDING_DIM = 8
HIDDEN = (64, 32)


class WideDeep(nn.Layer):  # type: ignore[misc]
    """Answers logits [batch] for keys [batch, WIDE_FIELDS] and numbers [batch, NUMBERS].

    Args:
        embedding: The layer's class, called as ``paddle.nn.Embedding`` is.
        rows: How many different keys there are; None: unlimited.
    """

    def __init__(self, embedding: Callable[..., Any], rows: int | None) -> None:
        super().__init__()
        initial = nn.initializer
        self.deep = embedding(
            rows, EMBEDDING_DIM, sparse=True, weight_attr=initial.Normal(0.0, 0.05), name="deep"
        )
        self.wide = embedding(rows, 1, sparse=True, weight_attr=initial.Constant(0.0), name="wide")
        sizes = (len(DEEP_FIELDS) * EMBEDDING_DIM + len(NUMBERS), *HIDDEN)
        layers: list[nn.Layer] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.network = nn.Sequential(*layers, nn.Linear(sizes[-1], 1))

    def forward(self, keys: paddle.Tensor, numbers: paddle.Tensor) -> paddle.Tensor:
        deep = self.deep(keys[:, : len(DEEP_FIELDS)]).flatten(1)
        deep = self.network(paddle.concat([deep, numbers], axis=1))
        return (self.wide(keys).sum(axis=1) + deep).squeeze(1)

    def prefetch(self, keys: NDArray[np.int64]) -> None:
        """Begin to fetch the rows of a coming batch; only where they are on pservers."""
        self.deep.prefetch(keys[:, : len(DEEP_FIELDS)])
        self.wide.prefetch(keys)
