"""PyTorch's tensors, and how a lookup takes part in its backward pass.

May import torch and numpy. Holds no connection: it moves arrays between PyTorch and the layer that
asked for them; rows are not copied where they are in main memory already.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd.function import once_differentiable

from backstay.trainer.adapter.framework import Tensors

__all__ = ["TENSORS"]


class _Tensors(Tensors):
    """See :class:`backstay.trainer.adapter.framework.Tensors`."""

    kind = torch.Tensor
    float32 = torch.float32
    autocast = "torch.autocast"

    def of_any(self, array: NDArray[Any]) -> torch.Tensor:
        if not array.flags.writeable or not array.flags.c_contiguous:
            array = np.array(array)  # PyTorch would share the memory, and warn
        return torch.from_numpy(array)

    def sharing(self, array: NDArray[np.float32], beside: Any) -> torch.Tensor:
        device = beside.device if isinstance(beside, torch.Tensor) else "cpu"
        return torch.from_numpy(array).to(device)

    def view(self, tensor: torch.Tensor) -> NDArray[Any]:
        numbers: NDArray[Any] = tensor.detach().cpu().numpy()
        return numbers

    def copy(self, tensor: torch.Tensor) -> NDArray[Any]:
        return np.array(self.view(tensor.to_dense() if tensor.is_sparse else tensor), order="C")

    def assign(self, tensor: torch.Tensor, values: NDArray[Any]) -> None:
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(values).view(tensor.shape))

    def attach(
        self,
        handle: torch.Tensor,
        rows: NDArray[np.float32],
        collect: Callable[[NDArray[np.float32]], None],
    ) -> torch.Tensor:
        return _Rows.apply(handle, rows, collect)

    def trains(self, parameter: torch.Tensor) -> bool:
        return bool(parameter.requires_grad)

    def records(self) -> bool:
        return bool(torch.is_grad_enabled())

    def no_gradients(self) -> AbstractContextManager[Any]:
        block: AbstractContextManager[Any] = torch.no_grad()
        return block


TENSORS = _Tensors()


class _Rows(torch.autograd.Function):  # type: ignore[misc]
    """Rows as the result of ``handle``, so that the backward pass comes by."""

    @staticmethod
    def forward(
        context: Any,
        handle: torch.Tensor,
        rows: NDArray[np.float32],
        collect: Callable[[NDArray[np.float32]], None],
    ) -> torch.Tensor:
        context.collect = collect
        return TENSORS.sharing(rows, handle)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(context: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        context.collect(TENSORS.gradient(gradient))
        return None, None, None
