"""How ``pserverctl`` prints for people: tables as wide as they are, sizes, lines without markup.

It knows no command and makes no call.
"""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

__all__ = ["count_text", "grid", "print_whole", "size_text"]

WIDTH_MAX = 10_000


def grid(*titles: str, narrow: bool = False) -> Table:
    """Return an empty table with these columns, in which no cell is broken.

    Args:
        titles: Of the columns.
        narrow: Leave less room between them.
    """
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0) if narrow else (0, 1))
    for title in titles:
        table.add_column(title, no_wrap=True)
    return table


def print_whole(console: Console, table: Table) -> None:
    """Print a table as wide as it is: an address in two halves cannot be copied."""
    unlimited = console.options.update(width=WIDTH_MAX)
    console.width = max(console.width, console.measure(table, options=unlimited).maximum)
    console.print(table)


def count_text(count: float) -> str:
    """Return a number for people, to three digits or four."""
    if abs(count) < 10:
        return f"{count:.3g}"
    for unit in ("", " k", " M"):
        if abs(count) < 10_000:
            return f"{count:.0f}{unit}"
        count /= 1000
    return f"{count:.0f} G"


def size_text(size_bytes: float) -> str:
    """Return a number of bytes for people."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
