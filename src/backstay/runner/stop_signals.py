"""The order to stop a job in good order: by a call, or by Ctrl-C and SIGTERM of a command.

The first signal is the order. A second one ends this process at once, and by their lifelines
(``backstay.lifeline``) all processes that it has started.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

from backstay.exit_codes import ExitCode

__all__ = ["StopOrder", "StopSignals"]

NUMBERS = (signal.SIGINT, signal.SIGTERM)


class StopOrder:
    """Whether a job is to stop, and why; safe to use from any thread."""

    def __init__(self) -> None:
        """Nothing is ordered yet."""
        self._asked = threading.Event()
        self.reason = ""

    @property
    def asked(self) -> bool:
        """Whether the order was given."""
        return self._asked.is_set()

    def ask(self, reason: str) -> None:
        """Give the order; the first reason counts."""
        if not self._asked.is_set():
            self.reason = reason
            self._asked.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the order is given, or the time is over; return whether it was given."""
        return self._asked.wait(timeout_s)


class StopSignals(StopOrder):
    """Takes the signals from ``with`` to its end; for the main thread."""

    def __init__(
        self,
        then: Callable[[], None] | None = None,
        last_words: Callable[[], str] | None = None,
    ) -> None:
        """Prepare.

        Args:
            then: Called by the handler of the first signal.
            last_words: Returns the line that the handler of the second signal writes to stderr.
        """
        super().__init__()
        self._then = then
        self._last_words = last_words
        self._before: list[object] = []

    def __enter__(self) -> StopSignals:
        self._before = [signal.signal(number, self._take) for number in NUMBERS]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in zip(NUMBERS, self._before, strict=True):
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if self._asked.is_set():
            try:
                self._say_last_words()
            finally:
                os._exit(ExitCode.STOPPED)
        self.ask("Ctrl-C" if number == signal.SIGINT else "SIGTERM")
        if self._then is not None:
            self._then()

    def _say_last_words(self) -> None:
        """Write them past Python's streams, which the interrupted code may have locked."""
        if self._last_words is None:
            return
        stderr = sys.stderr.fileno()
        # A reader that stands still must not hold up the end.
        _, writable, _ = select.select([], [stderr], [], 0)
        if writable:
            os.write(stderr, f"\n{self._last_words()}\n".encode())
