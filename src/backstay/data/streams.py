"""The content of a text file from any offset on, plain or gzip.

Offsets are those of the decompressed content. A gzip file cannot be entered just anywhere, so
copies of the decompressor's state are kept as entries while it is read: at most ``ENTRIES_MAX`` of
some 50 KiB. Where a gzip stream is damaged or cut short, the content ends there and ``damage`` says
why.

Imports ``backstay.data.files`` and the errors.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from backstay.data.files import DataFile, OpenFile

__all__ = [
    "BYTE_ORDER_MARK",
    "ContentStream",
    "GzipStream",
    "PlainStream",
    "after_byte_order_mark",
    "open_stream",
]

BLOCK_BYTES = 256 * 1024
OUTPUT_BYTES = 1024 * 1024
ENTRIES_MAX = 32
ENTRY_STEP_BYTES = 1024 * 1024
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_GZIP_MAGIC = b"\x1f\x8b"
# zlib's window size with which it expects gzip headers and checks their CRC.
_GZIP_WINDOW = 31


@dataclass(frozen=True)
class PlainStream:
    """A file as it is."""

    file: DataFile
    damage: str | None = None

    def blocks(self, offset: int) -> Iterator[bytes]:
        """Yield the content from an offset on, in parts of any length.

        Raises:
            DataUnavailable: The file cannot be read.
        """
        with self.file.open() as opened:
            while block := opened.read_at(offset, BLOCK_BYTES):
                yield block
                offset += len(block)


@dataclass(frozen=True)
class _Entry:
    """A place at which decompression can begin: nothing of the input before it is pending."""

    content_offset: int
    file_offset: int
    decompressor: Any


class GzipStream:
    """A gzip file of one or more members, decompressed.

    What comes before damage is a function of the file alone, not of where reading began: input
    is taken in parts of a fixed grid, entries lie on the grid, and where a part does not
    decompress it is gone through byte by byte.
    """

    def __init__(self, file: DataFile) -> None:
        self.file = file
        self.damage: str | None = None
        self._step = ENTRY_STEP_BYTES
        self._entries = [_Entry(0, 0, zlib.decompressobj(_GZIP_WINDOW))]

    def blocks(self, offset: int) -> Iterator[bytes]:
        """Yield the content from an offset on, in parts of any length; sets ``damage`` at the end.

        Raises:
            DataUnavailable: The file cannot be read.
        """
        # Another thread may thin the list out meanwhile.
        entries = self._entries
        entry = entries[bisect_right([one.content_offset for one in entries], offset) - 1]
        here = entry.content_offset
        with self.file.open() as opened:
            for block in self._decompress(opened, entry):
                if here + len(block) > offset:
                    yield block[max(0, offset - here) :]
                here += len(block)

    def _decompress(self, opened: OpenFile, entry: _Entry) -> Iterator[bytes]:
        decompressor = entry.decompressor.copy()
        here, file_offset = entry.content_offset, entry.file_offset
        while part := opened.read_at(file_offset, BLOCK_BYTES):
            file_offset += len(part)
            while part:
                if decompressor.eof:
                    # Files may be filled up with zeros; other members may follow.
                    part = part.lstrip(b"\0")
                    if not part:
                        break
                    decompressor = zlib.decompressobj(_GZIP_WINDOW)
                try:
                    for block in _inflate(decompressor, part):
                        here += len(block)
                        yield block
                except zlib.error as error:
                    self.damage = f"gzip: {error}"
                    return
                part = decompressor.unused_data
            self._remember(here, file_offset, decompressor)
        if not decompressor.eof and file_offset:
            self.damage = "the gzip stream ends early"

    def _remember(self, content_offset: int, file_offset: int, decompressor: Any) -> None:
        last = self._entries[-1]
        if decompressor.eof or file_offset < last.file_offset + self._step:
            return
        self._entries.append(_Entry(content_offset, file_offset, decompressor.copy()))
        if len(self._entries) > ENTRIES_MAX:
            self._entries = self._entries[::2]
            self._step *= 2


ContentStream = PlainStream | GzipStream


def after_byte_order_mark(stream: ContentStream) -> int:
    """Return where the content begins: behind the mark that some programs put before UTF-8.

    Raises:
        DataUnavailable: The file cannot be read.
    """
    content = b""
    for block in stream.blocks(0):
        content += block
        if len(content) >= len(BYTE_ORDER_MARK):
            break
    return len(BYTE_ORDER_MARK) if content.startswith(BYTE_ORDER_MARK) else 0


def open_stream(file: DataFile) -> ContentStream:
    """Return a file's content; that it is gzip shows in its first bytes, whatever its name.

    Raises:
        DataUnavailable: It cannot be read.
    """
    with file.open() as opened:
        return GzipStream(file) if opened.read_at(0, 2) == _GZIP_MAGIC else PlainStream(file)


def _inflate(decompressor: Any, part: bytes) -> Iterator[bytes]:
    """Yield what a part of the input decompresses to, in blocks of limited size.

    Raises:
        zlib.error: It is damaged; all that comes before the damage has been yielded.
    """
    while True:
        before = decompressor.copy()
        try:
            block = decompressor.decompress(part, OUTPUT_BYTES)
        except zlib.error:
            yield _until_damage(before, part)
            raise
        if block:
            yield block
        part = decompressor.unconsumed_tail
        if decompressor.eof or (not part and len(block) < OUTPUT_BYTES):
            return


def _until_damage(decompressor: Any, part: bytes) -> bytes:
    """Return all that comes out of a part before it fails: byte by byte, nothing is held back."""
    content = bytearray()
    try:
        while True:
            content += decompressor.decompress(part, 1)
            part = decompressor.unconsumed_tail
    except zlib.error:
        return bytes(content)
