"""xDeepFM in Paddle: a compressed interaction network, with ids of any 64 bits.

J. Lian et al., "xDeepFM: Combining explicit and implicit feature interactions for recommender
systems", arXiv:1803.05170. Its rows are in backstay's own layers: no weight matrix bounds their
number, two values do not share a row, and a row exists from its first gradient on. On one machine
they live in a server that ``backstay train --local`` starts. The features are in clicks.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import paddle
from clicks import ids_of, labels_of
from paddle import nn

from backstay.trainer.paddle import Embedding

DIM = 8
# Rows are met rarely and may take longer steps than the network, which all workers change at once.
ROW_RATE = 5.0


class InteractionNetwork(nn.Layer):  # type: ignore[misc]
    """Each layer crosses its input with the fields, element by element of the embeddings."""

    def __init__(self, fields: int, sizes: Sequence[int]) -> None:
        super().__init__()
        inputs = [fields, *sizes[:-1]]
        self.layers = nn.LayerList(
            [nn.Linear(size * fields, out) for size, out in zip(inputs, sizes, strict=True)]
        )

    def forward(self, rows: paddle.Tensor) -> paddle.Tensor:
        fields = crossed = rows.transpose([0, 2, 1])  # [batch, DIM, fields]
        sums = []
        for layer in self.layers:
            products = crossed.unsqueeze(3) * fields.unsqueeze(2)
            crossed = layer(products.flatten(2))
            sums.append(crossed.sum(axis=1))
        return paddle.concat(sums, axis=1)


class XDeepFM(nn.Layer):  # type: ignore[misc]
    def __init__(self, fields: int) -> None:
        super().__init__()
        factors = paddle.ParamAttr(
            initializer=nn.initializer.Normal(0.0, 0.1), learning_rate=ROW_RATE
        )
        linear = paddle.ParamAttr(initializer=nn.initializer.Constant(0.0), learning_rate=ROW_RATE)
        self.factors = Embedding(None, DIM, weight_attr=factors, name="factors")
        self.linear = Embedding(None, 1, weight_attr=linear, name="linear")
        self.interactions = InteractionNetwork(fields, (16, 16))
        self.network = nn.Sequential(
            nn.Linear(fields * DIM, 128), nn.ReLU(), nn.Dropout(0.2),
            nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.2),
        )  # fmt: skip
        self.output = nn.Linear(16 + 16 + 128, 1)

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        rows = self.factors(ids)
        parts = paddle.concat([self.interactions(rows), self.network(rows.flatten(1))], axis=1)
        return nn.functional.sigmoid(self.output(parts) + self.linear(ids).sum(axis=1)).squeeze(1)


def custom_model(fields: int) -> nn.Layer:
    return XDeepFM(fields)


def loss(labels: paddle.Tensor, predictions: paddle.Tensor) -> paddle.Tensor:
    return nn.functional.binary_cross_entropy(predictions, labels)


def optimizer(parameters: Iterable[paddle.Tensor]) -> paddle.optimizer.Optimizer:
    return paddle.optimizer.Adagrad(0.02, parameters=parameters)


def feed(records: Any, mode: str, metadata: Any) -> Any:
    ids = ids_of(records, metadata)
    return ids if mode == "prediction" else (ids, labels_of(records))


def eval_metrics() -> dict[str, str]:
    return {"auc": "auc", "logloss": "logloss"}
