"""The model file of the streams of the fault suite, beside a copy of ``job_model.py``.

Each record adds 1 to one row of ``counts``: so what servers and followers have is known exactly.
Rows of ``recent`` come with the numbers of records and expire once these have gone on.
"""

from __future__ import annotations

from typing import Any

# Writes down what workers are told of tasks, and slows batches down.
import job_model  # type: ignore[import-not-found]
import numpy as np
import torch

from backstay.tables import Expiry, Lifetime, Score, Zeros
from backstay.trainer.torch import Embedding

COUNTED = 64
# Of successive records, so many share a row; it is not met again.
SHARED = 8


class Net(torch.nn.Module):  # type: ignore[misc]
    """Rows that count, rows that come and go, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Embedding(None, 1, name="counts", initializer=Zeros())
        lifetime = Lifetime(expiry=Expiry(score_below=1.5), score=Score(decay=0.5))
        self.recent = Embedding(None, 4, name="recent", lifetime=lifetime)
        self.top = torch.nn.Linear(4, 1)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return a score for each record, and the row that it adds to."""
        scores = self.top(self.recent(numbers // SHARED))
        return torch.cat([scores, self.counts(numbers % COUNTED)], dim=1)


def custom_model() -> Net:
    """Return the model."""
    torch.set_num_threads(1)
    return Net()


def loss(labels: torch.Tensor, predictions: torch.Tensor) -> torch.Tensor:
    """Return what SGD of rate 1 makes 1 more of, for each record."""
    scores, counts = predictions[:, 0], predictions[:, 1]
    error = torch.nn.functional.binary_cross_entropy_with_logits(scores, labels)
    return 0.01 * error - counts.sum()


def optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return plain SGD."""
    return torch.optim.SGD(parameters, lr=1.0)


def feed(records: Any, mode: str, metadata: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers and labels of a batch."""
    job_model.feed(records, mode, metadata)
    numbers = records.column("n").astype(np.int64)
    return torch.from_numpy(numbers), torch.from_numpy((numbers % 2).astype(np.float32))
