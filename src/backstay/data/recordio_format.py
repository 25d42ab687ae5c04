"""RecordIO as ElasticDL and Paddle write it: chunks of records, each with a header.

A chunk is a header of five little-endian 32-bit words and a payload. The words are the magic number
0x01020304, then, in one of two orders (``Layout``), the number of records, the payload's checksum,
the compressor and the payload's size. Decompressed, the payload is each record's length (32 bits)
and bytes. The writers in use differ in more than the order, and each of them is read:

========================= ============== ========== =========================================
written by                layout         checksum   compressor: none, snappy, gzip
========================= ============== ========== =========================================
Paddle (C++), backstay    records first  CRC-32     0, 1 (framed), 2
recordio (Go)             checksum first CRC-32     0, 1 (framed), 2
ElasticDL (pyrecordio)    records first  CRC-32C    1, 2 (not framed), 3
========================= ============== ========== =========================================

Which compressor a payload has is told by how it begins. Pure: bytes in, bytes out. Imports the
errors and the native module; pyarrow for snappy.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import BinaryIO

from backstay._native import crc32c
from backstay.data.options import optional_import
from backstay.errors import ConfigError, InvalidRequest

__all__ = [
    "HEADER_BYTES",
    "MAGIC",
    "DamagedChunk",
    "Header",
    "Layout",
    "RecordIOWriter",
    "records_of",
    "write_recordio",
]

MAGIC = struct.pack("<I", 0x01020304)
HEADER_BYTES = 20
# As much as a chunk may decompress to; those in use have some MiB.
CHUNK_BYTES_MAX = 1024 * 1024 * 1024
# Nothing that gzip or snappy makes is smaller: a header that says otherwise is damaged.
RATIO_MAX = 1100
_COMPRESSOR_MAX = 3
_GZIP_BEGINS = b"\x1f\x8b\x08"
_SNAPPY_FRAMES_BEGIN = b"\xff\x06\x00\x00sNaPpY"
_GZIP_WINDOW = 31


class DamagedChunk(Exception):
    """A chunk's payload is not what its header says; the message says why."""


class Layout(Enum):
    """The order of a header's words after the magic number."""

    RECORDS_FIRST = "records_first"
    CHECKSUM_FIRST = "checksum_first"


@dataclass(frozen=True)
class Header:
    """A chunk's header; ``size`` is that of the payload, in bytes."""

    records: int
    checksum: int
    compressor: int
    size: int

    @classmethod
    def parse(cls, content: bytes, layout: Layout) -> Header | None:
        """Return the header at the beginning of some bytes, None if that cannot be one."""
        if len(content) < HEADER_BYTES or not content.startswith(MAGIC):
            return None
        words = struct.unpack_from("<4I", content, 4)
        if layout is Layout.RECORDS_FIRST:
            header = cls(*words)
        else:
            checksum, compressor, size, records = words
            header = cls(records, checksum, compressor, size)
        fits = header.records * 4 <= header.size * RATIO_MAX
        return header if fits and header.compressor <= _COMPRESSOR_MAX else None

    def pack(self, layout: Layout) -> bytes:
        """Return the header as bytes."""
        if layout is Layout.RECORDS_FIRST:
            words = (self.records, self.checksum, self.compressor, self.size)
        else:
            words = (self.checksum, self.compressor, self.size, self.records)
        return MAGIC + struct.pack("<4I", *words)


def records_of(header: Header, payload: bytes) -> list[bytes]:
    """Return the records of a chunk.

    Raises:
        DamagedChunk: The payload is damaged.
        ConfigError: It is compressed with snappy, and pyarrow is missing.
    """
    if len(payload) < header.size:
        raise DamagedChunk(f"the chunk ends after {len(payload)} of {header.size} bytes")
    if header.checksum != zlib.crc32(payload) and header.checksum != crc32c(payload):
        raise DamagedChunk("the checksum does not match")
    content = _decompressed(header.compressor, payload)
    records = []
    at = 0
    for number in range(header.records):
        if at + 4 > len(content):
            raise DamagedChunk(f"the chunk ends before record {number} of {header.records}")
        (length,) = struct.unpack_from("<I", content, at)
        at += 4 + length
        if at > len(content):
            raise DamagedChunk(f"record {number} is longer than its chunk")
        records.append(content[at - length : at])
    if at != len(content):
        raise DamagedChunk(f"{len(content) - at} bytes follow the last record of the chunk")
    return records


