"""What a ledger would have the journal write, as whole values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from backstay.job_engine.ledger import TaskLedger
from backstay.job_engine.values import DeadLetter, WorkerRecord


@dataclass(frozen=True)
class Changes:
    """What differs from the journal. Writing it twice does no harm.

    Attributes:
        done: Chunk number -> all tasks done of that chunk, as ``TaskBits.chunk`` writes them.
        workers: Worker -> its record; an empty one stands for "delete the record".
        dead_letters: Task -> its record; None stands for "delete the record".
    """

    done: Mapping[int, str]
    workers: Mapping[str, WorkerRecord]
    dead_letters: Mapping[int, DeadLetter | None]

    def __bool__(self) -> bool:
        return bool(self.done or self.workers or self.dead_letters)


def take_changes(ledger: TaskLedger) -> Changes:
    """Return what differs from the journal, with its values, and take it for written."""
    changed = ledger.take_changed()
    return Changes(
        {number: ledger.done.chunk(number) for number in changed.chunks},
        {worker: ledger.record_of(worker) for worker in changed.workers},
        {task: ledger.dead_letters.get(task) for task in changed.dead_letters},
    )
