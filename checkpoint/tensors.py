"""Files of tensors in the safetensors format, mapped: no row is copied to be read or written.

The format's own package reads into memory and writes from it; tables may be larger than that. So
the format's crate makes and checks the headers, and the arrays are views of the mapped file. Knows
nothing of checkpoints. Imports numpy, the native module and ``backstay.errors``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from backstay._native import make_tensor_header, read_tensor_header
from backstay.errors import CheckpointDamaged, CheckpointUnavailable, InvalidRequest

__all__ = ["STATE_DTYPES", "TensorFile", "create", "kind_of", "read"]

RANK_MAX = 16
# The kinds of numbers in our files, little-endian on every machine.
_DTYPES: Mapping[str, np.dtype[Any]] = {"U64": np.dtype("<u8"), "F32": np.dtype("<f4")}
# What a model's state may have besides.
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
        if not size or not path.is_file():
            raise CheckpointDamaged(f"{where}: {size} bytes are too few for a file of tensors")
        content = np.memmap(path, dtype=np.uint8, mode="r")
    except FileNotFoundError as error:
        raise CheckpointDamaged(f"{where}: missing") from error
    except OSError as error:
        raise CheckpointUnavailable(f"{where}: {error}") from error
    try:
        return _parsed(content, dtypes)
    except (InvalidRequest, ValueError) as error:
        raise CheckpointDamaged(f"{where}: {error}") from error


def _parsed(content: NDArray[np.uint8], dtypes: Mapping[str, np.dtype[Any]]) -> TensorFile:
    metadata, described = read_tensor_header(content)
    tensors = {}
    for name, kind, shape, (begin, end) in described:
        if kind not in dtypes:
            raise InvalidRequest(f"tensor {name} is of dtype {kind}, not {' or '.join(dtypes)}")
        if len(shape) > RANK_MAX:
            raise InvalidRequest(f"tensor {name} has {len(shape)} dimensions")
        # Views alone, so that the mapping ends with the last of them.
        tensors[name] = _view(content[begin:end], dtypes[kind], shape)
    return TensorFile(metadata, tensors)


def _view(content: NDArray[np.uint8], dtype: np.dtype[Any], shape: Sequence[int]) -> Array:
    array = content.view(np.ndarray)
    # Only a file of another writer has numbers that do not lie on their own multiples.
    if array.__array_interface__["data"][0] % dtype.itemsize:
        array = array.copy()
        array.setflags(write=False)
    return array.view(dtype).reshape(shape)


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
    listed = [(name, kind, list(shape)) for name, (kind, shape) in tensors.items()]
    header = make_tensor_header(dict(metadata), listed)
    sizes = [math.prod(shape) * STATE_DTYPES[kind].itemsize for kind, shape in tensors.values()]
    try:
        with path.open("xb") as file:
            file.write(header)
            _allocate(file.fileno(), len(header) + sum(sizes))
        content = np.memmap(path, dtype=np.uint8, mode="r+")
    except OSError as error:
        raise CheckpointUnavailable(f"{path}: {error}") from error
    arrays, end = {}, len(header)
    for (name, (kind, shape)), size in zip(tensors.items(), sizes, strict=True):
        begin, end = end, end + size
        arrays[name] = _view(content[begin:end], STATE_DTYPES[kind], shape)
    return arrays


def _allocate(descriptor: int, size: int) -> None:
    """Make a file so long.

    Where the system can, the room is taken at once: a disk that is full is then an error here,
    and not the end of the process when a page is written.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)
