"""A user's PyTorch model as a program: what the worker and ``backstay train --local`` run.

May import torch, this package and the neutral part of programs. Knows no master.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from backstay.errors import ConfigError
from backstay.job_spec import JobSpec
from backstay.trainer.adapter.session import opened_client
from backstay.trainer.client import Client
from backstay.trainer.model.model_definition import ModelDefinition
from backstay.trainer.model.prefetch import PrefetchPlan
from backstay.trainer.model.program import BaseProgram, steps_in_flight
from backstay.trainer.torch.embedding import Embedding, EmbeddingBag
from backstay.trainer.torch.optimizer import DistributedOptimizer
from backstay.trainer.torch.swap import swap_embeddings

__all__ = ["TorchProgram", "build"]


class TorchProgram(BaseProgram):
    """See ``backstay.trainer.model.frameworks.Program``.

    Args:
        definition: The user's.
        model: Its model.
        optimizer: PyTorch's, of the user's choice.
        updates: What runs that on the servers; None: it runs here.
        prefetching: See ``BaseProgram``.
    """

    def __init__(
        self,
        definition: ModelDefinition,
        model: Any,
        optimizer: torch.optim.Optimizer,
        updates: DistributedOptimizer | None,
        *,
        prefetching: bool,
    ) -> None:
        self._optimizer = optimizer
        super().__init__(definition, model, updates, prefetching=prefetching)

    def set_learning_rate(self, rate: float) -> None:
        """See ``frameworks.Program``; all parameter groups get it."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def save(self, folder: Path) -> list[Path]:
        """Write ``model.pt``: all that the model holds here, rows on servers excepted."""
        handles = {
            f"{name}.handle" for name, layer in self.model.named_modules() if _on_servers(layer)
        }
        own = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        path = folder / "model.pt"
        values = {name: value.detach() for name, value in own.items() if name not in handles}
        torch.save(values, path)
        return [path]

    def _server_layers(self) -> Iterable[Any]:
        return filter(_on_servers, self.model.modules())

    def _watch(self, layer: Any, plan: PrefetchPlan) -> Any:
        return layer.register_forward_pre_hook(lambda called, inputs: plan.watch(called, inputs))

    def _tensor(self, array: NDArray[Any]) -> Any:
        if not array.flags.writeable or not array.flags.c_contiguous:
            array = np.array(array)  # PyTorch would share the memory, and warn
        return torch.from_numpy(array)

    def _is_tensor(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    def _to_array(self, tensor: Any) -> NDArray[Any]:
        return tensor.detach().cpu().numpy()  # type: ignore[no-any-return]

    def _no_gradients(self) -> AbstractContextManager[Any]:
        return torch.no_grad()  # type: ignore[no-any-return]

    def _backward(self, loss: Any) -> None:
        loss.backward()

    def _step_here(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _forget_gradients(self) -> None:
        self._optimizer.zero_grad()


def build(definition: ModelDefinition, client: Client | None, spec: JobSpec) -> TorchProgram:
    """Make the program; see ``frameworks.Adapter``."""
    torch.manual_seed(spec.seed)
    model = definition.make_model()
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"custom_model in {definition.path} returned a {type(model).__name__}; it must return "
            "a torch.nn.Module"
        )
    # In one process the numbers are those of the framework alone: each step waits for its push.
    steps = steps_in_flight(spec.mode) if client is not None else 0
    # Layers may have opened one meanwhile, by the factory.
    client = client or opened_client()
    if client is not None:
        swap_embeddings(model, over_bytes=spec.swap_embeddings_over_bytes)
    # A list: some optimizers go over the parameters more than once.
    optimizer = definition.optimizer(list(model.parameters()))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer in {definition.path} returned a {type(optimizer).__name__}; it must return "
            "one of torch.optim"
        )
    updates = None
    if client is not None:
        updates = DistributedOptimizer(optimizer, client, steps_in_flight=steps)
    prefetching = updates is not None and steps > 0
    return TorchProgram(definition, model, optimizer, updates, prefetching=prefetching)


def _on_servers(layer: Any) -> bool:
    return isinstance(layer, Embedding | EmbeddingBag)
