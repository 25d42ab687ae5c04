"""RecordIO files as numbered records of bytes.

What it costs: the first look at a file reads its chunk headers, 20 bytes each; reading a range, the
chunks in which it lies. Imports the format and the readers' base and files.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from backstay.data.base import BadRecords, Metadata, Shard, check_range
from backstay.data.batch import Record
from backstay.data.files import DataFile, FileSet, KnownSizes, OpenFile
from backstay.data.options import check_options
from backstay.data.recordio_format import (
    HEADER_BYTES,
    MAGIC,
    DamagedChunk,
    Header,
    Layout,
    records_of,
)
from backstay.errors import ConfigError, DataDamaged

__all__ = ["RecordIOReader"]

SEARCH_BYTES = 1024 * 1024
_OPTIONS: Mapping[str, type] = {"layout": str, "storage": Mapping}


@dataclass(frozen=True)
class _Chunk:
    """A chunk, or (without a header) a damaged stretch of the file: one damaged record."""

    first: int
    offset: int
    header: Header | None

    @property
    def records(self) -> int:
        return self.header.records if self.header else 1


class RecordIOReader:
    """Records as bytes.

    A chunk whose payload is damaged, or cut off by the end of the file, is as many damaged records
    as its header says. Where there is no header, all up to the next one is one damaged record.

    Args:
        files: The files.
        options: ``layout``: ``records_first``, ``checksum_first`` or ``auto`` (the first chunk
            tells); ``storage``: of fsspec's file system.

    Raises:
        ConfigError: An option is unknown or wrong.
    """

    def __init__(self, files: FileSet, options: Mapping[str, Any]) -> None:
        check_options("recordio", options, _OPTIONS)
        layout = options.get("layout", "auto")
        allowed = ["auto", *(each.value for each in Layout)]
        if layout not in allowed:
            raise ConfigError(f"options.layout: is {layout!r}; one of {allowed} is expected")
        self._layouts = list(Layout) if layout == "auto" else [Layout(layout)]
        self._files = files
        self._sizes = KnownSizes()
        self._indexes: dict[str, list[_Chunk]] = {}
        # The chunk decoded last: the next task often begins within it.
        self._latest: tuple[str, int, list[bytes]] = ("", 0, [])
        self._lock = threading.Lock()

    @property
    def metadata(self) -> Metadata:
        """See ``Reader``: there are no columns."""
        return Metadata(())

    def shards(self) -> Iterator[Shard]:
        """See ``Reader``; reads the headers of all chunks."""
        for file in self._files.files():
            yield Shard(file.name, _total(self._index(file)))

    def read(self, shard: str, start: int, count: int, bad: BadRecords) -> Iterator[Record]:
        """See ``Reader``."""
        file = self._files.file(shard)
        index = self._index(file)
        check_range(shard, start, count, _total(index))
        stop = start + count
        at = bisect_right(index, start, key=lambda chunk: chunk.first) - 1
        if not count:
            return
        with file.open() as opened:
            for chunk in index[at:]:
                if chunk.first >= stop:
                    return
                a, b = max(start - chunk.first, 0), min(stop - chunk.first, chunk.records)
                if a >= b:
                    continue
                try:
                    records = self._records(shard, opened, chunk)
                except DamagedChunk as error:
                    bad.add(shard, chunk.offset, str(error), records=b - a)
                else:
                    yield from records[a:b]

    def read_columns(
        self, shard: str, start: int, count: int, bad: BadRecords | None = None
    ) -> None:
        """See ``Reader``: there are no columns."""
        del shard, start, count, bad

    def _records(self, shard: str, opened: OpenFile, chunk: _Chunk) -> list[bytes]:
        with self._lock:
            name, offset, records = self._latest
        if (name, offset) == (shard, chunk.offset):
            return records
        if chunk.header is None:
            raise DamagedChunk("no chunk begins here, or its header is damaged")
        payload = opened.read_at(chunk.offset + HEADER_BYTES, chunk.header.size)
        records = records_of(chunk.header, payload)
        with self._lock:
            self._latest = (shard, chunk.offset, records)
        return records

    def _index(self, file: DataFile) -> list[_Chunk]:
        """Return a file's chunks; their headers are read the first time."""
        size = self._sizes.check(file)
        if file.name not in self._indexes:
            with file.open() as opened:
                layout = self._layout(opened, size)
                self._indexes[file.name] = _chunks(opened, size, layout)
        return self._indexes[file.name]

    def _layout(self, opened: OpenFile, size: int) -> Layout:
        """Return the layout in which the first chunk's header is one."""
        begins = opened.read_at(0, HEADER_BYTES)
        if begins and not begins.startswith(MAGIC[: len(begins)]):
            raise DataDamaged(f"{opened.name}: does not begin with RecordIO's magic number")
        found = [each for each in self._layouts if Header.parse(begins, each)]
        # A tiny chunk may look like either; then the next one must follow where this one ends.
        whole = [each for each in found if _is_followed(opened, 0, size, each)]
        return (whole or found or self._layouts)[0]


def _total(index: list[_Chunk]) -> int:
    return index[-1].first + index[-1].records if index else 0


def _chunks(opened: OpenFile, size: int, layout: Layout) -> list[_Chunk]:
    chunks: list[_Chunk] = []
    offset = 0
    while offset < size:
        first = _total(chunks)
        header = Header.parse(opened.read_at(offset, HEADER_BYTES), layout)
        if header is not None and offset + HEADER_BYTES + header.size > size:
            # Cut off by the end, unless the size is what is damaged and chunks follow.
            following = _next_header(opened, offset + 1, size, layout)
            header = header if following == size else None
        chunks.append(_Chunk(first, offset, header))
        if header is None:
            offset = _next_header(opened, offset + 1, size, layout)
        else:
            offset += HEADER_BYTES + header.size
    return chunks


def _next_header(opened: OpenFile, offset: int, size: int, layout: Layout) -> int:
    """Return where the next chunk begins that another one or the end follows; else the size."""
    while offset < size:
        content = opened.read_at(offset, SEARCH_BYTES)
        at = content.find(MAGIC)
        while at >= 0:
            if _is_followed(opened, offset + at, size, layout):
                return offset + at
            at = content.find(MAGIC, at + 1)
        if len(content) < SEARCH_BYTES:
            return size
        offset += len(content) - len(MAGIC) + 1
    return size


def _is_followed(opened: OpenFile, offset: int, size: int, layout: Layout) -> bool:
    header = Header.parse(opened.read_at(offset, HEADER_BYTES), layout)
    if header is None:
        return False
    end = offset + HEADER_BYTES + header.size
    return end == size or opened.read_at(end, len(MAGIC)) == MAGIC
