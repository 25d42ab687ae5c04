"""Arrow IPC files (Feather version 2): record batches and columns of them, by pyarrow.

Arrow's streaming format has no footer, so nothing of it could be found without reading all; it is
refused. See ``readers.arrow_columns`` for what it costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from backstay.data.arrow_columns import ColumnarReader, PartedFile

__all__ = ["ArrowReader"]


class ArrowReader(ColumnarReader):
    """See :class:`ColumnarReader`; parts are record batches."""

    kind = "arrow"
    part_name = "record batch"

    def footer(self, source: Any) -> PartedFile:
        """See :class:`ColumnarReader`; reads the batches' headers too, which hold their lengths."""
        schema = self.arrow.ipc.open_file(source).schema
        # No column at all: what is read of a batch is its length.
        options = self.arrow.ipc.IpcReadOptions(included_fields=[0] if len(schema) else [])
        file = self.arrow.ipc.open_file(source, options=options)
        lengths = [file.get_batch(i).num_rows for i in range(file.num_record_batches)]
        return PartedFile.of_lengths(schema, lengths)

    def part(self, source: Any, number: int, names: Sequence[str]) -> Any:
        """See :class:`ColumnarReader`; checked: damaged offsets could point anywhere."""
        schema = self.arrow.ipc.open_file(source).schema
        fields = sorted(schema.get_field_index(name) for name in names)
        options = self.arrow.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
        batch = self.arrow.ipc.open_file(source, options=options).get_batch(number)
        batch.validate(full=True)
        return self.arrow.Table.from_batches([batch]).select(list(names))
