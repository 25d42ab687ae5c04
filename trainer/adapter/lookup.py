"""Rows in, gradients out: what a layer asks for and how it is combined, in numpy.

Imports numpy and the errors. Knows no framework and holds no connection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from backstay.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from backstay.trainer.table import KeyBatch

__all__ = ["Bags", "Lookup", "Mode", "bag_of_each_key", "checked_mode", "keys_of"]

# How the rows of a bag are combined.
Mode: TypeAlias = Literal["sum", "mean"]


@dataclass(frozen=True)
class Bags:
    """How the rows of one lookup fall into bags, in order.

    Attributes:
        counts: Rows of each bag, int64 [bags]; 0 for an empty one.
        mean: Average instead of sum.
    """

    counts: NDArray[np.int64]
    mean: bool

    def combine(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return rows [n, dim] summed or averaged by bag, [bags, dim]; empty bags are 0."""
        combined = np.zeros((self.counts.size, rows.shape[1]), np.float32)
        filled = self.counts > 0
        if filled.any():
            starts = (np.cumsum(self.counts) - self.counts)[filled]
            combined[filled] = np.add.reduceat(rows, starts, axis=0)
        return combined / self._divisors() if self.mean else combined

    def spread(self, gradient: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the gradient of each row [n, dim], given that of each bag [bags, dim]."""
        if self.mean:
            gradient = gradient / self._divisors()
        return np.repeat(gradient, self.counts, axis=0)

    def _divisors(self) -> NDArray[np.float32]:
        return np.maximum(self.counts, 1).astype(np.float32)[:, None]


@dataclass(frozen=True)
class Lookup:
    """One batch of ids that a layer was asked for.

    Attributes:
        keys: The ids whose rows are fetched, int64: of the shape asked for or, where some of
            them were padding, flat and without those.
        batch: ``keys``, deduplicated and partitioned for the servers; None if there are none.
        present: Which places of the shape asked for are not padding; None: all.
        bags: How the rows are combined; None: not at all.
        examples: Number of keys of each example, int64 [examples], where neither the shape nor
            ``bags`` tells; the keys are in the order of the examples.
    """

    keys: NDArray[np.int64]
    batch: KeyBatch | None
    present: NDArray[np.bool_] | None = None
    bags: Bags | None = None
    examples: NDArray[np.int64] | None = None

    def output(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return what the layer answers, given the fetched rows [*keys.shape, dim]."""
        if self.bags is not None:
            return self.bags.combine(rows.reshape(-1, rows.shape[-1]))
        if self.present is None:
            return rows
        padded = np.zeros((*self.present.shape, rows.shape[-1]), np.float32)
        padded[self.present] = rows
        return padded

    def row_gradients(self, gradient: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the gradient of each fetched row, given that of the answer."""
        if self.bags is not None:
            return self.bags.spread(gradient).reshape(*self.keys.shape, gradient.shape[-1])
        return gradient if self.present is None else gradient[self.present]

    def shows_and_clicks(self, clicks: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return show and click of each key, float32 [keys, 2].

        Each example shows each of its keys once, at the first place where it has it, and the
        example's clicks are the key's.

        Args:
            clicks: Of each example, float32 [examples].

        Raises:
            InvalidRequest: The lookup has another number of examples.
        """
        keys = self.keys.reshape(-1)
        example_of, count = self._examples()
        if clicks.shape != (count,):
            raise InvalidRequest(
                f"the clicks of {clicks.size} examples, and ids of {count}: the first axis of ids, "
                "or the bags, must be the examples"
            )
        order = np.lexsort((keys, example_of))
        again = (np.diff(keys[order]) == 0) & (np.diff(example_of[order]) == 0)
        shows = np.ones(keys.size, np.float32)
        shows[order[1:][again]] = 0
        return np.stack([shows, shows * clicks[example_of]], axis=1)

    def _examples(self) -> tuple[NDArray[np.int64], int]:
        """Return the example of each key, int64 [keys], and how many examples there are."""
        counts = self.examples if self.bags is None else self.bags.counts
        if counts is not None:
            return np.repeat(np.arange(counts.size), counts), counts.size
        if self.present is not None:
            axes = np.nonzero(np.atleast_1d(self.present))
            return axes[0], np.atleast_1d(self.present).shape[0]
        shape = np.atleast_1d(self.keys).shape
        return np.repeat(np.arange(shape[0]), self.keys.size // max(shape[0], 1)), shape[0]


def keys_of(ids: NDArray[Any]) -> NDArray[np.int64]:
    """Return integers as int64; unsigned ones keep their bits. Copied only if they are narrower.

    Raises:
        InvalidRequest: The ids are not integers.
    """
    if ids.dtype == np.uint64:
        return ids.view(np.int64)
    if ids.dtype.kind not in "iu":
        raise InvalidRequest(f"ids must be integers, these are {ids.dtype}")
    return ids.astype(np.int64, copy=False)


def checked_mode(mode: Mode) -> Mode:
    """Return how the rows of a bag are combined.

    Raises:
        ConfigError: In no way that there is.
    """
    if mode not in ("sum", "mean"):
        raise ConfigError(f"mode is {mode!r}; it must be 'sum' or 'mean'")
    return mode


def bag_of_each_key(
    keys: NDArray[np.int64], starts: NDArray[np.int64] | None
) -> tuple[NDArray[np.int64], int]:
    """Return the number of each key's bag, int64 [keys], and how many bags there are.

    Args:
        keys: [bags, n]; or flat, with ``starts``.
        starts: Where each bag begins in the flat keys: [bags], from 0, never falling.

    Raises:
        InvalidRequest: Shape and starts do not fit.
    """
    if starts is None:
        if keys.ndim != 2:
            raise InvalidRequest(f"ids of shape {keys.shape}: give [bags, n], or offsets too")
        return np.repeat(np.arange(keys.shape[0]), keys.shape[1]), keys.shape[0]
    if keys.ndim != 1 or starts.ndim != 1:
        raise InvalidRequest(
            f"with offsets, ids and offsets are flat; they have {keys.shape} and {starts.shape}"
        )
    ends = np.append(starts, keys.size)
    if ends[0] != 0 or (np.diff(ends) < 0).any():
        raise InvalidRequest(f"offsets must rise from 0 to at most the number of ids, {keys.size}")
    return np.repeat(np.arange(starts.size), np.diff(ends)), starts.size
