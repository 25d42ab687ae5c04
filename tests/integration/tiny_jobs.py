"""A small job for the tests of workers and local runs: a model file of each framework, and data.

Clicks of users on ads; the chance depends on both. The model files are what a user would write.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

__all__ = ["MODELS", "write_clicks", "write_model"]

PADDLE = """
import numpy as np
import paddle
from paddle import nn


class Clicks(nn.Layer):
    def __init__(self, dim):
        super().__init__()
        self.users = nn.Embedding(1000, dim, sparse=True)
        self.ads = nn.Embedding(50, dim, sparse=True)
        self.head = nn.Linear(2 * dim, 1)

    def forward(self, users, ads):
        rows = paddle.concat([self.users(users), self.ads(ads)], axis=1)
        return nn.functional.sigmoid(self.head(rows)).squeeze(1)


def custom_model(dim=4):
    return Clicks(dim)


def loss(labels, predictions):
    return nn.functional.binary_cross_entropy(predictions, labels)


def optimizer(parameters):
    return paddle.optimizer.Adagrad(0.1, parameters=parameters)
"""

TORCH = """
import numpy as np
import torch
from torch import nn


class Clicks(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.users = nn.Embedding(1000, dim, sparse=True)
        self.ads = nn.Embedding(50, dim, sparse=True)
        self.head = nn.Linear(2 * dim, 1)

    def forward(self, users, ads):
        rows = torch.cat([self.users(users), self.ads(ads)], dim=1)
        return torch.sigmoid(self.head(rows)).squeeze(1)


def custom_model(dim=4):
    return Clicks(dim)


def loss(labels, predictions):
    return nn.functional.binary_cross_entropy(predictions, labels)


def optimizer(parameters):
    return torch.optim.Adagrad(parameters, lr=0.1)
"""

SHARED = """

def feed(records, mode, metadata):
    features = {
        "users": records.column("user").astype(np.int64),
        "ads": records.column("ad").astype(np.int64),
    }
    if mode == "prediction":
        return features
    return features, records.column("click").astype(np.float32)


def eval_metrics():
    def positives(labels, predictions):
        return float(np.mean(labels))

    return {"auc": "auc", "logloss": "logloss", "positives": positives}
"""

MODELS = {"paddle": PADDLE + SHARED, "torch": TORCH + SHARED}


def write_model(folder: Path, framework: str, extra: str = "") -> Path:
    """Write a model file; returns its path."""
    path = folder / f"clicks_{framework}.py"
    path.write_text(MODELS[framework] + extra, encoding="utf-8")
    return path


def write_clicks(path: Path, records: int, seed: int = 1) -> Path:
    """Write a CSV file of clicks; the world that they come from is always the same."""
    world = np.random.default_rng(0)
    taste, appeal = world.normal(size=1000), world.normal(size=50)
    generator = np.random.default_rng(seed)
    users, ads = generator.integers(0, 1000, records), generator.integers(0, 50, records)
    chance = 1 / (1 + np.exp(-2 * (taste[users] + appeal[ads])))
    clicks = (generator.random(records) < chance).astype(int)
    lines = ["user,ad,click"]
    lines += [f"{u},{a},{c}" for u, a, c in zip(users, ads, clicks, strict=True)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
