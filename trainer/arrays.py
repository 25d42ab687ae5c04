"""Arrays in and out: what callers pass becomes contiguous numpy, copied only where it must be.

Imports numpy and the errors. Never touches the network.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from backstay.errors import InvalidRequest

Keys: TypeAlias = NDArray[np.uint64]
Rows: TypeAlias = NDArray[np.float32]


@runtime_checkable
class SupportsDLPack(Protocol):
    """Anything that hands out its memory by DLPack: a tensor of Paddle, PyTorch, JAX, ..."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...


ArrayLike: TypeAlias = np.ndarray[Any, Any] | SupportsDLPack


def as_array(values: object, what: str) -> np.ndarray[Any, Any]:
    """Return a numpy view of an array or tensor in main memory.

    Raises:
        InvalidRequest: It is neither an array nor a tensor in main memory.
    """
    if isinstance(values, np.ndarray):
        return values
    if isinstance(values, SupportsDLPack):
        try:
            return np.from_dlpack(values)
        except (BufferError, RuntimeError, TypeError) as error:
            raise InvalidRequest(
                f"{what}: the tensor cannot be read from main memory: {error}; "
                "move it there and detach it first"
            ) from error
    array = np.asarray(values)
    if array.dtype == object:
        raise InvalidRequest(f"{what}: {type(values).__name__} is neither an array nor a tensor")
    return array


def as_keys(values: object) -> Keys:
    """Return keys as contiguous uint64 of the same shape.

    Signed keys keep their bits: -1 is the key 2**64 - 1.

    Raises:
        InvalidRequest: The values are not integers of at most 64 bits.
    """
    array = as_array(values, "keys")
    if array.size == 0:
        raise InvalidRequest("there are no keys: a batch needs at least one")
    if array.dtype.kind not in "iu":
        raise InvalidRequest(f"keys have dtype {array.dtype}: they must be integers")
    if array.dtype not in (np.dtype(np.int64), np.dtype(np.uint64)):
        array = array.astype(np.int64)
    # numpy makes a single key a list of one: its shape is put back.
    return np.ascontiguousarray(array).view(np.uint64).reshape(array.shape)


def as_rows(values: object, shape: tuple[int, ...], what: str) -> Rows:
    """Return float32 values, contiguous, after checking their shape.

    Raises:
        InvalidRequest: Wrong shape, or a dtype that float32 does not hold.
    """
    array = as_array(values, what)
    if array.shape != shape:
        raise InvalidRequest(f"{what} have shape {array.shape}, must be {shape}")
    if array.dtype != np.float32:
        if array.dtype.kind != "f":
            raise InvalidRequest(f"{what} have dtype {array.dtype}: must be float32")
        array = array.astype(np.float32)
    return np.ascontiguousarray(array)


def as_counts(values: object, shape: tuple[int, ...], what: str) -> Rows:
    """Return numbers of shows or clicks as float32, contiguous.

    Raises:
        InvalidRequest: Wrong shape or dtype, or a number that is negative or not finite.
    """
    array = as_array(values, what)
    if array.shape != shape:
        raise InvalidRequest(f"{what} have shape {array.shape}, must be {shape}: one for each key")
    if array.dtype.kind not in "fiub":
        raise InvalidRequest(f"{what} have dtype {array.dtype}: must be numbers")
    with np.errstate(over="ignore"):
        counts = np.ascontiguousarray(array, np.float32).reshape(shape)
    wrong = ~((counts >= 0) & np.isfinite(counts))
    if wrong.any():
        first = array.reshape(-1)[np.argmax(wrong.reshape(-1))]
        raise InvalidRequest(f"{what} have the number {first}: must be 0 or more, and finite")
    return counts


def clicks_of_examples(clicks: Any) -> NDArray[np.float32] | None:
    """Return the clicks of a batch's examples as float32 [examples]; None stays None.

    Args:
        clicks: A tensor of the framework, an array or a list: [examples] or [examples, 1].

    Raises:
        InvalidRequest: It has another shape, or a number that is negative or not finite.
    """
    if clicks is None:
        return None
    array = np.asarray(clicks.detach().cpu().numpy() if hasattr(clicks, "detach") else clicks)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise InvalidRequest(f"clicks have shape {array.shape}: give one number for each example")
    return as_counts(array, array.shape, "clicks")


def output(out: Rows | None, shape: tuple[int, ...]) -> Rows:
    """Return the array to write results of ``shape`` to: ``out`` if it fits, else a new one.

    Raises:
        InvalidRequest: ``out`` has another shape or dtype, or is not contiguous or writeable.
    """
    if out is None:
        return np.empty(shape, dtype=np.float32)
    fits = out.shape == shape and out.dtype == np.float32
    if not (fits and out.flags.c_contiguous and out.flags.aligned and out.flags.writeable):
        raise InvalidRequest(
            f"out has shape {out.shape} and dtype {out.dtype}: "
            f"must be a contiguous, writeable float32 array of shape {shape}"
        )
    return out


def sum_by_key(keys: Keys, gradients: Rows) -> tuple[Keys, Rows]:
    """Return the different keys in order and the sum of each one's gradients.

    Args:
        keys: uint64 [n].
        gradients: float32 [n, dim].
    """
    order = np.argsort(keys, kind="stable")
    in_order = keys[order]
    starts = np.flatnonzero(np.append(True, in_order[1:] != in_order[:-1]))
    return in_order[starts], np.add.reduceat(gradients[order], starts, axis=0)
