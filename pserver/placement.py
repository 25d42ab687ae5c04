"""Which node is master of each slot, computed from the number of nodes alone.

Pure: the same numbers give the same answer on every node, which is what lets a fixed cluster
do without anybody who decides. It imports numpy only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from backstay.errors import ConfigError

__all__ = ["place_masters", "shuffled_slots"]

# The finaliser of splitmix64. Any fixed bijection on 64 bits would do; this one is well mixed.
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)


def place_masters(slot_count: int, node_count: int) -> NDArray[np.uint16]:
    """Return uint16 [slot_count]: the index of the node that is master of each slot.

    The slots are shuffled by a fixed hash and dealt to the nodes in turn. Dealing balances
    masters to within one slot. The shuffle is there because a node spreads its slots over
    locks or threads by some simple rule on the slot's number: dealt in plain order, with two
    nodes, one node would get the even slots only, and with ranges the lower half only, so
    that for one rule or the other half of its locks or threads had nothing to do.

    Raises:
        ConfigError: There are more nodes than slots, or no node.
    """
    if not 1 <= node_count <= slot_count:
        raise ConfigError(
            f"peers: {node_count} nodes for {slot_count} slots; each node needs a slot at least"
        )
    masters = np.empty(slot_count, dtype=np.uint16)
    masters[shuffled_slots(slot_count)] = np.arange(slot_count) % node_count
    return masters


def shuffled_slots(slot_count: int) -> NDArray[np.int64]:
    """Return the slots in the fixed order in which they are dealt."""
    return np.argsort(_mixed(np.arange(slot_count, dtype=np.uint64)), kind="stable")


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return well-mixed numbers, all different where ``numbers`` are."""
    mixed = numbers + _INCREMENT
    for shift, multiplier in zip(_SHIFTS[:2], _MULTIPLIERS, strict=True):
        mixed = (mixed ^ (mixed >> shift)) * multiplier
    return mixed ^ (mixed >> _SHIFTS[2])
