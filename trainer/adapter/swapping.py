"""Embeddings of a model's own put on the pservers: which of them, and how.

May import the table descriptions and the client; a framework says what its layers are. Looks at
weights, to see that no code has set them, and carries none of them over.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backstay import tables
from backstay.errors import ConfigError
from backstay.trainer.adapter.framework import Framework, Module, PlainEmbedding
from backstay.trainer.client import Client

__all__ = ["Swapper", "is_drawn_from", "is_to_swap"]

# Weights looked at to tell whether a layer's initializer is what it is taken for.
SAMPLE = 65_536
# The Kolmogorov-Smirnov distance of n numbers from their own distribution is above this over
# sqrt(n) once in 10^9 times: sqrt(ln(2 / 1e-9) / 2).
KS_LIMIT = 3.27


class Swapper:
    """Puts the embeddings of a framework's models on the pservers."""

    def __init__(self, framework: Framework) -> None:
        self._framework = framework

    def swap_embeddings(
        self,
        module: Module,
        *,
        over_bytes: int,
        client: Client | None = None,
        seed: int = 0,
        storage: tables.Storage = "float32",
    ) -> list[str]:
        """Replace embedding layers of the framework's own by those of its adapter.

        Replaced is a layer that trains and whose weight is larger than ``over_bytes`` or has
        ``sparse=True``. Make the optimizer afterwards. The servers draw the rows themselves: for
        Paddle with the initializer of the layer's ``weight_attr``, for PyTorch from Normal(0, 1),
        its default. For another distribution in PyTorch set ``layer.server_initializer``, say to
        ``tables.Normal(0, 0.01)``, beside the code that initialises the weight.

        Args:
            module: The model, changed in place. Other arguments and the mode of its layers stay.
            over_bytes: Larger weights move, of any float32 embedding.
            client: Default: that of the open session, which is asked for only if a layer moves.
            seed: Of the initial values; the same in every trainer.
            storage: Of the weights on the servers.

        Returns:
            The paths of the replaced layers in the model, which are the names of their tables
            (after the session's job): the same in every trainer that makes the same model.

        Raises:
            ConfigError: A layer above ``over_bytes`` cannot be replaced: its initializer is one
                that the servers do not have, its weights were set in another way, are shared with
                another layer or of another type, or it uses something else that servers do not
                know. The message names it and says what to do.
        """
        framework = self._framework
        chosen = []
        for path, layer in framework.modules(module):
            plain = framework.plain_embedding(layer)
            if plain is not None and is_to_swap(
                path,
                weight_bytes=math.prod(plain.weight.shape) * plain.weight.element_size(),
                sparse=plain.sparse,
                trains=framework.tensors.trains(plain.weight),
                over_bytes=over_bytes,
                obstacle=partial(self._obstacle, module, path, layer, plain),
            ):
                chosen.append((path, layer, plain))
        # All made before the first is put in: a refusal leaves the model as it is.
        swaps = []
        for path, layer, plain in chosen:
            try:
                twin = plain.twin(name=path, client=client, seed=seed, storage=storage)
            except ConfigError as error:
                raise ConfigError(
                    f"the embedding {path!r} cannot move to the servers: {error}"
                ) from error
            swaps.append((layer, twin))
        for layer, twin in swaps:
            for _, parent in framework.modules(module):
                for name, child in list(framework.children(parent).items()):
                    if child is layer:  # a layer may have several places
                        setattr(parent, name, twin)
        return [path for path, _, _ in chosen]

    def _obstacle(
        self, module: Module, path: str, layer: Module, plain: PlainEmbedding
    ) -> str | None:
        """Return why a layer cannot move and what to do; None: it can."""
        framework = self._framework
        if not path:
            return "it is the model itself; make it a part of one"
        if plain.obstacle is not None:
            return plain.obstacle
        if plain.weight.dtype != framework.tensors.float32:
            return f"its weights are {plain.weight.dtype}, the servers compute in float32"
        for _, other in framework.modules(module):
            if other is not layer and any(
                parameter is plain.weight for parameter in framework.own_parameters(other)
            ):
                return f"its weight is shared with a {type(other).__name__}"
        if plain.initializer is None:
            return None
        try:
            initializer = plain.initializer()
        except ConfigError as error:
            return str(error)
        if is_drawn_from(initializer, framework.tensors.view(plain.weight), plain.padding_idx):
            return None
        return (
            f"its weights are not drawn from {initializer}, {plain.source}, and the servers draw "
            f"rows themselves: {plain.otherwise}"
        )


