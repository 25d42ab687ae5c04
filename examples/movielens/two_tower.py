"""Two towers in PyTorch: one makes a vector of a user, one of a film; their product is the rating.

The vectors of all films can be computed once and searched for those nearest to a user's: that is
how such models retrieve. The biases are those of Y. Koren, R. Bell, C. Volinsky, "Matrix
factorization techniques for recommender systems", IEEE Computer 42(8).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from backstay.tables import Normal, Zeros

# Above every id of MovieLens, so ids are rows as they are.
ROWS = 1 << 18
DIM = 16
MEAN_RATING = 3.5


class Tower(nn.Module):  # type: ignore[misc]
    """A vector and a bias for each id."""

    def __init__(self) -> None:
        super().__init__()
        # Layers with sparse=True move to the servers of a cluster, which draw the rows themselves.
        self.vectors = nn.Embedding(ROWS, DIM, sparse=True)
        self.biases = nn.Embedding(ROWS, 1, sparse=True)
        nn.init.normal_(self.vectors.weight, std=0.1)
        self.vectors.server_initializer = Normal(0.0, 0.1)
        nn.init.zeros_(self.biases.weight)
        self.biases.server_initializer = Zeros()
        self.network = nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.2))

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.network(self.vectors(ids)), self.biases(ids).squeeze(1)


class TwoTower(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.user, self.film = Tower(), Tower()

    def forward(self, users: torch.Tensor, films: torch.Tensor) -> torch.Tensor:
        user, user_bias = self.user(users)
        film, film_bias = self.film(films)
        return MEAN_RATING + user_bias + film_bias + (user * film).sum(dim=1)


def custom_model() -> nn.Module:
    return TwoTower()


def loss(labels: torch.Tensor, predictions: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(predictions, labels)


def optimizer(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.05)


def feed(records: Any, mode: str, metadata: Any) -> Any:
    users = records.column("user_id:token").astype(np.int64)
    films = records.column("item_id:token").astype(np.int64)
    if mode == "prediction":
        return users, films
    return (users, films), records.column("rating:float").astype(np.float32)


def rmse(labels: NDArray[Any], predictions: NDArray[Any]) -> float:
    return float(np.sqrt(np.mean(np.square(predictions - labels))))


def eval_metrics() -> dict[str, Any]:
    return {"rmse": rmse, "mae": "mae"}
