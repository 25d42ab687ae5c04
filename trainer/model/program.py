"""A user's model, its loss and its optimizers as a program, which trains batch by batch.

What the worker and ``backstay train --local`` run. May import the adapter's neutral parts; imports
a framework only when it is asked for by name. Knows no job master.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backstay.errors import ConfigError, InvalidRequest
from backstay.job.model_definition import ModelDefinition
from backstay.job_spec import JobSpec, ModeSpec
from backstay.trainer.adapter.framework import Framework, Module, Optimizer, Tensor
from backstay.trainer.adapter.layers import Embedding, EmbeddingBag
from backstay.trainer.adapter.session import opened_client
from backstay.trainer.adapter.swapping import Swapper
from backstay.trainer.arrays import clicks_of_examples
from backstay.trainer.client import Client
from backstay.trainer.model.batches import arguments_of, checked_loss, plain_array
from backstay.trainer.model.optimizers import (
    CombinedOptimizer,
    check_each_has_one,
    made_optimizers,
    rates_of,
)
from backstay.trainer.model.prefetch import PrefetchPlan

__all__ = ["Program", "build", "framework_of", "predictions_of"]


class Program:
    """A user's model with its loss and optimizers, ready to be trained.

    Used by one thread, but for ``prefetch``.

    Args:
        framework: Of the model.
        definition: The user's.
        model: What the definition's ``make_model`` returned.
        optimizers: The framework's, of the user's choice, by name.
        updates: What runs them on the servers; None: they run in this process.
        prefetching: Whether rows may be fetched before the step before them is pushed.
    """

    def __init__(
        self,
        framework: Framework,
        definition: ModelDefinition,
        model: Module,
        optimizers: Mapping[str, Optimizer],
        updates: CombinedOptimizer | None,
        *,
        prefetching: bool,
    ) -> None:
        self.model = model
        self._framework = framework
        self._tensors = framework.tensors
        self._definition = definition
        self._optimizers = dict(optimizers)
        self._updates = updates
        self._plan: PrefetchPlan | None = None
        modules = framework.modules(model) if prefetching else ()
        layers = [layer for _, layer in modules if isinstance(layer, Embedding | EmbeddingBag)]
        if layers:
            plan = self._plan = PrefetchPlan(self._to_ids)
            self._unwatch = [
                framework.before_call(layer, partial(plan.watch, layer)) for layer in layers
            ]

    def tables(self) -> tuple[str, ...]:
        """The names of the tables that steps push to, in the order in which they were made."""
        return () if self._updates is None else self._updates.table_names

    def train_batch(self, features: Any, labels: Any) -> tuple[float, NDArray[Any] | None]:
        """Run forward, loss, backward and the optimizers' step.

        Args:
            features: As the user's ``feed`` returns them.
            labels: Likewise.

        Returns:
            The loss, and what the model answered if that is one tensor.

        Raises:
            NonFiniteLoss: The loss is NaN or infinite; nothing was pushed.
            BackstayError: A push failed.
        """
        learning = None if self._plan is None or self._plan.is_learned else self._plan
        if learning is not None:
            learning.start()

        def compute() -> tuple[Tensor, Any]:
            predictions = self._answer(features, training=True)
            return self._definition.loss(self._to_tensors(labels), predictions), predictions

        def accept(loss: Tensor) -> float:
            value = checked_loss(self._number(loss))
            if learning is not None:
                learning.learn(arguments_of(features).arrays())
                for unwatch in self._unwatch:
                    unwatch()
            return value

        value, predictions = self._framework.differentiate(compute, accept)
        if self._definition.clip_gradients is not None:
            parameters = list(self._framework.parameters(self.model).values())
            self._framework.clip(self._definition.clip_gradients, parameters)
        if self._updates is None:
            for optimizer in self._optimizers.values():
                self._framework.step(optimizer)
            self._forget_gradients()
        elif self._updates.begin_step(clicks=self._clicks(labels)):
            self._updates.end_step()
        return value, self._tensors.view(predictions) if self._is_tensor(predictions) else None

    def predict(self, features: Any) -> NDArray[Any]:
        """Return what the model answers in evaluation mode, without gradients.

        Raises:
            ConfigError: The model answers something else than one tensor.
        """
        with self._tensors.no_gradients():
            predictions = self._answer(features, training=False)
        if not self._is_tensor(predictions):
            raise ConfigError(
                f"the model answers a {type(predictions).__name__}: to be evaluated, or used for "
                "predictions, it must answer one tensor"
            )
        return self._tensors.view(predictions)

    def prefetch(self, features: Any) -> None:
        """Begin to fetch the rows of a coming batch, where it is known which ids it looks up."""
        if self._plan is not None:
            self._plan.prefetch(arguments_of(features).arrays())

    def synchronize(self) -> None:
        """Wait for this program's pushes, then load the dense values as they are now."""
        if self._updates is not None:
            self._updates.synchronize()

    def abandon(self) -> None:
        """Forget gradients and pushes of a batch that failed; the next one begins anew."""
        if self._updates is None:
            self._forget_gradients()
        else:
            self._updates.abandon()

    def set_learning_rate(self, rate: float | Mapping[str, float]) -> None:
        """Set the learning rate from the next step on: of all optimizers, or some by name.

        Raises:
            ConfigError: There is no optimizer of a name, or it has a scheduler of its own.
        """
        for name, value in rates_of(self._optimizers, rate).items():
            self._framework.set_rate(self._optimizers[name], value)

    def pass_begins(self, pass_number: int) -> None:
        """Set schedulers that the optimizers carry to this pass (from 1)."""
        self._framework.begin_pass(list(self._optimizers.values()), pass_number)

    def save(self, folder: Path) -> list[Path]:
        """Write all that the model holds here, in the framework's own format.

        Rows on servers are left out.
        """
        own = {**self._framework.parameters(self.model), **self._framework.buffers(self.model)}
        path = folder / self._framework.saved_file
        self._framework.save(
            {name: one for name, one in own.items() if not hasattr(one, "backstay_layer")}, path
        )
        return [path]

    def _answer(self, features: Any, *, training: bool) -> Any:
        arguments = arguments_of(features)
        positional = [self._to_tensors(value) for value in arguments.positional]
        named = {name: self._to_tensors(value) for name, value in arguments.named.items()}
        return self._framework.call(self.model, positional, named, training=training)

    def _clicks(self, labels: Any) -> NDArray[np.float32] | None:
        """Return what the user's ``clicks`` says of the examples; None: there is none."""
        clicks = self._definition.clicks
        if clicks is None:
            return None
        try:
            return clicks_of_examples(clicks(labels))
        except InvalidRequest as error:
            raise ConfigError(f"clicks in {self._definition.path}: {error}") from error

    def _number(self, loss: Any) -> float:
        if not self._is_tensor(loss) or int(np.prod(loss.shape, dtype=np.int64)) != 1:
            shape = list(loss.shape) if self._is_tensor(loss) else type(loss).__name__
            raise ConfigError(
                f"loss(labels, predictions) returned {shape}; it must return a tensor of one "
                "number, such as the mean over the batch"
            )
        return self._tensors.number(loss)

    def _to_tensors(self, value: Any) -> Any:
        """Return arrays as tensors, in a tuple, list or dict too; everything else as it is."""
        if isinstance(value, dict):
            return {name: self._to_tensors(member) for name, member in value.items()}
        if isinstance(value, tuple):
            return tuple(self._to_tensors(member) for member in value)
        value = plain_array(value)
        return self._tensors.of_any(value) if isinstance(value, np.ndarray) else value

    def _is_tensor(self, value: Any) -> bool:
        return isinstance(value, self._tensors.kind)

    def _to_ids(self, value: Any) -> NDArray[Any]:
        return self._tensors.view(value) if self._is_tensor(value) else np.asarray(value)

    def _forget_gradients(self) -> None:
        for optimizer in self._optimizers.values():
            self._framework.forget_gradients(optimizer)


