"""CSV, TSV and line-JSON: what users' files look like, and what is wrong with them."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backstay.data import BadRecords, read_batch
from backstay.errors import (
    ConfigError,
    DataChanged,
    DataDamaged,
    DataUnavailable,
    InvalidRequest,
    TooManyBadRecords,
)
from tests.integration.readers_data import read_all, reader_of, shard_sizes


def file_of(folder: Path, content: bytes | str, name: str = "data.csv") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a,b\n1,2\n3,4\n", [("1", "2"), ("3", "4")]),
        ("a,b\r\n1,2\r\n3,4\r\n", [("1", "2"), ("3", "4")]),
        ("a,b\n1,2\n3,4", [("1", "2"), ("3", "4")]),
        ("\ufeffa,b\n1,2\n", [("1", "2")]),
        ("a,b\n\n1,2\n\n\r\n3,4\n\n", [("1", "2"), ("3", "4")]),
        ('a,b\n"x\ny","say ""so"""\n', [("x\ny", 'say "so"')]),
        ('a,b\n5" pipe,"q"\n', [('5" pipe', "q")]),
        ("a,b\n", []),
        ("a,b", []),
        ('"a",b\n,\n', [("", "")]),
    ],
)
def test_files_as_they_come(tmp_path: Path, content: str, expected: list[tuple[str, str]]) -> None:
    path = file_of(tmp_path, content)
    for file in (path, file_of(tmp_path, gzip.compress(path.read_bytes()), "data.csv.gz")):
        reader = reader_of(file)
        assert shard_sizes(reader) == {str(file): len(expected)}
        assert reader.metadata.column_names == ("a", "b")
        records, _ = read_all(reader)
        assert records == [{"a": a, "b": b} for a, b in expected]


def test_options_of_delimited_files(tmp_path: Path) -> None:
    path = file_of(tmp_path, '|comment\n 39, x ,1.5\n40, "y, z" ,\n', "adult.data")
    reader = reader_of(
        path,
        kind="csv",
        columns=["age", "job", "gain"],
        select=["gain", "age"],
        types={"gain": "float32", "age": "int32"},
        skip_lines=1,
        strip=True,
    )
    columns = reader.read_columns(str(path), 0, 2)
    assert columns is not None
    assert list(columns) == ["gain", "age"]
    assert columns["age"].tolist() == [39, 40]
    assert columns["gain"].dtype == np.float32
    assert np.isnan(columns["gain"][1])
    text = reader_of(path, kind="csv", columns=["age", "job", "gain"], skip_lines=1, strip=True)
    assert read_all(text)[0][1] == {"age": "40", "job": "y, z", "gain": ""}
    as_is = reader_of(file_of(tmp_path, 'a\tb\n"x\ty\n', "d.tsv"), quote="")
    assert read_all(as_is)[0] == [{"a": '"x', "b": "y"}]


DAMAGED = [
    (b"a,b\n1,2\n3\n5,6\n", 8, "1 values, and there are 2 columns"),
    (b"a,b\n1,2\n3,4,5\n5,6\n", 8, "3 values, and there are 2 columns"),
    (b"a,b\n1,2\n3,\xff4\n5,6\n", 8, "not UTF-8"),
    (b"a,b\n1,2\n3\r,4\n5,6\n", 8, "new-line character"),
    (b"a,b\r\n1,2\r\n3\r\n5,6\r\n", 10, "1 values"),
    (b'a,b\n1,2\n3,"4\n5,6\n', 8, "opened and not closed"),
    (b"a,b\n1,2\n3," + b"x" * 140_000 + b"\n5,6\n", 8, "field larger"),
]


@pytest.mark.parametrize(("content", "offset", "reason"), DAMAGED)
def test_damaged_lines_keep_their_places(
    tmp_path: Path, content: bytes, offset: int, reason: str
) -> None:
    path = file_of(tmp_path, content)
    reader = reader_of(path)
    good = [{"a": "1", "b": "2"}, {"a": "5", "b": "6"}]
    for _ in range(2):
        records, bad = read_all(reader, limit=1)
        assert records == good
        assert bad.count == 1
        assert (bad.reports[0].file, bad.reports[0].offset) == (str(path), offset)
        assert reason in bad.reports[0].reason
    assert shard_sizes(reader) == {str(path): 3}
    columns = reader.read_columns(str(path), 0, 3, BadRecords(1))
    assert columns is not None
    assert columns["a"].tolist() == ["1", "5"]
    # The place is damaged, also when it is read alone; the one after it is not.
    assert list(reader.read(str(path), 1, 1, BadRecords(1))) == []
    assert list(reader.read(str(path), 2, 1, BadRecords(0))) == good[1:]
    with pytest.raises(TooManyBadRecords, match=rf"byte {offset}.*: .*{reason}"):
        list(reader.read(str(path), 0, 3, BadRecords(0)))
    with pytest.raises(TooManyBadRecords):
        reader.read_columns(str(path), 0, 3)


