"""PyTorch's models and optimizers, as ``trainer.adapter`` and ``trainer.model`` use them.

May import torch, this package and ``trainer.adapter``; see ``adapter.framework`` for the contract.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from backstay.trainer.adapter.framework import Framework, PlainEmbedding
from backstay.trainer.torch.layers import DEFAULT_INITIALIZER, Embedding, EmbeddingBag
from backstay.trainer.torch.optimizer import DistributedOptimizer
from backstay.trainer.torch.tensors import TENSORS

__all__ = ["FRAMEWORK"]

# What a user sets on a plain layer whose weights are not drawn from Normal(0, 1).
INITIALIZER_ATTRIBUTE = "server_initializer"


class _Torch(Framework):
    """See :class:`backstay.trainer.adapter.framework.Framework`."""

    name = "torch"
    tensors = TENSORS
    module_class = torch.nn.Module
    module = "a torch.nn.Module"
    optimizer_class = torch.optim.Optimizer
    optimizers = "torch.optim"
    distributed_optimizer = DistributedOptimizer
    saved_file = "model.pt"

    def begin(self, seed: int) -> None:
        torch.manual_seed(seed)

    def modules(self, model: torch.nn.Module) -> Iterable[tuple[str, torch.nn.Module]]:
        modules: Iterable[tuple[str, torch.nn.Module]] = model.named_modules()
        return modules

    def children(self, module: torch.nn.Module) -> Mapping[str, torch.nn.Module]:
        children: Mapping[str, torch.nn.Module] = module._modules
        return children

    def plain_embedding(self, module: torch.nn.Module) -> PlainEmbedding | None:
        if not isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
            return None
        own = getattr(module, INITIALIZER_ATTRIBUTE, None)
        return PlainEmbedding(
            weight=module.weight,
            padding_idx=module.padding_idx,
            sparse=module.sparse,
            obstacle=_obstacle(module),
            initializer=None if own is not None else lambda: DEFAULT_INITIALIZER,
            source="PyTorch's default, Normal(0, 1)",
            otherwise=f"set {INITIALIZER_ATTRIBUTE} of this layer to one of backstay.tables, or "
            "use backstay.trainer.torch.Embedding(initializer=...)",
            twin=partial(_twin, module, initializer=own),
        )

    def save(self, tensors: Mapping[str, torch.Tensor], path: Path) -> None:
        torch.save({name: value.detach() for name, value in tensors.items()}, path)

    def read(self, content: bytes) -> Mapping[str, torch.Tensor]:
        saved: Mapping[str, torch.Tensor] = torch.load(
            io.BytesIO(content), map_location="cpu", weights_only=True
        )
        return saved

    def parameters_of(self, optimizer: torch.optim.Optimizer) -> Sequence[torch.Tensor]:
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def forget_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()

    def set_rate(self, optimizer: torch.optim.Optimizer, rate: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate

    def clip(
        self, clip_gradients: Callable[[Any], Any], parameters: Sequence[torch.Tensor]
    ) -> None:
        with _dense_gradients(parameters) as clippable:
            clip_gradients(clippable)


FRAMEWORK = _Torch()


def _obstacle(layer: Any) -> str | None:
    if type(layer) not in (torch.nn.Embedding, torch.nn.EmbeddingBag):
        return f"{type(layer).__name__} may do more than its base class; use backstay's layer"
    if layer.max_norm is not None:
        return "the servers do not know max_norm; leave it out"
    if layer.scale_grad_by_freq:
        return "the servers do not know scale_grad_by_freq; leave it out"
    if getattr(layer, "mode", "sum") == "max":
        return "the servers do not know mode='max'; use 'sum' or 'mean'"
    if layer._forward_hooks or layer._forward_pre_hooks:
        return "it has forward hooks; set them on backstay's layer"
    return None


def _twin(layer: Any, **settings: Any) -> Embedding | EmbeddingBag:
    sizes = (layer.num_embeddings, layer.embedding_dim, layer.padding_idx)
    swapped: Embedding | EmbeddingBag
    if isinstance(layer, torch.nn.EmbeddingBag):
        last = layer.include_last_offset
        swapped = EmbeddingBag(*sizes, mode=layer.mode, include_last_offset=last, **settings)
    else:
        swapped = Embedding(*sizes, **settings)
    swapped.train(layer.training)
    swapped.to(layer.weight.device)
    return swapped


@contextmanager
def _dense_gradients(parameters: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
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
