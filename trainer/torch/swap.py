"""Plain PyTorch embeddings of a model put on the pservers.

May import torch, this package and the framework-neutral parts of ``backstay.trainer``. Looks at
weights, to see that no code has set them, and carries none of them over.
"""

from __future__ import annotations

from typing import Any

import torch

from backstay import tables
from backstay.errors import ConfigError
from backstay.trainer.adapter.swapping import is_drawn_from, is_to_swap
from backstay.trainer.client import Client
from backstay.trainer.torch.embedding import DEFAULT_INITIALIZER, Embedding, EmbeddingBag

__all__ = ["swap_embeddings"]

# What a user sets on a plain layer whose weights are not drawn from Normal(0, 1).
INITIALIZER_ATTRIBUTE = "server_initializer"


def swap_embeddings(
    module: torch.nn.Module,
    *,
    over_bytes: int,
    client: Client | None = None,
    seed: int = 0,
    storage: tables.Storage = "float32",
) -> list[str]:
    """Replace ``torch.nn.Embedding`` and ``EmbeddingBag`` modules by those of this package.

    Replaced is a module that trains and whose weight is larger than ``over_bytes`` or has
    ``sparse=True``. Rows begin as the servers draw them from Normal(0, 1), PyTorch's default;
    for another distribution set ``layer.server_initializer``, say to ``tables.Normal(0, 0.01)``,
    beside the code that initialises the weight. Make the optimizer afterwards.

    Args:
        module: The model, changed in place. Other arguments and the mode of its layers stay.
        over_bytes: Larger weights move, of any float32 embedding.
        client: Default: that of the open session, which is asked for only if a module moves.
        seed: Of the initial values; the same in every trainer.
        storage: Of the weights on the servers.

    Returns:
        The paths of the replaced modules in the model, which are the names of their tables (after
        the session's job): the same in every trainer that makes the same model.

    Raises:
        ConfigError: A module above ``over_bytes`` cannot be replaced: its weights were set in
            another way, are shared with another module or of another type, or it uses max_norm,
            scale_grad_by_freq or mode="max". The message names it and says what to do.
    """
    chosen = []
    for path, layer in module.named_modules():
        if not isinstance(layer, torch.nn.Embedding | torch.nn.EmbeddingBag):
            continue

        def obstacle(path: str = path, layer: Any = layer) -> str | None:
            return _obstacle(module, path, layer)

        weight = layer.weight
        if is_to_swap(
            path,
            weight_bytes=weight.numel() * weight.element_size(),
            sparse=layer.sparse,
            trains=weight.requires_grad,
            over_bytes=over_bytes,
            obstacle=obstacle,
        ):
            chosen.append((path, layer))
    # All made before the first is put in: a refusal leaves the model as it is.
    swaps = [
        (layer, _twin(path, layer, client=client, seed=seed, storage=storage))
        for path, layer in chosen
    ]
    for layer, swapped in swaps:
        for parent in module.modules():
            for name, child in parent._modules.items():  # a layer may have several places
                if child is layer:
                    setattr(parent, name, swapped)
    return [path for path, _ in chosen]


def _obstacle(module: torch.nn.Module, path: str, layer: Any) -> str | None:
    if not path:
        return "it is the model itself; make it a part of one"
    if type(layer) not in (torch.nn.Embedding, torch.nn.EmbeddingBag):
        return f"{type(layer).__name__} may do more than its base class; use backstay's layer"
    if layer.weight.dtype != torch.float32:
        return f"its weights are {layer.weight.dtype}, the servers compute in float32"
    if layer.max_norm is not None:
        return "the servers do not know max_norm; leave it out"
    if layer.scale_grad_by_freq:
        return "the servers do not know scale_grad_by_freq; leave it out"
    if getattr(layer, "mode", "sum") == "max":
        return "the servers do not know mode='max'; use 'sum' or 'mean'"
    if layer._forward_hooks or layer._forward_pre_hooks:
        return "it has forward hooks; set them on backstay's layer"
    for other in module.modules():
        if other is not layer and any(p is layer.weight for p in other._parameters.values()):
            return f"its weight is shared with a {type(other).__name__}"
    if getattr(layer, INITIALIZER_ATTRIBUTE, None) is None:
        weights = layer.weight.detach().cpu().numpy()
        if not is_drawn_from(DEFAULT_INITIALIZER, weights, layer.padding_idx):
            return (
                "its weights are not drawn from Normal(0, 1), PyTorch's default, and the servers "
                f"draw rows themselves: set {INITIALIZER_ATTRIBUTE} of this layer to one of "
                "backstay.tables, or use backstay.trainer.torch.Embedding(initializer=...)"
            )
    return None


def _twin(
    path: str, layer: Any, *, client: Client | None, seed: int, storage: tables.Storage
) -> Embedding | EmbeddingBag:
    shared: dict[str, Any] = {
        "initializer": getattr(layer, INITIALIZER_ATTRIBUTE, None),
        "name": path,
        "client": client,
        "seed": seed,
        "storage": storage,
    }
    sizes = (layer.num_embeddings, layer.embedding_dim, layer.padding_idx)
    try:
        swapped: Embedding | EmbeddingBag
        if isinstance(layer, torch.nn.EmbeddingBag):
            last = layer.include_last_offset
            swapped = EmbeddingBag(*sizes, mode=layer.mode, include_last_offset=last, **shared)
        else:
            swapped = Embedding(*sizes, **shared)
    except ConfigError as error:
        raise ConfigError(f"the embedding {path!r} cannot move to the servers: {error}") from error
    swapped.train(layer.training)
    swapped.to(layer.weight.device)
    return swapped
