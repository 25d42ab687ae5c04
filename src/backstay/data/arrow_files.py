"""Arrow IPC files (Feather version 2) and Parquet files: parts and columns of them, by pyarrow.

Arrow's streaming format has no footer, so nothing of it could be found without reading all; it is
refused. See ``data.arrow_columns`` for what it costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from backstay.data.arrow_columns import ColumnarReader, PartedFile
from backstay.data.files import FileSet
from backstay.data.options import optional_import

__all__ = ["ArrowReader", "ParquetReader"]


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


class ParquetReader(ColumnarReader):
    """See :class:`ColumnarReader`; parts are row groups."""

    kind = "parquet"
    part_name = "row group"

    def __init__(self, files: FileSet, options: Mapping[str, Any]) -> None:
        super().__init__(files, options)
        self._parquet = optional_import("pyarrow.parquet", "parquet", "a parquet file")

    def footer(self, source: Any) -> PartedFile:
        """See :class:`ColumnarReader`."""
        file = self._parquet.ParquetFile(source)
        groups = range(file.num_row_groups)
        lengths = [file.metadata.row_group(group).num_rows for group in groups]
        return PartedFile.of_lengths(file.schema_arrow, lengths)

    def part(self, source: Any, number: int, names: Sequence[str]) -> Any:
        """See :class:`ColumnarReader`; pages with checksums are held to them."""
        file = self._parquet.ParquetFile(source, page_checksum_verification=True)
        # A name stands for all that is below it; in the order asked for, not the file's.
        table = file.read_row_group(number, columns=list(names), use_threads=False)
        return table.select(list(names))