def is_to_swap(
    path: str,
    *,
    weight_bytes: int,
    sparse: bool,
    trains: bool,
    over_bytes: int,
    obstacle: Callable[[], str | None],
) -> bool:
    """Return whether a layer moves to the servers: it trains, and is large or ``sparse=True``.

    Args:
        path: Of the layer in the model.
        weight_bytes: Of its weight.
        sparse: It asks for sparse gradients.
        trains: Its weight takes gradients.
        over_bytes: A larger weight is large.
        obstacle: Says why the layer cannot move and what to do, None if it can. A small layer
            that cannot stays as it is.

    Raises:
        ConfigError: A large layer cannot move.
    """
    large = weight_bytes > over_bytes
    if not trains or not (large or sparse):
        return False
    why = obstacle()
    if why is not None and large:
        raise ConfigError(
            f"the embedding {path!r} has {weight_bytes} bytes of weights, more than {over_bytes}, "
            f"and cannot move to the servers: {why}. To keep it in the model of each worker, raise "
            "over_bytes (swap_embeddings_over_bytes of a job) to its size"
        )
    return why is None


def is_drawn_from(
    initializer: tables.Initializer, weights: NDArray[np.float32], without_row: int | None = None
) -> bool:
    """Return whether weights look as if the initializer had made them.

    Compares the distribution of at most 65,536 of them with the initializer's, by the
    Kolmogorov-Smirnov distance; wrongly says no once in 10^9 times. Another distribution is found
    out where the two differ by more than the distance's limit: 1.3% of the values for 65,536
    weights, 23% for 200; of ten nothing can be said.

    Args:
        initializer: What they are taken for.
        weights: [rows, dim].
        without_row: A row that stands apart, because it is padding.
    """
    flat = weights.reshape(-1)
    # An odd step, so that no column of an even number of them is left out.
    places = np.arange(0, flat.size, flat.size // SAMPLE | 1)
    if without_row is not None:
        places = places[places // weights.shape[1] != without_row]
    values = np.sort(flat[places].astype(np.float64))
    if not values.size:
        return True
    constant = _constant(initializer)
    if constant is not None:
        return bool(np.all(values == np.float32(constant)))
    expected = _cumulative(initializer)(values)
    steps = np.arange(values.size + 1) / values.size
    distance = max(np.max(steps[1:] - expected), np.max(expected - steps[:-1]))
    return bool(distance <= KS_LIMIT / math.sqrt(values.size))


def _constant(initializer: tables.Initializer) -> float | None:
    match initializer:
        case tables.Zeros():
            return 0.0
        case tables.Constant(value):
            return value
        case tables.Uniform(low, high) if low == high:
            return low
        case tables.Normal(mean, std) | tables.TruncatedNormal(mean, std) if std == 0.0:
            return mean
    return None


def _cumulative(
    initializer: tables.Initializer,
) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    """Return the share of an initializer's values that are below a number."""
    match initializer:
        case tables.Uniform(low, high):
            return lambda x: np.clip((x - low) / (high - low), 0.0, 1.0)
        case tables.Normal(mean, std):
            return lambda x: _below((x - mean) / std)
        case tables.TruncatedNormal(mean, std):
            outside = 0.5 * math.erfc(math.sqrt(2.0))  # of two deviations, on each side
            return lambda x: np.clip(
                (_below((x - mean) / std) - outside) / (1.0 - 2.0 * outside), 0.0, 1.0
            )
        case tables.Xavier(fan_in, fan_out, gain, distribution):
            variance = 2.0 * gain * gain / (fan_in + fan_out)
            if distribution == "normal":
                return _cumulative(tables.Normal(0.0, math.sqrt(variance)))
            bound = math.sqrt(3.0 * variance)
            return _cumulative(tables.Uniform(-bound, bound))
    raise AssertionError(f"{initializer!r} has no distribution")


def _below(deviations: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the standard normal distribution function."""
    erf: Any = np.frompyfunc(math.erf, 1, 1)
    share: NDArray[np.float64] = 0.5 * (1.0 + erf(deviations / math.sqrt(2.0)).astype(np.float64))
    return share
