"""Parquet files: row groups and columns of them, by pyarrow.

See ``readers.arrow_columns`` for what it costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from backstay.data.arrow_columns import ColumnarReader, PartedFile
from backstay.data.files import FileSet
from backstay.data.options import optional_import

__all__ = ["ParquetReader"]


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
