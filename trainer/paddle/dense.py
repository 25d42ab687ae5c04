"""A Paddle parameter as flat numbers in main memory. May import paddle and numpy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import paddle
from numpy.typing import NDArray

from backstay.errors import ConfigError

__all__ = ["PaddleParameter"]


@dataclass(frozen=True)
class PaddleParameter:
    """One parameter of a model; see ``backstay.trainer.adapter.dense.DenseParameter``.

    Raises:
        ConfigError: It is not float32.
    """

    tensor: paddle.Tensor

    def __post_init__(self) -> None:
        if self.tensor.dtype != paddle.float32:
            raise ConfigError(
                f"parameter {self.tensor.name} is {self.tensor.dtype}: the servers keep float32; "
                "train with paddle.amp.auto_cast instead of converting the parameters"
            )

    @property
    def name(self) -> str:
        """The name that Paddle gave it."""
        return str(self.tensor.name)

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return int(np.prod(self.tensor.shape, dtype=np.int64))

    def value(self) -> NDArray[np.float32]:
        """Return its numbers as they are now."""
        numbers: NDArray[np.float32] = self.tensor.numpy()
        return numbers

    def load(self, values: NDArray[np.float32]) -> None:
        """Replace its numbers by these, [elements]."""
        self.tensor.set_value(values.reshape(self.tensor.shape))
