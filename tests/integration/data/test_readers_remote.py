"""Readers of files behind URLs: a real S3 server on loopback, and fsspec's memory."""

from __future__ import annotations

import gzip
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs

from backstay.data import BadRecords
from backstay.data.files import FileSet
from backstay.errors import ConfigError, DataChanged, DataUnavailable
from tests.integration.readers_data import read_all, reader_of, shard_sizes
from tests.s3 import s3_server


@pytest.mark.slow
def test_readers_of_s3(tmp_path: Path) -> None:
    table = pa.table({"a": list(range(100))})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=30)
    with s3_server(tmp_path) as storage:
        store = s3fs.S3FileSystem(**storage)
        store.mkdir("bucket")
        text = b"a\n" + b"".join(b"%d\n" % i for i in range(100))
        store.pipe_file("bucket/text/1.csv", text)
        store.pipe_file("bucket/text/2.csv.gz", gzip.compress(text))
        store.pipe_file("bucket/parquet/_SUCCESS", b"")
        store.put_file(str(tmp_path / "t.parquet"), "bucket/parquet/t.parquet")

        reader = reader_of("s3://bucket/text", storage=storage)
        first, second = "s3://bucket/text/1.csv", "s3://bucket/text/2.csv.gz"
        assert shard_sizes(reader) == {first: 100, second: 100}
        # As a worker does: by the name alone.
        worker = reader_of("s3://bucket/text/*", kind="csv", storage=storage)
        for name in (first, second):
            found = list(worker.read(name, 90, 10, BadRecords(0)))
            assert found == [{"a": str(i)} for i in range(90, 100)]

        parquet = reader_of("s3://bucket/parquet", storage=storage)
        assert shard_sizes(parquet) == {"s3://bucket/parquet/t.parquet": 100}
        columns = parquet.read_columns("s3://bucket/parquet/t.parquet", 55, 10)
        assert columns is not None
        assert columns["a"].tolist() == list(range(55, 65))

        store.pipe_file("bucket/text/1.csv", text + b"100\n")
        with pytest.raises(DataChanged):
            list(worker.read(first, 0, 1, BadRecords(0)))
        with pytest.raises(DataUnavailable, match="s3://bucket/none"):
            shard_sizes(reader_of("s3://bucket/none", kind="csv", storage=storage))
    with pytest.raises(DataUnavailable):
        list(worker.read(second, 0, 1, BadRecords(0)))


def test_memory_and_its_patterns() -> None:
    memory = fsspec.filesystem("memory")
    for name in ("1", "2"):
        memory.pipe_file(f"/several/{name}.jsonl", b'{"a": %s}\n' % name.encode())
    names = ["memory://several/1.jsonl", "memory://several/2.jsonl"]
    for path in ("memory://several", "memory://several/*.jsonl"):
        reader = reader_of(path)
        assert list(shard_sizes(reader)) == names
        assert read_all(reader)[0] == [{"a": 1}, {"a": 2}]


def test_an_unknown_protocol_is_named() -> None:
    with pytest.raises(ConfigError, match="nosuch://x"):
        reader_of("nosuch://x/y.csv")


def test_a_password_stays_out_of_names_and_messages() -> None:
    url = "ftp://me:hunter2@127.0.0.1:1/data.csv"
    with pytest.raises(DataUnavailable) as caught:
        FileSet([url]).files()
    assert "hunter2" not in str(caught.value)
    assert "ftp://127.0.0.1:1/data.csv" in str(caught.value)
