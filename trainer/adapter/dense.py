"""Dense parameters as one flat table: a model of many small tensors costs one round trip.

May import the client and numpy; no framework. Knows nothing of embeddings or of when to step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backstay import tables
from backstay.trainer.adapter.framework import Tensor, Tensors
from backstay.trainer.client import Client
from backstay.trainer.pending import Pending

__all__ = ["DenseGroup", "DenseParameter", "Placed", "dense_groups", "made_groups"]

# 64 MiB of float32 in one table: a pull then stays well below the limit of a frame, whatever the
# number of servers. A larger parameter gets a table to itself.
GROUP_ELEMENTS_MAX = 16 * 1024 * 1024


_made: ContextVar[list[DenseGroup] | None] = ContextVar("_made", default=None)


@contextmanager
def made_groups() -> Iterator[list[DenseGroup]]:
    """Collect the groups that are made in this block, to load newer values into them later."""
    groups: list[DenseGroup] = []
    token = _made.set(groups)
    try:
        yield groups
    finally:
        _made.reset(token)


@dataclass(frozen=True)
class DenseParameter:
    """A float32 parameter of a framework, seen as flat numbers in main memory.

    Attributes:
        tensors: Those of the framework.
        tensor: The parameter, on any device.
        name: Its own among the parameters of one optimizer; the same in every trainer.
    """

    tensors: Tensors
    tensor: Tensor
    name: str

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.tensor.shape)

    def value(self) -> NDArray[np.float32]:
        """Return its numbers as they are now, in row-major order; the shape does not matter."""
        return self.tensors.view(self.tensor)

    def load(self, values: NDArray[np.float32]) -> None:
        """Replace its numbers by these, [elements], which are copied."""
        self.tensors.assign(self.tensor, values)


@dataclass(frozen=True)
class Placed:
    """A parameter, and what its table shall be.

    Attributes:
        parameter: The parameter.
        optimizer: That its table runs.
        rate: Which of the optimizer's learning rates it follows: the number of its param group.
    """

    parameter: DenseParameter
    optimizer: tables.Optimizer
    rate: int = 0


class DenseGroup:
    """Parameters that share an optimizer, laid end to end in one dense table.

    A parameter without a gradient in a step takes part with a gradient of zeros.

    Args:
        client: Connected.
        spec: Of the table; its shape is [number of elements].
        parameters: In the order in which they lie in the table.
        rate: Which of the optimizer's learning rates they follow.
    """

    def __init__(
        self,
        client: Client,
        spec: tables.TableSpec,
        parameters: Sequence[DenseParameter],
        rate: int = 0,
    ) -> None:
        self.rate = rate
        self._client = client
        self._parameters = list(parameters)
        ends = np.cumsum([parameter.elements for parameter in parameters])
        self._places = [
            slice(int(end) - parameter.elements, int(end))
            for parameter, end in zip(parameters, ends, strict=True)
        ]
        self._elements = int(ends[-1])
        self._table = client.create_table(spec)
        # The first trainer's values win; everyone, the first included, then takes what is there.
        client.init_dense(self._table, self._flat([p.value() for p in parameters]))
        self.load(client.pull_dense(self._table))
        if (collected := _made.get()) is not None:
            collected.append(self)

    @property
    def table_name(self) -> str:
        """The name of the table in the cluster."""
        return self._table.name

    def push_async(
        self, gradients: Mapping[str, NDArray[np.float32]], scale: float
    ) -> Pending[None] | None:
        """Send the gradients, by parameter name, of any shape; None if this group has none."""
        own = [gradients.get(parameter.name) for parameter in self._parameters]
        if all(gradient is None for gradient in own):
            return None
        return self._client.push_dense_async(
            self._table, self._flat(own), learning_rate_scale=scale
        )

    def pull_async(self) -> Pending[NDArray[np.float32]]:
        """Ask for the values as they are now."""
        return self._client.pull_dense_async(self._table)

    def load(self, values: NDArray[np.float32]) -> None:
        """Put pulled values [elements] into the parameters."""
        for parameter, place in zip(self._parameters, self._places, strict=True):
            parameter.load(values[place])

    def _flat(self, arrays: Sequence[NDArray[np.float32] | None]) -> NDArray[np.float32]:
        # A new array each time: the last one may still be on its way.
        flat = np.zeros(self._elements, np.float32)
        for array, place in zip(arrays, self._places, strict=True):
            if array is not None:
                flat[place] = array.reshape(-1)
        return flat


def dense_groups(client: Client, parameters: Sequence[Placed], prefix: str) -> list[DenseGroup]:
    """Lay out parameters in as few tables as their optimizers, rates and sizes allow.

    Args:
        client: Connected.
        parameters: In the order of the program, the same in every trainer.
        prefix: Comes before the table's name, which is that of its first parameter.
    """
    lists: dict[tuple[tables.Optimizer, int], list[list[DenseParameter]]] = {}
    for placed in parameters:
        members = lists.setdefault((placed.optimizer, placed.rate), [[]])
        size = sum(p.elements for p in members[-1]) + placed.parameter.elements
        if members[-1] and size > GROUP_ELEMENTS_MAX:
            members.append([])
        members[-1].append(placed.parameter)
    return [
        DenseGroup(
            client,
            tables.TableSpec.dense(
                f"{prefix}{members[0].name}",
                [sum(parameter.elements for parameter in members)],
                optimizer=optimizer,
                compensation=client.default_compensation,
            ),
            members,
            rate,
        )
        for (optimizer, rate), groups in lists.items()
        for members in groups
    ]
