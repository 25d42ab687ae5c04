"""What tells where training data without an end begin and end now.

A source is made of *parts*, each with records numbered from 0 that only become more: the partitions
of topics (``clicks/3``), or the files of folders that are closed. The job takes ranges of them.
Imports nothing of this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

__all__ = ["Source", "SourceLook"]


class SourceLook(NamedTuple):
    """What a source has now.

    Attributes:
        ends: The first record and the one after the last of each part; None: it is there, and
            nobody can tell now.
        folders: Closed folders that are not over, in the order in which they are taken, each with
            its files, which are parts; None: the source has no folders.
        waiting_folders: Closed folders whose records are not counted yet.
        trouble: What is wrong with some of it, for people; empty: nothing.
    """

    ends: Mapping[str, tuple[int, int] | None]
    folders: Mapping[str, tuple[str, ...]] | None = None
    waiting_folders: int = 0
    trouble: str = ""


class Source(Protocol):
    """Tells where data without an end begin and end now. Its calls block.

    One thread may call ``start`` and ``look``, another one ``oldest_s`` and ``commit``.
    """

    def start(self) -> dict[str, int]:
        """Return where a new job begins: the next record of each part; not empty.

        Raises:
            DataUnavailable: It does not answer.
            ConfigError: An option is wrong.
        """

    def look(self, positions: Mapping[str, int]) -> SourceLook:
        """Return what it has.

        Args:
            positions: The next record of each part that the job takes.

        Raises:
            DataUnavailable: It does not answer.
            DataDamaged: What it has is not of its format.
        """

    def oldest_s(self, offsets: Mapping[str, int]) -> float | None:
        """Return when the oldest of some records came, in Unix time; None: it is not known.

        Args:
            offsets: One record of each part.

        Raises:
            DataUnavailable: It does not answer.
        """

    def commit(self, offsets: Mapping[str, int]) -> None:
        """Show others how far the job is, if the job says where; nothing reads it back.

        Args:
            offsets: Of each part the record below which all are done.

        Raises:
            DataUnavailable: It could not be shown.
        """

    def close(self) -> None:
        """Close the connections."""
