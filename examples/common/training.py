"""The training loop of the examples: the same for one machine and for a cluster.

May import paddle, numpy and its siblings. It does not know whether the model's rows are in a
weight matrix here or on pservers.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import paddle
from numpy.typing import NDArray

from examples.common.dataset import Examples, batches
from examples.common.launch import REPORT
from examples.common.metrics import auc, logloss

__all__ = ["RunningScore", "fit", "predict", "print_report", "score"]

WINDOW_EXAMPLES = 8192
T = TypeVar("T")


class RunningScore:
    """Loss and AUC of the last examples, each predicted before the model was trained on it."""

    def __init__(self) -> None:
        self.examples = 0
        self._begin = time.perf_counter()
        self._window: deque[tuple[NDArray[Any], NDArray[Any]]] = deque()
        self._window_examples = 0

    def add(self, labels: NDArray[Any], logits: NDArray[Any]) -> None:
        """Take note of a batch; both arrays are [n]."""
        self.examples += len(labels)
        self._window.append((labels, logits))
        self._window_examples += len(labels)
        while self._window_examples - len(self._window[0][0]) >= WINDOW_EXAMPLES:
            self._window_examples -= len(self._window.popleft()[0])

    def summary(self) -> dict[str, float]:
        """Return examples and seconds so far, loss and AUC of about the last 8,192 examples."""
        labels = np.concatenate([part[0] for part in self._window])
        logits = np.concatenate([part[1] for part in self._window])
        both = 0 < labels.sum() < len(labels)
        return {
            "examples": self.examples,
            "seconds": time.perf_counter() - self._begin,
            "loss": logloss(labels, _sigmoid(logits)),
            "auc": auc(labels, logits) if both else 0.5,
        }


def fit(
    model: paddle.nn.Layer,
    optimizers: Sequence[Any],
    examples: Examples,
    *,
    passes: int,
    batch_size: int,
    seed: int,
    scheduler: paddle.optimizer.lr.LRScheduler | None = None,
    prefetch: Callable[[NDArray[np.int64]], None] | None = None,
    report: Callable[[RunningScore], None] | None = None,
    report_seconds: float = 0.3,
    pass_ended: Callable[[int], None] | None = None,
) -> RunningScore:
    """Train in place.

    Args:
        model: Called with keys [batch, fields] and numbers [batch, numbers], answers logits.
        optimizers: Paddle's, or what wraps them; together they have the model's parameters.
            Anything else with ``step`` and ``clear_grad`` may come along.
        examples: Shuffled anew in each pass.
        passes: How often each example is used.
        batch_size: Examples of one step.
        seed: Of the order of the examples.
        scheduler: Of the learning rate; makes one step a batch.
        prefetch: Called with the keys of the batch after the current one.
        report: Called about every ``report_seconds`` seconds.
        report_seconds: See ``report``.
        pass_ended: Called after each pass with its number, from 1.

    Returns:
        How it went to the end.
    """
    generator = np.random.default_rng(seed)
    running = RunningScore()
    reported = time.perf_counter()
    model.train()
    for number in range(1, passes + 1):
        for batch, following in _with_following(batches(examples, batch_size, generator)):
            if prefetch is not None and following is not None:
                prefetch(following.keys)
            logits = model(paddle.to_tensor(batch.keys), paddle.to_tensor(batch.numbers))
            loss = paddle.nn.functional.binary_cross_entropy_with_logits(
                logits, paddle.to_tensor(batch.labels)
            )
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.clear_grad()
            if scheduler is not None:
                scheduler.step()
            running.add(batch.labels, logits.numpy())
            now = time.perf_counter()
            if report is not None and now - reported >= report_seconds:
                reported = now
                report(running)
        if pass_ended is not None:
            pass_ended(number)
    return running


def predict(model: paddle.nn.Layer, examples: Examples, batch_size: int = 8192) -> NDArray[Any]:
    """Return the predicted probabilities, float64 [n]."""
    model.eval()
    parts = []
    with paddle.no_grad():
        for begin in range(0, len(examples), batch_size):
            batch = examples[begin : begin + batch_size]
            parts.append(model(paddle.to_tensor(batch.keys), paddle.to_tensor(batch.numbers)))
    model.train()
    return _sigmoid(np.concatenate([part.numpy() for part in parts]))


def score(model: paddle.nn.Layer, examples: Examples) -> dict[str, float]:
    """Return AUC and logloss on ``examples``."""
    probabilities = predict(model, examples)
    return {
        "auc": auc(examples.labels, probabilities),
        "logloss": logloss(examples.labels, probabilities),
    }


def print_report(**values: Any) -> None:
    """Tell the program that started this trainer; see ``REPORT``."""
    print(REPORT + json.dumps(values), flush=True)


def _sigmoid(logits: NDArray[Any]) -> NDArray[np.float64]:
    return 1.0 / (1.0 + np.exp(-np.clip(logits.astype(np.float64), -500.0, 500.0)))


def _with_following(items: Iterable[T]) -> Iterator[tuple[T, T | None]]:
    iterator = iter(items)
    current = next(iterator, None)
    while current is not None:
        following = next(iterator, None)
        yield current, following
        current = following
