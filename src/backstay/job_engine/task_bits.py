"""One bit for each task of a round, in chunks that are single records of the journal.

A chunk also names the tasks that had another number of batches than their records give: damaged
records are no part of a batch.

Imports numpy and ``backstay.errors``; does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from backstay.errors import InvalidRequest

__all__ = ["CHUNK_TASKS", "TaskBits", "chunk_of"]

# 512 bytes, 1 KiB as hex: one record.
CHUNK_TASKS = 4096
_CHUNK_BYTES = CHUNK_TASKS // 8


def chunk_of(task: int) -> int:
    """Return the chunk that holds a task's bit."""
    return task // CHUNK_TASKS


class TaskBits:
    """A set of tasks of one round; bit ``task % 8`` of byte ``task // 8``."""

    __slots__ = ("_bytes", "_count", "_odd", "_size")

    def __init__(self, size: int) -> None:
        """Begin empty, for the tasks 0 to ``size`` - 1."""
        self._size = size
        self._bytes = bytearray(-(-size // 8))
        self._count = 0
        # Chunk -> task -> batches.
        self._odd: dict[int, dict[int, int]] = {}

    def __len__(self) -> int:
        """Return how many tasks are in the set."""
        return self._count

    def __contains__(self, task: int) -> bool:
        """Return whether a task, which must be one of the round, is in the set."""
        return bool(self._bytes[task >> 3] >> (task & 7) & 1)

    @property
    def size(self) -> int:
        """The number of tasks of the round."""
        return self._size

    def add(self, task: int) -> None:
        """Put a task, which must be one of the round, into the set."""
        if task not in self:
            self._bytes[task >> 3] |= 1 << (task & 7)
            self._count += 1

    def set_odd_size(self, task: int, batches: int) -> None:
        """Keep how many batches a task of the set had: not as many as its records give."""
        self._odd.setdefault(chunk_of(task), {})[task] = batches

    def odd_sizes(self) -> Iterator[tuple[int, int]]:
        """Yield the tasks of which :meth:`set_odd_size` told, and their batches."""
        for chunk in self._odd.values():
            yield from chunk.items()

    def chunk(self, number: int) -> str:
        """Return a chunk as text; an empty one if it has no bit.

        Its bits as hex, without the zeros at its end; then " task:batches" for odd sizes.
        """
        at = number * _CHUNK_BYTES
        odd = sorted(self._odd.get(number, {}).items())
        bits = self._bytes[at : at + _CHUNK_BYTES].rstrip(b"\0").hex()
        return " ".join([bits, *(f"{task}:{batches}" for task, batches in odd)])

    def chunks(self) -> dict[int, str]:
        """Return all chunks that have a bit, by their numbers."""
        count = -(-self._size // CHUNK_TASKS)
        return {number: text for number in range(count) if (text := self.chunk(number))}

    @classmethod
    def full(cls, size: int) -> TaskBits:
        """Return the set of all tasks of a round."""
        bits = cls(size)
        bits._bytes = bytearray(b"\xff") * len(bits._bytes)
        if size % 8:
            bits._bytes[-1] = (1 << size % 8) - 1
        bits._count = size
        return bits

    @classmethod
    def from_chunks(cls, size: int, chunks: Mapping[int, str]) -> TaskBits:
        """Return the set that ``chunks`` wrote.

        Raises:
            InvalidRequest: A chunk is no such text, or has a task that the round has not.
        """
        bits = cls(size)
        for number, text in chunks.items():
            hexadecimal, *odd = text.split(" ")
            try:
                part = bytes.fromhex(hexadecimal)
            except ValueError as error:
                raise InvalidRequest(f"chunk {number} of the tasks done: {error}") from error
            at = number * _CHUNK_BYTES
            part = part.rstrip(b"\0")
            if (
                number < 0
                or len(part) > _CHUNK_BYTES
                or (part and at + len(part) > len(bits._bytes))
            ):
                raise InvalidRequest(f"chunk {number} of the tasks done: more than {size} tasks")
            bits._bytes[at : at + len(part)] = part
            bits._read_odd(number, odd)
        if size % 8 and bits._bytes[-1] >> size % 8:
            raise InvalidRequest(f"tasks done: a bit above the {size} tasks is set")
        bits._count = int.from_bytes(bits._bytes, "little").bit_count()
        return bits

    def to_array(self) -> npt.NDArray[np.uint8]:
        """Return 1 for each task in the set, else 0; shape (size,)."""
        packed = np.frombuffer(self._bytes, dtype=np.uint8)
        return np.unpackbits(packed, count=self._size, bitorder="little")

    def copy(self) -> TaskBits:
        """Return an independent copy."""
        other = TaskBits(0)
        other._size, other._bytes, other._count = self._size, self._bytes[:], self._count
        other._odd = {number: dict(odd) for number, odd in self._odd.items()}
        return other

    def _read_odd(self, number: int, odd: Sequence[str]) -> None:
        for text in odd:
            task, _, batches = text.partition(":")
            if not (task.isdecimal() and batches.isdecimal() and chunk_of(int(task)) == number):
                raise InvalidRequest(f"chunk {number} of the tasks done: {text!r} is no odd size")
            if int(task) >= self._size or int(task) not in self:
                raise InvalidRequest(f"chunk {number} of the tasks done: {task} is not done")
            self.set_odd_size(int(task), int(batches))
