"""Tracebacks of a limited size: the user's frames, and the words of the error itself, stay.

Frames of libraries are left out first, then those in the middle; how many is said in their place.
Imports the standard library only; does no I/O but to read the lines of source that it shows.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from traceback import FrameSummary, StackSummary

__all__ = ["HEADER", "cut_middle", "frames_within", "traceback_within"]

# As Python begins a traceback.
HEADER = "Traceback (most recent call last):\n"
_CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
_CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"
_CUT = "\n[...]\n"
# What stands in a gap, at its longest.
_MARK = "  [1000 frames left out]\n"
# Of exceptions that caused each other: the oldest are forgotten.
CHAIN_MAX = 8
_PACKAGE = Path(__file__).parents[1]
_LIBRARIES = (
    *(sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    f"{_PACKAGE}/",
    # The command of a worker is a program of the library.
    "<frozen ",
)


def traceback_within(error: BaseException, bytes_max: int) -> str:
    """Return an error's traceback, with those of its causes, in at most so many bytes of UTF-8.

    The first line, the frames of the user's code and the last lines stay as far as they fit.
    """
    whole = "".join(traceback.format_exception(error))
    if _bytes_of(whole) <= bytes_max:
        return whole
    chain = list(_chain(error))
    stacks = [list(traceback.extract_tb(one.__traceback__)) for one, _ in chain]
    heads = [HEADER if stack else "" for stack in stacks]
    ends = ["".join(traceback.format_exception_only(one)) + how for one, how in chain]
    room = bytes_max - sum(map(_bytes_of, (*heads, *ends)))
    kept = _kept([frame for stack in stacks for frame in stack], room, _bytes_of)
    parts = zip(heads, stacks, ends, strict=True)
    text = "".join(head + _rendered(stack, kept) + end for head, stack, end in parts)
    return cut_middle(text, bytes_max)


def frames_within(frames: Sequence[FrameSummary], room: int, size: Callable[[str], int]) -> str:
    """Return frames as a traceback shows them; if they are too large, not all of them.

    Args:
        frames: The frames, the outermost first. The first and the last always stay.
        room: How large the text may be.
        size: Returns the size of a text.
    """
    return _rendered(frames, _kept(frames, room, size))


def cut_middle(text: str, bytes_max: int) -> str:
    """Return a text in at most so many bytes of UTF-8: its beginning and its end."""
    data = text.encode(errors="replace")
    if len(data) <= bytes_max:
        return text
    half = max(0, bytes_max - len(_CUT)) // 2
    return data[:half].decode(errors="ignore") + _CUT + data[-half:].decode(errors="ignore")


def _chain(error: BaseException) -> Iterator[tuple[BaseException, str]]:
    """Yield the exceptions that Python shows, the oldest first, each with what follows it."""
    found: list[tuple[BaseException, str]] = [(error, "")]
    seen = {id(error)}
    while len(found) < CHAIN_MAX:
        one = found[-1][0]
        before, how = one.__cause__, _CAUSE
        if before is None and not one.__suppress_context__:
            before, how = one.__context__, _CONTEXT
        if before is None or id(before) in seen:
            break
        seen.add(id(before))
        found.append((before, how))
    yield from reversed(found)


def _kept(frames: Sequence[FrameSummary], room: int, size: Callable[[str], int]) -> set[int]:
    """Return the ids of the frames to show."""
    kept = {id(one) for one in frames}
    # Frames that repeat each other are shown once, so all may fit though their sum does not.
    left = size("".join(StackSummary.from_list(list(frames)).format()))
    if left <= room:
        return kept
    sizes = [size("".join(traceback.format_list([one]))) for one in frames]
    left = sum(sizes)
    for number in _in_order_to_go(frames):
        if left <= room:
            break
        beside = sum(id(frames[one]) in kept for one in (number - 1, number + 1))
        kept.discard(id(frames[number]))
        # A gap of its own has a mark of its own, and two that meet have one.
        left += (beside - 1) * size(_MARK) - sizes[number]
    return kept


def _in_order_to_go(frames: Sequence[FrameSummary]) -> list[int]:
    """Return the numbers of frames that may go: of libraries first, then from the middle on."""
    inner = range(1, len(frames) - 1)
    libraries = [number for number in inner if frames[number].filename.startswith(_LIBRARIES)]
    others = sorted(set(inner) - set(libraries), key=lambda one: abs(2 * one - len(frames)))
    return libraries + others


def _rendered(frames: Sequence[FrameSummary], kept: set[int]) -> str:
    text = ""
    for is_kept, group in groupby(frames, key=lambda one: id(one) in kept):
        run = list(group)
        if is_kept:
            text += "".join(StackSummary.from_list(run).format())
        else:
            text += f"  [{len(run)} frame{'s' if len(run) > 1 else ''} left out]\n"
    return text


def _bytes_of(text: str) -> int:
    # A message may have what no file takes, such as half of a surrogate pair.
    return len(text.encode(errors="replace"))
