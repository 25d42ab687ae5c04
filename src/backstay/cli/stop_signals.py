"""Ctrl-C and SIGTERM of a command that has a job to end in good order.

The first one asks; a second one ends this process at once, and with it, by their lines
(``backstay.lifeline``), everything that it has started.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

from backstay.cli.exit_codes import EXIT_STOPPED

__all__ = ["StopSignals"]

NUMBERS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Takes the signals from ``with`` to its end; for the main thread."""

    def __init__(self, then: Callable[[], None] | None = None) -> None:
        """Prepare.

        Args:
            then: Called by the handler of the first signal.
        """
        self._then = then
        self._asked = threading.Event()
        self._before: list[object] = []
        self.reason = ""

    @property
    def asked(self) -> bool:
        """Whether a signal came."""
        return self._asked.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until a signal comes, or the time is over; return whether one has come."""
        return self._asked.wait(timeout_s)

    def __enter__(self) -> StopSignals:
        self._before = [signal.signal(number, self._take) for number in NUMBERS]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in zip(NUMBERS, self._before, strict=True):
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if self._asked.is_set():
            os._exit(EXIT_STOPPED)
        self.reason = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        self._asked.set()
        if self._then is not None:
            self._then()
