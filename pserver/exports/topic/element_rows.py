"""Makes an element of an export into messages: rows as a pull gives them, and keys without a row.

Where a slot is replaced as a whole, as by a base, keys that only the topic has are removed. Blocks
of dense tables are never removed; one without a row has its initial value.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from backstay._native import initial_rows, slots_of, table_id
from backstay.checkpoint.export_reader import pulled
from backstay.checkpoint.parts import TableRows, read_part
from backstay.checkpoint.reading import block_count
from backstay.checkpoint.storage import ExportFolder
from backstay.pserver.exports.topic.key_ledger import KeyLedger
from backstay.pserver.exports.topic.messages import (
    TABLES_KEY,
    Message,
    row_key_of,
    row_messages,
    tables_text,
)
from backstay.pserver.exports.topic.steps import TopicStep
from backstay.tables import Dense, TableSpec

__all__ = ["ElementRows", "Written"]


class Written(NamedTuple):
    """How many rows were written, and how many went."""

    rows: int = 0
    gone: int = 0


class ElementRows:
    """An element's parts, open and checked, and what they are for a topic. A context manager.

    Parts that are not on this machine are copied first, so that no fault of the storage comes up in
    the middle of a transaction. For one thread.

    Args:
        folder: Where the element is.
        step: The element, and the slots that are wanted of it.
        keys: Yields the topic's keys, each with whether it has a value; asked only if slots are
            replaced as a whole.

    Raises:
        CheckpointDamaged: A part is not what the manifest says.
        CheckpointUnavailable: It cannot be read.
    """

    def __init__(
        self,
        folder: ExportFolder,
        step: TopicStep,
        keys: Callable[[], Iterable[Sequence[tuple[bytes, bool]]]],
    ) -> None:
        self.step = step
        element = step.element
        self.written = Written()
        self._taken = np.zeros(element.slot_count, np.bool_)
        self._taken[step.slots] = True
        self._replaced = np.zeros(element.slot_count, np.bool_)
        self._replaced[step.replaced] = True
        self._tables = {spec.name: spec for spec in element.tables}
        self._names: dict[bytes, int] = {}
        self._ledger: KeyLedger | None = None
        with ExitStack() as stack:
            scratch = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="backstay-topic-"))
            )
            self._parts = [
                read_part(folder, element, index, scratch) for index in range(len(element.parts))
            ]
            if len(step.replaced):
                self._ledger = stack.enter_context(KeyLedger())
                for some in keys():
                    self._note(some)
            self._stack = stack.pop_all()

    def __enter__(self) -> ElementRows:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._parts = []
        self._stack.close()

    def messages(self, partitions: int) -> Iterator[Message]:
        """Yield all messages, but for the word that ends the transaction."""
        for spec in self._tables.values():
            name, blocks = spec.name.encode(), _Blocks.of(spec)
            for part in self._parts:
                rows = part.rows(spec.name)
                yield from self._gone(spec, name, blocks, rows, partitions)
                mine = _of_slots(rows.slots, rows.ends, self._taken)
                keys, weights, state = rows.keys[mine], rows.weights[mine], rows.state[mine]
                if self._ledger is not None and blocks is None:
                    replaced = _of_slots(rows.slots, rows.ends, self._replaced)
                    self._ledger.note(self._number(name), rows.keys[replaced], stays=True)
                if blocks is not None:
                    keys = blocks.seen(keys)
                values = pulled(spec, weights)
                if state.shape[1]:
                    # Bits of statistics that are no numbers stay as they are.
                    values = np.concatenate([values, state], axis=1)
                self.written = Written(self.written.rows + len(keys), self.written.gone)
                yield from row_messages(name, keys, values, partitions)
            if blocks is not None and self._ledger is not None:
                yield from self._initial(spec, name, blocks.missing(self._replaced), partitions)
        if self._ledger is not None:
            yield from self._swept(self._ledger, partitions)
            yield Message(TABLES_KEY, tables_text(self.step.element).encode(), 0)

    def _gone(
        self,
        spec: TableSpec,
        name: bytes,
        blocks: _Blocks | None,
        rows: TableRows,
        partitions: int,
    ) -> Iterator[Message]:
        gone = rows.deleted[_of_slots(rows.deleted_slots, rows.deleted_ends, self._taken)]
        if blocks is not None:
            yield from self._initial(spec, name, gone - np.uint64(blocks.first), partitions)
            return
        self.written = Written(self.written.rows, self.written.gone + len(gone))
        yield from row_messages(name, gone, None, partitions)

    def _initial(
        self, spec: TableSpec, name: bytes, numbers: NDArray[np.uint64], partitions: int
    ) -> Iterator[Message]:
        """Yield blocks of a dense table that have no row."""
        if not len(numbers):
            return
        keys = numbers + np.uint64(table_id(spec.name))
        values = pulled(spec, initial_rows(spec.to_json(), keys))
        self.written = Written(self.written.rows + len(keys), self.written.gone)
        yield from row_messages(name, numbers, values, partitions)

    def _swept(self, ledger: KeyLedger, partitions: int) -> Iterator[Message]:
        names = {number: name for name, number in self._names.items()}
        for table, keys in ledger.gone():
            self.written = Written(self.written.rows, self.written.gone + len(keys))
            yield from row_messages(names[table], keys, None, partitions)

    def _note(self, some: Sequence[tuple[bytes, bool]]) -> None:
        """Note keys that the topic has."""
        assert self._ledger is not None
        found: dict[bytes, tuple[list[int], list[bool]]] = {}
        for key, has_value in some:
            row = row_key_of(key)
            if row is None:
                continue
            keys, live = found.setdefault(row[1], ([], []))
            keys.append(row[0])
            live.append(has_value)
        for name, (keys, live) in found.items():
            array, is_gone = np.array(keys, np.uint64), ~np.array(live, np.bool_)
            spec = self._tables.get(name.decode(errors="replace"))
            if spec is not None:
                blocks = _Blocks.of(spec)
                if blocks is None:
                    mine = self._replaced[slots_of(array, len(self._replaced))]
                else:
                    mine = array >= np.uint64(blocks.count)
                array, is_gone = array[mine], is_gone[mine]
            self._ledger.note(self._number(name), array, stays=is_gone)

    def _number(self, table: bytes) -> int:
        return self._names.setdefault(table, len(self._names))


class _Blocks:
    """The blocks of a dense table: which were seen."""

    def __init__(self, spec: TableSpec) -> None:
        self.first = table_id(spec.name)
        self.count = block_count(spec)
        self._seen = np.zeros(self.count, np.bool_)

    @classmethod
    def of(cls, spec: TableSpec) -> _Blocks | None:
        return cls(spec) if isinstance(spec.kind, Dense) else None

    def seen(self, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the numbers of blocks."""
        numbers = keys - np.uint64(self.first)
        self._seen[numbers.astype(np.int64)] = True
        return numbers

    def missing(self, replaced: NDArray[np.bool_]) -> NDArray[np.uint64]:
        """Return the numbers of the blocks that were not seen, of some slots."""
        numbers = np.flatnonzero(~self._seen).astype(np.uint64)
        return numbers[replaced[slots_of(numbers + np.uint64(self.first), len(replaced))]]


def _of_slots(
    slots: NDArray[np.int64], ends: NDArray[np.int64], wanted: NDArray[np.bool_]
) -> NDArray[np.bool_] | slice:
    """Return which rows are of slots that are wanted."""
    mine = wanted[slots]
    return slice(None) if mine.all() else np.repeat(mine, np.diff(ends))
