"""Parquet and Arrow files, RecordIO files and databases."""

from __future__ import annotations

import gzip
import io
import sqlite3
import struct
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from backstay._native import crc32c
from backstay.data import BadRecords, Reader, open_reader, read_batch
from backstay.data.recordio_format import (
    MAGIC,
    Layout,
    RecordIOWriter,
    write_recordio,
)
from backstay.errors import (
    ConfigError,
    DataChanged,
    DataDamaged,
    DataUnavailable,
    TooManyBadRecords,
)
from backstay.job_spec import DataSpec
from tests.integration.readers_data import read_all, reader_of, shard_sizes

ROWS = 1000
PART_ROWS = 150
TABLE = pa.table(
    {
        "i": np.arange(ROWS),
        "f": pa.array([None if i % 7 == 0 else i / 2 for i in range(ROWS)]),
        "s": [f"row {i}" for i in range(ROWS)],
        "v": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(ROWS * 2.0)), 2),
        "d": pa.array([f"k{i % 3}" for i in range(ROWS)]).dictionary_encode(),
    }
)


def written(folder: Path, kind: str, table: pa.Table = TABLE, name: str = "t") -> Path:
    path = folder / f"{name}.{kind}"
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=PART_ROWS)
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=PART_ROWS)
    return path


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_ranges_of_columns(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path, kind)
    reader = reader_of(path)
    assert shard_sizes(reader) == {str(path): ROWS}
    assert reader.metadata.column_names == tuple(TABLE.column_names)
    for start, count in ((0, 0), (140, 20), (0, ROWS), (149, 302), (999, 1), (150, 150)):
        columns = reader.read_columns(str(path), start, count)
        assert columns is not None
        expected = np.arange(start, start + count)
        assert columns["i"].tolist() == expected.tolist()
        assert columns["s"].tolist() == [f"row {i}" for i in expected]
        assert columns["d"].tolist() == [f"k{i % 3}" for i in expected]
        assert np.isnan(columns["f"]).tolist() == (expected % 7 == 0).tolist()
        assert np.array_equal(columns["v"], np.stack([expected * 2, expected * 2 + 1], axis=1))
        rows = list(reader.read(str(path), start, count, BadRecords(0)))
        assert [row["i"] for row in rows] == expected.tolist()
    some = reader_of(path, select=["s", "i"], cache_bytes=0)
    assert list(some.read(str(path), 151, 1, BadRecords(0))) == [{"s": "row 151", "i": 151}]
    with pytest.raises(ConfigError, match=r"has no column \['z'\]"):
        shard_sizes(reader_of(path, select=["z"]))
    with pytest.raises(DataChanged):
        reader.read_columns(str(path), 990, 11)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_files_that_are_none(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path, kind)
    whole = path.read_bytes()
    for content in (b"", b"x", whole[:-10], b"rubbish" * 100):
        path.write_bytes(content)
        with pytest.raises(DataDamaged, match=f"{path}: is no {kind} file"):
            shard_sizes(reader_of(path))
    empty = written(tmp_path, kind, TABLE.slice(0, 0), "empty")
    reader = reader_of(empty)
    assert shard_sizes(reader) == {str(empty): 0}
    columns = reader.read_columns(str(empty), 0, 0)
    assert columns is not None
    assert columns["i"].dtype == np.int64


