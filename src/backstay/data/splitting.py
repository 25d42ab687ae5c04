"""Text to records: where each one begins and ends, quoted line ends included.

A record is a line; with quotes, lines up to the one in which the quoted field is closed, as
Python's csv module reads it. Blank lines are no records. Where a quote is not closed in the
lines that begin within ``RECORD_BYTES_MAX`` bytes, the record is damaged and ends with its first
line. Where a record begins and ends depends only on the content after a record's beginning, never
on how the content was cut into blocks: this is what makes reading from an index possible.

Pure: bytes in, offsets out. Imports numpy and the errors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from backstay.errors import DataDamaged

__all__ = ["Piece", "Quoting", "pieces"]

RECORD_BYTES_MAX = 16 * 1024 * 1024
_NEWLINE, _RETURN = 10, 13
_UNCLOSED = "a quoted field is opened and not closed"

Offsets = NDArray[np.int64]


@dataclass(frozen=True)
class Quoting:
    """What a quoted field looks like: the quote and the delimiter, one byte each."""

    quote: bytes
    delimiter: bytes
    skip_space: bool = False


@dataclass(frozen=True)
class Piece:
    """Whole records, one after the other.

    ``starts`` and ``ends`` are positions in ``content``, without the line end; ``bad`` says of
    damaged records (by number in the piece) what is wrong; ``quoted`` whether there may be quotes
    and ``clean`` whether every quote stands where RFC 4180 wants it.
    """

    offset: int
    content: bytes
    starts: Offsets
    ends: Offsets
    quoted: bool
    clean: bool = True
    bad: dict[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def next_offset(self) -> int:
        """Where the content goes on."""
        return self.offset + len(self.content)

    def part(self, first: int, stop: int) -> Piece:
        """Return the records ``first`` to ``stop - 1``; ``content`` stays."""
        bad = {at - first: reason for at, reason in self.bad.items() if first <= at < stop}
        return Piece(
            self.offset,
            self.content,
            self.starts[first:stop],
            self.ends[first:stop],
            self.quoted,
            self.clean,
            bad,
        )

    def offset_of(self, record: int) -> int:
        """Return where in the file a record of the piece begins."""
        return self.offset + int(self.starts[record])

    def texts(self) -> list[bytes]:
        """Return the records."""
        content = self.content
        return [content[a:b] for a, b in zip(self.starts.tolist(), self.ends.tolist(), strict=True)]


def pieces(
    blocks: Iterator[bytes],
    offset: int,
    quoting: Quoting | None,
    damage: Callable[[], str | None] = lambda: None,
) -> Iterator[Piece]:
    """Cut content into pieces of whole records.

    Args:
        blocks: The content from ``offset`` on, where a record begins.
        offset: See ``blocks``.
        quoting: None where quotes mean nothing.
        damage: Asked at the end of the blocks: None, or why the content ends before its time.
            Then what follows the last line end is one damaged record, be it empty.

    Raises:
        DataDamaged: A line has more than ``RECORD_BYTES_MAX`` bytes.
    """
    rest = b""
    for block in blocks:
        rest = rest + block if rest else block
        cut = rest.rfind(b"\n", len(rest) - len(block)) + 1
        if cut == 0:
            _check_lines([len(rest) - rest.rfind(b"\n") - 1], offset)
            continue
        piece = _split(rest[:cut], offset, quoting, is_end=False)
        if piece.content:
            yield piece
            offset, rest = piece.next_offset, rest[len(piece.content) :]
    reason = damage()
    cut = rest.rfind(b"\n") + 1 if reason else len(rest)
    while cut:
        piece = _split(rest[:cut], offset, quoting, is_end=True)
        yield piece
        offset, rest = piece.next_offset, rest[len(piece.content) :]
        cut -= len(piece.content)
    if reason:
        ends = np.array([len(rest)], dtype=np.int64)
        yield Piece(offset, rest, np.zeros(1, np.int64), ends, False, bad={0: reason})


def _check_lines(lengths: Collection[int] | Offsets, offset: int) -> None:
    if max(lengths) > RECORD_BYTES_MAX:
        raise DataDamaged(
            f"after byte {offset}: a line of more than {RECORD_BYTES_MAX} bytes; is this text?"
        )


def _split(content: bytes, offset: int, quoting: Quoting | None, *, is_end: bool) -> Piece:
    """Return the whole records at the beginning of content that ends with a line.

    The piece's content is shorter than this where the last record is still open; never so at the
    end of the file.
    """
    codes = np.frombuffer(content, dtype=np.uint8)
    newlines = np.flatnonzero(codes == _NEWLINE)
    if not content.endswith(b"\n"):
        newlines = np.append(newlines, len(content))
    if len(content) > RECORD_BYTES_MAX:
        _check_lines(np.diff(newlines, prepend=-1) - 1, offset)
    if quoting is None or quoting.quote not in content:
        return _piece(content, offset, newlines, quoted=False)
    quotes = np.flatnonzero(codes == quoting.quote[0])
    if _is_clean(codes, quotes, quoting):
        # An even number of quotes before a line end: it is not within a quoted field.
        closed = newlines[np.searchsorted(quotes, newlines) % 2 == 0]
        # An open record at the end, and one that is too long, are judged line by line.
        if len(closed) and (closed[-1] == newlines[-1] or not is_end):
            lengths = np.diff(closed, prepend=-1, append=newlines[-1])
            if lengths.max() <= RECORD_BYTES_MAX:
                return _piece(content[: int(closed[-1]) + 1], offset, closed, quoted=True)
    return _split_by_line(content, offset, newlines, quoting, is_end=is_end)


def _is_clean(codes: NDArray[np.uint8], quotes: Offsets, quoting: Quoting) -> bool:
    """Whether each quote opens a field, closes one or is doubled within one.

    Then, and only then, counting quotes tells what is within a quoted field.
    """
    around = np.concatenate(([_NEWLINE], codes, [_NEWLINE]))
    delimiter, quote = quoting.delimiter[0], quoting.quote[0]
    before = around[quotes[0::2]]
    after = around[quotes[1::2] + 2]
    opens = (before == delimiter) | (before == _NEWLINE)
    # A doubled quote: the one before this closes the field for a moment.
    opens[1:] |= quotes[2::2] == quotes[1:-1:2] + 1
    closes = (after == delimiter) | (after == _NEWLINE) | (after == _RETURN) | (after == quote)
    return bool(opens.all() and closes.all())


def _split_by_line(
    content: bytes, offset: int, newlines: Offsets, quoting: Quoting, *, is_end: bool
) -> Piece:
    """As ``_split``, line by line: for quotes that stand anywhere, and for what is too long."""
    ends: list[int] = []
    unclosed: set[int] = set()
    line_ends = newlines.tolist()
    number = 0
    while number < len(line_ends):
        first = number
        begin = start = line_ends[number - 1] + 1 if number else 0
        is_open = False
        while number < len(line_ends):
            end = line_ends[number]
            is_open = _is_open(content[begin:end], is_open, quoting)
            number += 1
            begin = end + 1
            if not is_open or begin - start > RECORD_BYTES_MAX:
                break
        if is_open and begin - start <= RECORD_BYTES_MAX and not is_end:
            # What follows may close it.
            content = content[:start]
            break
        if is_open:
            number = first + 1
            unclosed.add(line_ends[first])
        ends.append(line_ends[number - 1])
    return _piece(
        content, offset, np.array(ends, np.int64), quoted=True, clean=False, unclosed=unclosed
    )


def _is_open(line: bytes, is_open: bool, quoting: Quoting) -> bool:
    """Whether a quoted field is open at the end of a line, as Python's csv module sees it."""
    quote, at, length = quoting.quote, 0, len(line)
    while True:
        if not is_open and quoting.skip_space:
            while at < length and line[at] == 32:
                at += 1
        if is_open or line.startswith(quote, at):
            at += 0 if is_open else 1
            while True:
                at = line.find(quote, at) + 1
                if at == 0:
                    return True
                if not line.startswith(quote, at):
                    break
                at += 1
            is_open = False
        # Whatever else is in the field, a quote too, is taken as it is.
        at = line.find(quoting.delimiter, at) + 1
        if at == 0:
            return False


def _piece(
    content: bytes,
    offset: int,
    newlines: Offsets,
    *,
    quoted: bool,
    clean: bool = True,
    unclosed: Collection[int] = (),
) -> Piece:
    """Return a piece of the records that end at these line ends, without blank ones."""
    starts = np.empty(len(newlines), dtype=np.int64)
    if len(newlines):
        starts[0] = 0
        starts[1:] = newlines[:-1] + 1
    codes = np.frombuffer(content, dtype=np.uint8)
    ends = newlines.astype(np.int64)
    if len(ends):
        has_return = (ends > starts) & (codes[np.maximum(ends - 1, 0)] == _RETURN)
        ends = ends - has_return
    kept = ends > starts
    if not kept.all():
        starts, ends, newlines = starts[kept], ends[kept], newlines[kept]
    bad = {i: _UNCLOSED for i, at in enumerate(newlines.tolist()) if at in unclosed}
    return Piece(offset, content, starts, ends, quoted, clean, bad)
