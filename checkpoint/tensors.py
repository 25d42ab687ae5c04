"""Files of tensors in the safetensors format: a reader that trusts nothing, and a writer.

The format is 8 bytes of length, a JSON header, then the tensors without gaps. The reader does
what docs/reference/checkpoint-format.md asks of one: limits, no overlap, no gap, no byte left
over; the arrays it gives are views of the mapped file. Knows nothing of checkpoints. Imports
numpy and ``backstay.errors``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from backstay.checkpoint.documents import parse_json
from backstay.errors import CheckpointDamaged, CheckpointUnavailable, InvalidRequest

__all__ = ["HEADER_BYTES_MAX", "STATE_DTYPES", "TensorFile", "create", "kind_of", "read"]

# As the format's own library has it.
HEADER_BYTES_MAX = 100_000_000
RANK_MAX = 16
_LENGTH_BYTES = 8
# The kinds of numbers in our files, little-endian whatever the machine.
_DTYPES: Mapping[str, np.dtype[Any]] = {"U64": np.dtype("<u8"), "F32": np.dtype("<f4")}
# Besides those, what a model's state may hold.
STATE_DTYPES: Mapping[str, np.dtype[Any]] = {
    **_DTYPES,
    "F64": np.dtype("<f8"),
    "F16": np.dtype("<f2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("<i1"),
    "U8": np.dtype("<u1"),
    "BOOL": np.dtype("?"),
}
_METADATA = "__metadata__"

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class TensorFile:
    """What a file holds.

    Attributes:
        metadata: Texts about the file as a whole.
        tensors: By name; read-only views of the mapped file.
    """

    metadata: Mapping[str, str]
    tensors: Mapping[str, Array]


def kind_of(array: Array) -> str | None:
    """Return the dtype of an array as the format writes it; None: it has none for it."""
    little = array.dtype.newbyteorder("<")
    return next((kind for kind, dtype in STATE_DTYPES.items() if dtype == little), None)


def read(path: Path, where: str, *, dtypes: Mapping[str, np.dtype[Any]] = _DTYPES) -> TensorFile:
    """Map a file of tensors.

    Args:
        path: On this machine. It must not be cut short while the arrays are in use.
        where: Its name, for the error.
        dtypes: What its tensors may be, by the format's names.

    Raises:
        CheckpointDamaged: It is no such file; the message says where and what is wrong.
        CheckpointUnavailable: It cannot be opened or read.
    """
    try:
        size = path.stat().st_size
        if size < _LENGTH_BYTES or not path.is_file():
            raise CheckpointDamaged(f"{where}: {size} bytes are too few for a file of tensors")
        content = np.memmap(path, dtype=np.uint8, mode="r")
    except FileNotFoundError as error:
        raise CheckpointDamaged(f"{where}: missing") from error
    except OSError as error:
        raise CheckpointUnavailable(f"{where}: {error}") from error
    try:
        return _parsed(content, dtypes)
    except InvalidRequest as error:
        raise CheckpointDamaged(f"{where}: {error}") from error


def _parsed(content: NDArray[np.uint8], dtypes: Mapping[str, np.dtype[Any]]) -> TensorFile:
    length = int.from_bytes(content[:_LENGTH_BYTES].tobytes(), "little")
    begin = _LENGTH_BYTES + length
    if length > HEADER_BYTES_MAX or begin > len(content):
        raise InvalidRequest(
            f"a header of {length} bytes in a file of {len(content)}; at most {HEADER_BYTES_MAX}"
        )
    header = parse_json(content[_LENGTH_BYTES:begin].tobytes())
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not set(map(type, metadata.values())) <= {str}:
        raise InvalidRequest(f"{_METADATA} is not an object of strings")
    places = {name: _Place.of(name, entry, dtypes) for name, entry in header.items()}
    end = 0
    for name, place in sorted(places.items(), key=lambda item: (item[1].begin, item[1].end)):
        if place.begin != end:
            raise InvalidRequest(f"tensor {name} begins at {place.begin}, not at {end}")
        end = place.end
    if end != len(content) - begin:
        raise InvalidRequest(f"{len(content) - begin} bytes of tensors, its header says {end}")
    # Views alone, so that the mapping ends with the last of them.
    tensors = {name: place.view(content[begin:]) for name, place in places.items()}
    return TensorFile(metadata, tensors)


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies behind the header."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int

    @classmethod
    def of(cls, name: str, entry: object, dtypes: Mapping[str, np.dtype[Any]]) -> _Place:
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise InvalidRequest(f"tensor {name} does not have dtype, shape and data_offsets")
        kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(kind, str) or kind not in dtypes:
            known = " or ".join(dtypes)
            raise InvalidRequest(f"tensor {name} is of dtype {kind!r}, not {known}")
        for numbers in (shape, offsets):
            if not isinstance(numbers, list) or not all(_is_size(number) for number in numbers):
                raise InvalidRequest(f"tensor {name}: a shape or offset is no list of sizes")
        if len(shape) > RANK_MAX or len(offsets) != 2:
            raise InvalidRequest(f"tensor {name} has {len(shape)} dimensions, {offsets} offsets")
        # Python's numbers do not overflow: a shape cannot wrap around to the length it needs.
        length = math.prod(shape) * dtypes[kind].itemsize
        if offsets[1] - offsets[0] != length:
            raise InvalidRequest(f"tensor {name} of shape {shape} does not fill {offsets}")
        return cls(dtypes[kind], tuple(shape), offsets[0], offsets[1])

    def view(self, content: NDArray[np.uint8]) -> Array:
        array = content[self.begin : self.end].view(np.ndarray)
        # Only a file of another writer has numbers that do not lie on their own multiples.
        if array.__array_interface__["data"][0] % self.dtype.itemsize:
            array = array.copy()
            array.setflags(write=False)
        return array.view(self.dtype).reshape(self.shape)


def create(
    path: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    metadata: Mapping[str, str],
) -> dict[str, Array]:
    """Make a file of tensors and return them, zeros, to be written to in place.

    What is written is in the file once the arrays are gone; ``sync_file`` makes it last.

    Args:
        path: Must not exist.
        tensors: dtype (of ``STATE_DTYPES``) and shape of each, by name. The wide ones first, so
            that all numbers lie on multiples of their size.
        metadata: Texts about the file as a whole.

    Raises:
        CheckpointUnavailable: It cannot be written.
    """
    header: dict[str, object] = {_METADATA: dict(metadata)}
    places, end = {}, 0
    for name, (kind, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * STATE_DTYPES[kind].itemsize
        places[name] = _Place(STATE_DTYPES[kind], shape, begin, end)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    begin = _LENGTH_BYTES + len(text)
    try:
        with path.open("xb") as file:
            file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
            _allocate(file.fileno(), begin + end)
        content = np.memmap(path, dtype=np.uint8, mode="r+")
    except OSError as error:
        raise CheckpointUnavailable(f"{path}: {error}") from error
    return {name: place.view(content[begin:]) for name, place in places.items()}


def _allocate(descriptor: int, size: int) -> None:
    """Make a file so long.

    Where the system can, the room is taken at once: a disk that is full is then an error here,
    and not the end of the process when a page is written.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 0
