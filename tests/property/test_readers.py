"""Readers of text and RecordIO: whatever was written comes back, however it is cut into ranges.

Blocks, index steps and limits are made tiny, so that every boundary falls everywhere.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import fsspec
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from backstay._native import crc32c
from backstay.data import (
    BadRecords,
    Reader,
    Shard,
    open_reader,
    read_batch,
    splitting,
    streams,
    text_files,
    typed_text,
)
from backstay.data.recordio_format import Layout, RecordIOWriter
from backstay.data.splitting import Piece, Quoting, pieces
from backstay.errors import DataDamaged
from backstay.job_spec import DataSpec
from tests.examples import examples

TEXT = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0") | st.sampled_from('",\r\n '),
    max_size=12,
)
NASTY = st.lists(
    st.sampled_from(['"', "\n", ",", "a", " ", '"\n"', 'a"', '",', "\r", '\n"aaaa\naaaaaa\na'])
).map("".join)
QUOTING = Quoting(b'"', b",")
UNLIMITED = 10**9


@pytest.fixture(autouse=True, scope="module")
def tiny_parts() -> Iterator[None]:
    with (
        patch.object(streams, "BLOCK_BYTES", 7),
        patch.object(streams, "OUTPUT_BYTES", 11),
        patch.object(streams, "ENTRY_STEP_BYTES", 10),
        patch.object(streams, "ENTRIES_MAX", 4),
        patch.object(text_files, "INDEX_STEP", 3),
    ):
        yield


def written(name: str, content: bytes) -> str:
    url = f"memory://readers/{name}"
    fsspec.filesystem("memory").pipe_file(url, content)
    return url


def reader_of(kind: str, content: bytes, **options: Any) -> tuple[Reader, Shard]:
    url = written(f"data.{kind}", content)
    reader = open_reader(DataSpec(kind=kind, paths=(url,), options=options))
    (shard,) = reader.shards()
    return reader, shard


def read_all(reader: Reader, shard: Shard, cuts: list[int]) -> tuple[list[Any], list[Any]]:
    """Everything, in ranges that end at these places (modulo the number of records)."""
    bad = BadRecords(UNLIMITED, kept=UNLIMITED)
    edges = sorted({0, shard.records, *(cut % (shard.records + 1) for cut in cuts)})
    records = []
    for start, stop in pairwise(edges):
        records += list(reader.read(shard.name, start, stop - start, bad))
    return records, [(each.offset, each.reason, each.records) for each in bad.reports]


@st.composite
def tables(draw: st.DrawFn) -> list[list[str]]:
    width = draw(st.integers(1, 4))
    return draw(st.lists(st.lists(TEXT, min_size=width, max_size=width), max_size=20))


CUTS = st.lists(st.integers(0, 30), max_size=4)


@given(rows=tables(), cuts=CUTS, quote_all=st.booleans(), zipped=st.booleans(), last=st.booleans())
def test_a_table_comes_back_in_any_ranges(
    rows: list[list[str]], cuts: list[int], quote_all: bool, zipped: bool, last: bool
) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, quoting=csv.QUOTE_ALL if quote_all else csv.QUOTE_MINIMAL)
    names = [f"c{i}" for i in range(len(rows[0]) if rows else 2)]
    writer.writerow(names)
    writer.writerows(rows)
    content = text.getvalue().encode()
    content = content if last else content.removesuffix(b"\r\n")
    reader, shard = reader_of("csv", gzip.compress(content) if zipped else content)
    assert shard.records == len(rows)
    expected = [dict(zip(names, row, strict=True)) for row in rows]
    assert read_all(reader, shard, cuts) == (expected, [])
    for arrow in (True, False):
        with arrow_there(arrow):
            batch = read_batch(reader, shard.name, 0, len(rows), BadRecords(0))
            assert list(batch) == expected
            assert reader.metadata.column_names == batch.columns == tuple(names)


def arrow_there(is_there: bool) -> Any:
    found = typed_text._arrow()
    assert found is not None
    return patch.object(typed_text, "_arrow", lambda: found if is_there else None)


NUMBER_TEXT = st.one_of(
    st.integers(-(2**63), 2**63 - 1).map(str),
    st.floats().map(str),
    st.sampled_from(["", " ", "nan", "0x1F", " 7 ", "+1", "1_0", "1e400", ".5", "5.", "x", "٣"]),
)


@given(rows=st.lists(st.tuples(NUMBER_TEXT, NUMBER_TEXT), max_size=15), cuts=CUTS)
def test_types_mean_the_same_with_and_without_pyarrow(
    rows: list[tuple[str, str]], cuts: list[int]
) -> None:
    content = "".join(f"{a},{b},.\n" for a, b in rows).encode()
    types = {"a": "float32", "b": "int64"}
    reader, shard = reader_of("csv", content, columns=["a", "b", "t"], types=types)
    assert shard.records == len(rows)
    found = {}
    for arrow in (True, False):
        bad = BadRecords(UNLIMITED)
        with arrow_there(arrow):
            columns = reader.read_columns(shard.name, 0, len(rows), bad)
        assert columns is not None
        assert columns["a"].dtype == np.float32
        assert columns["b"].dtype == np.int64
        found[arrow] = ([column.tolist() for column in columns.values()], bad.reports)
    assert repr(found[True]) == repr(found[False])
    # Every range counts the same damaged records and gives the same values.
    records, reports = read_all(reader, shard, cuts)
    by_column = [[record[name] for record in records] for name in ("a", "b", "t")]
    assert repr(by_column) == repr(found[False][0])
    assert [reason for _, reason, _ in reports] == [each.reason for each in found[False][1]]


def records_in(found: list[Piece]) -> list[tuple[int, bytes, str | None]]:
    return [
        (piece.offset_of(i), text, piece.bad.get(i))
        for piece in found
        for i, text in enumerate(piece.texts())
    ]


def split(content: bytes, cuts: list[int], offset: int = 0) -> list[tuple[int, bytes, str | None]]:
    edges = sorted({0, len(content), *(cut % (len(content) + 1) for cut in cuts)})
    blocks = (content[a:b] for a, b in pairwise(edges))
    return records_in(list(pieces(blocks, offset, QUOTING)))


@settings(max_examples=examples(300))
@given(text=NASTY, cuts=st.lists(st.integers(0, 200), max_size=6))
def test_where_records_begin_does_not_depend_on_where_reading_begins(
    text: str, cuts: list[int]
) -> None:
    content = text.encode()
    with patch.object(splitting, "RECORD_BYTES_MAX", 8):
        try:
            whole = split(content, [])
        except DataDamaged:
            assume(False)
        assert split(content, cuts) == whole
        for number, (offset, _, _) in enumerate(whole):
            assert split(content[offset:], cuts, offset) == whole[number:]
    # Nothing but line ends is outside of records.
    without = bytearray(content)
    for offset, record, _ in whole:
        assert content[offset : offset + len(record)] == record
        without[offset : offset + len(record)] = b"\n" * len(record)
    assert not without.strip(b"\r\n")


@settings(max_examples=examples(500))
@given(text=NASTY.map(lambda text: text.replace("\r", "")), skip_space=st.booleans())
def test_records_are_those_of_the_csv_module(text: str, skip_space: bool) -> None:
    quoting = Quoting(b'"', b",", skip_space)
    found = records_in(list(pieces(iter([text.encode()]), 0, quoting)))
    # A quote that is not closed damages its record here, and takes all the rest there.
    assume(not any(reason for _, _, reason in found))
    lines = io.StringIO(text, newline="\n")
    rows = [row for row in csv.reader(lines, skipinitialspace=skip_space) if row]
    parsed = [
        next(csv.reader([record.decode()], skipinitialspace=skip_space)) for _, record, _ in found
    ]
    assert parsed == rows


@given(
    records=st.lists(
        st.dictionaries(TEXT, st.integers() | TEXT | st.none(), max_size=3), max_size=20
    ),
    cuts=CUTS,
    zipped=st.booleans(),
)
def test_json_lines_come_back_in_any_ranges(
    records: list[dict[str, Any]], cuts: list[int], zipped: bool
) -> None:
    content = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in records).encode()
    reader, shard = reader_of("jsonl", gzip.compress(content) if zipped else content)
    assert shard.records == len(records)
    assert read_all(reader, shard, cuts) == (records, [])


@given(
    lines=st.lists(st.text("ab1", max_size=8), min_size=1, max_size=30),
    members=st.integers(1, 3),
    damage=st.tuples(st.sampled_from(["cut", "flip", "append"]), st.integers(0, 500)),
    cuts=CUTS,
)
@example(lines=["", "1"], members=2, damage=("cut", 377), cuts=[])
def test_a_damaged_gzip_file_reads_the_same_in_any_ranges(
    lines: list[str], members: int, damage: tuple[str, int], cuts: list[int]
) -> None:
    content = "".join(f'{{"x": "{line}"}}\n' for line in lines).encode()
    step = len(content) // members + 1
    zipped = bytearray(
        b"".join(gzip.compress(content[i : i + step]) for i in range(0, len(content), step))
    )
    kind, at = damage
    # The header's first bytes say that it is gzip at all.
    at = 3 + at % (len(zipped) - 3)
    if kind == "cut":
        del zipped[at:]
    elif kind == "flip":
        zipped[at] ^= 0x55
    else:
        zipped += b"rubbish"
    reader, shard = reader_of("jsonl", bytes(zipped))
    whole = read_all(reader, shard, [])
    assert read_all(reader, shard, cuts) == whole
    good = [json.loads(line) for line in content.splitlines()]
    if kind == "cut":
        # What came before the cut is there, and one damaged record tells of the rest. Between
        # members it is a whole file: the reader cannot tell, but a cut line is no JSON.
        assert whole[0] == good[: len(whole[0])]
        try:
            gzip.decompress(zipped)
        except (EOFError, gzip.BadGzipFile):  # The latter where one byte of a header is left.
            assert [reason for _, reason, _ in whole[1]] == ["the gzip stream ends early"]
        else:
            assert all("not JSON" in reason for _, reason, _ in whole[1])
    # A process that enters the file elsewhere first sees the same.
    again = open_reader(DataSpec(kind="jsonl", paths=(shard.name,)))
    start = cuts[0] % shard.records if cuts and shard.records else 0
    bad = BadRecords(UNLIMITED)
    tail = list(again.read(shard.name, start, shard.records - start, bad))
    assert len(tail) + bad.count == shard.records - start
    assert tail == whole[0][len(whole[0]) - len(tail) :]


@given(
    records=st.lists(st.binary(max_size=30), max_size=40),
    chunk_bytes=st.integers(1, 200),
    compressor=st.sampled_from(["none", "gzip"]),
    layout=st.sampled_from(Layout),
    damage=st.none() | st.tuples(st.booleans(), st.integers(0, 5000)),
    cuts=CUTS,
)
def test_recordio_comes_back_and_damage_keeps_its_places(
    records: list[bytes],
    chunk_bytes: int,
    compressor: str,
    layout: Layout,
    damage: tuple[bool, int] | None,
    cuts: list[int],
) -> None:
    file = io.BytesIO()
    with RecordIOWriter(
        file, compressor=compressor, chunk_bytes=chunk_bytes, layout=layout
    ) as writer:
        for record in records:
            writer.write(record)
    content = bytearray(file.getvalue())
    if damage is not None and len(content) > 20:
        is_cut, at = damage
        at = 4 + at % (len(content) - 4)
        if is_cut:
            del content[at:]
        else:
            content[at] ^= 0x55
    reader, shard = reader_of("recordio", bytes(content), layout=layout.value)
    found, reports = read_all(reader, shard, [])
    assert len(found) + sum(count for _, _, count in reports) == shard.records
    if damage is None:
        assert (found, reports) == (records, [])
    in_parts, part_reports = read_all(reader, shard, cuts)
    assert in_parts == found
    assert {(offset, reason) for offset, reason, _ in part_reports} == {
        (offset, reason) for offset, reason, _ in reports
    }
    # What is not damaged is what was written, in its order.
    left = iter(records)
    assert all(record in left for record in found)


@given(content=st.binary(max_size=3000))
def test_crc32c_is_the_bitwise_one(content: bytes) -> None:
    state = 0xFFFFFFFF
    for byte in content:
        state ^= byte
        for _ in range(8):
            state = (state >> 1) ^ (0x82F63B78 if state & 1 else 0)
    assert crc32c(content) == state ^ 0xFFFFFFFF
