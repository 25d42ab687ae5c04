"""The weights of a row before its first push. Imports ``backstay.tables.checks`` only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from backstay.tables.checks import MAX_FAN, check_choice, check_integer, check_number


@dataclass(frozen=True)
class Zeros:
    """All weights 0."""


@dataclass(frozen=True)
class Constant:
    """All weights ``value``."""

    value: float

    def __post_init__(self) -> None:
        check_number(self, "value")


@dataclass(frozen=True)
class Uniform:
    """Uniform in [low, high]."""

    low: float
    high: float

    def __post_init__(self) -> None:
        check_number(self, "low")
        check_number(self, "high", self.low)


@dataclass(frozen=True)
class Normal:
    """Normal with this mean and standard deviation."""

    mean: float = 0.0
    std: float = 0.01

    def __post_init__(self) -> None:
        check_number(self, "mean")
        check_number(self, "std", 0.0)


@dataclass(frozen=True)
class TruncatedNormal:
    """Normal, cut at two standard deviations from the mean.

    ``std`` is that of the uncut distribution, as in Paddle and TensorFlow; what is left has
    0.88 times it.
    """

    mean: float = 0.0
    std: float = 0.01

    def __post_init__(self) -> None:
        check_number(self, "mean")
        check_number(self, "std", 0.0)


@dataclass(frozen=True)
class Xavier:
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

    def __post_init__(self) -> None:
        check_integer(self, "fan_in", 1, MAX_FAN)
        check_integer(self, "fan_out", 1, MAX_FAN)
        check_number(self, "gain", 0.0)
        check_choice(self, "distribution", ("uniform", "normal"))


Initializer: TypeAlias = Zeros | Constant | Uniform | Normal | TruncatedNormal | Xavier
