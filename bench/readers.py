"""How fast the readers are, on one core: records of 20 columns by ranges of 4096.

Usage: ``python bench/readers.py [--records N]``. Writes its files to a temporary folder.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from backstay.data import BadRecords, open_reader
from backstay.job_spec import DataSpec

RANGE = 4096
INTEGERS, FLOATS = 14, 6
REPEATS = 3


def write(folder: Path, records: int) -> None:
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {
        f"i{i}": rng.integers(0, 1_000_000, records) for i in range(INTEGERS)
    }
    columns |= {f"f{i}": np.round(rng.random(records), 4) for i in range(FLOATS)}
    with open(folder / "plain.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))
    with open(folder / "plain.csv", "rb") as plain, gzip.open(folder / "z.csv.gz", "wb", 6) as out:
        shutil.copyfileobj(plain, out)
    pq.write_table(pa.table(columns), folder / "t.parquet", row_group_size=RANGE * 8)


def per_second(records: int, work: Callable[[], object]) -> str:
    """The best of some runs, in thousands of records a second."""
    best = float("inf")
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return f"{records / best / 1000:,.0f} k"


def measure(data: DataSpec, records: int) -> str:
    reader = open_reader(data)
    (shard,) = reader.shards()
    ranges = [(at, min(RANGE, records - at)) for at in range(0, records, RANGE)]
    bad = BadRecords(0)

    def by_record() -> None:
        for start, count in ranges:
            for _ in reader.read(shard.name, start, count, bad):
                pass

    def by_column() -> None:
        for start, count in ranges:
            reader.read_columns(shard.name, start, count, bad)

    work = (lambda: list(open_reader(data).shards()), by_record, by_column)
    return " | ".join(per_second(records, each) for each in work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=200_000)
    records = parser.parse_args().records
    pa.set_cpu_count(1)
    types = {f"i{i}": "int64" for i in range(INTEGERS)}
    types |= {f"f{i}": "float32" for i in range(FLOATS)}
    print("| data | index scan | dicts | columns |\n| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), records)
        for file, options in (
            ("plain.csv", {}),
            ("plain.csv", {"types": types}),
            ("z.csv.gz", {"types": types}),
            # One row group is kept, as it is when a worker goes from task to task.
            ("t.parquet", {"cache_bytes": 0}),
        ):
            figures = measure(DataSpec(paths=(f"{folder}/{file}",), options=options), records)
            print(f"| {file}{' with types' if 'types' in options else ''} | {figures} |")


if __name__ == "__main__":
    main()
