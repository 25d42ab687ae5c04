"""How a lookup takes part in PyTorch's backward pass.

May import torch, numpy and ``trainer.adapter.lookup``. Holds no connection: it moves arrays
between PyTorch and the layer that asked for them; rows are not copied where they are in main
memory already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd.function import once_differentiable

from backstay.trainer.adapter.lookup import keys_of

__all__ = ["as_gradient", "as_keys", "as_tensor", "attach_gradient"]

Collect: TypeAlias = Callable[[NDArray[np.float32]], None]


class _Rows(torch.autograd.Function):  # type: ignore[misc]
    """Rows as the result of ``handle``, so that the backward pass comes by."""

    @staticmethod
    def forward(
        context: Any, handle: torch.Tensor, rows: NDArray[np.float32], collect: Collect
    ) -> torch.Tensor:
        context.collect = collect
        return as_tensor(rows, handle.device)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(context: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        context.collect(as_gradient(gradient))
        return None, None, None


def attach_gradient(
    handle: torch.Tensor, rows: NDArray[np.float32], collect: Collect
) -> torch.Tensor:
    """Return ``rows`` as a tensor of the graph; each backward pass calls ``collect(gradient)``.

    Nothing is remembered of a lookup that no backward pass reaches, and ``handle`` gets no
    gradient. The answer is on its device.
    """
    output: torch.Tensor = _Rows.apply(handle, rows, collect)
    return output


def as_keys(ids: Any) -> NDArray[np.int64]:
    """Return a tensor, array or list of ids as int64, copied; unsigned ids keep their bits.

    The copy is what a later comparison with prefetched ids, or a push, goes by, whatever the
    caller does with the array meanwhile.

    Raises:
        InvalidRequest: The ids are not integers.
    """
    return keys_of(np.array(ids.detach().cpu().numpy() if isinstance(ids, torch.Tensor) else ids))


def as_tensor(rows: NDArray[np.float32], device: torch.device) -> torch.Tensor:
    """Return an array as a tensor on ``device``; on the CPU they share memory."""
    return torch.from_numpy(rows).to(device)


def as_gradient(gradient: torch.Tensor) -> NDArray[np.float32]:
    """Return a gradient as a contiguous float32 array of its own."""
    if gradient.is_sparse:  # of a plain embedding with sparse=True
        gradient = gradient.to_dense()
    # Copied: the same tensor may be the gradient of something else, which the user may change.
    numbers: NDArray[np.float32] = np.array(gradient.detach().cpu().numpy(), np.float32, order="C")
    return numbers
