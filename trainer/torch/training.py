"""A user's PyTorch model as a program: what the worker and ``backstay train --local`` run.

May import torch, this package and the neutral part of programs. Knows no job master.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from backstay.errors import ConfigError
from backstay.job.model_definition import ModelDefinition
from backstay.job_spec import JobSpec
from backstay.trainer.adapter.session import opened_client
from backstay.trainer.client import Client
from backstay.trainer.model.optimizers import check_each_has_one, made_optimizers
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
        optimizers: PyTorch's, of the user's choice, by name.
        updates: What runs them on the servers; empty: they run here.
        prefetching: See ``BaseProgram``.
    """

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

    def _set_rate(self, optimizer: torch.optim.Optimizer, rate: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate

    def _clip_gradients(self) -> None:
        if self._definition.clip_gradients is not None:
            with _dense_gradients(list(self.model.parameters())) as parameters:
                self._definition.clip_gradients(parameters)

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
        for optimizer in self._optimizers.values():
            optimizer.step()
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.zero_grad()


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
    optimizers = _optimizers(definition, model)
    updates = []
    if client is not None:
        updates = [
            DistributedOptimizer(optimizer, client, steps_in_flight=steps)
            for optimizer in optimizers.values()
        ]
    return TorchProgram(
        definition, model, optimizers, updates, prefetching=client is not None and steps > 0
    )


def _optimizers(definition: ModelDefinition, model: Any) -> dict[str, Any]:
    # A list: some optimizers go over the parameters more than once.
    parameters = list(model.parameters())
    kind = torch.optim.Optimizer
    optimizers = made_optimizers(definition, parameters, model, kind, "torch.optim")
    check_each_has_one(
        definition,
        [(name, one) for name, one in model.named_parameters() if one.requires_grad],
        {
            name: [one for group in optimizer.param_groups for one in group["params"]]
            for name, optimizer in optimizers.items()
        },
    )
    return optimizers


@contextmanager
def _dense_gradients(parameters: list[Any]) -> Iterator[list[Any]]:
    """Yield parameters of which no gradient is sparse, because PyTorch clips none that is.

    In the place of one with a sparse gradient stands another whose gradient has one row for each
    different id, as that of an embedding on the servers has.
    """
    shown, sparse = [], []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or not gradient.is_sparse:
            shown.append(parameter)
            continue
        gradient = gradient.coalesce()
        rows = torch.nn.Parameter(torch.empty_like(gradient.values()))
        rows.grad = gradient.values()
        shown.append(rows)
        sparse.append((parameter, gradient, rows))
    yield shown
    for parameter, gradient, rows in sparse:
        parameter.grad = torch.sparse_coo_tensor(
            gradient.indices(), rows.grad, gradient.shape, is_coalesced=True
        )


def _on_servers(layer: Any) -> bool:
    return isinstance(layer, Embedding | EmbeddingBag)
