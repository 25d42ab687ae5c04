"""Which of a model's own embeddings move to the servers, for the adapters' ``swap_embeddings``.

Imports numpy, the table descriptions and the errors; knows no framework and changes no model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backstay import tables
from backstay.errors import ConfigError

__all__ = ["is_drawn_from", "is_to_swap"]

# Weights looked at to tell whether a layer's initializer is what it is taken for.
SAMPLE = 65_536
# The Kolmogorov-Smirnov distance of n numbers from their own distribution is above this over
# sqrt(n) once in 10^9 times: sqrt(ln(2 / 1e-9) / 2).
KS_LIMIT = 3.27


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
