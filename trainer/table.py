"""What a client knows of a table, and of a batch of keys.

Imports the table descriptions and the native module. Never touches the network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from backstay._native import KeyPlan, table_id
from backstay.errors import InvalidRequest
from backstay.tables import Dense, Refuse, Sparse, TableSpec
from backstay.trainer.arrays import Keys


@dataclass(frozen=True)
class Table:
    """A table of the cluster.

    Attributes:
        spec: Its description, every default filled in.
        id: The number under which it travels.
    """

    spec: TableSpec
    id: int

    @classmethod
    def of(cls, spec: TableSpec) -> Table:
        """Return the handle of a table that exists."""
        return cls(spec, table_id(spec.name))

    @property
    def name(self) -> str:
        """Its name."""
        return self.spec.name

    @property
    def row_elements(self) -> int:
        """Elements of a row, or of a block of a dense table."""
        kind = self.spec.kind
        return kind.dim if isinstance(kind, Sparse) else kind.block_elements

    @property
    def dim(self) -> int:
        """Elements of a row of a sparse table."""
        return self.sparse().dim

    @property
    def refuses_non_finite(self) -> bool:
        """Whether gradients with NaN or infinity are refused."""
        return isinstance(self.spec.non_finite, Refuse)

    def sparse(self) -> Sparse:
        """Return its kind, which must be sparse."""
        if not isinstance(self.spec.kind, Sparse):
            raise InvalidRequest(f"table {self.name} is dense: use pull_dense and push_dense")
        return self.spec.kind

    def dense(self) -> Dense:
        """Return its kind, which must be dense."""
        if not isinstance(self.spec.kind, Dense):
            raise InvalidRequest(f"table {self.name} is sparse: use pull and push with keys")
        return self.spec.kind

    def block_keys(self) -> Keys:
        """Return the keys of a dense table's blocks, in order, uint64 [blocks].

        The same rule as ``dense_block_key`` in the core: the table's id plus the block's
        number, modulo 2**64.
        """
        dense = self.dense()
        blocks = max(1, math.ceil(math.prod(dense.shape) / dense.block_elements))
        with np.errstate(over="ignore"):
            return np.arange(blocks, dtype=np.uint64) + np.uint64(self.id)


@dataclass(frozen=True)
class KeyBatch:
    """A batch of keys made ready once, for any number of pulls and pushes of any tables.

    Attributes:
        shape: The shape of the keys, which results take over.
        plan: The native side of it.
    """

    shape: tuple[int, ...]
    plan: KeyPlan

    @property
    def size(self) -> int:
        """Number of keys, duplicates included."""
        return self.plan.size

    @property
    def unique_count(self) -> int:
        """Number of different keys."""
        return self.plan.unique_count
