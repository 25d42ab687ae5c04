"""Text files as numbered records: a sparse index of offsets, built as far as it is needed.

The index of a file holds the offset of every 1024th record, 8 bytes each. Building it is one pass
over the content at the speed of finding line ends (some GB/s of plain text, as fast as gzip
decompresses otherwise), from the beginning to the last record that was asked for. Reading a range
then enters the file at most 1023 records before it; a gzip file at one of at most 32 kept entries.
Each process builds its own.

Imports ``backstay.data.files``, ``streams`` and ``splitting``, and the errors.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator

from backstay.data.base import check_range
from backstay.data.files import DataFile, KnownSizes
from backstay.data.splitting import Piece, Quoting, pieces
from backstay.data.streams import ContentStream, open_stream
from backstay.errors import DataDamaged

__all__ = ["TextFile", "TextFiles", "first_record"]

INDEX_STEP = 1024
# A stream of gzip keeps entries of some MiB; an index is small and is kept for every file.
STREAMS_MAX = 64


class TextFiles:
    """The text files that this process has read, by name, with their indexes."""

    def __init__(self, quoting: Quoting | None) -> None:
        self._quoting = quoting
        self._sizes = KnownSizes()
        self._files: dict[str, TextFile] = {}
        self._streams: OrderedDict[str, ContentStream] = OrderedDict()
        self._lock = threading.Lock()

    def stream(self, file: DataFile) -> ContentStream:
        """Return a file's content.

        Raises:
            DataChanged: The file has another size than when it was first read.
            DataUnavailable: It cannot be read.
        """
        self._sizes.check(file)
        with self._lock:
            stream = self._streams.pop(file.name, None)
        stream = stream or open_stream(file)
        with self._lock:
            self._streams[file.name] = stream
            if len(self._streams) > STREAMS_MAX:
                self._streams.popitem(last=False)
        return stream

    def known(self, file: DataFile) -> TextFile | None:
        """Return the file with its index, if it was added; its size is checked.

        Raises:
            DataChanged, DataUnavailable: As with ``stream``.
        """
        found = self._files.get(file.name)
        if found is not None:
            found.stream = self.stream(file)
        return found

    def add(self, file: DataFile, first_offset: int) -> TextFile:
        """Return the file with an index to be built; its records begin at that offset."""
        added = TextFile(file.name, self.stream(file), first_offset, self._quoting)
        with self._lock:
            return self._files.setdefault(file.name, added)


class TextFile:
    """One file's records by number. Threads may share it."""

    def __init__(
        self, name: str, stream: ContentStream, first_offset: int, quoting: Quoting | None
    ) -> None:
        self.name = name
        self.stream = stream
        self._quoting = quoting
        self._lock = threading.Lock()
        # Invariant: offsets[i] is where record i * INDEX_STEP begins, for each such i with
        # i * INDEX_STEP <= _records; record number _records begins at or after _scanned_to.
        self._offsets = [first_offset]
        self._records = 0
        self._scanned_to = first_offset
        self._is_complete = False

    def total(self) -> int:
        """Return the number of records; reads the file to its end the first time."""
        self._scan(None)
        return self._records

    def read(self, start: int, count: int) -> Iterator[Piece]:
        """Yield the records of a range, in pieces.

        Raises:
            DataChanged: The file has fewer records.
            DataUnavailable: It cannot be read.
            DataDamaged: A line is too long for text.
        """
        check_range(self.name, start, count)
        self._scan(start + count)
        check_range(self.name, start, count, self._records if self._is_complete else None)
        if not count:
            return
        entry = start // INDEX_STEP
        place = entry * INDEX_STEP
        stop = start + count
        for piece in self.pieces(self._offsets[entry]):
            first, after = max(0, start - place), min(len(piece), stop - place)
            if first < after:
                yield piece.part(first, after)
            place += len(piece)
            if place >= stop:
                return

    def _scan(self, until: int | None) -> None:
        """Extend the index to that many records, or to the end."""
        with self._lock:
            if self._is_complete or (until is not None and self._records >= until):
                return
            for piece in self.pieces(self._scanned_to):
                following = len(self._offsets) * INDEX_STEP
                for record in range(following - self._records, len(piece), INDEX_STEP):
                    self._offsets.append(piece.offset_of(record))
                self._records += len(piece)
                self._scanned_to = piece.next_offset
                if until is not None and self._records >= until:
                    return
            self._is_complete = True

    def pieces(self, offset: int | None = None) -> Iterator[Piece]:
        """Yield the records from an offset at which one begins, or from the first one on.

        Raises:
            DataUnavailable: The file cannot be read.
            DataDamaged: A line is too long for text.
        """
        offset = self._offsets[0] if offset is None else offset
        stream = self.stream
        try:
            yield from pieces(stream.blocks(offset), offset, self._quoting, lambda: stream.damage)
        except DataDamaged as error:
            raise DataDamaged(f"{self.name}, {error}") from error


def first_record(
    name: str, stream: ContentStream, offset: int, quoting: Quoting | None
) -> tuple[Piece | None, int]:
    """Return the piece with the record that begins at an offset, and where the next one begins.

    Returns:
        None and the same offset if there is no further record; else a piece of that record alone.

    Raises:
        DataUnavailable: The file cannot be read.
        DataDamaged: A line is too long for text.
    """
    whole = TextFile(name, stream, offset, quoting)
    for piece in whole.pieces(offset):
        if not len(piece):
            continue
        end = int(piece.ends[0])
        newline = piece.content.find(b"\n", end) + 1 or len(piece.content)
        return piece.part(0, 1), piece.offset + newline
    return None, offset
