"""A PyTorch parameter as flat numbers in main memory. May import torch and numpy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from backstay.errors import ConfigError
from backstay.trainer.torch.lookup import as_gradient

__all__ = ["TorchParameter"]


@dataclass(frozen=True)
class TorchParameter:
    """One parameter of a model; see ``backstay.trainer.adapter.dense.DenseParameter``.

    Attributes:
        tensor: The parameter, on any device.
        name: PyTorch gives parameters none: its place in the optimizer.
        decay: The factor of its numbers that is added to its gradient.

    Raises:
        ConfigError: It is not float32.
    """

    tensor: torch.Tensor
    name: str
    decay: float = 0.0

    def __post_init__(self) -> None:
        if self.tensor.dtype != torch.float32:
            raise ConfigError(
                f"parameter {self.name} of the optimizer, of shape {tuple(self.tensor.shape)}, is "
                f"{self.tensor.dtype}: the servers keep float32; train with torch.autocast "
                "instead of converting the parameters"
            )

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return int(self.tensor.numel())

    def value(self) -> NDArray[np.float32]:
        """Return its numbers as they are now."""
        numbers: NDArray[np.float32] = self.tensor.detach().cpu().numpy()
        return numbers

    def load(self, values: NDArray[np.float32]) -> None:
        """Replace its numbers by these, [elements]."""
        with torch.no_grad():
            self.tensor.copy_(torch.from_numpy(values).view(self.tensor.shape))

    def take_gradient(self) -> NDArray[np.float32] | None:
        """Return its gradient, decay included, as an array of its own, and forget it."""
        gradient, self.tensor.grad = self.tensor.grad, None
        if gradient is None:
            return None
        if self.decay:
            gradient = gradient + self.decay * self.tensor.detach()
        return as_gradient(gradient)
