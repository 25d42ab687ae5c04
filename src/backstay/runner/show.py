"""How a running job is shown: what the runner tells, and one way that needs no terminal.

The command shows it live (``backstay.cli.progress``), the Python calls log it.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Protocol

from backstay._proto.v1 import job_pb2
from backstay.runner.status_words import figures_text, notes_text, round_text

__all__ = ["Lines", "Servers", "Show"]

LINE_PAUSE_S = 10.0


@dataclass(frozen=True)
class Servers:
    """The parameter servers: how many serve, of how many; None: not known."""

    alive: int | None = None
    total: int | None = None

    def __str__(self) -> str:
        """Return it for people."""
        return "?" if self.alive is None else f"{self.alive}/{self.total}"


class Show(Protocol):
    """Shows a job; all calls come from one thread."""

    def __enter__(self) -> object:
        """Begin to show what changes."""

    def __exit__(self, *_: object) -> None:
        """End it."""

    def say(self, text: str) -> None:
        """Show a sentence."""

    def update(self, status: job_pb2.JobStatus, servers: Servers, trouble: str = "") -> None:
        """Show the figures.

        Args:
            status: As the job master told it last.
            servers: How many serve.
            trouble: Why there are no newer figures; empty: these are new.
        """


class Lines:
    """Shows a job as plain lines on standard error, one now and then."""

    def __init__(self) -> None:
        """Begin with the first status."""
        self._next_line_s = 0.0
        self._last_round = ""

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        """Lines need no end."""

    def say(self, text: str) -> None:
        """Write a line."""
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def update(self, status: job_pb2.JobStatus, servers: Servers, trouble: str = "") -> None:
        """Write a line, if a new round has begun or the last one is old."""
        now_s = time.monotonic()
        if now_s < self._next_line_s and round_text(status) == self._last_round:
            return
        self._next_line_s = now_s + LINE_PAUSE_S
        self._last_round = round_text(status)
        self.say(_line(status, servers, notes_text(status, trouble)))


def _line(status: job_pb2.JobStatus, servers: Servers, trouble: str) -> str:
    tasks = status.tasks
    done = f": tasks {tasks.done}/{tasks.total}" if tasks.total else ""
    parts = [round_text(status) + done]
    parts += [f"{name} {value}" for name, value in figures_text(status, str(servers))]
    return ", ".join(parts) + (f" ({trouble})" if trouble else "")
