"""How often tasks went wrong, and when it is too often.

Two counts for each task. A failure is the task's own fault, and few are too many. An attempt that
ends without one (the worker died, or gave the task back) is mostly the fault of something else;
but a task whose attempts end so again and again without one newly settled batch may be what kills
the workers. Kept in memory only: a new master counts anew. Imports ``master.core``.
"""

from __future__ import annotations

from backstay.master.core.holds import Failure, LedgerLimits

__all__ = ["Trouble"]

# After so many fruitless attempts in a row a task is tried after all others.
_FRUITLESS_AT_FRONT = 2


class Trouble:
    """The failures and the fruitless attempts of tasks that are not done."""

    def __init__(self, limits: LedgerLimits) -> None:
        self._limits = limits
        self._failures: dict[int, tuple[int, Failure]] = {}
        self._fruitless: dict[int, tuple[int, Failure]] = {}

    @property
    def tasks(self) -> set[int]:
        """The tasks in some trouble."""
        return self._failures.keys() | self._fruitless.keys()

    def failed(self, task: int, failure: Failure) -> None:
        """Count a failure."""
        count, _ = self._failures.get(task, (0, failure))
        self._failures[task] = (count + 1, failure)

    def fruitless(self, task: int, worker: str, why: str) -> None:
        """Count an attempt that ended without a failure and without a newly settled batch."""
        count = self._fruitless[task][0] + 1 if task in self._fruitless else 1
        error = f"{count} attempts in a row ended without a result; the last: {why}"
        self._fruitless[task] = (count, Failure(error, worker))

    def fruitful(self, task: int) -> None:
        """Begin the count of fruitless attempts anew."""
        self._fruitless.pop(task, None)

    def forget(self, task: int) -> None:
        """Begin both counts anew."""
        self._failures.pop(task, None)
        self._fruitless.pop(task, None)

    def comes_first(self, task: int) -> bool:
        """Return whether a task that came back may be tried before all others."""
        return task not in self._fruitless or self._fruitless[task][0] <= _FRUITLESS_AT_FRONT

    def is_last_chance_over(self, task: int, lapsed: int) -> bool:
        """Return whether a task is to be tried no more if its lapsed holds were in vain, too."""
        fruitless = self._fruitless[task][0] if task in self._fruitless else 0
        return lapsed > 0 and fruitless + lapsed > self._limits.max_fruitless

    def verdict(self, task: int) -> tuple[int, Failure] | None:
        """Return the number of failures and the reason to park a task; None if it may be tried."""
        if task not in self._failures and task not in self._fruitless:
            return None
        failures, failure = self._failures.get(task, (0, None))
        if failure is not None and failures > self._limits.max_retries:
            return failures, failure
        fruitless, why = self._fruitless.get(task, (0, None))
        if why is not None and fruitless > self._limits.max_fruitless:
            return failures, why
        return None
