"""Tables and queries of a database: DuckDB embedded, or whatever has a DB-API or ADBC driver.

What it costs: ``shards()`` counts rows and checks that the order is one; reading a range asks for
these rows. A DuckDB table without deleted rows is entered by row id; all else is sorted by the
database for each range, so give it an index on the order's columns, or large tasks.

Imports the readers' base; a database's package when it is connected to.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from backstay.data.arrow_columns import columns_of_table
from backstay.data.base import BadRecords, Metadata, Shard, check_range
from backstay.data.batch import Batch, Column, Record, object_array
from backstay.data.files import reading
from backstay.data.options import check_options, optional_import, text_tuple
from backstay.errors import ConfigError, DataChanged

__all__ = ["SqlReader"]

_OPTIONS: Mapping[str, type] = {
    "database": str,
    "connect": str,
    "connect_options": Mapping,
    "order_by": tuple,
    "select": tuple,
}
_ROW_ID = "rowid"


@dataclass(frozen=True)
class _Source:
    """A table or query: its SQL, its number of rows, and whether row ids are 0, 1, 2, ..."""

    sql: str
    rows: int
    by_row_id: bool


class SqlReader:
    """Records as dicts of column to value; shards are the tables and queries.

    Args:
        paths: Tables (``clicks`` or ``schema.clicks``) or queries (``SELECT ...``).
        options: ``database``: a DuckDB file, opened for reading only (without it: in memory, for
            queries of files); or ``connect``: ``module:function`` of another driver, with
            ``connect_options`` as its arguments, best without passwords. ``order_by``: columns
            that give each row its place; not needed for tables of DuckDB. ``select``: columns.

    Raises:
        ConfigError: An option is unknown, wrong or missing, or a package is not installed.
    """

    def __init__(self, paths: Sequence[str], options: Mapping[str, Any]) -> None:
        check_options("sql", options, _OPTIONS)
        self._paths = tuple(paths)
        self._database = options.get("database", ":memory:")
        self._connect = options.get("connect", "")
        self._connect_options = dict(options.get("connect_options", {}))
        self._order = text_tuple("order_by", options["order_by"]) if "order_by" in options else ()
        self._select = text_tuple("select", options["select"]) if "select" in options else ()
        if self._connect and "database" in options:
            raise ConfigError("options: database is DuckDB's, connect another one's; give one")
        for path in self._paths:
            if not self._order and (self._connect or _is_query(path)):
                raise ConfigError(
                    f"options.order_by: name columns by which each row of {path!r} has its place; "
                    "only tables of DuckDB have one without"
                )
        self._driver = self._find_driver()
        self._sources: dict[str, _Source] = {}
        self._metadata: Metadata | None = None

    @property
    def metadata(self) -> Metadata:
        """See ``Reader``; asks for the first source's columns."""
        if self._metadata is None:
            first = self._paths[0]
            with reading(first), closing(self._connection()) as connection:
                names = self._select or _columns_of(connection, _from(first))
            self._metadata = Metadata(names)
        return self._metadata

    def shards(self) -> Iterator[Shard]:
        """See ``Reader``; counts rows.

        Raises:
            ConfigError: Rows share a place: ``order_by`` does not tell them apart.
        """
        for path in self._paths:
            source = self._source(path)
            if self._order:
                self._check_order(path, source)
            yield Shard(path, source.rows)

    def read(self, shard: str, start: int, count: int, bad: BadRecords) -> Iterator[Record]:
        """See ``Reader``; the values are those of the columns."""
        yield from Batch.of_columns(self.read_columns(shard, start, count, bad))

    def read_columns(
        self, shard: str, start: int, count: int, bad: BadRecords | None = None
    ) -> dict[str, Column]:
        """See ``Reader``: text comes as objects, integers with nulls as floats with NaN."""
        del bad
        source = self._source(shard)
        check_range(shard, start, count, source.rows)
        names = self.metadata.column_names
        sql = f"SELECT {', '.join(map(_quoted, names))} FROM {source.sql}"
        if source.by_row_id:
            sql += f" WHERE {_ROW_ID} >= {start} AND {_ROW_ID} < {start + count}"
        sql += f" ORDER BY {', '.join(map(_quoted, self._order)) or _ROW_ID}"
        if not source.by_row_id:
            sql += f" LIMIT {count} OFFSET {start}"
        with reading(shard), closing(self._connection()) as connection:
            columns = self._fetched(connection, sql, names)
        found = len(next(iter(columns.values())))
        if found != count:
            raise DataChanged(
                f"{shard}: has {found} of the {count} rows from {start} on; it had {source.rows} "
                "when they were counted. A running job's tables must not change"
            )
        return columns

    def _fetched(self, connection: Any, sql: str, names: Sequence[str]) -> dict[str, Column]:
        with closing(connection.cursor()) as cursor:
            cursor.execute(sql)
            if not self._connect:
                columns = cursor.fetchnumpy()
                return {name: _unmasked(columns[name]) for name in names}
            # ADBC's cursors have it; it is many times faster than rows.
            if hasattr(cursor, "fetch_arrow_table"):
                return columns_of_table(cursor.fetch_arrow_table())
            rows = cursor.fetchall()
        by_column = list(zip(*rows, strict=True)) or [()] * len(names)
        return {name: _of_values(values) for name, values in zip(names, by_column, strict=True)}

    def _find_driver(self) -> Any:
        if not self._connect:
            return optional_import("duckdb", "sql", "an SQL source")
        module, separator, function = self._connect.partition(":")
        try:
            if not separator:
                raise ImportError("module:function is expected")
            return getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"options.connect: {self._connect!r}: {error}") from error

    def _connection(self) -> Any:
        """Return a new connection: one for each range, so that threads need not share any."""
        if self._connect:
            return self._driver(**self._connect_options)
        in_memory = self._database == ":memory:"
        options = {"read_only": not in_memory, **self._connect_options}
        return self._driver.connect(self._database, **options)

    def _source(self, path: str) -> _Source:
        """Return a table or query with its number of rows, counted the first time."""
        if path not in self._sources:
            sql = _from(path)
            with reading(path), closing(self._connection()) as connection:
                (rows,) = _one(connection, f"SELECT count(*) FROM {sql}")
                by_row_id = False
                if not self._order:
                    if _ROW_ID in _columns_of(connection, sql):
                        raise ConfigError(
                            f"options.order_by: {path!r} has a column {_ROW_ID} of its own, which "
                            "hides the row ids; name columns that give each row its place"
                        )
                    # Deleted rows leave gaps.
                    (last,) = _one(connection, f"SELECT max({_ROW_ID}) FROM {sql}")
                    by_row_id = last is None or last + 1 == rows
            self._sources[path] = _Source(sql, int(rows), by_row_id)
        return self._sources[path]

    def _check_order(self, path: str, source: _Source) -> None:
        names = ", ".join(map(_quoted, self._order))
        with reading(path), closing(self._connection()) as connection:
            (places,) = _one(
                connection, f"SELECT count(*) FROM (SELECT DISTINCT {names} FROM {source.sql}) AS d"
            )
        if places != source.rows:
            raise ConfigError(
                f"options.order_by: {source.rows} rows of {path!r} have {places} places by "
                f"{list(self._order)}; name columns that tell them apart"
            )


