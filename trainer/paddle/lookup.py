"""How a lookup takes part in Paddle's backward pass.

May import paddle, numpy and ``trainer.adapter.lookup``. Holds no connection: it moves arrays
between Paddle and the layer that asked for them; rows are not copied where they are in main
memory already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from backstay.trainer.adapter.lookup import Bags, Lookup, keys_of

__all__ = ["Bags", "Lookup", "as_gradient", "as_keys", "as_tensor", "attach_gradient"]


def attach_gradient(
    rows: NDArray[np.float32], collect: Callable[[NDArray[np.float32]], None]
) -> paddle.Tensor:
    """Return ``rows`` as a tensor of the graph; each backward pass calls ``collect(gradient)``.

    Nothing is remembered of a lookup that no backward pass reaches.
    """
    # It is no PyLayer: Paddle 3.3 crashes when a graph with one is run backward twice.
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
    return keys_of(ids.numpy() if isinstance(ids, paddle.Tensor) else np.array(ids))


def as_tensor(rows: NDArray[np.float32]) -> paddle.Tensor:
    """Return an array as a tensor on Paddle's current device; on the CPU they share memory."""
    if rows.size and paddle.get_device() == "cpu":
        return paddle.utils.dlpack.from_dlpack(rows)
    return paddle.to_tensor(rows)


def as_gradient(gradient: paddle.Tensor) -> NDArray[np.float32]:
    """Return a gradient, float32 as what it belongs to, as a contiguous array of its own."""
    # Copied: Paddle adds the gradient of the next backward pass to this memory.
    return np.ascontiguousarray(gradient.numpy())
