"""Census income rows as arrays: hashed keys, scaled numbers, labels.

May import numpy and examples.common. Never downloads: the files lie in data/.
"""

from __future__ import annotations

import gzip
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from examples.common.dataset import Examples
from examples.common.hashing import hash_key

__all__ = ["DATA_DIR", "DEEP_FIELDS", "NUMBERS", "WIDE_FIELDS", "load"]

DATA_DIR = Path(__file__).parent / "data"

COLUMNS = (
    "age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation",
    "relationship", "race", "sex", "capital_gain", "capital_loss", "hours_per_week",
    "native_country",
)  # fmt: skip
CATEGORIES = (
    "workclass", "education", "marital_status", "occupation", "relationship", "race", "sex",
    "native_country",
)  # fmt: skip
NUMBERS = ("age", "education_num", "capital_gain", "capital_loss", "hours_per_week")
# Upper edges: a number also becomes a category, so that the model can bend where the data does.
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
DEEP_FIELDS = (*CATEGORIES, *(f"{name}_bucket" for name in BUCKETS))
WIDE_FIELDS = (*DEEP_FIELDS, *("*".join(cross) for cross in CROSSES))


def load(data_dir: Path = DATA_DIR) -> tuple[Examples, Examples, Examples]:
    """Return training, validation and test examples.

    They are the first 90 % and the last 10 % of adult.data, and adult.test. The first
    len(DEEP_FIELDS) columns of the keys are the plain categories, the others their crosses; the
    numbers are scaled to mean 0 and deviation 1 over the training rows.

    Raises:
        FileNotFoundError: A file is missing from ``data_dir``.
        ValueError: A row has the wrong number of columns; the message names file and line.
    """
    known = _read_rows(data_dir / "adult.data.gz")
    split = len(known) * 9 // 10
    training = known[:split]
    raw = _raw_numbers(training)
    scale = (raw.mean(axis=0), raw.std(axis=0))
    test = _read_rows(data_dir / "adult.test.gz")
    return _examples(training, scale), _examples(known[split:], scale), _examples(test, scale)


def _read_rows(path: Path) -> list[list[str]]:
    rows = []
    with gzip.open(path, "rt", encoding="ascii") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip() or line.startswith("|"):  # adult.test opens with a remark
                continue
            row = [value.strip() for value in line.split(",")]
            if len(row) != len(COLUMNS) + 1:
                raise ValueError(f"{path}, line {number}: {len(row)} columns, 15 expected")
            rows.append(row)
    return rows


def _raw_numbers(rows: Sequence[Sequence[str]]) -> NDArray[np.float64]:
    columns = [COLUMNS.index(name) for name in NUMBERS]
    raw = np.array([[float(row[column]) for column in columns] for row in rows])
    # Capital gain and loss span five decades.
    for name in ("capital_gain", "capital_loss"):
        raw[:, NUMBERS.index(name)] = np.log1p(raw[:, NUMBERS.index(name)])
    return raw


def _examples(
    rows: Sequence[Sequence[str]], scale: tuple[NDArray[np.float64], NDArray[np.float64]]
) -> Examples:
    mean, deviation = scale
    return Examples(
        keys=np.array([_keys(row) for row in rows], dtype=np.int64),
        numbers=((_raw_numbers(rows) - mean) / deviation).astype(np.float32),
        labels=np.array([row[-1].startswith(">50K") for row in rows], dtype=np.float32),
    )


def _keys(row: Sequence[str]) -> list[int]:
    values = dict(zip(COLUMNS, row, strict=False))
    for name, edges in BUCKETS.items():
        values[f"{name}_bucket"] = str(bisect_right(edges, float(values[name])))
    for cross in CROSSES:
        values["*".join(cross)] = "\x1f".join(values[name] for name in cross)
    return [hash_key(field, values[field]) for field in WIDE_FIELDS]