def test_a_damaged_row_group_is_as_many_damaged_records(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    table = TABLE.select(["i", "s"])
    pq.write_table(table, path, row_group_size=PART_ROWS, write_page_checksum=True)
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    content = bytearray(path.read_bytes())
    middle = column.data_page_offset + column.total_compressed_size // 2
    content[middle] ^= 0xFF
    path.write_bytes(content)
    reader = reader_of(path)
    bad = BadRecords(ROWS)
    batch = read_batch(reader, str(path), 100, 300, bad)
    assert batch.column("i").tolist() == [*range(100, 150), *range(300, 400)]
    (report,) = bad.reports
    assert (report.offset, report.unit, report.records) == (150, "row", 150)
    assert "row group 1 is damaged" in report.reason
    with pytest.raises(TooManyBadRecords, match="150 damaged records"):
        reader.read_columns(str(path), 150, 150, BadRecords(149))
    # What a range counts is what lies in it.
    assert [row["i"] for row in reader.read(str(path), 299, 2, BadRecords(1))] == [300]


def test_pyarrow_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'backstay\[parquet\]'"):
        reader_of(tmp_path / "t.parquet", kind="parquet")


def chunk(words: tuple[int, ...], payload: bytes) -> bytes:
    return MAGIC + struct.pack("<4I", *words) + payload


def framed(content: bytes) -> bytes:
    """Snappy's framing: one compressed frame, one as it is, and one to skip."""
    half = len(content) // 2
    block = pa.compress(content[:half], codec="snappy", asbytes=True)
    frames = b"\xff\x06\x00\x00sNaPpY"
    for kind, body in ((0, block), (0x80, b"padding"), (1, content[half:])):
        body = body if kind == 0x80 else b"\0\0\0\0" + body
        frames += bytes([kind]) + len(body).to_bytes(3, "little") + body
    return frames


RECORDS = [b"", b"one", b"x" * 1000, b"\0\x01\x02"]
PLAIN = b"".join(struct.pack("<I", len(each)) + each for each in RECORDS)
SNAPPED = pa.compress(PLAIN, codec="snappy", asbytes=True)


@pytest.mark.parametrize(
    "payload", [PLAIN, SNAPPED, gzip.compress(PLAIN)], ids=["plain", "snappy", "gzip"]
)
def test_recordio_of_elasticdl(tmp_path: Path, payload: bytes) -> None:
    compressor = 1 + [PLAIN, SNAPPED].index(payload) if payload in (PLAIN, SNAPPED) else 3
    path = tmp_path / "x.recordio"
    path.write_bytes(2 * chunk((4, crc32c(payload), compressor, len(payload)), payload))
    assert read_all(reader_of(path))[0] == RECORDS * 2


@pytest.mark.parametrize("go", [False, True], ids=["paddle", "go"])
@pytest.mark.parametrize("compressor", [0, 1, 2])
def test_recordio_of_paddle(tmp_path: Path, compressor: int, go: bool) -> None:
    payload = [PLAIN, framed(PLAIN), gzip.compress(PLAIN)][compressor]
    crc, size = zlib.crc32(payload), len(payload)
    words = (crc, compressor, size, 4) if go else (4, crc, compressor, size)
    path = tmp_path / "x.recordio"
    path.write_bytes(2 * chunk(words, payload))
    reader = reader_of(path)
    assert shard_sizes(reader) == {str(path): 8}
    assert read_all(reader)[0] == RECORDS * 2
    assert list(reader.read(str(path), 3, 2, BadRecords(0))) == [RECORDS[3], RECORDS[0]]
    assert read_batch(reader, str(path), 1, 1, BadRecords(0))[0] == b"one"


def test_recordio_damage_is_told_by_chunk(tmp_path: Path) -> None:
    file = io.BytesIO()
    with RecordIOWriter(file, chunk_bytes=20, layout=Layout.CHECKSUM_FIRST) as writer:
        for i in range(9):
            writer.write(b"%06d" % i)
    content = bytearray(file.getvalue())
    path = tmp_path / "x.recordio"
    path.write_bytes(content)
    reader = reader_of(path)
    assert shard_sizes(reader) == {str(path): 9}

    one = 20 + 2 * 10  # A chunk of two records of 6 bytes with their lengths.
    content[one + 25] ^= 1
    path.write_bytes(content)
    records, bad = read_all(reader_of(path), limit=9)
    assert len(records) == 7
    assert (bad.count, bad.reports[0].offset, bad.reports[0].reason) == (
        2,
        one,
        "the checksum does not match",
    )
    # A header that is none: all up to the next one is one damaged record.
    content[2 * one] ^= 1
    path.write_bytes(content)
    records, bad = read_all(reader_of(path), limit=9)
    assert len(records) == 5
    assert [report.offset for report in bad.reports] == [one, 2 * one]
    path.write_bytes(content[:-3])
    records, bad = read_all(reader_of(path), limit=9)
    assert len(records) == 4
    assert "the chunk ends after" in bad.reports[-1].reason


def test_recordio_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "x.recordio"
    path.write_bytes(b"something else altogether")
    with pytest.raises(DataDamaged, match="magic number"):
        shard_sizes(reader_of(path))
    path.write_bytes(b"")
    assert shard_sizes(reader_of(path)) == {str(path): 0}
    write_recordio(str(path), RECORDS, compressor="gzip")
    assert read_all(reader_of(path))[0] == RECORDS
    with pytest.raises(ConfigError, match=r"options.layout"):
        reader_of(path, layout="x")
    with pytest.raises(ConfigError, match="compressor"):
        RecordIOWriter(io.BytesIO(), compressor="zip")


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "x.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute(
            "CREATE TABLE whole AS SELECT range AS i, 's' || range AS s, "
            "CASE WHEN range % 7 = 0 THEN NULL ELSE range END AS n FROM range(1000)"
        )
        connection.execute("CREATE TABLE gaps AS SELECT * FROM whole ORDER BY i DESC")
        connection.execute("DELETE FROM gaps WHERE i % 3 = 0")
    return path


QUERY = "SELECT i, s, n FROM whole WHERE i >= 500"


