"""From a DataSpec to its reader.

Imports the readers, each with its packages, only when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from backstay.data.base import Reader
from backstay.data.delimited import DelimitedOptions, DelimitedReader
from backstay.data.files import FileSet
from backstay.errors import ConfigError
from backstay.job_spec import STREAM_KINDS, DataSpec

if TYPE_CHECKING:
    from backstay.data.closed_folders import ClosedFolders
    from backstay.data.source import Source

__all__ = ["files_of", "kind_of", "open_reader", "open_source"]

_SUFFIXES = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".recordio": "recordio",
    ".rio": "recordio",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
}


def files_of(data: DataSpec) -> FileSet | None:
    """Return the files that data is in; None: it is in tables or topics, or the user reads it.

    Raises:
        ConfigError: ``options.storage`` is no mapping.
    """
    if data.kind in ("custom", "kafka", "sql"):
        return None
    return FileSet(data.paths, _storage(data))


def _storage(data: DataSpec) -> dict[str, Any]:
    storage = data.options.get("storage", {})
    if not isinstance(storage, dict):
        raise ConfigError(f"options.storage: is {storage!r}; names with values are expected")
    return storage


def open_reader(data: DataSpec, *, module: ModuleType | None = None, grows: bool = False) -> Reader:
    """Return the reader of a job's data. Files are looked at when records are asked for.

    Args:
        data: Kind, paths and options.
        module: The model file's module; for ``custom`` its ``custom_data_reader`` is called.
        grows: Whether it has no end; shards are takes of its source, then.

    Raises:
        ConfigError: An option is wrong, a package is missing, or the kind cannot be told.
        DataUnavailable: The kind is ``auto`` and the files cannot be looked at.
    """
    options = data.options
    if data.kind == "custom":
        from backstay.data.custom import open_custom

        return open_custom(data, module)
    if data.kind == "sql":
        from backstay.data.sql import SqlReader

        return SqlReader(data.paths, options)
    if data.kind == "kafka":
        from backstay.data.kafka import KafkaReader

        return KafkaReader(data.paths, options)
    if grows:
        from backstay.data.folder_source import FolderReader

        return FolderReader(*_folders(data))
    files = files_of(data)
    assert files is not None
    kind = kind_of(files) if data.kind == "auto" else data.kind
    return _file_reader(kind, files, options)


def _file_reader(kind: str, files: FileSet, options: Mapping[str, Any]) -> Reader:
    """Return the reader of some files."""
    if kind in ("csv", "tsv"):
        return DelimitedReader(files, DelimitedOptions.from_mapping(kind, options))
    if kind == "jsonl":
        from backstay.data.json_lines import JsonLinesReader

        return JsonLinesReader(files, options)
    if kind == "recordio":
        from backstay.data.recordio import RecordIOReader

        return RecordIOReader(files, options)
    from backstay.data.arrow_files import ArrowReader, ParquetReader

    return ParquetReader(files, options) if kind == "parquet" else ArrowReader(files, options)


def open_source(data: DataSpec) -> Source:
    """Return what tells where data without an end begin and end now.

    Raises:
        ConfigError: An option is wrong, a package is missing, or the kind has no such data.
    """
    if data.kind == "kafka":
        from backstay.data.kafka_source import KafkaSource

        return KafkaSource(data.paths, data.options)
    from backstay.data.folder_source import FolderSource

    return FolderSource(*_folders(data))


def _folders(data: DataSpec) -> tuple[ClosedFolders, Callable[[FileSet], Reader]]:
    """Return what finds the folders of data without an end, and what reads files in them."""
    from backstay.data.closed_folders import ClosedFolders, FolderOptions, without_folder_options

    if data.kind not in STREAM_KINDS:
        raise ConfigError(f"kind: data of kind {data.kind} have an end")
    folders = ClosedFolders(data.paths, _storage(data), FolderOptions.of(data.options))
    options = without_folder_options(data.options)
    return folders, lambda files: _file_reader(data.kind, files, options)


def kind_of(files: FileSet) -> str:
    """Return the format of files by their ending, without a ``.gz`` at the end of it.

    Raises:
        ConfigError: An ending is not known, or files are of several formats.
        DataUnavailable: A path leads to nothing, or cannot be reached.
    """
    kinds = {}
    for file in files.files():
        name = file.name.lower().removesuffix(".gz")
        kind = next((kind for end, kind in _SUFFIXES.items() if name.endswith(end)), None)
        if kind is None:
            raise ConfigError(
                f"kind: {file.name} has none of the endings {', '.join(sorted(_SUFFIXES))}; say "
                "which kind it is, such as csv"
            )
        kinds[kind] = file.name
    if len(kinds) > 1:
        raise ConfigError(f"kind: the files are of several formats: {kinds}; use one of them")
    return next(iter(kinds))
