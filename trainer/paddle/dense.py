"""Dense parameters as one flat table: a model of many small tensors costs one round trip.

May import the client, paddle and numpy. Knows nothing of embeddings or of when to step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import paddle
from numpy.typing import NDArray

from backstay import tables
from backstay.errors import ConfigError
from backstay.trainer.client import Client
from backstay.trainer.paddle.lookup import as_gradient
from backstay.trainer.pending import Pending

__all__ = ["DenseGroup", "dense_groups"]

# 64 MiB of float32 in one table: a pull then stays well below the limit of a frame, whatever the
# number of servers. A larger parameter gets a table to itself.
GROUP_ELEMENTS_MAX = 16 * 1024 * 1024


class DenseGroup:
    """Parameters that share an optimizer, laid end to end in one dense table.

    A parameter without a gradient in a step takes part with a gradient of zeros.

    Args:
        client: Connected.
        spec: Of the table; its shape is [number of elements].
        parameters: float32, in the order in which they lie in the table.
    """

    def __init__(
        self, client: Client, spec: tables.TableSpec, parameters: Sequence[paddle.Tensor]
    ) -> None:
        self._client = client
        self._parameters = list(parameters)
        ends = np.cumsum([_elements(parameter) for parameter in parameters])
        self._places = [
            slice(int(end) - _elements(parameter), int(end))
            for parameter, end in zip(parameters, ends, strict=True)
        ]
        self._elements = int(ends[-1])
        self._table = client.create_table(spec)
        # The first trainer's values win; everyone, the first included, then takes what is there.
        client.init_dense(self._table, self._flat([p.numpy() for p in parameters]))
        self.load(client.pull_dense(self._table))

    def push_async(self, gradients: dict[str, paddle.Tensor], scale: float) -> Pending[None] | None:
        """Send the gradients, by parameter name; None if this group has none."""
        own = [gradients.get(parameter.name) for parameter in self._parameters]
        if all(gradient is None for gradient in own):
            return None
        flat = self._flat([None if g is None else as_gradient(g) for g in own])
        return self._client.push_dense_async(self._table, flat, learning_rate_scale=scale)

    def pull_async(self) -> Pending[NDArray[np.float32]]:
        """Ask for the values as they are now."""
        return self._client.pull_dense_async(self._table)

    def load(self, values: NDArray[np.float32]) -> None:
        """Put pulled values [elements] into the parameters."""
        for parameter, place in zip(self._parameters, self._places, strict=True):
            parameter.set_value(values[place].reshape(parameter.shape))

    def _flat(self, arrays: Sequence[NDArray[np.float32] | None]) -> NDArray[np.float32]:
        # A new array each time: the last one may still be on its way.
        flat = np.zeros(self._elements, np.float32)
        for array, place in zip(arrays, self._places, strict=True):
            if array is not None:
                flat[place] = array.reshape(-1)
        return flat


def dense_groups(
    client: Client,
    parameters: Sequence[tuple[paddle.Tensor, tables.Optimizer]],
    name_prefix: str,
) -> list[DenseGroup]:
    """Lay out parameters in as few tables as their optimizers and sizes allow.

    Args:
        client: Connected.
        parameters: Each with the optimizer that its table shall run.
        name_prefix: Comes before the table's name, which is that of its first parameter.

    Raises:
        ConfigError: A parameter is not float32.
    """
    lists: dict[tables.Optimizer, list[list[paddle.Tensor]]] = {}
    for parameter, optimizer in parameters:
        if parameter.dtype != paddle.float32:
            raise ConfigError(
                f"parameter {parameter.name} is {parameter.dtype}: the servers keep float32; "
                "train with paddle.amp.auto_cast instead of converting the parameters"
            )
        members = lists.setdefault(optimizer, [[]])
        size = sum(map(_elements, members[-1])) + _elements(parameter)
        if members[-1] and size > GROUP_ELEMENTS_MAX:
            members.append([])
        members[-1].append(parameter)
    return [
        DenseGroup(
            client,
            tables.TableSpec.dense(
                f"{name_prefix}{members[0].name}",
                [sum(map(_elements, members))],
                optimizer=optimizer,
            ),
            members,
        )
        for optimizer, groups in lists.items()
        for members in groups
    ]


def _elements(parameter: paddle.Tensor) -> int:
    return int(np.prod(parameter.shape, dtype=np.int64))
