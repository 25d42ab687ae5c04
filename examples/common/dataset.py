"""Labelled examples as arrays, and the batches of a pass.

May import numpy only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Examples", "batches", "renumber"]


@dataclass(frozen=True)
class Examples:
    """Rows of one split.

    Attributes:
        keys: One hashed key a field, int64 [n, fields].
        numbers: Scaled numbers, float32 [n, numbers]; there may be none.
        labels: 0 or 1, float32 [n].
    """

    keys: NDArray[np.int64]
    numbers: NDArray[np.float32]
    labels: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: slice | NDArray[np.int64]) -> Examples:
        return Examples(self.keys[rows], self.numbers[rows], self.labels[rows])


def batches(examples: Examples, size: int, generator: np.random.Generator) -> Iterator[Examples]:
    """Yield the examples once, in random order; the last batch may be short."""
    order = generator.permutation(len(examples))
    for begin in range(0, len(order), size):
        yield examples[order[begin : begin + size]]


def renumber(*splits: Examples) -> tuple[int, list[Examples]]:
    """Replace keys by 0, 1, 2, ...: what a layer with a weight matrix needs.

    Returns:
        The number of different keys of all splits together, and the splits.
    """
    known = np.unique(np.concatenate([split.keys.reshape(-1) for split in splits]))
    return len(known), [
        Examples(np.searchsorted(known, split.keys), split.numbers, split.labels)
        for split in splits
    ]
