"""Rows as they are before their first push: of keys that a checkpoint does not have.

Imports ``backstay.tables``, numpy and the native module.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from backstay._native import SimNode, table_id
from backstay.tables import TableSpec

__all__ = ["initial_rows"]

TABLES_REMEMBERED_MAX = 64


def initial_rows(spec: TableSpec, keys: NDArray[np.uint64]) -> NDArray[np.float32]:
    """Return the initial weights of keys [n], float32 [n, elements]; the servers' own bits.

    Meant for the few keys that training has not met: each takes microseconds.
    """
    if not len(keys):
        return np.empty((0, spec.row_elements), np.float32)
    values = _node_with(spec).peek(table_id(spec.name), keys.tolist())
    return np.array(values, np.float32).reshape(len(keys), spec.row_elements)


@lru_cache(maxsize=TABLES_REMEMBERED_MAX)
def _node_with(spec: TableSpec) -> SimNode:
    # The simulator's node is a real one without sockets and threads: it has an empty table and
    # answers from its initializer, and it keeps no row for having been asked.
    node = SimNode(1, 1)
    node.create_table(spec.to_json())
    return node
