"""The engine of a job over the coordination store, in the job master.

What the engine stages goes to the journal, and calls wait here for something new. Belongs to one
event loop; decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from backstay.consensus.keys import JobKeys
from backstay.job_engine.engine import JobEngine
from backstay.job_engine.opened_job import OpenedJob
from backstay.master.journal import Journal

__all__ = ["Job"]


class Job(JobEngine):
    """One job, in its job master."""

    def __init__(
        self, opened: OpenedJob, keys: JobKeys, journal: Journal, clock: Callable[[], float]
    ) -> None:
        """Take the job over as its records say; see ``JobEngine``."""
        self.journal = journal
        self._changed = asyncio.Event()
        super().__init__(opened, keys, journal, clock)

    @property
    def changed(self) -> asyncio.Event:
        """Set when there may be something new for those who wait: tasks, rounds, the end."""
        return self._changed

    def notify(self) -> None:
        """Wake everybody who waits."""
        self._changed.set()
        self._changed = asyncio.Event()
