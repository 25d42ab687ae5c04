"""The weights of a row before its first push. Imports ``backstay.tables.part`` only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from backstay.tables.part import Part


class Initializer(Part, at="initializer"):
    """Base of what gives a row its first weights."""


@dataclass(frozen=True)
class Zeros(Initializer, name="zeros"):
    """All weights 0."""


@dataclass(frozen=True)
class Constant(Initializer, name="constant"):
    """All weights ``value``."""

    value: float


@dataclass(frozen=True)
class Uniform(Initializer, name="uniform"):
    """Uniform in [low, high]."""

    low: float
    high: float


@dataclass(frozen=True)
class Normal(Initializer, name="normal"):
    """Normal with this mean and standard deviation."""

    mean: float = 0.0
    std: float = 0.01


@dataclass(frozen=True)
class TruncatedNormal(Initializer, name="truncated_normal"):
    """Normal, cut at two standard deviations from the mean.

    ``std`` is that of the uncut distribution, as in Paddle and TensorFlow; what is left has
    0.88 times it.
    """

    mean: float = 0.0
    std: float = 0.01


@dataclass(frozen=True)
class Xavier(Initializer, name="xavier"):
    """Scaled by the sizes of the layers that the weights connect.

    Uniform within ``gain * sqrt(6 / (fan_in + fan_out))`` of 0, or normal with standard
    deviation ``gain * sqrt(2 / (fan_in + fan_out))``.

    Source: X. Glorot and Y. Bengio, "Understanding the difficulty of training deep
    feedforward neural networks", AISTATS 2010, section 4.2.1.
    """

    fan_in: int
    fan_out: int
    gain: float = 1.0
    distribution: Literal["uniform", "normal"] = "uniform"