def test_values_that_are_none_of_their_type_damage_their_record(tmp_path: Path) -> None:
    path = file_of(tmp_path, "a,b\n1,2\nx,y\n3,\n99999999999,5\n")
    reader = reader_of(path, types={"a": "int32", "b": "float64"})
    bad = BadRecords(5)
    batch = read_batch(reader, str(path), 0, 4, bad)
    assert batch.column("a").tolist() == [1, 3]
    assert [report.reason for report in bad.reports] == [
        "column 'a': 'x' is not int32",
        "column 'a': '99999999999' is not int32",
    ]
    assert [report.offset for report in bad.reports] == [8, 15]


def test_line_json(tmp_path: Path) -> None:
    lines = [b'{"a": 1}', b"", b"[1]", b'{"a": ', b'{"b": "\xff"}', b"[" * 100_000]
    lines += [b'{"a": ' + b"7" * 5000 + b"}", b'{"a": 2}\r']
    path = file_of(tmp_path, b"\n".join(lines), "data.jsonl")
    reader = reader_of(path)
    records, bad = read_all(reader, limit=10)
    assert records == [{"a": 1}, {"a": 2}]
    reasons = [report.reason for report in bad.reports]
    assert [reason.split(":")[0] for reason in reasons[:3]] == [
        "a JSON list, not an object",
        "not JSON",
        "not UTF-8",
    ]
    assert len(reasons) == 5
    assert reasons[4].startswith("JSON that Python does not take: Exceeds the limit")
    assert bad.reports[0].offset == len(b"\n".join(lines[:2])) + 1
    assert reader.metadata.column_names == ("a",)
    assert read_batch(reader, str(path), 0, 1, bad).column("a").tolist() == [1]
    strict = reader_of(path, columns=["a", "c"])
    assert strict.metadata.column_names == ("a", "c")
    with pytest.raises(TooManyBadRecords, match=r"has no \['c'\]"):
        list(strict.read(str(path), 0, 1, BadRecords(0)))


@pytest.mark.parametrize("zipped", [False, True])
def test_line_json_may_begin_with_a_byte_order_mark(tmp_path: Path, zipped: bool) -> None:
    content = b'\xef\xbb\xbf{"a": 1}\n{"a": 2}\n'
    path = file_of(tmp_path, gzip.compress(content) if zipped else content, "data.jsonl")
    reader = reader_of(path)
    assert read_all(reader)[0] == [{"a": 1}, {"a": 2}]
    assert reader.metadata.column_names == ("a",)


def test_folders_patterns_and_names(tmp_path: Path) -> None:
    for name in ("b/2.csv", "b/1.csv", "b/deep/3.csv", "b/_SUCCESS", "b/.x.csv", "c[1].csv"):
        file_of(tmp_path, "a\n1\n", name)
    folder = tmp_path / "b"
    inside = [str(folder / name) for name in ("1.csv", "2.csv", "deep/3.csv")]
    assert list(shard_sizes(reader_of(folder))) == inside
    assert list(shard_sizes(reader_of(folder / "2.csv", folder))) == [
        inside[1],
        inside[0],
        inside[2],
    ]
    assert list(shard_sizes(reader_of(folder / "*.csv"))) == inside[:2]
    assert list(shard_sizes(reader_of(tmp_path / "**/*.csv")))[:3] == inside
    assert list(shard_sizes(reader_of(tmp_path / "c[1].csv"))) == [str(tmp_path / "c[1].csv")]
    for missing in ("x.csv", "x*.csv"):
        with pytest.raises(DataUnavailable, match=r"no such file"):
            shard_sizes(reader_of(tmp_path / missing, kind="csv"))


