"""Click logs as ids: the Criteo format and the Frappe log, by the names of their columns.

May import numpy and backstay.trainer.hashing. Shared by the models of this folder, which import it
as a sibling: the folder of a definition file is on the module path.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from backstay.trainer.hashing import hash_ids

__all__ = ["CRITEO_COLUMNS", "FRAPPE_COLUMNS", "ids_of", "labels_of"]

CRITEO_NUMBERS = tuple(f"I{number}" for number in range(1, 14))
CRITEO_CATEGORIES = tuple(f"C{number}" for number in range(1, 27))
# Files of this format have no header.
CRITEO_COLUMNS = ("label", *CRITEO_NUMBERS, *CRITEO_CATEGORIES)
FRAPPE_COLUMNS = (
    "label", "user", "item", "daytime", "weekday", "isweekend", "homework", "cost", "weather",
    "country", "city",
)  # fmt: skip
# Of a number that is not there; no bucket reaches it.
MISSING = 1000


def ids_of(records: Any, metadata: Any, rows: int | None = None) -> NDArray[np.int64]:
    """Return one id a field, [records, fields]: every column but the label is a field.

    Args:
        records: Of either format.
        metadata: Names the columns.
        rows: Ids are below it; None: any 64 bits (see ``hash_ids``).
    """
    fields = [name for name in metadata.column_names if name != "label"]
    columns = [
        _buckets(records.column(name)) if name in CRITEO_NUMBERS else records.column(name)
        for name in fields
    ]
    ids = [
        hash_ids(column, field=name, rows=rows)
        for name, column in zip(fields, columns, strict=True)
    ]
    return np.stack(ids, axis=1)


def labels_of(records: Any) -> NDArray[np.float32]:
    """Return 1 for a click, else 0: [records]."""
    labels: NDArray[np.float32] = records.column("label").astype(np.float32)
    return labels


def _buckets(column: NDArray[Any]) -> NDArray[np.int64]:
    """Small numbers are their own bucket; above 2, buckets widen as the square of the logarithm."""
    present = column != ""
    numbers = np.where(present, column, "0").astype(np.float64)
    wide = 16 + np.floor(np.log(np.maximum(numbers, 1.0)) ** 2)
    buckets = np.where(numbers > 2, wide, np.maximum(numbers, -8.0) + 8)
    return np.where(present, buckets, MISSING).astype(np.int64)
