"""A user's Paddle model as a program: what the worker and ``backstay train --local`` run.

May import paddle, this package and the neutral part of programs. Knows no job master.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import paddle
from numpy.typing import NDArray

from backstay.errors import ConfigError
from backstay.job.model_definition import ModelDefinition
from backstay.job_spec import JobSpec
from backstay.trainer.adapter.session import opened_client
from backstay.trainer.client import Client
from backstay.trainer.model.optimizers import check_each_has_one, made_optimizers
from backstay.trainer.model.prefetch import PrefetchPlan
from backstay.trainer.model.program import BaseProgram, steps_in_flight
from backstay.trainer.paddle.embedding import Embedding, EmbeddingBag
from backstay.trainer.paddle.optimizer import DistributedOptimizer
from backstay.trainer.paddle.swap import swap_embeddings

__all__ = ["PaddleProgram", "build"]


def _keep_own_signal_handlers() -> None:
    """Undo what importing Paddle did: its handlers end the process, and no task is given back."""
    if threading.current_thread() is not threading.main_thread():
        return
    own = signal.getsignal(signal.SIGTERM)
    paddle.disable_signal_handler()
    if own is not None:
        signal.signal(signal.SIGTERM, own)


_keep_own_signal_handlers()


class PaddleProgram(BaseProgram):
    """See ``backstay.trainer.model.frameworks.Program``.

    Args:
        definition: The user's.
        model: Its model.
        optimizers: Paddle's, of the user's choice, by name.
        updates: What runs them on the servers; empty: they run here.
        prefetching: See ``BaseProgram``.
    """

    def pass_begins(self, pass_number: int) -> None:
        """Set schedulers of Paddle's to the pass: the same in a worker that joins late."""
        schedulers = map(_scheduler_of, self._optimizers.values())
        # Two optimizers may share one.
        for scheduler in {id(one): one for one in schedulers if one is not None}.values():
            scheduler.step(pass_number - 1)

    def save(self, folder: Path) -> list[Path]:
        """Write ``model.pdparams``: all that the model holds here, rows on servers excepted."""
        handles = {
            f"{name}.handle" for name, layer in self.model.named_sublayers() if _on_servers(layer)
        }
        own = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        path = folder / "model.pdparams"
        values = {name: value for name, value in own.items() if name not in handles}
        paddle.save(values, str(path))
        return [path]

    def _set_rate(self, optimizer: paddle.optimizer.Optimizer, rate: float) -> None:
        if _scheduler_of(optimizer) is not None:
            raise ConfigError(
                "the optimizer has a scheduler of Paddle's and the callbacks have a "
                "LearningRateScheduler: leave one of them out"
            )
        optimizer.set_lr(rate)

    def _clip_gradients(self) -> None:
        """Nothing: Paddle's optimizers have ``grad_clip``."""

    def _server_layers(self) -> Iterable[Any]:
        return filter(_on_servers, self.model.sublayers(include_self=True))

    def _watch(self, layer: Any, plan: PrefetchPlan) -> Any:
        return layer.register_forward_pre_hook(lambda called, inputs: plan.watch(called, inputs))

    def _tensor(self, array: NDArray[Any]) -> Any:
        return paddle.to_tensor(array)

    def _is_tensor(self, value: Any) -> bool:
        return isinstance(value, paddle.Tensor)

    def _to_array(self, tensor: Any) -> NDArray[Any]:
        return tensor.numpy()  # type: ignore[no-any-return]

    def _no_gradients(self) -> AbstractContextManager[Any]:
        return paddle.no_grad()  # type: ignore[no-any-return]

    def _backward(self, loss: Any) -> None:
        loss.backward()

    def _step_here(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.step()
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.clear_grad()


def build(definition: ModelDefinition, client: Client | None, spec: JobSpec) -> PaddleProgram:
    """Make the program; see ``frameworks.Adapter``."""
    paddle.seed(spec.seed)
    # Layers and parameters are numbered from 0, so that a program which is built again in this
    # process finds its tables by the same names.
    with paddle.utils.unique_name.guard():
        model = definition.make_model()
        if not isinstance(model, paddle.nn.Layer):
            raise ConfigError(
                f"custom_model in {definition.path} returned a {type(model).__name__}; it must "
                "return a paddle.nn.Layer"
            )
        # In one process the numbers are those of the framework alone: each step waits for its push.
        steps = steps_in_flight(spec.mode) if client is not None else 0
        # Layers may have opened one meanwhile, by the factory.
        client = client or opened_client()
        if client is not None:
            swap_embeddings(model, over_bytes=spec.swap_embeddings_over_bytes)
        optimizers = _optimizers(definition, model)
        updates = []
        if client is not None:
            updates = [
                DistributedOptimizer(optimizer, client, steps_in_flight=steps)
                for optimizer in optimizers.values()
            ]
    if client is None:
        _make_gradients_clippable(model, optimizers.values())
    return PaddleProgram(
        definition, model, optimizers, updates, prefetching=client is not None and steps > 0
    )


def _optimizers(definition: ModelDefinition, model: Any) -> dict[str, Any]:
    if definition.clip_gradients is not None:
        raise ConfigError(
            f"clip_gradients in {definition.path} is for PyTorch: Paddle's optimizers clip "
            "themselves; pass grad_clip=paddle.nn.ClipGradByGlobalNorm(...) to the optimizer"
        )
    kind = paddle.optimizer.Optimizer
    optimizers = made_optimizers(definition, model.parameters(), model, kind, "paddle.optimizer")
    check_each_has_one(
        definition,
        [(name, one) for name, one in model.named_parameters() if not one.stop_gradient],
        {name: _parameters_of(optimizer) for name, optimizer in optimizers.items()},
    )
    return optimizers


def _parameters_of(optimizer: paddle.optimizer.Optimizer) -> list[Any]:
    given = optimizer._parameter_list or []
    if given and isinstance(given[0], dict):
        return [parameter for group in given for parameter in group["params"]]
    return list(given)


def _make_gradients_clippable(model: Any, optimizers: Iterable[Any]) -> None:
    """Let plain embeddings have dense gradients: Paddle clips no sparse ones by value."""
    by_value = paddle.nn.ClipGradByValue
    if any(isinstance(optimizer._grad_clip, by_value) for optimizer in optimizers):
        for layer in model.sublayers(include_self=True):
            if isinstance(layer, paddle.nn.Embedding):
                layer._sparse = False


def _scheduler_of(
    optimizer: paddle.optimizer.Optimizer,
) -> paddle.optimizer.lr.LRScheduler | None:
    rate = optimizer._learning_rate
    return rate if isinstance(rate, paddle.optimizer.lr.LRScheduler) else None


def _on_servers(layer: Any) -> bool:
    return isinstance(layer, Embedding | EmbeddingBag)