def test_a_file_that_changed_is_refused(tmp_path: Path) -> None:
    path = file_of(tmp_path, "a\n1\n2\n")
    reader = reader_of(path)
    assert shard_sizes(reader) == {str(path): 2}
    with pytest.raises(DataChanged, match="has 2 records, and 1 to 3 are asked for"):
        list(reader.read(str(path), 1, 3, BadRecords(0)))
    path.write_text("a\n1\n2\n3\n")
    with pytest.raises(DataChanged, match="had 6 bytes when it was first read and has 8 now"):
        list(reader.read(str(path), 0, 1, BadRecords(0)))
    path.write_text("a\n1\n2\n")
    with pytest.raises(InvalidRequest):
        list(reader.read(str(path), -1, 1, BadRecords(0)))
    path.unlink()
    with pytest.raises(DataUnavailable, match="No such file"):
        list(reader.read(str(path), 0, 1, BadRecords(0)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sep": ";"}, "csv has no option 'sep'"),
        ({"delimiter": ";;"}, "options.delimiter: is ';;'"),
        ({"delimiter": '"'}, "is the delimiter and the quote"),
        ({"header": False}, "name the columns"),
        ({"types": {"a": "double"}}, "options.types.a: is 'double'"),
        ({"types": {"z": "int64"}}, r"and \['z'\] are expected"),
        ({"select": ["z"]}, r"and \['z'\] are expected"),
        ({"columns": ["a", "a"]}, "options.columns"),
        ({"columns": "a"}, "options.columns"),
        ({"skip_lines": True}, "options.skip_lines"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    path = file_of(tmp_path, "a,b\n1,2\n")
    with pytest.raises(ConfigError, match=message):
        read_all(reader_of(path, **options))


def test_headers_of_several_files(tmp_path: Path) -> None:
    first = file_of(tmp_path, "a,b\n1,2\n", "1.csv")
    turned = file_of(tmp_path, "b,a\n4,3\n", "2.csv")
    empty = file_of(tmp_path, "", "3.csv")
    records, _ = read_all(reader_of(first, turned, empty))
    assert records == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
    assert shard_sizes(reader_of(empty, first)) == {str(empty): 0, str(first): 1}
    with pytest.raises(DataDamaged, match="not even a header"):
        shard_sizes(reader_of(empty))
    other = file_of(tmp_path, "a,c\n1,2\n", "4.csv")
    with pytest.raises(ConfigError, match=r"4.csv: its columns are \['a', 'c'\], and \['b'\]"):
        read_all(reader_of(first, other))
    of_pandas = file_of(tmp_path, ",a\n0,1\n", "6.csv")
    assert read_all(reader_of(of_pandas))[0] == [{"": "0", "a": "1"}]
    assert list(read_batch(reader_of(of_pandas), str(of_pandas), 0, 1, BadRecords(0))) == [
        {"": "0", "a": "1"}
    ]
    double = file_of(tmp_path, "1,1\n2,2\n", "5.csv")
    with pytest.raises(ConfigError, match="is there a header"):
        shard_sizes(reader_of(double))


def test_the_kind_goes_by_the_ending(tmp_path: Path) -> None:
    odd = file_of(tmp_path, "a\n", "data.txt")
    with pytest.raises(ConfigError, match=r"none of the endings"):
        reader_of(odd)
    with pytest.raises(ConfigError, match="several formats"):
        reader_of(file_of(tmp_path, "a\n", "1.csv"), file_of(tmp_path, "{}\n", "2.jsonl.gz"))


def test_a_gzip_file_is_entered_near_the_range(tmp_path: Path) -> None:
    # Hardly compressible, so that there is more than one entry.
    rng = np.random.default_rng(0)
    lines = [f"{i},{rng.bytes(100).hex()}\n" for i in range(30_000)]
    path = file_of(tmp_path, gzip.compress(("i,x\n" + "".join(lines)).encode(), 1), "data.csv.gz")
    reader = reader_of(path)
    assert shard_sizes(reader) == {str(path): 30_000}
    for start in (29_990, 7, 15_000, 29_000):
        found = [record["i"] for record in reader.read(str(path), start, 10, BadRecords(0))]
        assert found == [str(i) for i in range(start, start + 10)]
    cut = file_of(tmp_path, path.read_bytes()[:-5000], "cut.csv.gz")
    reader = reader_of(cut)
    (places,) = shard_sizes(reader).values()
    bad = BadRecords(1)
    records = list(reader.read(str(cut), places - 10, 10, bad))
    assert len(records) == 9
    assert "gzip stream ends early" in bad.reports[0].reason
