"""In which order a job goes over its tasks, and over the records of a task.

What the job's ``shuffle`` and ``seed`` mean for the order of tasks. Orders are functions of
seeds, the same everywhere and after every restart: a 64-bit mixer (splitmix64's finaliser) instead
of a generator has no state and gives any position at once. Imports numpy,
``backstay.schedule.rounds`` and ``backstay.job_spec``.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from backstay.job_spec import JobSpec
from backstay.schedule.rounds import RoundId, RoundKind

__all__ = [
    "order_seed",
    "permutation",
    "record_order_seed",
    "shuffle_seed",
    "task_order",
    "task_order_seed",
]

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
# What keeps the seeds of two kinds apart. They are part of what a restart must find again.
_KINDS = {
    RoundKind.TRAINING: 1,
    RoundKind.EVALUATION: 2,
    RoundKind.PREDICTION: 3,
    RoundKind.TRAIN_END: 4,
}


def task_order_seed(spec: JobSpec, round_id: RoundId) -> int | None:
    """Return the seed of the order of a round's tasks; None: as they are numbered.

    Those of a period are taken one after the other, so it has no other order.
    """
    if round_id.kind is not RoundKind.TRAINING or spec.shuffle == "none" or spec.is_stream:
        return None
    return order_seed(spec.seed, round_id)


def task_order(seed: int | None, size: int) -> Sequence[int]:
    """Return the numbers of ``size`` tasks in the order of a seed; see ``task_order_seed``."""
    return range(size) if seed is None else array("I", permutation(seed, size).tobytes())


def record_order_seed(spec: JobSpec, round_id: RoundId, task: int) -> int:
    """Return the seed of the order of a task's records; 0: as they are."""
    if round_id.kind is not RoundKind.TRAINING or spec.shuffle != "tasks_and_records":
        return 0
    return shuffle_seed(spec.seed, round_id, task)


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


def _mix(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def _seed(*numbers: int) -> int:
    seed = 0
    for number in numbers:
        seed = _mix((seed + _STEP + number) & _MASK)
    return seed >> 1  # a JSON reader keeps 63 bits
