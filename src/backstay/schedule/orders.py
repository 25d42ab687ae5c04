"""In which order a job goes over its tasks, and over the records of a task.

What the job's ``shuffle`` and ``seed`` mean for the order of tasks. Imports
``backstay.schedule``, ``backstay.job_spec`` and the standard library.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from backstay.job_spec import JobSpec
from backstay.schedule.rounds import RoundId, RoundKind
from backstay.schedule.seeds import order_seed, permutation, shuffle_seed

__all__ = ["record_order_seed", "task_order", "task_order_seed"]


def task_order_seed(spec: JobSpec, round_id: RoundId) -> int | None:
    """Return the seed of the order of a round's tasks; None: as they are numbered."""
    if round_id.kind is not RoundKind.TRAINING or spec.shuffle == "none":
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
