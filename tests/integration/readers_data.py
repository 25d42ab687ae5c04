"""What tests of readers share: a reader of files, and reading all of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backstay.data import BadRecords, Reader, open_reader
from backstay.job_spec import DataSpec


def reader_of(*paths: str | Path, kind: str = "auto", **options: Any) -> Reader:
    """A reader of these files."""
    data = DataSpec(kind=kind, paths=tuple(str(path) for path in paths), options=options)
    return open_reader(data)


def shard_sizes(reader: Reader) -> Mapping[str, int]:
    """The shards and their numbers of records, in order."""
    return {shard.name: shard.records for shard in reader.shards()}


def read_all(reader: Reader, limit: int = 0) -> tuple[list[Any], BadRecords]:
    """All good records of all shards, and the damaged ones."""
    bad = BadRecords(limit)
    records = []
    for shard in reader.shards():
        records += list(reader.read(shard.name, 0, shard.records, bad))
    return records, bad
