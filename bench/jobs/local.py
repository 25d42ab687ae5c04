"""What the backstay jobs share: the batches, the table, the trainer processes, the clock's figures.

The jobs use backstay as a user does: its Python client against servers in processes of their own.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backstay.tables import SGD, Constant, TableSpec

__all__ = [
    "BATCHES",
    "GRADIENT_SCALE",
    "draw_batches",
    "embedding",
    "print_result",
    "result_of",
    "running_job",
    "step_figures",
]

BATCHES = 8
LEARNING_RATE = 0.1
INITIAL_WEIGHT = 0.01
# The loss is the sum over the batch of 1e-3 * (row - 1)^2: its gradient is 2e-3 * (row - 1).
GRADIENT_SCALE = 2e-3


def draw_batches(keys_per_step: int, keys: int, zipf: float, seed: int) -> list[NDArray[np.int64]]:
    """Draw the batches that the steps use in turn; drawing is never timed.

    Args:
        keys_per_step: Length of each batch.
        keys: Keys are in [0, keys).
        zipf: Exponent of the Zipf distribution; 0 draws uniformly.
        seed: Each trainer has its own.
    """
    generator = np.random.default_rng(seed)
    if zipf:
        return [
            (generator.zipf(zipf, keys_per_step) % keys).astype(np.int64) for _ in range(BATCHES)
        ]
    return [generator.integers(0, keys, keys_per_step, dtype=np.int64) for _ in range(BATCHES)]


def embedding(dim: int) -> TableSpec:
    """The benchmark's sparse table: float32, plain SGD, constant start."""
    return TableSpec.sparse(
        "embedding",
        dim,
        optimizer=SGD(learning_rate=LEARNING_RATE),
        initializer=Constant(INITIAL_WEIGHT),
    )


def step_figures(keys_per_step: int, seconds: Sequence[float], total: float) -> dict[str, float]:
    """Turn step times into figures.

    ``keys_per_s`` comes from the median step and says what one step costs when nothing
    disturbs it; ``mean_keys_per_s`` is all keys over all time, which alone is right where work
    runs across the borders of steps.
    """
    median = statistics.median(seconds)
    return {
        "keys_per_s": keys_per_step / median,
        "mean_keys_per_s": keys_per_step * len(seconds) / total,
        "median_step_ms": median * 1e3,
        "best_step_ms": min(seconds) * 1e3,
    }


@contextmanager
def running_job(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start another job of this folder in its own process, with pipes to talk through.

    It is killed on leaving the block, if it still runs.
    """
    with subprocess.Popen(
        [sys.executable, "-m", f"bench.jobs.{module}", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for a job to end and return what it printed last, a JSON object.

    Raises:
        RuntimeError: It failed, or printed none.
    """
    output, _ = process.communicate()
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if process.returncode != 0 or not lines:
        raise RuntimeError(f"a trainer ended with exit code {process.returncode}: {output!r}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def print_result(figures: dict[str, Any]) -> None:
    print(json.dumps(figures), flush=True)
