"""DeepFM in PyTorch: a factorisation machine and a network over the same embeddings.

H. Guo et al., "DeepFM: a factorization-machine based neural network for CTR prediction",
arXiv:1703.04247. The same model as deepfm_paddle.py; the features are in clicks.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from clicks import ids_of, labels_of
from torch import nn

from backstay.tables import Normal, Zeros

ROWS = 1 << 20
DIM = 16


class DeepFM(nn.Module):  # type: ignore[misc]
    def __init__(self, fields: int) -> None:
        super().__init__()
        # Layers with sparse=True move to the servers of a cluster, which draw the rows themselves.
        self.factors = nn.Embedding(ROWS, DIM, sparse=True)
        self.linear = nn.EmbeddingBag(ROWS, 1, mode="sum", sparse=True)
        nn.init.normal_(self.factors.weight, std=0.01)
        self.factors.server_initializer = Normal(0.0, 0.01)
        nn.init.zeros_(self.linear.weight)
        self.linear.server_initializer = Zeros()
        self.network = nn.Sequential(
            nn.Linear(fields * DIM, 128), nn.ReLU(), nn.Dropout(0.2),
            nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.2),
            nn.Linear(128, 1),
        )  # fmt: skip

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        factors = self.factors(ids)
        # The sum over all pairs of fields, in linear time.
        pairs = 0.5 * (factors.sum(dim=1).square() - factors.square().sum(dim=1))
        deep = self.network(factors.flatten(1))
        return torch.sigmoid(self.linear(ids) + pairs.sum(dim=1, keepdim=True) + deep).squeeze(1)


def custom_model(fields: int) -> nn.Module:
    return DeepFM(fields)


def loss(labels: torch.Tensor, predictions: torch.Tensor) -> torch.Tensor:
    return nn.functional.binary_cross_entropy(predictions, labels)


def optimizer(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    # Rows are met rarely and may take long steps; the network, which all workers change, may not.
    # Parameters come in the order of __init__.
    factors, linear, *network = parameters
    return torch.optim.Adagrad(
        [{"params": [factors, linear], "lr": 0.05}, {"params": network}], lr=0.01
    )


def feed(records: Any, mode: str, metadata: Any) -> Any:
    ids = ids_of(records, metadata, ROWS)
    return ids if mode == "prediction" else (ids, labels_of(records))


def eval_metrics() -> dict[str, str]:
    return {"auc": "auc", "logloss": "logloss"}
