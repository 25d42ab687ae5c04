"""Tables of a follower: each call goes to the newest version."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from backstay._native import ServedTables, initial_rows, table_id
from backstay.checkpoint.chain import Followed
from backstay.checkpoint.export_reader import Unknown, as_keys, pulled, with_unknown
from backstay.checkpoint.reading import block_count
from backstay.errors import InvalidRequest
from backstay.tables import Dense, Sparse, TableSpec

__all__ = ["FollowedTable", "Version", "dense_values"]


class Version(NamedTuple):
    """One version of what is served; it never changes.

    Attributes:
        number: Grows with each version.
        state: What it has of each slot.
        tables: Its rows.
    """

    number: int
    state: Followed
    tables: ServedTables

    def spec(self, name: str, kind: type[Sparse] | type[Dense]) -> TableSpec:
        """Return the description of a table of a kind.

        Raises:
            InvalidRequest: There is none of that name.
        """
        of_kind = [one for one in self.state.specs if isinstance(one.kind, kind)]
        for spec in of_kind:
            if spec.name == name:
                return spec
        known = ", ".join(one.name for one in of_kind) or "none"
        raise InvalidRequest(f"the export has no {kind.__name__.lower()} table {name!r}: {known}")


class FollowedTable:
    """The rows of one sparse table, of the newest version at each call. For any thread."""

    def __init__(self, spec: TableSpec, newest: Callable[[], Version]) -> None:
        self.spec = spec
        self._newest = newest

    @property
    def dim(self) -> int:
        """Elements of a row."""
        return self.spec.row_elements

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._newest().tables.row_count(self.spec.name)

    def lookup(self, keys: Any, *, unknown: Unknown = "zeros") -> NDArray[np.float32]:
        """Return the rows of keys, float32 [*keys.shape, dim], all of one version.

        Args:
            keys: Integers of any shape; signed ones keep their bits.
            unknown: What a key without a row gets: "zeros"; "initial", the value that it would
                have on a server before its first push, at microseconds a key; "refuse".

        Raises:
            InvalidRequest: The keys are not integers; or one has no row, with "refuse".
        """
        wanted = as_keys(keys)
        flat = np.ascontiguousarray(wanted.reshape(-1))
        rows, known = self._newest().tables.lookup(self.spec.name, flat)
        return with_unknown(self.spec, flat, rows, known, unknown).reshape(*wanted.shape, self.dim)

    def to_numpy(self) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
        """Return keys, ascending, and weights as arrays of their own."""
        keys, weights = self._newest().tables.all_rows(self.spec.name)
        order = np.argsort(keys)
        return keys[order], weights[order]


def dense_values(version: Version, name: str) -> NDArray[np.float32]:
    """Return a dense table of a version, float32 of its shape.

    Raises:
        InvalidRequest: There is none of that name.
    """
    spec = version.spec(name, Dense)
    assert isinstance(spec.kind, Dense)
    keys = np.arange(block_count(spec), dtype=np.uint64) + np.uint64(table_id(name))
    rows, known = version.tables.lookup(name, keys)
    if not known.all():
        rows[~known] = initial_rows(spec.to_json(), keys[~known])
    values = rows.reshape(-1)[: math.prod(spec.kind.shape)].reshape(spec.kind.shape)
    return pulled(spec, values)
