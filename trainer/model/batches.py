"""What goes into a user's model and what comes out of it: batches as ``feed`` returns them.

Imports numpy and the errors; no framework.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from backstay.errors import ConfigError, NonFiniteLoss

__all__ = ["Arguments", "arguments_of", "checked_loss", "plain_array", "split_feed"]


class Arguments:
    """Features as the arguments of the model.

    Attributes:
        positional: In order.
        named: By name.
    """

    def __init__(self, positional: Sequence[Any], named: Mapping[str, Any]) -> None:
        self.positional = tuple(positional)
        self.named = dict(named)

    def arrays(self) -> dict[str, Any]:
        """Return all of them under names: positions are "0", "1", ..."""
        return {**{str(n): value for n, value in enumerate(self.positional)}, **self.named}


def arguments_of(features: Any) -> Arguments:
    """Return the model's arguments: a dict gives names, a tuple or list positions, else one."""
    if isinstance(features, Mapping):
        return Arguments((), features)
    if isinstance(features, tuple | list):
        return Arguments(features, {})
    return Arguments((features,), {})


def split_feed(fed: Any, mode: str) -> tuple[Any, Any]:
    """Return (features, labels) of what ``feed`` returned; labels are None for predictions.

    Raises:
        ConfigError: It is not a pair in a mode that needs labels.
    """
    if mode == "prediction":
        return fed, None
    if not isinstance(fed, tuple | list) or len(fed) != 2:
        raise ConfigError(
            f"feed(records, {mode!r}, metadata) returned {_described(fed)}; it must return a pair: "
            "features, labels"
        )
    return fed[0], fed[1]


def checked_loss(value: float) -> float:
    """Return the loss.

    Raises:
        NonFiniteLoss: It is NaN or infinite.
    """
    if not math.isfinite(value):
        raise NonFiniteLoss(
            f"the loss is {value}: look for damaged numbers in the records of the batch, or for a "
            "learning rate that is too high"
        )
    return value


def plain_array(value: Any) -> Any:
    """Return an array fit for a tensor: float64 becomes float32, what frameworks compute in."""
    if isinstance(value, list):
        value = np.asarray(value)
    if isinstance(value, np.ndarray) and value.dtype == np.float64:
        return value.astype(np.float32)
    return value


def _described(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
