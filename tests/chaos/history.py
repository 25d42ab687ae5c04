"""What a trainer writes down about each push, and how it is read again.

One file per trainer process, one line per fact, each written and fsynced before the trainer goes
on; so a trainer that is killed leaves at most its last facts out. The keys of a push are drawn
from (seed, stream, sequence): a line carries their checksum, not the keys.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["History", "Push", "Shape", "Writer", "keys_of", "parse"]

Outcome = Literal["acknowledged", "not_applied", "unknown"]
Keys = NDArray[np.uint64]

# One push in so many takes every key at once: a batch that travels in parts.
LARGE_EVERY = 200


@dataclass(frozen=True)
class Shape:
    """What the keys of all pushes are drawn from.

    Attributes:
        seed: The run's.
        universe: Keys are 0 .. universe - 1.
        hot: The first so many keys come in half of all pushes each.
        batch: Further keys of one push.
    """

    seed: int
    universe: int = 4096
    hot: int = 8
    batch: int = 96


def keys_of(shape: Shape, stream: int, sequence: int) -> Keys:
    """Return the keys of one push, each once, in rising order."""
    if sequence % LARGE_EVERY == LARGE_EVERY - 1:
        return np.arange(shape.universe, dtype=np.uint64)
    draw = np.random.default_rng([shape.seed, stream, sequence])
    cold = draw.integers(shape.hot, shape.universe, shape.batch, dtype=np.uint64)
    hot = np.flatnonzero(draw.random(shape.hot) < 0.5).astype(np.uint64)
    return np.unique(np.concatenate([hot, cold]))


@dataclass
class Push:
    """One push as its trainer saw it; times are of the system's monotonic clock."""

    stream: int
    sequence: int
    begun_ns: int
    # Until told otherwise: a trainer that was killed did not learn it.
    outcome: Outcome = "unknown"
    ended_ns: int = 0
    why: str = ""


@dataclass
class History:
    """All that one trainer process wrote.

    Attributes:
        stream: Its number, unique in the run.
        shape: What it drew keys from.
        pushes: By sequence.
        reads: Pulls that were compared with what it had acknowledged.
        stale: Pulls that showed less than that; each as a line of text.
        state_lost: Whether it was told that slots had lost all their copies.
        ended: Whether it came to its end, rather than being killed.
    """

    stream: int
    shape: Shape
    pushes: dict[int, Push] = field(default_factory=dict)
    reads: int = 0
    stale: list[str] = field(default_factory=list)
    state_lost: bool = False
    ended: bool = False


class Writer:
    """The trainer's end of a history."""

    def __init__(self, path: Path, stream: int, shape: Shape) -> None:
        """Begin a file that must not be there yet."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        self._line("h", json.dumps({"stream": stream, "shape": asdict(shape)}))

    def begun(self, sequence: int, keys: Keys) -> None:
        """A push is about to be sent."""
        self._line("b", sequence, time.monotonic_ns(), zlib.crc32(keys.tobytes()))

    def ended(self, sequence: int, outcome: Outcome, why: str = "") -> None:
        """The outcome of a push is known, or will not be known."""
        text = " ".join(why.split())[:200]
        self._line(outcome[0], sequence, time.monotonic_ns(), text)

    def read(self, keys: int) -> None:
        """A pull of so many keys showed what it must."""
        self._line("r", keys, time.monotonic_ns())

    def stale(self, key: int, read: float, acknowledged: int) -> None:
        """A pull showed less than this trainer had acknowledged before."""
        self._line("s", key, time.monotonic_ns(), f"read {read:g}, acknowledged {acknowledged}")

    def state_lost(self, why: str) -> None:
        """The client said that rows are gone."""
        self._line("l", 0, time.monotonic_ns(), " ".join(why.split())[:200])

    def close(self) -> None:
        """The trainer ends as it should."""
        self._line("e", 0, time.monotonic_ns())
        os.close(self._file)

    def _line(self, *fields: object) -> None:
        # One write: another process that reads meanwhile sees a line or none.
        os.write(self._file, (" ".join(map(str, fields)) + "\n").encode())
        os.fsync(self._file)


OUTCOMES: dict[str, Outcome] = {"a": "acknowledged", "n": "not_applied", "u": "unknown"}


def parse(text: str) -> History | None:
    """Return what a file says, or None if not even its first line was written.

    Raises:
        ValueError: A line contradicts the ones before it: the file is not to be relied on.
    """
    # What comes after the last line feed was being written when the trainer was killed.
    lines = text.split("\n")[:-1]
    if not lines:
        return None
    head = json.loads(lines[0].removeprefix("h "))
    history = History(head["stream"], Shape(**head["shape"]))
    for line in lines[1:]:
        kind, number, at_ns, rest = ([*line.split(" ", 3), ""])[:4]
        _take(history, kind, int(number), int(at_ns), rest)
    return history


def _take(history: History, kind: str, number: int, at_ns: int, rest: str) -> None:
    if kind == "b":
        if number in history.pushes:
            raise ValueError(f"stream {history.stream}: sequence {number} begins twice")
        keys = keys_of(history.shape, history.stream, number)
        if int(rest) != zlib.crc32(keys.tobytes()):
            raise ValueError(f"stream {history.stream}: other keys in push {number} than drawn")
        history.pushes[number] = Push(history.stream, number, at_ns)
    elif kind in OUTCOMES:
        push = history.pushes[number]
        if push.ended_ns:
            raise ValueError(f"stream {history.stream}: sequence {number} ends twice")
        push.outcome, push.ended_ns, push.why = OUTCOMES[kind], at_ns, rest
    elif kind == "r":
        history.reads += 1
    elif kind == "s":
        history.stale.append(f"stream {history.stream}, key {number}: {rest}")
    elif kind == "l":
        history.state_lost = True
    elif kind == "e":
        history.ended = True
    else:
        raise ValueError(f"stream {history.stream}: a line of unknown kind {kind!r}")