def _is_query(path: str) -> bool:
    words = path.split(None, 1)
    return len(words) > 1 and words[0].upper() in ("SELECT", "WITH", "FROM", "VALUES")


def _from(path: str) -> str:
    if _is_query(path):
        return f"({path.strip().rstrip(';')}) AS q"
    return ".".join(map(_quoted, path.split(".")))


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _one(connection: Any, sql: str) -> Any:
    with closing(connection.cursor()) as cursor:
        cursor.execute(sql)
        return cursor.fetchone()


def _columns_of(connection: Any, sql: str) -> tuple[str, ...]:
    with closing(connection.cursor()) as cursor:
        cursor.execute(f"SELECT * FROM {sql} LIMIT 0")
        return tuple(str(column[0]) for column in cursor.description)


def _unmasked(column: Any) -> Column:
    """Return DuckDB's column with nulls as NaN, NaT or None."""
    if not isinstance(column, np.ma.MaskedArray):
        return np.asarray(column)
    mask = np.ma.getmaskarray(column)
    if not mask.any():
        return np.asarray(column.data)
    kind = column.dtype.kind
    if kind in "iuf":
        # Integers with nulls have no other way to say so.
        floats = column.data.astype(column.dtype if kind == "f" else np.float64)
        floats[mask] = np.nan
        return floats
    if kind in "Mm":
        times = column.data.copy()
        times[mask] = "NaT"
        return np.asarray(times)
    objects = np.array(column.data, dtype=object)
    objects[mask] = None
    return objects


def _of_values(values: Sequence[Any]) -> Column:
    """Return a DB-API column: numbers as such, nulls among them as NaN, all else as objects."""
    known = [value for value in values if value is not None]
    if all(isinstance(value, (int, float)) for value in known) and known:
        if len(known) == len(values):
            return np.asarray(values)
        return np.array([np.nan if value is None else value for value in values], np.float64)
    return object_array(values)
