"""Bounded mode: no worker gets more than so many steps ahead of the slowest one.

Each worker keeps its clock, the number of its steps, in a row of a table of the job; who is
ahead waits until the others have caught up (Ho et al., "More Effective Distributed ML via a Stale
Synchronous Parallel Parameter Server", section 3). Which workers count is the job master's to say:
the workers that lease a task of the pass. May import the client and numpy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

import numpy as np

from backstay.backoff import Backoff
from backstay.errors import TaskLeaseLost
from backstay.tables import SGD, TableSpec, Zeros
from backstay.trainer.client import Client

__all__ = ["StalenessGate", "clock_of", "row_of"]

# A float32 counts to 2**24 exactly: a clock stands in two of them.
LIMB = 1 << 24
LOOK = Backoff(first_s=0.001, longest_s=0.02)
# A worker that took longer than this for a step looks how far the others are.
CATCH_UP_S = 1.0


def row_of(clock: int) -> list[float]:
    """Return a clock, below 2**48, as a row."""
    return [float(clock // LIMB), float(clock % LIMB)]


def clock_of(row: np.ndarray) -> int:
    """Return the clock that ``row_of`` wrote."""
    return int(row[0]) * LIMB + int(row[1])


class StalenessGate:
    """One worker's clock, and the wait for those of the others.

    A row holds the clock plus one; 0 stands for a worker that has not begun.
    """

    def __init__(
        self,
        client: Client,
        table_name: str,
        own: int,
        staleness: int,
        *,
        others: Callable[[], Collection[int]],
        is_unwanted: Callable[[], bool],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare, create the table of the clocks if it is not there, and take no part yet.

        Args:
            client: Connected.
            table_name: The same in all workers of the job.
            own: This worker's clock; the key of its row.
            staleness: Most steps that it may be ahead.
            others: The clocks of the workers that are to be waited for, as the job master said
                last; its own among them or not.
            is_unwanted: Whether the task is another worker's by now, or this worker is to end.
            now: Seconds on a clock that never goes back.
        """
        spec = TableSpec.sparse(table_name, 2, optimizer=SGD(1.0), initializer=Zeros())
        self._client = client
        self._table = client.create_table(spec)
        self._own = own
        self._staleness = staleness
        self._others = others
        self._is_unwanted = is_unwanted
        self._now = now
        self._pause = threading.Event()
        self.clock = 0
        # Clocks only grow, so what was the least once is a bound for ever; of a changed set of
        # workers it is not.
        self._least = 0
        self._of: frozenset[int] = frozenset()
        self._stepped_s = now()
        # What a process that had this name before wrote is of no use.
        self._write(0)

    def begin_task(self, others: Collection[int]) -> None:
        """Take part: begin where the slowest one is, so that no worker waits for this one.

        Args:
            others: The clocks of all that have a task, its own among them or not.
        """
        clocks = self._read(others)
        if clocks:
            # The slowest clock may be left over from a worker's earlier task, so it is no lower
            # bound.
            self.clock = max(self.clock, min(clocks), self._behind(clocks))
        self._write(self.clock + 1)
        self._stepped_s = self._now()

    def step(self) -> None:
        """Count a step that is about to begin, and wait until it may.

        Raises:
            TaskLeaseLost: The task is unwanted meanwhile.
            BackstayError: The clocks cannot be read or written; see ``Client.pull``.
        """
        if self._now() - self._stepped_s > CATCH_UP_S:
            # The others may have gone on without this one: no worker is to wait until it has done
            # what they have done.
            clocks = self._read(self._others())
            self.clock = max(self.clock, self._behind(clocks))
        self.clock += 1
        self._write(self.clock + 1)
        looks = LOOK.begin()
        while self.clock - self._known_least() > self._staleness:
            if self._is_unwanted():
                raise TaskLeaseLost(
                    "the task was taken away, or this worker is to end, while it waited"
                )
            self._least = min(self._read(self._others()), default=self.clock)
            if self.clock - self._least > self._staleness:
                self._pause.wait(looks.next_s())
        self._stepped_s = self._now()

    def _behind(self, clocks: Collection[int]) -> int:
        """Return the lowest clock that a worker can have which the others have waited for."""
        # Who waits has counted the step that it is about to begin.
        return max(clocks, default=0) - self._staleness - 1

    def _known_least(self) -> int:
        now = frozenset(self._others()) - {self._own}
        if now != self._of:
            self._of = now
            self._least = 0
        return self._least if now else self.clock

    def _read(self, workers: Collection[int]) -> list[int]:
        """Return the clocks of others, as far as they have begun."""
        others = sorted(frozenset(workers) - {self._own})
        if not others:
            return []
        rows = self._client.pull(self._table, np.array(others, np.uint64))
        return [clock - 1 for clock in map(clock_of, rows) if clock]

    def _write(self, clock: int) -> None:
        row = np.array([row_of(clock)], np.float32)
        self._client.assign(self._table, np.array([self._own], np.uint64), row)
