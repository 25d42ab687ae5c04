"""Wide & Deep on census income, in Paddle: a linear model beside a small network.

H.-T. Cheng et al., "Wide & deep learning for recommender systems", arXiv:1606.07792. The same model
as wide_deep_torch.py; the features are in census_features.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import paddle
from census_features import DEEP_FIELDS, NUMBERS, ROWS, features_of, labels_of
from paddle import nn

DIM = 8


class WideDeep(nn.Layer):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        # Layers with sparse=True move to the servers of a cluster.
        self.deep = nn.Embedding(
            ROWS, DIM, sparse=True, weight_attr=nn.initializer.Normal(0.0, 0.05)
        )
        self.wide = nn.Embedding(ROWS, 1, sparse=True, weight_attr=nn.initializer.Constant(0.0))
        self.network = nn.Sequential(
            nn.Linear(DEEP_FIELDS * DIM + len(NUMBERS), 64), nn.ReLU(),
            nn.Linear(64, 32), nn.ReLU(),
            nn.Linear(32, 1),
        )  # fmt: skip

    def forward(
        self, deep_ids: paddle.Tensor, wide_ids: paddle.Tensor, numbers: paddle.Tensor
    ) -> paddle.Tensor:
        deep = paddle.concat([self.deep(deep_ids).flatten(1), numbers], axis=1)
        return nn.functional.sigmoid(self.network(deep) + self.wide(wide_ids).sum(axis=1)).squeeze(
            1
        )


def custom_model() -> nn.Layer:
    return WideDeep()


def loss(labels: paddle.Tensor, predictions: paddle.Tensor) -> paddle.Tensor:
    return nn.functional.binary_cross_entropy(predictions, labels)


def optimizer(parameters: Iterable[paddle.Tensor]) -> paddle.optimizer.Optimizer:
    return paddle.optimizer.Adagrad(0.02, parameters=parameters)


def feed(records: Any, mode: str, metadata: Any) -> Any:
    features = features_of(records)
    return features if mode == "prediction" else (features, labels_of(records))


def eval_metrics() -> dict[str, str]:
    return {"auc": "auc", "logloss": "logloss"}
