"""The model file of the jobs of the fault suite: small, with rows and a dense table on servers.

It stands still a little for each training batch while the file ``slow`` is beside its copy, so that
a job lasts as long as faults are to strike it. It also writes down what the worker is told when it
completes a task: no two may be told that they were first.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backstay.job.messages import Task
from backstay.trainer.worker.master_link import MasterLink

HERE = Path(__file__).parent
SLOW = HERE / "slow"
BATCH_S = 0.03
ROWS = 64

_complete = MasterLink.complete


def _told(link: MasterLink, task: Task, **more: Any) -> bool:
    first = _complete(link, task, **more)
    if task.kind == "training":
        line = f"{task.round} {task.number} {task.attempt} {int(first)}\n"
        with (HERE / f"told-{link.worker_id}-{os.getpid()}").open("a", encoding="ascii") as file:
            file.write(line)
    return first


MasterLink.complete = _told  # type: ignore[method-assign,assignment]


class Net(torch.nn.Module):  # type: ignore[misc]
    """Embeddings on servers and one dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(ROWS, 4, sparse=True)
        self.top = torch.nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return a score for each record."""
        return self.top(self.rows(ids))[:, 0]


def custom_model() -> Net:
    """Return the model."""
    torch.set_num_threads(1)
    return Net()


def loss(labels: torch.Tensor, predictions: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of a batch."""
    return torch.nn.functional.binary_cross_entropy_with_logits(predictions, labels)


def optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return plain SGD."""
    return torch.optim.SGD(parameters, lr=0.01)


def feed(records: Any, mode: str, _metadata: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and labels of a batch."""
    if mode == "training" and SLOW.exists():
        time.sleep(BATCH_S)
    numbers = records.column("n").astype(np.int64)
    return torch.from_numpy(numbers % ROWS), torch.from_numpy((numbers % 2).astype(np.float32))


def eval_metrics() -> dict[str, str]:
    """Return what is computed after each pass."""
    return {"auc": "auc"}
