"""Census records as what Wide & Deep takes: hashed ids of categories and crosses, scaled numbers.

May import numpy and backstay.trainer.hashing. Shared by the Paddle and the PyTorch definition,
which import it as a sibling: the folder of a definition file is on the module path.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from backstay.trainer.hashing import hash_ids

__all__ = ["DEEP_FIELDS", "NUMBERS", "ROWS", "WIDE_FIELDS", "features_of", "labels_of"]

ROWS = 1 << 16
CATEGORIES = (
    "workclass", "education", "marital_status", "occupation", "relationship", "race", "sex",
    "native_country",
)  # fmt: skip
# Mean and deviation over the training records; capital gain and loss as logarithms.
NUMBERS = {
    "age": (38.6, 13.6),
    "education_num": (10.1, 2.6),
    "capital_gain": (0.73, 2.5),
    "capital_loss": (0.36, 1.6),
    "hours_per_week": (40.4, 12.3),
}
# Lower edges: a number also becomes a category, so that the model can bend where the data does.
BUCKETS = {
    "age": (18, 22, 26, 30, 35, 40, 45, 50, 55, 60, 65, 70),
    "education_num": (4, 8, 9, 10, 12, 13, 14, 15),
    "hours_per_week": (20, 30, 36, 40, 45, 50, 60),
    "capital_gain": (1, 3000, 4000, 5000, 5100, 6000, 7000, 10000, 15000),
    "capital_loss": (1, 1400, 1600, 1820, 1860, 1900, 1980, 2000, 2200, 2400),
}
CROSSES = (
    ("education", "occupation"),
    ("age_bucket", "education", "occupation"),
    ("relationship", "education"),
    ("relationship", "hours_per_week_bucket"),
    ("relationship", "age_bucket"),
    ("occupation", "hours_per_week_bucket"),
    ("workclass", "occupation"),
    ("native_country", "education"),
    ("marital_status", "sex", "age_bucket"),
)
DEEP_FIELDS = len(CATEGORIES) + len(BUCKETS)
WIDE_FIELDS = DEEP_FIELDS + len(CROSSES)

Features = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]


def features_of(records: Any) -> Features:
    """Return ids for the network, ids for the linear part, and scaled numbers.

    Their shapes are [records, DEEP_FIELDS], [records, WIDE_FIELDS] and [records, len(NUMBERS)].
    """
    values: dict[str, NDArray[Any]] = {name: _texts(records, name) for name in CATEGORIES}
    numbers = {name: records.column(name).astype(np.float32) for name in NUMBERS}
    for name, edges in BUCKETS.items():
        values[f"{name}_bucket"] = np.digitize(numbers[name], edges)
    for name in ("capital_gain", "capital_loss"):
        numbers[name] = np.log1p(numbers[name])
    scaled = [(numbers[name] - mean) / deviation for name, (mean, deviation) in NUMBERS.items()]
    deep = [hash_ids(column, field=name, rows=ROWS) for name, column in values.items()]
    wide = [
        hash_ids(*(values[name] for name in cross), field="*".join(cross), rows=ROWS)
        for cross in CROSSES
    ]
    return np.stack(deep, axis=1), np.stack(deep + wide, axis=1), np.stack(scaled, axis=1)


def labels_of(records: Any) -> NDArray[np.float32]:
    """Return 1 for an income above 50,000 dollars, else 0: [records]."""
    # Labels of adult.test end in a dot.
    return np.char.startswith(_texts(records, "income"), ">50K").astype(np.float32)


def _texts(records: Any, name: str) -> NDArray[np.str_]:
    # A blank follows each comma of these files.
    return np.char.strip(records.column(name).astype(np.str_))