@pytest.mark.parametrize(
    ("source", "order", "expected"),
    [
        ("whole", None, list(range(1000))),
        ("gaps", None, [i for i in range(999, -1, -1) if i % 3]),
        ("gaps", ["i"], [i for i in range(1000) if i % 3]),
        (QUERY, ["n", "i"], None),
        ("main.whole", ["i"], list(range(1000))),
    ],
)
def test_ranges_of_duckdb(
    database: Path, source: str, order: list[str] | None, expected: list[int] | None
) -> None:
    options: dict[str, Any] = {"database": str(database)} | ({"order_by": order} if order else {})
    reader = reader_of(source, kind="sql", **options)
    (records,) = shard_sizes(reader).values()
    assert reader.metadata.column_names == ("i", "s", "n")
    found = []
    for start in range(0, records, 77):
        columns = reader.read_columns(source, start, min(77, records - start))
        assert columns is not None
        found += columns["i"].tolist()
        assert columns["s"].tolist() == [f"s{i}" for i in columns["i"]]
        assert np.isnan(columns["n"].astype(float)).tolist() == (columns["i"] % 7 == 0).tolist()
    assert len(set(found)) == len(found) == records
    assert expected is None or found == expected
    assert next(iter(reader.read(source, 5, 1, BadRecords(0))))["i"] == found[5]
    with pytest.raises(DataChanged):
        reader.read_columns(source, records, 1)


def test_orders_that_are_none(database: Path) -> None:
    with pytest.raises(ConfigError, match=r"1000 rows of 'whole' have 858 places"):
        shard_sizes(reader_of("whole", kind="sql", database=str(database), order_by=["n"]))
    with pytest.raises(ConfigError, match=r"options\.order_by: name columns"):
        reader_of(QUERY, kind="sql", database=str(database))
    with pytest.raises(DataUnavailable, match="nosuch"):
        shard_sizes(reader_of("nosuch", kind="sql", database=str(database)))
    with pytest.raises(DataUnavailable):
        shard_sizes(reader_of("t", kind="sql", database=str(database) + ".none"))


def test_files_by_a_query_of_duckdb(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n2,x\n1,y\n")
    query = f"SELECT * FROM read_csv('{path}')"
    reader = reader_of(query, kind="sql", order_by=["a"], select=["b"])
    assert read_all(reader)[0] == [{"b": "y"}, {"b": "x"}]


def test_another_database_by_its_driver(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE t (i INTEGER, f REAL, s TEXT)")
    rows = [(i, None if i % 5 == 0 else i / 2, f"s{i}") for i in range(100)]
    connection.executemany("INSERT INTO t VALUES (?, ?, ?)", rows[::-1])
    connection.commit()
    connection.close()
    options = {"connect": "sqlite3:connect", "connect_options": {"database": str(path)}}
    reader = reader_of("t", kind="sql", order_by=["i"], **options)
    assert shard_sizes(reader) == {"t": 100}
    columns = reader.read_columns("t", 10, 20)
    assert columns is not None
    assert columns["i"].tolist() == list(range(10, 30))
    assert columns["s"][0] == "s10"
    assert np.isnan(columns["f"]).sum() == 4
    for wrong in ("sqlite3", "sqlite3:nosuch", "nosuch:connect"):
        with pytest.raises(ConfigError, match=r"options.connect"):
            reader_of("t", kind="sql", order_by=["i"], connect=wrong)


def module_with(reader: Any) -> ModuleType:
    module = ModuleType("model")
    module.custom_data_reader = reader  # type: ignore[attr-defined]
    return module


class Own:
    """The least a custom reader may have."""

    def __init__(self, data_origin: str, size: int) -> None:
        self.origin = data_origin
        self.size = size

    def shards(self) -> list[tuple[str, int]]:
        return [(self.origin, self.size)]

    def read(self, shard: str, start: int, count: int, bad: BadRecords) -> Any:
        for i in range(start, start + count):
            if i == 3:
                bad.add(shard, i, "three", unit="row")
            else:
                yield {"i": i}


class Elastic:
    """A reader written for ElasticDL."""

    def __init__(self, data_origin: str, size: int) -> None:
        del data_origin
        self.size = size

    def create_shards(self) -> dict[str, tuple[int, int]]:
        return {"a": (0, self.size), "b": (100, self.size)}

    def read_records(self, task: Any) -> Any:
        for i in range(task.shard.start, task.shard.end):
            yield f"{task.shard.name}{i}"


def custom(reader: Any) -> Reader:
    data = DataSpec(kind="custom", paths=("here",), options={"size": 5})
    return open_reader(data, module=module_with(reader))


def test_readers_of_the_users_own() -> None:
    own = custom(Own)
    assert shard_sizes(own) == {"here": 5}
    bad = BadRecords(1)
    assert read_batch(own, "here", 2, 3, bad).column("i").tolist() == [2, 4]
    assert str(bad.reports[0]) == "here, row 3: three"
    elastic = custom(Elastic)
    assert shard_sizes(elastic) == {"a": 5, "b": 5}
    assert list(elastic.read("b", 1, 2, bad)) == ["b101", "b102"]
    with pytest.raises(ConfigError, match="shards"):
        custom(lambda data_origin, size: None)
    with pytest.raises(ConfigError, match="custom_data_reader"):
        open_reader(DataSpec(kind="custom"), module=ModuleType("model"))
