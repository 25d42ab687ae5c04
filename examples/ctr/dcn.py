"""DCN v2 in PyTorch: layers that cross all features with all, beside a network.

R. Wang et al., "DCN V2: Improved deep & cross network and practical lessons for web-scale learning
to rank systems", arXiv:2008.13535, in parallel form. The features are in clicks.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from clicks import ids_of, labels_of
from torch import nn

from backstay.tables import Normal

ROWS = 1 << 20
DIM = 16


class DCN(nn.Module):  # type: ignore[misc]
    def __init__(self, fields: int, cross_layers: int) -> None:
        super().__init__()
        # Layers with sparse=True move to the servers of a cluster, which draw the rows themselves.
        self.embedding = nn.Embedding(ROWS, DIM, sparse=True)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.embedding.server_initializer = Normal(0.0, 0.1)
        width = fields * DIM
        self.crosses = nn.ModuleList(nn.Linear(width, width) for _ in range(cross_layers))
        self.network = nn.Sequential(
            nn.Linear(width, 128), nn.ReLU(), nn.Dropout(0.2),
            nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.2),
        )  # fmt: skip
        self.output = nn.Linear(width + 128, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        first = crossed = self.embedding(ids).flatten(1)
        for cross in self.crosses:
            crossed = first * cross(crossed) + crossed
        return torch.sigmoid(self.output(torch.cat([crossed, self.network(first)], dim=1))).squeeze(
            1
        )


def custom_model(fields: int, cross_layers: int = 2) -> nn.Module:
    return DCN(fields, cross_layers)


def loss(labels: torch.Tensor, predictions: torch.Tensor) -> torch.Tensor:
    return nn.functional.binary_cross_entropy(predictions, labels)


def optimizer(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    # Rows are met rarely and may take long steps; the network, which all workers change, may not.
    # Parameters come in the order of __init__.
    rows, *network = parameters
    return torch.optim.Adagrad([{"params": [rows], "lr": 0.1}, {"params": network}], lr=0.03)


def feed(records: Any, mode: str, metadata: Any) -> Any:
    ids = ids_of(records, metadata, ROWS)
    return ids if mode == "prediction" else (ids, labels_of(records))


def eval_metrics() -> dict[str, str]:
    return {"auc": "auc", "logloss": "logloss"}
