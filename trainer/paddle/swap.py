"""Plain Paddle embeddings of a model put on the pservers.

May import paddle, this package and the framework-neutral parts of ``backstay.trainer``. Looks at
weights, to see that no code has set them, and carries none of them over.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from backstay import tables
from backstay.errors import ConfigError
from backstay.trainer.adapter.swapping import is_drawn_from, is_to_swap
from backstay.trainer.client import Client
from backstay.trainer.paddle.embedding import Embedding
from backstay.trainer.paddle.translate import initializer_of

__all__ = ["swap_embeddings"]


def swap_embeddings(
    module: paddle.nn.Layer,
    *,
    over_bytes: int,
    client: Client | None = None,
    seed: int = 0,
    storage: tables.Storage = "float32",
) -> list[str]:
    """Replace ``paddle.nn.Embedding`` layers by those of this package.

    Replaced is a layer that trains and whose weight is larger than ``over_bytes`` or has
    ``sparse=True``. Rows begin as the servers draw them with the initializer of the layer's
    ``weight_attr``, Paddle's XavierUniform by default. Make the optimizer afterwards.

    Args:
        module: The model, changed in place. The mode of its layers stays.
        over_bytes: Larger weights move, of any float32 embedding.
        client: Default: that of the open session, which is asked for only if a layer moves.
        seed: Of the initial values; the same in every trainer.
        storage: Of the weights on the servers.

    Returns:
        The paths of the replaced layers in the model, which are the names of their tables (after
        the session's job): the same in every trainer that makes the same model.

    Raises:
        ConfigError: A layer above ``over_bytes`` cannot be replaced: its initializer is one that
            the servers do not have, its weights were set afterwards, are shared with another layer
            or of another type, or it uses max_norm or scale_grad_by_freq. The message names it
            and says what to do.
    """
    chosen = []
    for path, layer in module.named_sublayers(include_self=True):
        if not isinstance(layer, paddle.nn.Embedding):
            continue

        def obstacle(path: str = path, layer: Any = layer) -> str | None:
            return _obstacle(module, path, layer)

        if is_to_swap(
            path,
            weight_bytes=int(np.prod(layer.weight.shape)) * layer.weight.element_size(),
            sparse=layer._sparse,
            trains=not layer.weight.stop_gradient,
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
        for parent in module.sublayers(include_self=True):
            for name, child in list(parent._sub_layers.items()):  # a layer may have several places
                if child is layer:
                    setattr(parent, name, swapped)
    return [path for path, _ in chosen]


def _obstacle(module: paddle.nn.Layer, path: str, layer: Any) -> str | None:
    if not path:
        return "it is the model itself; make it a part of one"
    if type(layer) is not paddle.nn.Embedding:
        return f"{type(layer).__name__} may do more than its base class; use backstay's layer"
    if layer.weight.dtype != paddle.float32:
        return f"its weights are {layer.weight.dtype}, the servers compute in float32"
    if getattr(layer, "_max_norm", None) is not None:
        return "the servers do not know max_norm; leave it out"
    if getattr(layer, "_scale_grad_by_freq", False):
        return "the servers do not know scale_grad_by_freq; leave it out"
    if layer._forward_post_hooks or layer._forward_pre_hooks:
        return "it has forward hooks; set them on backstay's layer"
    for other in module.sublayers(include_self=True):
        if other is not layer and any(p is layer.weight for p in other._parameters.values()):
            return f"its weight is shared with a {type(other).__name__}"
    try:
        initializer = initializer_of(
            layer._weight_attr, layer._num_embeddings, layer._embedding_dim
        )
    except ConfigError as error:
        return str(error)
    if not is_drawn_from(initializer, layer.weight.numpy(), _padding_of(layer)):
        return (
            f"its weights are not drawn from {initializer}, as its weight_attr says, and the "
            "servers draw rows themselves: pass the initializer in weight_attr, or use "
            "backstay.trainer.paddle.Embedding"
        )
    return None


def _twin(
    path: str, layer: Any, *, client: Client | None, seed: int, storage: tables.Storage
) -> Embedding:
    try:
        swapped = Embedding(
            layer._num_embeddings,
            layer._embedding_dim,
            _padding_of(layer),
            weight_attr=layer._weight_attr,
            name=path,
            client=client,
            seed=seed,
            storage=storage,
        )
    except ConfigError as error:
        raise ConfigError(f"the embedding {path!r} cannot move to the servers: {error}") from error
    if not layer.training:
        swapped.eval()
    return swapped


def _padding_of(layer: Any) -> int | None:
    padding: int | None = layer._padding_idx
    if padding is None or padding >= 0:
        return padding
    return padding + int(layer._num_embeddings)
