"""Finds the keys of a topic that have no row any more, in little memory, with files.

It writes keys and what became of them to files by hash, and reads back one file after the other.
That takes 16 bytes of disk for each message of the topic and each new row, and a 256th of it in
memory, and some MiB.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["KeyLedger"]

FILES = 256
# Entries that are kept until they are written: 1 MiB.
KEPT = 65_536

_ENTRY = np.dtype([("key", "<u8"), ("table", "<u4"), ("stays", "<u4")])
_MIX = np.uint64(0x9E37_79B9_7F4A_7C15)


class KeyLedger:
    """What became of keys, the later word counts. A context manager; for one thread."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="backstay-topic-")
        self._kept: list[NDArray[Any]] = []
        self._count = 0

    def __enter__(self) -> KeyLedger:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._folder.cleanup()

    def note(
        self, table: int, keys: NDArray[np.uint64], *, stays: bool | NDArray[np.bool_]
    ) -> None:
        """Note of keys, each, that they need nothing (``stays``), or are to go.

        Raises:
            OSError: The disk is full.
        """
        flags = np.broadcast_to(np.asarray(stays), len(keys))
        for first in range(0, len(keys), KEPT):
            some = slice(first, first + KEPT)
            entries = np.empty(len(keys[some]), _ENTRY)
            entries["key"], entries["table"], entries["stays"] = keys[some], table, flags[some]
            self._kept.append(entries)
            self._count += len(entries)
            if self._count >= KEPT:
                self._write()

    def gone(self) -> Iterator[tuple[int, NDArray[np.uint64]]]:
        """Yield the keys whose last word was that they are to go, by table.

        Raises:
            OSError: The disk is full, or cannot be read.
        """
        self._write()
        for path in sorted(Path(self._folder.name).iterdir()):
            entries = np.fromfile(path, _ENTRY)
            order = np.lexsort((np.arange(len(entries)), entries["key"], entries["table"]))
            entries = entries[order]
            same = (entries["key"][1:] == entries["key"][:-1]) & (
                entries["table"][1:] == entries["table"][:-1]
            )
            last = entries[np.append(~same, True)]
            going = last[last["stays"] == 0]
            for table in np.unique(going["table"]).tolist():
                yield table, going["key"][going["table"] == table].astype(np.uint64)

    def _write(self) -> None:
        if not self._count:
            return
        entries = np.concatenate(self._kept)
        self._kept, self._count = [], 0
        files = (entries["key"] * _MIX >> np.uint64(56)).astype(np.int64)
        order = np.argsort(files, kind="stable")
        entries, files = entries[order], files[order]
        ends = np.searchsorted(files, np.arange(FILES + 1))
        for number in np.unique(files).tolist():
            with (Path(self._folder.name) / f"{number:03d}").open("ab") as file:
                file.write(entries[ends[number] : ends[number + 1]].tobytes())
