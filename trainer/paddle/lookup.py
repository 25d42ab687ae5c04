"""Rows in, gradients out: how a lookup takes part in Paddle's backward pass.

May import paddle and numpy. Holds no connection: it moves arrays between Paddle and the layer
that asked for them; rows are not copied where they are in main memory already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle
from numpy.typing import NDArray

from backstay.errors import InvalidRequest

if TYPE_CHECKING:
    from backstay.trainer.table import KeyBatch

__all__ = ["Bags", "Lookup", "as_gradient", "as_keys", "as_tensor", "attach_gradient"]


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
    """

    keys: NDArray[np.int64]
    batch: KeyBatch | None
    present: NDArray[np.bool_] | None = None
    bags: Bags | None = None

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


def attach_gradient(
    rows: NDArray[np.float32], collect: Callable[[NDArray[np.float32]], None]
) -> paddle.Tensor:
    """Return ``rows`` as a tensor of the graph; each backward pass calls ``collect(gradient)``.

    Nothing is remembered of a lookup that no backward pass reaches.
    """
    # Not a PyLayer: Paddle 3.3 crashes when a graph that holds one is run backward twice.
    leaf = as_tensor(rows)
    leaf.stop_gradient = False
    leaf.register_hook(lambda gradient: collect(as_gradient(gradient)))
    # A view, because Paddle changes no leaf in place, and the output of a layer may be.
    return leaf.view(leaf.shape) if rows.size else leaf


def as_keys(ids: Any) -> NDArray[np.int64]:
    """Return a tensor, array or list of ids as int64, copied; unsigned ids keep their bits.

    The copy is what a later comparison with prefetched ids, or a push, goes by, whatever the
    caller does with the array meanwhile.

    Raises:
        InvalidRequest: The ids are not integers.
    """
    keys = ids.numpy() if isinstance(ids, paddle.Tensor) else np.array(ids)
    if keys.dtype == np.uint64:
        return keys.view(np.int64)
    if keys.dtype.kind not in "iu":
        raise InvalidRequest(f"ids must be integers, these are {keys.dtype}")
    return keys.astype(np.int64, copy=False)


def as_tensor(rows: NDArray[np.float32]) -> paddle.Tensor:
    """Return an array as a tensor on Paddle's current device; on the CPU they share memory."""
    if rows.size and paddle.get_device() == "cpu":
        return paddle.utils.dlpack.from_dlpack(rows)
    return paddle.to_tensor(rows)


def as_gradient(gradient: paddle.Tensor) -> NDArray[np.float32]:
    """Return a gradient, float32 as what it belongs to, as a contiguous array of its own."""
    # Copied: Paddle adds the gradient of the next backward pass to this memory.
    return np.ascontiguousarray(gradient.numpy())