def framework_of(name: str) -> Framework:
    """Import the adapter of a framework, and with it the framework.

    Args:
        name: ``paddle`` or ``torch``.

    Raises:
        ConfigError: The framework is not installed.
    """
    try:
        module = importlib.import_module(f"backstay.trainer.{name}.framework")
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        package = "paddlepaddle" if name == "paddle" else name
        raise ConfigError(f"the model needs {name}: pip install {package}") from error
    framework: Framework = module.FRAMEWORK
    return framework


def build(
    framework: Framework, definition: ModelDefinition, client: Client | None, spec: JobSpec
) -> Program:
    """Make the model and its optimizers, on the servers or in this process.

    Args:
        framework: Of the model.
        definition: The user's.
        client: Of the session that is open. None: all is in this process, unless the model has
            layers of the adapter; these open a session by the factory that is set.
        spec: Of the job.

    Raises:
        ConfigError: The model file's functions return something else than they should, or the
            servers do not have what they ask for.
    """
    framework.begin(spec.seed)
    # In one process the numbers are those of the framework alone: each step waits for its push.
    steps = _steps_in_flight(spec.mode) if client is not None else 0
    # A program that is built again in this process finds its tables by the same names.
    with framework.fresh_names():
        model = definition.make_model()
        if not isinstance(model, framework.module_class):
            raise ConfigError(
                f"custom_model in {definition.path} returned a {type(model).__name__}; it must "
                f"return {framework.module}"
            )
        # Layers may have opened one meanwhile, by the factory.
        client = client or opened_client()
        if client is not None:
            over_bytes = spec.swap_embeddings_over_bytes
            Swapper(framework).swap_embeddings(model, over_bytes=over_bytes)
        optimizers = _optimizers(framework, definition, model)
        updates: CombinedOptimizer | None = None
        if client is not None:
            updates = CombinedOptimizer(
                [
                    framework.distributed_optimizer(optimizer, client, steps_in_flight=steps)
                    for optimizer in optimizers.values()
                ]
            )
        else:
            framework.prepare_clipping(model, list(optimizers.values()))
    prefetching = client is not None and steps > 0
    return Program(framework, definition, model, optimizers, updates, prefetching=prefetching)


