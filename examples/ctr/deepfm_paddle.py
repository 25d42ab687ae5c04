"""DeepFM in Paddle: a factorisation machine and a network over the same embeddings.

H. Guo et al., "DeepFM: a factorization-machine based neural network for CTR prediction",
arXiv:1703.04247. The same model as deepfm_torch.py; the features are in clicks.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import paddle
from clicks import ids_of, labels_of
from paddle import nn

ROWS = 1 << 20
DIM = 16
# Rows are met rarely and may take longer steps than the network, which all workers change at once.
ROW_RATE = 5.0


class DeepFM(nn.Layer):  # type: ignore[misc]
    def __init__(self, fields: int) -> None:
        super().__init__()
        # Layers with sparse=True move to the servers of a cluster.
        factors = paddle.ParamAttr(
            initializer=nn.initializer.Normal(0.0, 0.01), learning_rate=ROW_RATE
        )
        linear = paddle.ParamAttr(initializer=nn.initializer.Constant(0.0), learning_rate=ROW_RATE)
        self.factors = nn.Embedding(ROWS, DIM, sparse=True, weight_attr=factors)
        self.linear = nn.Embedding(ROWS, 1, sparse=True, weight_attr=linear)
        self.network = nn.Sequential(
            nn.Linear(fields * DIM, 128), nn.ReLU(), nn.Dropout(0.2),
            nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.2),
            nn.Linear(128, 1),
        )  # fmt: skip

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        factors = self.factors(ids)
        # The sum over all pairs of fields, in linear time.
        pairs = 0.5 * (factors.sum(axis=1).square() - factors.square().sum(axis=1))
        deep = self.network(factors.flatten(1))
        linear = self.linear(ids).sum(axis=1)
        return nn.functional.sigmoid(linear + pairs.sum(axis=1, keepdim=True) + deep).squeeze(1)


def custom_model(fields: int) -> nn.Layer:
    return DeepFM(fields)


def loss(labels: paddle.Tensor, predictions: paddle.Tensor) -> paddle.Tensor:
    return nn.functional.binary_cross_entropy(predictions, labels)


def optimizer(parameters: Iterable[paddle.Tensor]) -> paddle.optimizer.Optimizer:
    return paddle.optimizer.Adagrad(0.01, parameters=parameters)


def feed(records: Any, mode: str, metadata: Any) -> Any:
    ids = ids_of(records, metadata, ROWS)
    return ids if mode == "prediction" else (ids, labels_of(records))


def eval_metrics() -> dict[str, str]:
    return {"auc": "auc", "logloss": "logloss"}
