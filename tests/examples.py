"""How much of what could be tried `make test` tries; `make test-slow` tries the rest.

Hypothesis draws a tenth of a property's examples, or all of them where ``EXAMPLES=all`` asks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest

__all__ = ["examples", "few"]

SHARE = 1.0 if os.environ.get("EXAMPLES") == "all" else 0.1
# Fewer would hardly be a property.
FEWEST = 5


def examples(count: int) -> int:
    """Return this run's part of the examples of a property.

    Args:
        count: All of them.
    """
    return max(FEWEST, round(count * SHARE))


def few(count: int, cases: Sequence[Any]) -> list[Any]:
    """Return the cases of a test; all but the first so many are slow.

    For cases of which each takes seconds, and which differ little in what they try.
    """
    slow = [
        pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.slow)
        for one in cases[count:]
    ]
    return [*cases[:count], *slow]
