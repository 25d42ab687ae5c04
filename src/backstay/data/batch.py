"""Records as a model's feed gets them: iterable one by one, or as columns.

A batch is a view: slicing and reordering copy nothing until a column or a record is asked for, so
a worker can shuffle a task and cut it into batches at no cost for columns that are not read.

Imports numpy and the errors; no framework, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from backstay.errors import InvalidRequest

__all__ = ["Batch", "Column", "Record"]

# A dict of column to value; of formats without columns (RecordIO), bytes.
Record: TypeAlias = Any
Column: TypeAlias = NDArray[Any]
_Rows: TypeAlias = "slice | NDArray[np.intp]"


class Batch:
    """Records in order: ``len``, iteration, ``batch[i]``, ``batch[i:j]``, ``take``, ``column``.

    Made by :meth:`of_records` or :meth:`of_columns`. Iterating over a batch of columns makes dicts
    of Python values; ``column`` of a batch of dicts makes an array of their values. What it is made
    of must not be changed afterwards.
    """

    def __init__(
        self,
        records: Sequence[Record] | None,
        columns: Mapping[str, Column] | None,
        rows: _Rows,
        length: int,
    ) -> None:
        self._records = records
        self._columns = columns
        self._rows = rows
        self._length = length

    @classmethod
    def of_records(cls, records: Sequence[Record]) -> Batch:
        """Return a batch of these records."""
        return cls(records, None, slice(0, len(records)), len(records))

    @classmethod
    def of_columns(cls, columns: Mapping[str, Column]) -> Batch:
        """Return a batch of these columns; the first dimension of each is the record.

        Raises:
            InvalidRequest: There is no column, or their lengths differ.
        """
        lengths = {name: len(column) for name, column in columns.items()}
        if not lengths or len(set(lengths.values())) > 1:
            raise InvalidRequest(f"columns of one length are expected, not {lengths}")
        length = next(iter(lengths.values()))
        return cls(None, columns, slice(0, length), length)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns; of records, those of the first one; none of bytes."""
        if self._columns is not None:
            return tuple(self._columns)
        first = self[0] if self._length else None
        return tuple(first) if isinstance(first, Mapping) else ()

    def column(self, name: str) -> Column:
        """Return a column as an array, first dimension ``len(self)``; a copy if reordered.

        Raises:
            InvalidRequest: There is no such column, or a record has no value for it.
        """
        if self._columns is not None:
            if name not in self._columns:
                raise self._no_column(name)
            return self._columns[name][self._rows]
        try:
            values = [record[name] for record in self]
        except (KeyError, TypeError, IndexError) as error:
            raise self._no_column(name) from error
        return array_of(values)

    def take(self, order: NDArray[np.integer[Any]] | Sequence[int]) -> Batch:
        """Return the records at these positions, in this order; a position may come twice.

        Raises:
            InvalidRequest: A position is not in the batch.
        """
        positions = np.asarray(order, dtype=np.intp)
        if positions.ndim != 1:
            raise InvalidRequest(f"positions have the shape {positions.shape}; one dimension only")
        if positions.size and not (positions.min() >= 0 and positions.max() < self._length):
            raise InvalidRequest(f"a position is not among 0..{self._length - 1}")
        rows = self._rows
        rows = positions + rows.start if isinstance(rows, slice) else rows[positions]
        return Batch(self._records, self._columns, rows, len(positions))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Record]:
        if self._columns is not None:
            names = tuple(self._columns)
            values = [_python_values(column[self._rows]) for column in self._columns.values()]
            for row in zip(*values, strict=True):
                yield dict(zip(names, row, strict=True))
            return
        records = self._records or ()
        if isinstance(self._rows, slice):
            yield from records[self._rows]
        else:
            for row in self._rows.tolist():
                yield records[row]

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> Batch: ...
    def __getitem__(self, index: int | slice) -> Record | Batch:
        """Return a record, or a part of the batch."""
        if not isinstance(index, slice):
            if not -self._length <= index < self._length:
                raise IndexError(f"record {index} of {self._length}")
            position = index % self._length
            return next(iter(self[position : position + 1]))
        start, stop, step = index.indices(self._length)
        if step != 1:
            return self.take(np.arange(start, stop, step))
        stop = max(start, stop)
        rows = self._rows
        if isinstance(rows, slice):
            rows = slice(rows.start + start, rows.start + stop)
        else:
            rows = rows[start:stop]
        return Batch(self._records, self._columns, rows, stop - start)

    def __repr__(self) -> str:
        return f"Batch({self._length} records, columns {list(self.columns)})"

    def _no_column(self, name: str) -> InvalidRequest:
        return InvalidRequest(f"a record has no column {name!r}; there are {list(self.columns)}")


def array_of(values: Sequence[Any]) -> Column:
    """Return values as an array: numbers and equal shapes as such, all else as objects.

    Text becomes an array of objects, which costs nothing, not of fixed-width characters.
    """
    if any(isinstance(value, (str, bytes)) or value is None for value in values):
        return object_array(values)
    try:
        return np.asarray(values)
    except ValueError:  # Lists of different lengths.
        return object_array(values)


def object_array(values: Sequence[Any]) -> Column:
    """Return a one-dimensional array of the objects themselves, lists included."""
    array = np.empty(len(values), dtype=object)
    for position, value in enumerate(values):
        array[position] = value
    return array


def _python_values(column: Column) -> Sequence[Any]:
    # Rows of an array of more dimensions stay arrays; so do dates, of which tolist makes numbers.
    return list(column) if column.ndim > 1 or column.dtype.kind in "Mm" else column.tolist()
