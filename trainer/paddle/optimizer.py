"""A Paddle optimizer whose updates run on the pservers.

May import paddle, this package and ``trainer.adapter``; see ``adapter.optimizer`` for what it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from backstay import tables
from backstay.errors import ConfigError
from backstay.trainer.adapter.optimizer import ServerOptimizer, Trained
from backstay.trainer.client import Client
from backstay.trainer.paddle.layers import RowsHandle
from backstay.trainer.paddle.tensors import TENSORS
from backstay.trainer.paddle.translate import base_learning_rate, optimizer_of

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(ServerOptimizer):
    """Keeps the parameters of a Paddle optimizer on the pservers.

    See ``backstay.trainer.adapter.optimizer.ServerOptimizer`` for what ``step`` does and when.

    Args:
        optimizer: paddle.optimizer SGD, Momentum, Adadelta, Adagrad, Adam, Adamax, AdamW or
            RMSProp, with a number or a scheduler as learning rate. Its ``grad_clip`` clips the
            gradients of the dense parameters and of the embeddings' rows here, before they are
            sent. Weight decay other than AdamW's is computed here, for dense parameters; with
            embeddings it is refused.
        client: Default: that of the open session (``init``).
        steps_in_flight: 0 to 16.

    Raises:
        ConfigError: A setting that the servers do not have, no connection, an optimizer or an
            embedding that is wrapped already, or an embedding of another client.
        TableConflict: Another trainer made a table with other settings.
    """

    tensors = TENSORS

    def __init__(
        self,
        optimizer: paddle.optimizer.Optimizer,
        client: Client | None = None,
        *,
        steps_in_flight: int = 0,
    ) -> None:
        self._wrap(optimizer, client, steps_in_flight)

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Forget the gradients, those of the embeddings too."""
        self._cycle.discard_gradients()
        self._optimizer.clear_grad(set_to_zero)

    clear_gradients = clear_grad

    def minimize(
        self,
        loss: paddle.Tensor,
        startup_program: None = None,
        parameters: None = None,
        no_grad_set: None = None,
    ) -> tuple[None, list[tuple[paddle.Tensor, paddle.Tensor]]]:
        """Paddle's older name for ``step``; as there, ``loss.backward()`` comes before it.

        Raises:
            ConfigError: One of the arguments of Paddle's that this class does not have is given.
        """
        for name, value in (
            ("startup_program", startup_program),
            ("parameters", parameters),
            ("no_grad_set", no_grad_set),
        ):
            if value is not None:
                raise ConfigError(
                    f"minimize({name}=...) is not supported: which parameters train is decided "
                    "when the optimizer is wrapped; set stop_gradient on parameters that shall not"
                )
        pairs = self._dense_pairs()
        self.step()
        return None, pairs

    def set_state_dict(self, state_dict: Any) -> None:
        """Refused, like ``state_dict``.

        Raises:
            ConfigError: Always.
        """
        self._refuse_loading("set_state_dict")

    def get_lr(self) -> float:
        """Return the current learning rate."""
        return float(self._optimizer.get_lr())

    def set_lr(self, value: float) -> None:
        """Set the learning rate of this trainer's pushes from now on."""
        self._optimizer.set_lr(value)

    def _trained(self, optimizer: paddle.optimizer.Optimizer) -> list[Trained]:
        given = optimizer._parameter_list
        if not given:
            raise ConfigError("the optimizer has no parameters: pass parameters=model.parameters()")
        if isinstance(given[0], dict):
            raise ConfigError(
                "parameter groups are not supported: wrap one optimizer for each group"
            )
        self._base_rate = base_learning_rate(optimizer)
        # In Paddle's order: sums over all of them round as Paddle's.
        self._all = list(filter(TENSORS.trains, given))
        if optimizer.regularization is not None and any(map(_is_handle, self._all)):
            raise ConfigError(
                "weight_decay on embeddings needs AdamW, which decays the rows that are pushed; or "
                "give the embeddings an optimizer without it, of their own"
            )
        return [
            Trained(one, self._table_optimizer(optimizer, one), name=one.name) for one in self._all
        ]

    def _table_optimizer(
        self, optimizer: paddle.optimizer.Optimizer, parameter: paddle.Tensor
    ) -> tables.Optimizer:
        chooses = getattr(optimizer, "_apply_decay_param_fun", None)
        return optimizer_of(
            optimizer,
            rate=self._base_rate * parameter.optimize_attr["learning_rate"],
            decay=chooses is None or bool(chooses(parameter.name)),
            sparse=_is_handle(parameter),
        )

    def _scales(self) -> list[float]:
        return [self.get_lr() / self._base_rate]

    def _gradients(self) -> Callable[[], Mapping[str, NDArray[np.float32]]]:
        clipped = None if self._optimizer._grad_clip is None else self._clip()
        return lambda: self._take_dense_gradients(clipped)

    def _clip(self) -> list[tuple[paddle.Tensor, paddle.Tensor]]:
        """Clip all gradients by Paddle's own function; return those of the dense parameters."""
        pairs = [(one, one.grad) for one in self._all if one.grad is not None]
        dense = []
        for parameter, gradient in self._optimizer._grad_clip(pairs):
            if _is_handle(parameter):
                parameter.grad = gradient
            else:
                dense.append((parameter, gradient))
        return dense

    def _take_dense_gradients(
        self, clipped: list[tuple[paddle.Tensor, paddle.Tensor]] | None
    ) -> dict[str, NDArray[np.float32]]:
        pairs = self._dense_pairs() if clipped is None else clipped
        # Paddle's own function, and after clipping, as Paddle does it.
        pairs = self._optimizer.append_regularization_ops(pairs, self._optimizer.regularization)
        gradients = {parameter.name: TENSORS.gradient(gradient) for parameter, gradient in pairs}
        for parameter in self._dense:
            parameter.tensor.clear_gradient(False)
        return gradients

    def _dense_pairs(self) -> list[tuple[paddle.Tensor, paddle.Tensor]]:
        """Return the dense parameters that have a gradient, and the gradients."""
        tensors = (parameter.tensor for parameter in self._dense)
        return [(tensor, tensor.grad) for tensor in tensors if tensor.grad is not None]

    def _forget_dense_gradients(self) -> None:
        self._optimizer.clear_grad(False)


def _is_handle(parameter: paddle.Tensor) -> bool:
    return isinstance(parameter, RowsHandle)
