"""A reader of the user's own: what ``custom_data_reader`` of the model file returns.

It is either a ``Reader``, or has the methods of ElasticDL's: ``create_shards()`` and
``read_records(task)``. Imports the readers' base.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from types import ModuleType, SimpleNamespace
from typing import Any

from backstay.data.base import BadRecords, Metadata, Reader, Shard, check_range
from backstay.data.batch import Record
from backstay.errors import ConfigError
from backstay.job_spec import DataSpec

__all__ = ["FUNCTION", "open_custom"]

FUNCTION = "custom_data_reader"


def open_custom(data: DataSpec, module: ModuleType | None) -> Reader:
    """Return the reader that the model file makes of the paths and options.

    ``custom_data_reader(data_origin=..., **options)`` is called with one path as a string, with
    several ones as a tuple, with none as an empty string.

    Raises:
        ConfigError: There is no such function, or what it returns cannot read.
    """
    make = getattr(module, FUNCTION, None)
    if not callable(make):
        where = getattr(module, "__file__", None) or "no model file"
        raise ConfigError(f"kind: custom needs a function {FUNCTION} in the model file ({where})")
    origin = data.paths[0] if len(data.paths) == 1 else (data.paths or "")
    made = make(data_origin=origin, **data.options)
    if callable(getattr(made, "shards", None)) and callable(getattr(made, "read", None)):
        return _OwnReader(made)
    if callable(getattr(made, "create_shards", None)) and callable(
        getattr(made, "read_records", None)
    ):
        return _ElasticReader(made)
    raise ConfigError(
        f"{FUNCTION} returned a {type(made).__name__}; it needs the methods shards() and "
        "read(shard, start, count, bad), or create_shards() and read_records(task)"
    )


def _metadata_of(reader: Any) -> Metadata:
    names = getattr(getattr(reader, "metadata", None), "column_names", None)
    return Metadata(tuple(names or ()))


class _OwnReader:
    """A user's reader with what it may leave out: ``metadata`` and ``read_columns``."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    @property
    def metadata(self) -> Metadata:
        return _metadata_of(self._reader)

    def shards(self) -> Iterator[Shard]:
        for each in self._reader.shards():
            yield each if isinstance(each, Shard) else Shard(*each)

    def read(self, shard: str, start: int, count: int, bad: BadRecords) -> Iterator[Record]:
        check_range(shard, start, count)
        yield from self._reader.read(shard, start, count, bad)

    def read_columns(
        self, shard: str, start: int, count: int, bad: BadRecords | None = None
    ) -> Mapping[str, Any] | None:
        if not hasattr(self._reader, "read_columns"):
            return None
        columns: Mapping[str, Any] | None = self._reader.read_columns(shard, start, count, bad)
        return columns


class _ElasticReader:
    """A reader with the methods of ElasticDL's ``AbstractDataReader``.

    A task has what theirs has: ``shard.name``, ``shard.start``, ``shard.end``. A shard that does
    not begin at 0 is read at these places.
    """

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self._starts: dict[str, int] | None = None

    @property
    def metadata(self) -> Metadata:
        return _metadata_of(self._reader)

    def shards(self) -> Iterator[Shard]:
        for name, _, count in self._created():
            yield Shard(name, count)

    def read(self, shard: str, start: int, count: int, bad: BadRecords) -> Iterator[Record]:
        del bad
        check_range(shard, start, count)
        if self._starts is None:
            self._starts = {name: first for name, first, _ in self._created()}
        first = self._starts.get(shard, 0) + start
        range_of = SimpleNamespace(
            name=shard, start=first, end=first + count, indices=list(range(first, first + count))
        )
        task = SimpleNamespace(shard=range_of, shard_name=shard, start=first, end=first + count)
        yield from islice(self._reader.read_records(task), count)

    def read_columns(
        self, shard: str, start: int, count: int, bad: BadRecords | None = None
    ) -> None:
        del shard, start, count, bad

    def _created(self) -> list[tuple[str, int, int]]:
        created = self._reader.create_shards()
        # Their documentation says a dict of name to (start, count); their readers return a list.
        if isinstance(created, Mapping):
            created = [(name, *range_of) for name, range_of in created.items()]
        names = [name for name, _, _ in created]
        if len(set(names)) != len(names):
            raise ConfigError("create_shards names a shard twice; give each part a name of its own")
        return [(str(name), int(start), int(count)) for name, start, count in created]
