"""Wide & Deep on census income, in PyTorch: a linear model beside a small network.

H.-T. Cheng et al., "Wide & deep learning for recommender systems", arXiv:1606.07792. The same model
as wide_deep_paddle.py; the features are in census_features.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from census_features import DEEP_FIELDS, NUMBERS, ROWS, features_of, labels_of
from torch import nn

from backstay.tables import Normal, Zeros

DIM = 8


class WideDeep(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        # Layers with sparse=True move to the servers of a cluster, which draw the rows themselves.
        self.deep = nn.Embedding(ROWS, DIM, sparse=True)
        self.wide = nn.EmbeddingBag(ROWS, 1, mode="sum", sparse=True)
        nn.init.normal_(self.deep.weight, std=0.05)
        self.deep.server_initializer = Normal(0.0, 0.05)
        nn.init.zeros_(self.wide.weight)
        self.wide.server_initializer = Zeros()
        self.network = nn.Sequential(
            nn.Linear(DEEP_FIELDS * DIM + len(NUMBERS), 64), nn.ReLU(),
            nn.Linear(64, 32), nn.ReLU(),
            nn.Linear(32, 1),
        )  # fmt: skip

    def forward(
        self, deep_ids: torch.Tensor, wide_ids: torch.Tensor, numbers: torch.Tensor
    ) -> torch.Tensor:
        deep = torch.cat([self.deep(deep_ids).flatten(1), numbers], dim=1)
        return torch.sigmoid(self.network(deep) + self.wide(wide_ids)).squeeze(1)


def custom_model() -> nn.Module:
    return WideDeep()


def loss(labels: torch.Tensor, predictions: torch.Tensor) -> torch.Tensor:
    return nn.functional.binary_cross_entropy(predictions, labels)


def optimizer(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.02)


def feed(records: Any, mode: str, metadata: Any) -> Any:
    features = features_of(records)
    return features if mode == "prediction" else (features, labels_of(records))


def eval_metrics() -> dict[str, str]:
    return {"auc": "auc", "logloss": "logloss"}
