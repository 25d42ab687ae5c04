"""A factorisation machine of user, ad and place, in Paddle, whose rows come and go.

S. Rendle, "Factorization Machines", ICDM 2010. An id gets a row when it is met the second time, and
loses it when it was not met for a while, so the model stays as large as what goes on now. Adam's
steps stay as large as they are: what is learned from old clicks does not hold new ones back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import nn

from backstay.tables import AdmitAfter, Expiry, Lifetime
from backstay.trainer.hashing import hash_ids
from backstay.trainer.paddle import Embedding

DIM = 8
FIELDS = ("user", "ad", "place")
LIFETIME = Lifetime(admission=AdmitAfter(2), expiry=Expiry(unseen_seconds=30, every_seconds=5))


class Clicks(nn.Layer):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        # The first number of a row is the id's own part, the others are its factors.
        normal = nn.initializer.Normal(0.0, 0.05)
        self.rows = Embedding(None, 1 + DIM, name="ids", weight_attr=normal, lifetime=LIFETIME)
        self.bias = self.create_parameter([1], is_bias=True)

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        rows = self.rows(ids)
        factors = rows[:, :, 1:]
        # The sum over all pairs of fields.
        pairs = 0.5 * (factors.sum(axis=1).square() - factors.square().sum(axis=1))
        return self.bias + rows[:, :, 0].sum(axis=1) + pairs.sum(axis=1)


def custom_model() -> nn.Layer:
    return Clicks()


def loss(labels: paddle.Tensor, predictions: paddle.Tensor) -> paddle.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(predictions, labels)


def optimizer(parameters: Iterable[paddle.Tensor]) -> paddle.optimizer.Optimizer:
    return paddle.optimizer.Adam(0.02, parameters=parameters)


def ids_of(column: Any) -> NDArray[np.int64]:
    """Return the ids, [records, fields], of columns that a function gives by name."""
    return np.stack([hash_ids(column(name), field=name) for name in FIELDS], axis=1)


def feed(records: Any, mode: str, metadata: Any) -> Any:
    ids = ids_of(records.column)
    return ids if mode == "prediction" else (ids, records.column("click").astype(np.float32))


def eval_metrics() -> dict[str, str]:
    return {"auc": "auc", "logloss": "logloss_of_logits"}
