"""The limits of table descriptions, and checks of dataclass fields against them.

The servers enforce the same limits (crates/backstay-core/src/spec/check.rs). Imports
``backstay.errors`` only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from backstay.errors import ConfigError

MAX_DIM = 65_536
MAX_BLOCK_ELEMENTS = 1_048_576
MAX_DENSE_ELEMENTS = 1 << 40
MAX_RANK = 16
MAX_FAN = 1 << 40
MIN_EPSILON = 1e-30
MAX_NUMBER = 1e30


def check_integer(owner: object, name: str, low: int, high: int) -> None:
    """Refuse a field that is not an integer in [low, high]; NumPy's integers become int."""
    value = getattr(owner, name)
    try:
        # True is an int to Python, but it is no size.
        number = None if isinstance(value, bool) else int(value.__index__())
    except AttributeError:
        number = None
    if number is None or not low <= number <= high:
        where = f"{type(owner).__name__}.{name}"
        raise ConfigError(f"{where} is {value!r}; allowed: an integer from {low} to {high}")
    object.__setattr__(owner, name, number)


def check_number(
    owner: object, name: str, low: float = -MAX_NUMBER, high: float = MAX_NUMBER
) -> None:
    """Refuse a field that is not a number in [low, high]; NaN never is."""
    where = f"{type(owner).__name__}.{name}"
    object.__setattr__(owner, name, number_in(where, getattr(owner, name), low, high))


def number_in(where: str, value: Any, low: float = -MAX_NUMBER, high: float = MAX_NUMBER) -> float:
    """Return a value as a float; refuse one that is not a number in [low, high]."""
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not low <= number <= high:
        raise ConfigError(f"{where} is {value!r}; allowed: a number from {low!r} to {high!r}")
    return number


def check_fraction(owner: object, name: str) -> None:
    """Refuse a field that is not a number in [0, 1)."""
    check_number(owner, name, 0.0, math.nextafter(1.0, 0.0))


def check_flag(owner: object, name: str) -> None:
    """Refuse a field that is not True or False."""
    value = getattr(owner, name)
    if not isinstance(value, bool):
        where = f"{type(owner).__name__}.{name}"
        raise ConfigError(f"{where} is {value!r}; allowed: True or False")


def check_choice(owner: object, name: str, allowed: Sequence[str]) -> None:
    """Refuse a field that is none of the allowed words."""
    value = getattr(owner, name)
    if value not in allowed:
        where = f"{type(owner).__name__}.{name}"
        raise ConfigError(f"{where} is {value!r}; allowed: {', '.join(allowed)}")
