"""The steps that a trainer counts for tables whose optimizer has ``steps="global"``.

The servers leave the bias correction of such a table to the trainer, which has it in the learning
rate scale of each push: so every replica, and every retry, has the same (docs/adr/0014). Imports
``backstay.trainer.table`` only; never touches the network.
"""

from __future__ import annotations

import threading

from backstay.trainer.table import Table


class PushSteps:
    """Counts update pushes by table, from 1; safe to use from many threads.

    Attributes:
        done: Steps that all trainers have done so far, as far as this one was told.
    """

    def __init__(self) -> None:
        """Begin at 0."""
        self.done = 0
        self._pushed: dict[int, int] = {}
        self._lock = threading.Lock()

    def correction(self, table: Table) -> float:
        """Count a push to a table; return the factor of its learning rate."""
        with self._lock:
            step = max(self._pushed.get(table.id, 0), self.done) + 1
            self._pushed[table.id] = step
        return table.spec.optimizer.correction(step)
