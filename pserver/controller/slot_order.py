"""The order in which slots are dealt to nodes.

A node spreads its slots over locks or threads by some simple rule on the slot's number. Dealt in
plain order to two nodes, one node would get the even slots only, and in ranges the lower half
only, so that for one rule or the other half of its locks or threads had nothing to do. Hence a
fixed shuffle. Pure; imports numpy only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["shuffled_slots"]

# The finaliser of splitmix64. Any fixed bijection on 64 bits would do; this one is well mixed.
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)


def shuffled_slots(slot_count: int) -> NDArray[np.int64]:
    """Return the slots in the fixed order in which they are dealt."""
    return np.argsort(_mixed(np.arange(slot_count, dtype=np.uint64)), kind="stable")


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return well-mixed numbers, all different where ``numbers`` are."""
    mixed = numbers + _INCREMENT
    for shift, multiplier in zip(_SHIFTS[:2], _MULTIPLIERS, strict=True):
        mixed = (mixed ^ (mixed >> shift)) * multiplier
    return mixed ^ (mixed >> _SHIFTS[2])
