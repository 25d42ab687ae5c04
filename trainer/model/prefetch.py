"""Which features a model looks up in which embedding layer, learned from one batch.

So that the rows of the coming batch can be asked for before it is its turn, without a word from
the user. A wrong guess costs only a useless fetch: layers compare the ids before they take
fetched rows. Imports numpy and the protocol; no framework.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["PrefetchPlan", "ServerLayer"]

# Lookups of one batch that are looked at; a model with more has them in a loop.
LOOKUPS_MAX = 256


class ServerLayer(Protocol):
    """An embedding layer with rows on servers."""

    def prefetch(self, ids: Any, /) -> None:
        """Begin to fetch the rows of these ids."""


@dataclass(frozen=True)
class _Lookup:
    """A layer is given this feature, or the columns ``first`` to ``last`` - 1 of it.

    Attributes:
        layer: Which.
        feature: Name of the feature.
        columns: None: the whole feature. A number: that column. A slice: these columns.
    """

    layer: ServerLayer
    feature: str
    columns: int | slice | None


class PrefetchPlan:
    """Watches the lookups of one batch, then knows those of every other one.

    Args:
        to_array: Returns a framework's tensor as an array.
    """

    def __init__(self, to_array: Callable[[Any], NDArray[Any]]) -> None:
        self._to_array = to_array
        self._seen: list[tuple[ServerLayer, NDArray[Any]]] = []
        self._lookups: list[_Lookup] | None = None

    @property
    def is_learned(self) -> bool:
        """Whether a batch was watched."""
        return self._lookups is not None

    def start(self) -> None:
        """A batch to learn from begins; what was watched before, in an evaluation say, is none."""
        self._seen = []

    def watch(self, layer: ServerLayer, inputs: Sequence[Any]) -> None:
        """Note that a layer is called; bags with offsets are not learned."""
        if self._lookups is None and len(inputs) == 1 and len(self._seen) < LOOKUPS_MAX:
            # A copy: the model may change the tensor in place.
            self._seen.append((layer, np.array(self._to_array(inputs[0]))))

    def learn(self, features: Mapping[str, Any]) -> None:
        """Find what was watched among the features of that batch."""
        arrays = {name: self._to_array(value) for name, value in features.items()}
        arrays = {name: array for name, array in arrays.items() if array.dtype.kind in "iu"}
        found = [_find(layer, ids, arrays) for layer, ids in self._seen]
        self._seen = []
        self._lookups = [lookup for lookup in found if lookup is not None]

    def prefetch(self, features: Mapping[str, Any]) -> None:
        """Ask for the rows of a coming batch."""
        for lookup in self._lookups or ():
            ids = self._to_array(features[lookup.feature])
            lookup.layer.prefetch(ids if lookup.columns is None else ids[:, lookup.columns])


def _find(
    layer: ServerLayer, ids: NDArray[Any], arrays: Mapping[str, NDArray[Any]]
) -> _Lookup | None:
    for name, array in arrays.items():
        if array.shape == ids.shape and np.array_equal(array, ids):
            return _Lookup(layer, name, None)
        if array.ndim != 2 or not ids.shape or array.shape[0] != ids.shape[0]:
            continue
        width = ids.shape[1] if ids.ndim == 2 else 1
        for first in range(array.shape[1] - width + 1):
            if ids.ndim == 1 and np.array_equal(array[:, first], ids):
                return _Lookup(layer, name, first)
            if ids.ndim == 2 and np.array_equal(array[:, first : first + width], ids):
                return _Lookup(layer, name, slice(first, first + width))
    return None
