"""A Paddle optimizer whose updates run on the pservers.

May import paddle, this package and the framework-neutral parts of ``backstay.trainer``. It computes
no update itself: it translates the optimizer's settings into tables; gradients are sent, and what
the servers make of them is loaded, by a ``PushCycle``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
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
from backstay.trainer.adapter.session import connection, dense_prefix
from backstay.trainer.arrays import clicks_of_examples
from backstay.trainer.client import Client
from backstay.trainer.paddle.embedding import RowsHandle
from backstay.trainer.paddle.lookup import as_gradient
from backstay.trainer.paddle.translate import base_learning_rate, optimizer_of

__all__ = ["DistributedOptimizer", "PaddleParameter"]


@dataclass(frozen=True)
class PaddleParameter:
    """One parameter of a model; see ``backstay.trainer.adapter.dense.DenseParameter``.

    Raises:
        ConfigError: It is not float32.
    """

    tensor: paddle.Tensor

    def __post_init__(self) -> None:
        if self.tensor.dtype != paddle.float32:
            raise ConfigError(
                f"parameter {self.tensor.name} is {self.tensor.dtype}: the servers keep float32; "
                "train with paddle.amp.auto_cast instead of converting the parameters"
            )

    @property
    def name(self) -> str:
        """The name that Paddle gave it."""
        return str(self.tensor.name)

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return int(np.prod(self.tensor.shape, dtype=np.int64))

    def value(self) -> NDArray[np.float32]:
        """Return its numbers as they are now."""
        numbers: NDArray[np.float32] = self.tensor.numpy()
        return numbers

    def load(self, values: NDArray[np.float32]) -> None:
        """Replace its numbers by these, [elements]."""
        self.tensor.set_value(values.reshape(self.tensor.shape))


class DistributedOptimizer:
    """Keeps the parameters of a Paddle optimizer on the pservers.

    Wrap the optimizer after the model is made. Dense parameters that share settings are laid end
    to end in one table, so that a model of many small tensors costs one round trip; the values of
    the trainer that comes first win. Embeddings of this package are found among the parameters by
    their handles, and their tables are made here.

    ``step()`` sends the gradients of the dense parameters and of every embedding looked up since
    the last step, and loads fresh dense values. It takes the gradients with it: a second
    ``step()`` without a backward pass in between does nothing.

    ``steps_in_flight`` decides how it waits:

    - 0: until the servers have applied the push, then pulls. With one trainer, this gives the
      numbers of plain Paddle.
    - n > 0: asynchronous. ``step()`` returns while the pushes of up to n steps are under way, and
      loads the dense values that were asked for at the step before, so that the network and the
      computation overlap; the parameters are then one step behind. A failed push is reported by
      a later ``step()``, or by ``synchronize()``.

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

    def __init__(
        self,
        optimizer: paddle.optimizer.Optimizer,
        client: Client | None = None,
        *,
        steps_in_flight: int = 0,
    ) -> None:
        connected, _ = connection(client)
        refuse_wrapped(optimizer)
        check_steps_in_flight(steps_in_flight)
        self._optimizer = optimizer
        self._base_rate = base_learning_rate(optimizer)
        # In Paddle's order: sums over all of them round as Paddle's.
        self._all, self._parameters, embeddings = _sorted_out(optimizer)
        _refuse_unsupported(optimizer, bool(embeddings))
        refuse_embeddings(embeddings, connected)
        for layer in embeddings:
            layer.create_table(self._twin(layer.handle))
        dense = dense_groups(
            connected,
            [Placed(PaddleParameter(p), self._twin(p)) for p in self._parameters],
            dense_prefix(connected),
        )
        self._cycle = PushCycle(
            connected, [(layer, 0) for layer in embeddings], dense, steps_in_flight
        )
        for wrapped in (optimizer, self):
            setattr(wrapped, WRAPPED, True)

    @property
    def table_names(self) -> tuple[str, ...]:
        """The tables that this optimizer pushes to, in the order in which they were made."""
        return self._cycle.table_names

    @paddle.no_grad()  # type: ignore[untyped-decorator]
    def step(self, *, clicks: Any = None) -> None:
        """Push all gradients since the last step, and load fresh dense values.

        Args:
            clicks: Of each example that was looked up since the last step, [examples] or
                [examples, 1], as a rule the labels. Embeddings whose lifetime uses a score count
                them: an example shows each of its ids once a lookup, and clicks it so often.

        Raises:
            NonFiniteGradient: A gradient is NaN or infinite, and its table refuses that.
            BackstayError: A push of this step, or with ``steps_in_flight`` of an earlier one,
                failed.
        """
        if self.begin_step(clicks=clicks):
            self.end_step()

    @paddle.no_grad()  # type: ignore[untyped-decorator]
    def begin_step(self, *, clicks: Any = None) -> bool:
        """Send all gradients since the last step; ``end_step`` belongs to it if there was one.

        For several optimizers of one model: their pushes are then under way together.

        Raises:
            BackstayError: A push was refused before it left.
        """
        clipped = None if self._optimizer._grad_clip is None else self._clip()
        scales = [self.get_lr() / self._base_rate]
        return self._cycle.begin_step(
            lambda: self._take_dense_gradients(clipped), scales, clicks_of_examples(clicks)
        )

    @paddle.no_grad()  # type: ignore[untyped-decorator]
    def end_step(self) -> None:
        """Wait for the pushes, as far as ``steps_in_flight`` asks for it; load dense values."""
        self._cycle.end_step()

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Forget the gradients, those of the embeddings too."""
        self._optimizer.clear_grad(set_to_zero)
        self._cycle.discard_gradients()

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
        pairs = [(p, p.grad) for p in self._parameters if p.grad is not None]
        self.step()
        return None, pairs

    @paddle.no_grad()  # type: ignore[untyped-decorator]
    def synchronize(self) -> None:
        """Wait for every push of this trainer, then load the dense values as they are now.

        Call it before evaluating; other trainers' pushes may still follow.
        """
        self._cycle.synchronize()

    def abandon(self) -> int:
        """Forget gradients, prefetched rows and every push under way: after a failure, begin anew.

        What was sent may have been applied. ``synchronize`` then loads the dense values as they
        are.

        Returns:
            How many of the pushes had failed.
        """
        self._optimizer.clear_grad(False)
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

    def set_state_dict(self, state_dict: Any) -> None:
        """Refused, like ``state_dict``.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "DistributedOptimizer.set_state_dict(): the optimizer's state is on the pservers, and "
            "a trainer cannot load one there; start the servers from a checkpoint (see "
            "docs/guide/checkpoints.md)"
        )

    def get_lr(self) -> float:
        """Return the current learning rate."""
        return float(self._optimizer.get_lr())

    def set_lr(self, value: float) -> None:
        """Set the learning rate of this trainer's pushes from now on."""
        self._optimizer.set_lr(value)

    def _clip(self) -> list[tuple[paddle.Tensor, paddle.Tensor]]:
        """Clip all gradients by Paddle's own function; return those of the dense parameters."""
        pairs = [(p, p.grad) for p in self._all if p.grad is not None]
        dense = []
        for parameter, gradient in self._optimizer._grad_clip(pairs):
            if isinstance(parameter, RowsHandle):
                parameter.grad = gradient
            else:
                dense.append((parameter, gradient))
        return dense

    def _take_dense_gradients(
        self, clipped: list[tuple[paddle.Tensor, paddle.Tensor]] | None
    ) -> dict[str, NDArray[np.float32]]:
        pairs = clipped
        if pairs is None:
            pairs = [(p, p.grad) for p in self._parameters if p.grad is not None]
        # Paddle's own function, and after clipping, as Paddle does it.
        pairs = self._optimizer.append_regularization_ops(pairs, self._optimizer.regularization)
        gradients = {parameter.name: as_gradient(gradient) for parameter, gradient in pairs}
        for parameter in self._parameters:
            parameter.clear_gradient(False)
        return gradients

    def _twin(self, parameter: paddle.Tensor) -> Any:
        rate = self._base_rate * parameter.optimize_attr["learning_rate"]
        chooses = getattr(self._optimizer, "_apply_decay_param_fun", None)
        decay = chooses is None or bool(chooses(parameter.name))
        sparse = isinstance(parameter, RowsHandle)
        return optimizer_of(self._optimizer, rate=rate, decay=decay, sparse=sparse)


def _sorted_out(
    optimizer: paddle.optimizer.Optimizer,
) -> tuple[list[paddle.Tensor], list[paddle.Tensor], list[Any]]:
    """Return all parameters that train, the dense ones of them, and the embedding layers."""
    given = optimizer._parameter_list
    if not given:
        raise ConfigError("the optimizer has no parameters: pass parameters=model.parameters()")
    if isinstance(given[0], dict):
        raise ConfigError("parameter groups are not supported: wrap one optimizer for each group")
    training = [parameter for parameter in given if not parameter.stop_gradient]
    layers = [getattr(parameter, "backstay_layer", None) for parameter in training]
    dense = [p for p, layer in zip(training, layers, strict=True) if layer is None]
    return training, dense, [layer for layer in layers if layer is not None]


def _refuse_unsupported(optimizer: paddle.optimizer.Optimizer, has_embeddings: bool) -> None:
    """Refuse what would silently hold for dense parameters only."""
    if has_embeddings and optimizer.regularization is not None:
        raise ConfigError(
            "weight_decay on embeddings needs AdamW, which decays the rows that are pushed; or "
            "give the embeddings an optimizer without it, of their own"
        )
