"""Where the engine stages the records of a job.

The job master gives the outbox of its journal. A job in one process gives ``MemoryRecords``.
Imports the standard library only; does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["MemoryRecords", "Records"]


class Records(Protocol):
    """Takes records that are to be written, in the order in which they were staged first."""

    def stage(self, key: str, render: Callable[[], str | None]) -> None:
        """Have a record written soon.

        Args:
            key: Its key.
            render: Called when it is taken, perhaps more than once; None: the key goes.
        """

    def stage_first(self, key: str, render: Callable[[], str | None]) -> None:
        """Have a record written before all that is not written by now, or with it."""

    def stage_text(self, key: str, text: str) -> None:
        """Have a record written soon, as it is."""

    def stage_removal(self, key: str) -> None:
        """Have a record removed soon."""


class MemoryRecords:
    """The records of a job that ends with its process: none is written."""

    def stage(self, key: str, render: Callable[[], str | None]) -> None:
        """Keep nothing: the engine's own state is the record."""

    def stage_first(self, key: str, render: Callable[[], str | None]) -> None:
        """Keep nothing."""

    def stage_text(self, key: str, text: str) -> None:
        """Keep nothing."""

    def stage_removal(self, key: str) -> None:
        """Keep nothing."""
