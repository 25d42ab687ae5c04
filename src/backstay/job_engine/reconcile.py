"""What the records of a round mean where the schedule is ahead of them.

A master may die between two groups of its journal. The schedule may then say that a round is over
while the last bits of its tasks, or why some are dead-lettered, were not written; or its records
may be removed in part. The schedule is believed: it was over. Imports ``backstay.schedule`` and
``job_engine``; does no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence

from backstay.job_engine.task_bits import TaskBits
from backstay.job_engine.values import DeadLetter, Failure
from backstay.schedule.rounds import RoundId, RoundKind
from backstay.schedule.schedule import Schedule

__all__ = ["is_over", "reconcile"]

_UNKNOWN = Failure("a master died before it had recorded what was wrong with it", "")


def is_over(schedule: Schedule, round_id: RoundId) -> bool:
    """Return whether all tasks of a round are done or dead-lettered, as the schedule has it.

    A training pass that was cut short is not over, and neither is one that has yet to begin.
    """
    if round_id in schedule.open_rounds:
        return False
    return round_id.kind is not RoundKind.TRAINING or round_id.number <= schedule.passes_over


def reconcile(
    schedule: Schedule, round_id: RoundId, done: TaskBits, dead_letters: Sequence[DeadLetter]
) -> tuple[TaskBits, list[DeadLetter]]:
    """Return which tasks of a round are done and dead-lettered.

    Args:
        schedule: Where the job is.
        round_id: Which round.
        done: As it is recorded.
        dead_letters: Likewise.
    """
    if not is_over(schedule, round_id):
        return done, list(dead_letters)
    if round_id not in schedule.dead_letters:
        return TaskBits.full(done.size), []
    # To try again what was done does no harm: its batches are known on the servers.
    known = {one.task for one in dead_letters}
    lost = (task for task in range(done.size) if task not in done and task not in known)
    return done, [*dead_letters, *(DeadLetter(task, 0, _UNKNOWN, 0) for task in lost)]