def _decompressed(compressor: int, payload: bytes) -> bytes:
    if compressor == 0:
        return payload
    if payload.startswith(_GZIP_BEGINS) and compressor >= 2:
        return _gunzipped(payload)
    if payload.startswith(_SNAPPY_FRAMES_BEGIN) and compressor == 1:
        return _unframed(payload[len(_SNAPPY_FRAMES_BEGIN) :])
    if compressor == 1:
        return payload
    if compressor == 2:
        return _unsnapped(payload)
    raise DamagedChunk(f"compressor {compressor}, but the payload is not gzip")


def _gunzipped(payload: bytes) -> bytes:
    decompressor = zlib.decompressobj(_GZIP_WINDOW)
    try:
        content = decompressor.decompress(payload, CHUNK_BYTES_MAX)
    except zlib.error as error:
        raise DamagedChunk(f"gzip: {error}") from error
    if not decompressor.eof:
        raise DamagedChunk("gzip: the stream ends early, or is too large")
    return content


def _unframed(payload: bytes) -> bytes:
    """Return the content of Snappy's framing format, after the frame that identifies it."""
    parts = []
    at = size = 0
    while at < len(payload):
        kind = payload[at]
        length = int.from_bytes(payload[at + 1 : at + 4], "little")
        frame = payload[at + 4 : at + 4 + length]
        at += 4 + length
        if kind == 0xFF or 0x80 <= kind <= 0xFE:
            continue
        if at > len(payload) or length < 4 or kind > 1:
            raise DamagedChunk("snappy: a frame is damaged")
        # The frame's own checksum says nothing that the chunk's has not said.
        parts.append(_unsnapped(frame[4:]) if kind == 0 else frame[4:])
        size += len(parts[-1])
        if size > CHUNK_BYTES_MAX:
            raise DamagedChunk(f"snappy: more than {CHUNK_BYTES_MAX} bytes")
    return b"".join(parts)


def _unsnapped(block: bytes) -> bytes:
    arrow = optional_import("pyarrow", "parquet", "RecordIO that is compressed with snappy")
    size = 0
    for position, byte in enumerate(block[:5]):
        size |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            break
    if size > CHUNK_BYTES_MAX:
        raise DamagedChunk(f"snappy: {size} bytes, at most {CHUNK_BYTES_MAX}")
    try:
        return bytes(arrow.decompress(block, decompressed_size=size, codec="snappy", asbytes=True))
    except (arrow.ArrowException, OSError) as error:
        raise DamagedChunk(f"snappy: {error}") from error


class RecordIOWriter:
    """Writes records to a file that is open for writing; a context manager that writes the rest.

    Args:
        file: Where to; not closed.
        compressor: ``"none"`` or ``"gzip"``.
        chunk_bytes: A chunk is written when its records have as many bytes.
        layout: Which readers are to understand it, see the module.

    Raises:
        ConfigError: There is no such compressor.
    """

    def __init__(
        self,
        file: BinaryIO,
        *,
        compressor: str = "none",
        chunk_bytes: int = 1024 * 1024,
        layout: Layout = Layout.RECORDS_FIRST,
    ) -> None:
        if compressor not in ("none", "gzip"):
            raise ConfigError(f"compressor: is {compressor!r}; none or gzip is expected")
        self._file = file
        self._compress = compressor == "gzip"
        self._chunk_bytes = chunk_bytes
        self._layout = layout
        self._records: list[bytes] = []
        self._bytes = 0

    def write(self, record: bytes) -> None:
        """Add a record; it may be empty.

        Raises:
            InvalidRequest: It is longer than a chunk may be.
        """
        if len(record) + 4 > CHUNK_BYTES_MAX:
            raise InvalidRequest(f"a record of {len(record)} bytes; at most {CHUNK_BYTES_MAX - 4}")
        self._records.append(record)
        self._bytes += len(record) + 4
        if self._bytes >= self._chunk_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what has been added as a chunk."""
        if not self._records:
            return
        payload = b"".join(struct.pack("<I", len(each)) + each for each in self._records)
        if self._compress:
            compressor = zlib.compressobj(wbits=_GZIP_WINDOW)
            payload = compressor.compress(payload) + compressor.flush()
        kind = 2 if self._compress else 0
        header = Header(len(self._records), zlib.crc32(payload), kind, len(payload))
        self._file.write(header.pack(self._layout) + payload)
        self._records, self._bytes = [], 0

    def __enter__(self) -> RecordIOWriter:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.flush()


def write_recordio(path: str, records: Iterable[bytes], *, compressor: str = "none") -> None:
    """Write a file of these records on this machine; one that is there is replaced."""
    with open(path, "wb") as file, RecordIOWriter(file, compressor=compressor) as writer:
        for record in records:
            writer.write(record)