def predictions_of(program: Program, features: Any, records: int) -> NDArray[Any]:
    """Return what the model answers for a batch, [records] or [records, ...].

    Raises:
        ConfigError: It answers something else.
    """
    predictions = program.predict(features)
    if predictions.shape[:1] != (records,):
        raise ConfigError(
            f"the model answers {list(predictions.shape)} for {records} records: the first "
            "dimension must be the record"
        )
    return predictions


def _steps_in_flight(mode: ModeSpec) -> int:
    """Return how many steps the optimizers keep under way; only async mode has any."""
    return mode.steps_in_flight if mode.kind == "async" else 0


def _optimizers(
    framework: Framework, definition: ModelDefinition, model: Module
) -> dict[str, Optimizer]:
    if definition.clip_gradients is not None and framework.no_clip_gradients is not None:
        raise ConfigError(
            f"clip_gradients in {definition.path} is not for {framework.name}: "
            f"{framework.no_clip_gradients}"
        )
    parameters = framework.parameters(model)
    optimizers = made_optimizers(
        definition,
        # A list: some optimizers go over the parameters more than once.
        list(parameters.values()),
        model,
        framework.optimizer_class,
        framework.optimizers,
    )
    check_each_has_one(
        definition,
        [(name, one) for name, one in parameters.items() if framework.tensors.trains(one)],
        {name: framework.parameters_of(optimizer) for name, optimizer in optimizers.items()},
    )
    return optimizers
