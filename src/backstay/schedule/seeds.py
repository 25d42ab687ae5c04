"""Random orders as functions of seeds: the same everywhere, after every restart.

A 64-bit mixer (splitmix64's finaliser) instead of a generator: no state, any position at once.
Imports numpy and ``backstay.schedule.rounds``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from backstay.schedule.rounds import RoundId, RoundKind

__all__ = ["order_seed", "permutation", "shuffle_seed"]

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
# What keeps the seeds of two kinds apart. They are part of what a restart must find again.
_KINDS = {
    RoundKind.TRAINING: 1,
    RoundKind.EVALUATION: 2,
    RoundKind.PREDICTION: 3,
    RoundKind.TRAIN_END: 4,
}


def _mix(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def _seed(*numbers: int) -> int:
    seed = 0
    for number in numbers:
        seed = _mix((seed + _STEP + number) & _MASK)
    return seed >> 1  # a JSON reader keeps 63 bits


def order_seed(job_seed: int, round_id: RoundId) -> int:
    """Return the seed of the order in which a round's tasks are handed out, 63 bits."""
    return _seed(job_seed, _KINDS[round_id.kind], round_id.number)


def shuffle_seed(job_seed: int, round_id: RoundId, task: int) -> int:
    """Return the seed of the order of records within a task, 63 bits.

    The same for every attempt, so every worker makes the same batches of the task.
    """
    return _seed(job_seed, _KINDS[round_id.kind], round_id.number, task + 1)


def permutation(seed: int, size: int) -> npt.NDArray[np.uint32]:
    """Return the numbers below ``size`` (at most 2**32) in an order that depends on the seed.

    Returns:
        Shape (size,).
    """
    keys = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(_STEP) + np.uint64(
        _mix(seed & _MASK)
    )
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    keys ^= keys >> np.uint64(31)
    # The mixer maps no two numbers to one, so the order does not depend on the kind of sort.
    return np.argsort(keys).astype(np.uint32)
