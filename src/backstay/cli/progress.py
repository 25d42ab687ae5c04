"""How a running job is shown on a terminal: a live table; elsewhere plain lines.

The display goes to standard error, because standard output belongs to the command's result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from backstay._proto.v1 import job_pb2
from backstay.runner.show import Lines, Servers
from backstay.runner.status_words import figures_text, notes_text, round_text

__all__ = ["Display"]


class Display(Lines):
    """Shows a job from ``with`` to its end: live on a terminal, else as lines."""

    def __init__(self, job: str, *, console: Console | None = None) -> None:
        """Prepare.

        Args:
            job: Its name.
            console: Default: standard error.
        """
        super().__init__()
        self._job = job
        self._console = console or Console(stderr=True)
        self._live: Live | None = None
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=40),
            TextColumn("{task.fields[of]}"),
        )
        self._task: TaskID = self._bar.add_task(job, total=None, of="")

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live = Live(Text(), console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the terminal as it was."""
        if self._live is not None:
            self._live.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the terminal to a question, inside ``with``."""
        is_live = self._live is not None
        if self._live is not None:
            self._live.stop()
            self._live = None
        yield
        if is_live:
            self.__enter__()

    def say(self, text: str) -> None:
        """Show a sentence, above what is live."""
        self._console.print(Text(text), soft_wrap=True)

    def update(self, status: job_pb2.JobStatus, servers: Servers, trouble: str = "") -> None:
        """Show the figures."""
        if self._live is None:
            super().update(status, servers, trouble)
        else:
            self._live.update(self._picture(status, servers, notes_text(status, trouble)))

    def _picture(self, status: job_pb2.JobStatus, servers: Servers, notes: str) -> RenderableType:
        tasks = status.tasks
        self._bar.update(
            self._task,
            description=f"{self._job}  {round_text(status)}",
            completed=tasks.done,
            total=tasks.total or None,
            of=f"{tasks.done:,}/{tasks.total:,} tasks",
        )
        figures = Table.grid(padding=(0, 2))
        for name, value in figures_text(status, str(servers)):
            figures.add_row(Text(name, style="dim"), Text(value))
        below = [Text(notes, style="yellow")] if notes else []
        return Group(self._bar, figures, *below)
