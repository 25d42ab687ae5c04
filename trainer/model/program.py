"""What a program does in every framework: the order of forward, loss, backward and step.

The adapters add the few calls that differ. Imports numpy and the protocol; no framework.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backstay.errors import ConfigError, InvalidRequest
from backstay.job.model_definition import ModelDefinition
from backstay.job_spec import ModeSpec
from backstay.trainer.arrays import clicks_of_examples
from backstay.trainer.model.frameworks import arguments_of, checked_loss, plain_array
from backstay.trainer.model.optimizers import CombinedOptimizer, StepOptimizer, rates_of
from backstay.trainer.model.prefetch import PrefetchPlan

__all__ = ["BaseProgram", "steps_in_flight"]


def steps_in_flight(mode: ModeSpec) -> int:
    """Return how many steps the optimizer keeps under way; only async mode has any."""
    return mode.steps_in_flight if mode.kind == "async" else 0


class BaseProgram(ABC):
    """A model, its loss and its optimizer; see ``frameworks.Program``.

    Args:
        definition: The user's.
        model: What the definition's ``make_model`` returned.
        optimizers: The framework's, of the user's choice, by name.
        updates: What runs them on the servers; empty: they run in this process.
        prefetching: Whether rows may be fetched before the step before them is pushed.
    """

    def __init__(
        self,
        definition: ModelDefinition,
        model: Any,
        optimizers: Mapping[str, Any],
        updates: Sequence[StepOptimizer],
        *,
        prefetching: bool,
    ) -> None:
        self.model = model
        self._definition = definition
        self._optimizers = dict(optimizers)
        self._updates = CombinedOptimizer(updates) if updates else None
        self._plan: PrefetchPlan | None = None
        layers = list(self._server_layers()) if prefetching else []
        if layers:
            self._plan = PrefetchPlan(self._to_ids)
            self._hooks = [self._watch(layer, self._plan) for layer in layers]

    def tables(self) -> tuple[str, ...]:
        """See ``frameworks.Program``."""
        return () if self._updates is None else self._updates.table_names

    def train_batch(self, features: Any, labels: Any) -> tuple[float, NDArray[Any] | None]:
        """See ``frameworks.Program``."""
        self.model.train()
        if self._plan is not None and not self._plan.is_learned:
            self._plan.start()
        predictions = self._forward(features)
        loss = self._definition.loss(self._tensors(labels), predictions)
        value = checked_loss(self._number(loss))
        if self._plan is not None and not self._plan.is_learned:
            self._plan.learn(arguments_of(features).arrays())
            for hook in self._hooks:
                hook.remove()
        self._backward(loss)
        self._clip_gradients()
        if self._updates is None:
            self._step_here()
        elif self._updates.begin_step(clicks=self._clicks(labels)):
            self._updates.end_step()
        return value, self._to_array(predictions) if self._is_tensor(predictions) else None

    def _clicks(self, labels: Any) -> NDArray[np.float32] | None:
        """Return what the user's ``clicks`` says of the examples; None: there is none."""
        clicks = self._definition.clicks
        if clicks is None:
            return None
        try:
            return clicks_of_examples(clicks(labels))
        except InvalidRequest as error:
            raise ConfigError(f"clicks in {self._definition.path}: {error}") from error

    def predict(self, features: Any) -> NDArray[Any]:
        """See ``frameworks.Program``."""
        self.model.eval()
        with self._no_gradients():
            predictions = self._forward(features)
        if not self._is_tensor(predictions):
            raise ConfigError(
                f"the model answers a {type(predictions).__name__}: to be evaluated, or used for "
                "predictions, it must answer one tensor"
            )
        return self._to_array(predictions)

    def prefetch(self, features: Any) -> None:
        """See ``frameworks.Program``."""
        if self._plan is not None:
            self._plan.prefetch(arguments_of(features).arrays())

    def synchronize(self) -> None:
        """See ``frameworks.Program``."""
        if self._updates is not None:
            self._updates.synchronize()

    def abandon(self) -> None:
        """See ``frameworks.Program``."""
        if self._updates is None:
            self._forget_gradients()
        else:
            self._updates.abandon()

    def pass_begins(self, pass_number: int) -> None:
        """See ``frameworks.Program``."""
        del pass_number  # an optimizer without schedulers knows no passes

    def _forward(self, features: Any) -> Any:
        arguments = arguments_of(features)
        positional = [self._tensors(value) for value in arguments.positional]
        named = {name: self._tensors(value) for name, value in arguments.named.items()}
        return self.model(*positional, **named)

    def _number(self, loss: Any) -> float:
        if not self._is_tensor(loss) or int(np.prod(loss.shape, dtype=np.int64)) != 1:
            shape = list(loss.shape) if self._is_tensor(loss) else type(loss).__name__
            raise ConfigError(
                f"loss(labels, predictions) returned {shape}; it must return a tensor of one "
                "number, such as the mean over the batch"
            )
        return float(loss.detach())

    def _tensors(self, value: Any) -> Any:
        """Return arrays as tensors, in a tuple, list or dict too; everything else as it is."""
        if isinstance(value, dict):
            return {name: self._tensors(member) for name, member in value.items()}
        if isinstance(value, tuple):
            return tuple(self._tensors(member) for member in value)
        value = plain_array(value)
        return self._tensor(value) if isinstance(value, np.ndarray) else value

    def _to_ids(self, value: Any) -> NDArray[Any]:
        return self._to_array(value) if self._is_tensor(value) else np.asarray(value)

    def set_learning_rate(self, rate: float | Mapping[str, float]) -> None:
        """See ``frameworks.Program``."""
        for name, value in rates_of(self._optimizers, rate).items():
            self._set_rate(self._optimizers[name], value)

    @abstractmethod
    def _set_rate(self, optimizer: Any, rate: float) -> None:
        """Set the learning rate of one optimizer.

        Raises:
            ConfigError: It has a scheduler of its own.
        """

    @abstractmethod
    def _clip_gradients(self) -> None:
        """Call the user's ``clip_gradients``, if there is one."""

    @abstractmethod
    def save(self, folder: Path) -> list[Path]:
        """See ``frameworks.Program``."""

    @abstractmethod
    def _server_layers(self) -> Iterable[Any]:
        """Return the layers of the model whose rows are on servers."""

    @abstractmethod
    def _watch(self, layer: Any, plan: PrefetchPlan) -> Any:
        """Have ``plan.watch(layer, inputs)`` called before the layer; ``remove()`` ends that."""

    @abstractmethod
    def _tensor(self, array: NDArray[Any]) -> Any:
        """Return an array as a tensor."""

    @abstractmethod
    def _is_tensor(self, value: Any) -> bool:
        """Return whether it is a tensor of this framework."""

    @abstractmethod
    def _to_array(self, tensor: Any) -> NDArray[Any]:
        """Return a tensor as an array."""

    @abstractmethod
    def _no_gradients(self) -> AbstractContextManager[Any]:
        """Return what holds gradients back."""

    @abstractmethod
    def _backward(self, loss: Any) -> None:
        """Run the backward pass."""

    @abstractmethod
    def _step_here(self) -> None:
        """Run the optimizer of this process, and forget the gradients."""

    @abstractmethod
    def _forget_gradients(self) -> None:
        """Forget the gradients of this process's optimizer."""
