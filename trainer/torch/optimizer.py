"""A PyTorch optimizer whose updates run on the pservers.

May import torch, this package and the framework-neutral parts of ``backstay.trainer``. It computes
no update itself: it translates the optimizer's settings into tables; gradients are sent, and what
the servers make of them is loaded, by a ``PushCycle``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from backstay.errors import ConfigError
from backstay.trainer.adapter.dense import Placed, dense_groups
from backstay.trainer.adapter.push_cycle import (
    WRAPPED,
    PushCycle,
    check_steps_in_flight,
    refuse_embeddings,
    refuse_wrapped,
)
from backstay.trainer.adapter.server_rows import ServerRows
from backstay.trainer.adapter.session import connection, dense_prefix, numbered
from backstay.trainer.arrays import clicks_of_examples
from backstay.trainer.client import Client
from backstay.trainer.torch.lookup import as_gradient
from backstay.trainer.torch.translate import base_learning_rate, decay_of_gradient, optimizer_of

__all__ = ["DistributedOptimizer", "TorchParameter"]


@dataclass(frozen=True)
class TorchParameter:
    """One parameter of a model; see ``backstay.trainer.adapter.dense.DenseParameter``.

    Attributes:
        tensor: The parameter, on any device.
        name: PyTorch gives parameters none: its place in the optimizer.
        decay: The factor of its numbers that is added to its gradient.

    Raises:
        ConfigError: It is not float32.
    """

    tensor: torch.Tensor
    name: str
    decay: float = 0.0

    def __post_init__(self) -> None:
        if self.tensor.dtype != torch.float32:
            raise ConfigError(
                f"parameter {self.name} of the optimizer, of shape {tuple(self.tensor.shape)}, is "
                f"{self.tensor.dtype}: the servers keep float32; train with torch.autocast "
                "instead of converting the parameters"
            )

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return int(self.tensor.numel())

    def value(self) -> NDArray[np.float32]:
        """Return its numbers as they are now."""
        numbers: NDArray[np.float32] = self.tensor.detach().cpu().numpy()
        return numbers

    def load(self, values: NDArray[np.float32]) -> None:
        """Replace its numbers by these, [elements]."""
        with torch.no_grad():
            self.tensor.copy_(torch.from_numpy(values).view(self.tensor.shape))

    def take_gradient(self) -> NDArray[np.float32] | None:
        """Return its gradient, decay included, as an array of its own, and forget it."""
        gradient, self.tensor.grad = self.tensor.grad, None
        if gradient is None:
            return None
        if self.decay:
            gradient = gradient + self.decay * self.tensor.detach()
        return as_gradient(gradient)


class DistributedOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """Keeps the parameters of a PyTorch optimizer on the pservers.

    Wrap the optimizer after the model is made. Dense parameters that share settings are laid end
    to end in one table, so that a model of many small tensors costs one round trip; the values of
    the trainer that comes first win. Embeddings of this package are found among the parameters by
    their handles, and their tables are made here.

    ``step()`` sends the gradients of the dense parameters and of every embedding looked up since
    the last step, and loads fresh dense values. It takes the gradients with it: a second
    ``step()`` without a backward pass in between does nothing.

    Parameter groups keep their own settings and learning rates. A scheduler may be given this
    optimizer or the one inside: they share their ``param_groups``.

    ``steps_in_flight`` decides how it waits:

    - 0: until the servers have applied the push, then pulls. With one trainer, this gives the
      numbers of plain PyTorch.
    - n > 0: asynchronous. ``step()`` returns while the pushes of up to n steps are under way, and
      loads the dense values that were asked for at the step before, so that the network and the
      computation overlap; the parameters are then one step behind. A failed push is reported by
      a later ``step()``, or by ``synchronize()``.

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

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        client: Client | None = None,
        *,
        steps_in_flight: int = 0,
        name: str | None = None,
    ) -> None:
        connected, _ = connection(client)
        refuse_wrapped(optimizer)
        check_steps_in_flight(steps_in_flight)
        # Every refusal comes before the first table is made.
        groups = optimizer.param_groups
        translated = [optimizer_of(optimizer, group) for group in groups]
        name = name or numbered(connected, "optimizer")
        embeddings, dense = _sorted_out(optimizer, name)
        refuse_embeddings([layer for layer, _ in embeddings], connected)
        for layer, rate in embeddings:
            layer.create_table(translated[rate])
        placed = [Placed(parameter, translated[rate], rate) for parameter, rate in dense]
        tables_of_dense = dense_groups(connected, placed, dense_prefix(connected))
        self._cycle = PushCycle(connected, embeddings, tables_of_dense, steps_in_flight)
        self._dense = [parameter for parameter, _ in dense]
        self._base_rates = [base_learning_rate(group) for group in groups]
        self._settings = [_settings(optimizer, group) for group in groups]
        self._optimizer = optimizer
        self._whole = False
        # The groups themselves, not copies: a scheduler of either optimizer changes both.
        super().__init__(groups, optimizer.defaults)
        self._whole = True
        for wrapped in (optimizer, self):
            setattr(wrapped, WRAPPED, True)

    # Tells GradScaler to call step() with its scale set, so that step() can refuse it.
    _step_supports_amp_scaling = True

    @property
    def table_names(self) -> tuple[str, ...]:
        """The tables that this optimizer pushes to, in the order in which they were made."""
        return self._cycle.table_names

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()  # type: ignore[untyped-decorator]
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
        self._refuse_changes()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._begin_step(clicks):
            self.end_step()
        return loss

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def begin_step(self, *, clicks: Any = None) -> bool:
        """Send all gradients since the last step; ``end_step`` belongs to it if there was one.

        For several optimizers of one model: their pushes are then under way together.

        Raises:
            BackstayError: A push was refused before it left.
            ConfigError: As of ``step``.
        """
        self._refuse_changes()
        return self._begin_step(clicks)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def end_step(self) -> None:
        """Wait for the pushes, as far as ``steps_in_flight`` asks for it; load dense values."""
        self._cycle.end_step()

    def _begin_step(self, clicks: Any) -> bool:
        scales = [
            float(group["lr"]) / base
            for group, base in zip(self.param_groups, self._base_rates, strict=True)
        ]
        # A scheduler of the optimizer inside warns if that never stepped.
        self._optimizer._opt_called = True
        return self._cycle.begin_step(
            self._take_dense_gradients, scales, clicks_of_examples(clicks)
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, those of the embeddings too."""
        super().zero_grad(set_to_none)
        self._cycle.discard_gradients()

    def synchronize(self) -> None:
        """Wait for every push of this trainer, then load the dense values as they are now.

        Call it before evaluating; other trainers' pushes may still follow.
        """
        self._cycle.synchronize()

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

    def abandon(self) -> int:
        """Forget gradients, prefetched rows and every push under way: after a failure, begin anew.

        What was sent may have been applied. ``synchronize`` then loads the dense values as they
        are.

        Returns:
            How many of the pushes had failed.
        """
        super().zero_grad()
        return self._cycle.abandon()

    def state_dict(self) -> dict[str, Any]:
        """Refused: the optimizer's state is on the servers, in their checkpoints.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "DistributedOptimizer.state_dict(): the optimizer's state is on the pservers, and "
            "trainers have no checkpoints of it; write one of the whole cluster with "
            "session.client.checkpoints.save() (see docs/guide/checkpoints.md)"
        )

    def load_state_dict(self, state_dict: Any) -> None:
        """Refused, like ``state_dict``.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "DistributedOptimizer.load_state_dict(): the optimizer's state is on the pservers, and "
            "a trainer cannot load one there; start the servers from a checkpoint (see "
            "docs/guide/checkpoints.md)"
        )

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
            gradient = parameter.take_gradient()
            if gradient is not None:
                gradients[parameter.name] = gradient
        return gradients


def _settings(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Return what the tables are made from, of one parameter group."""
    return {name: group[name] for name in optimizer.defaults if name != "lr"}


def _sorted_out(
    optimizer: torch.optim.Optimizer, name: str
) -> tuple[list[tuple[ServerRows, int]], list[tuple[TorchParameter, int]]]:
    """Return the embeddings and the dense parameters that train, each with its group's number."""
    embeddings: list[tuple[ServerRows, int]] = []
    dense: list[tuple[TorchParameter, int]] = []
    for rate, group in enumerate(optimizer.param_groups):
        decay = decay_of_gradient(optimizer, group)
        for tensor in group["params"]:
            layer = getattr(tensor, "backstay_layer", None)
            if not tensor.requires_grad:
                continue
            if layer is None:
                dense.append((TorchParameter(tensor, f"{name}.{len(dense)}", decay), rate))
                continue
            if decay:
                raise ConfigError(
                    f"weight_decay={decay} on the embedding {layer.table_name!r} needs AdamW, "
                    "which decays the rows that are pushed; or give the embeddings a parameter "
                    "group with weight_decay=0"
                )
            embeddings.append((layer, rate))
    return embeddings, dense
