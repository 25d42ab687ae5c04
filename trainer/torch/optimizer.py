"""A PyTorch optimizer whose updates run on the pservers.

May import torch, this package and ``trainer.adapter``; see ``adapter.optimizer`` for what it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from backstay.errors import ConfigError
from backstay.trainer.adapter.optimizer import ServerOptimizer, Trained
from backstay.trainer.client import Client
from backstay.trainer.torch.tensors import TENSORS
from backstay.trainer.torch.translate import base_learning_rate, decay_of_gradient, optimizer_of

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(ServerOptimizer, torch.optim.Optimizer):  # type: ignore[misc]
    """Keeps the parameters of a PyTorch optimizer on the pservers.

    See ``backstay.trainer.adapter.optimizer.ServerOptimizer`` for what ``step`` does and when.
    Parameter groups keep their own settings and learning rates. A scheduler may be given this
    optimizer or the one inside: they share their ``param_groups``.

    Args:
        optimizer: torch.optim SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, RMSprop or SparseAdam.
            Weight decay other than AdamW's is computed here, for dense parameters; with embeddings
            in the same parameter group it is refused.
        client: Default: that of the open session (``init``).
        steps_in_flight: 0 to 16.
        name: Of the dense tables: "dense.NAME.0" is the first. Default: ``optimizer_0``, then
            ``optimizer_1``, the same in every trainer that runs the same program.

    Raises:
        ConfigError: A setting that the servers do not have, no connection, an optimizer or an
            embedding that is wrapped already, or an embedding of another client.
        TableConflict: Another trainer made a table with other settings.
    """

    tensors = TENSORS
    parameters_have_names = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        client: Client | None = None,
        *,
        steps_in_flight: int = 0,
        name: str | None = None,
    ) -> None:
        self._wrap(optimizer, client, steps_in_flight, name)
        groups = optimizer.param_groups
        self._base_rates = [base_learning_rate(group) for group in groups]
        self._decays = [decay_of_gradient(optimizer, group) for group in groups]
        self._settings = [_settings(optimizer, group) for group in groups]
        self._whole = False
        # The groups themselves, not copies: a scheduler of either optimizer changes both.
        super().__init__(groups, optimizer.defaults)
        self._whole = True

    # Tells GradScaler to call step() with its scale set, so that step() can refuse it.
    _step_supports_amp_scaling = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None, *, clicks: Any = None) -> Any:
        """Push all gradients since the last step, and load fresh dense values.

        Args:
            closure: Called first, with gradients enabled: computes the loss and runs backward.
            clicks: Of each example that was looked up since the last step, [examples] or
                [examples, 1], as a rule the labels. Embeddings whose lifetime uses a score count
                them: an example shows each of its ids once a lookup, and clicks it so often.

        Returns:
            What the closure returned.

        Raises:
            NonFiniteGradient: A gradient is NaN or infinite, and its table refuses that.
            BackstayError: A push of this step, or with ``steps_in_flight`` of an earlier one,
                failed.
            ConfigError: A ``GradScaler`` is in use, or a setting other than the learning rate
                has changed since the optimizer was wrapped.
        """
        if hasattr(self, "grad_scale"):
            raise ConfigError(
                "GradScaler does not reach the gradients of embeddings on the servers; train with "
                "torch.autocast in bfloat16, which needs none, or GradScaler(enabled=False)"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        super().step(clicks=clicks)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, those of the embeddings too."""
        self._cycle.discard_gradients()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: which parameters train is decided when the optimizer is wrapped.

        Raises:
            ConfigError: Always, but while this object is made.
        """
        if self._whole:
            raise ConfigError(
                "DistributedOptimizer.add_param_group(): its tables are made already; give all "
                "parameter groups to the PyTorch optimizer before it is wrapped"
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: Any) -> None:
        """Refused, like ``state_dict``.

        Raises:
            ConfigError: Always.
        """
        self._refuse_loading("load_state_dict")

    def _trained(self, optimizer: torch.optim.Optimizer) -> list[Trained]:
        trained = []
        translated = [optimizer_of(optimizer, group) for group in optimizer.param_groups]
        for rate, group in enumerate(optimizer.param_groups):
            decay = decay_of_gradient(optimizer, group)
            for tensor in filter(TENSORS.trains, group["params"]):
                layer = getattr(tensor, "backstay_layer", None)
                if layer is not None and decay:
                    raise ConfigError(
                        f"weight_decay={decay} on the embedding {layer.table_name!r} needs AdamW, "
                        "which decays the rows that are pushed; or give the embeddings a parameter "
                        "group with weight_decay=0"
                    )
                trained.append(Trained(tensor, translated[rate], rate))
        return trained

    def _scales(self) -> list[float]:
        return [
            float(group["lr"]) / base
            for group, base in zip(self.param_groups, self._base_rates, strict=True)
        ]

    def _gradients(self) -> Callable[[], Mapping[str, NDArray[np.float32]]]:
        self._refuse_changes()
        # A scheduler of the optimizer inside warns if that never stepped.
        self._optimizer._opt_called = True
        return self._take_dense_gradients

    def _refuse_changes(self) -> None:
        """Refuse settings that the tables do not have: only learning rates travel with pushes."""
        for number, (group, before) in enumerate(
            zip(self.param_groups, self._settings, strict=True)
        ):
            now = _settings(self._optimizer, group)
            if now != before:
                name = next(name for name in before if now[name] != before[name])
                raise ConfigError(
                    f"{name} of parameter group {number} is {now[name]}, and was {before[name]} "
                    "when the optimizer was wrapped: the servers can change the learning rate "
                    "only; OneCycleLR and CyclicLR need cycle_momentum=False"
                )

    def _take_dense_gradients(self) -> dict[str, NDArray[np.float32]]:
        gradients = {}
        for parameter in self._dense:
            tensor, decay = parameter.tensor, self._decays[parameter.rate]
            gradient, tensor.grad = tensor.grad, None
            if gradient is not None:
                if decay:
                    gradient = gradient + decay * tensor.detach()
                gradients[parameter.name] = TENSORS.gradient(gradient)
        return gradients

    def _forget_dense_gradients(self) -> None:
        super().zero_grad()


def _settings(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Return what the tables are made from, of one parameter group."""
    return {name: group[name] for name in optimizer.defaults if name != "lr"}
