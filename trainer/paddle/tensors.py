"""Paddle's tensors, and how a lookup takes part in its backward pass.

May import paddle and numpy. Holds no connection: it moves arrays between Paddle and the layer that
asked for them; rows are not copied where they are in main memory already.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from backstay.trainer.adapter.framework import Tensors

__all__ = ["TENSORS"]


class _Tensors(Tensors):
    """See :class:`backstay.trainer.adapter.framework.Tensors`."""

    kind = paddle.Tensor
    float32 = paddle.float32
    autocast = "paddle.amp.auto_cast"

    def of_any(self, array: NDArray[Any]) -> paddle.Tensor:
        return paddle.to_tensor(array)

    def sharing(self, array: NDArray[np.float32], beside: Any) -> paddle.Tensor:
        del beside  # Paddle has a current device
        if array.size and paddle.get_device() == "cpu":
            return paddle.utils.dlpack.from_dlpack(array)
        return paddle.to_tensor(array)

    def view(self, tensor: paddle.Tensor) -> NDArray[Any]:
        numbers: NDArray[Any] = tensor.numpy()
        return numbers

    def copy(self, tensor: paddle.Tensor) -> NDArray[Any]:
        return np.asarray(tensor.numpy(), order="C")  # numpy() copies

    def assign(self, tensor: paddle.Tensor, values: NDArray[Any]) -> None:
        tensor.set_value(values.reshape(tensor.shape))

    def attach(
        self,
        handle: paddle.Tensor,
        rows: NDArray[np.float32],
        collect: Callable[[NDArray[np.float32]], None],
    ) -> paddle.Tensor:
        # It is no PyLayer: Paddle 3.3 crashes when a graph with one is run backward twice.
        leaf = self.sharing(rows, handle)
        leaf.stop_gradient = False
        leaf.register_hook(lambda gradient: collect(self.gradient(gradient)))
        # A view, because Paddle changes no leaf in place, and the output of a layer may be.
        return leaf.view(leaf.shape) if rows.size else leaf

    def trains(self, parameter: paddle.Tensor) -> bool:
        return not parameter.stop_gradient

    def records(self) -> bool:
        return bool(paddle.is_grad_enabled())

    def no_gradients(self) -> AbstractContextManager[Any]:
        block: AbstractContextManager[Any] = paddle.no_grad()
        return block


TENSORS = _Tensors()
