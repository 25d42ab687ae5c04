"""Readers of training data: files of several formats, SQL, or a reader of the user's own.

``open_reader`` returns the reader of a DataSpec; ``read_batch`` reads a task's records with it.
"""

from backstay.trainer.readers.base import (
    BadRecord,
    BadRecords,
    Metadata,
    Reader,
    Shard,
    read_batch,
)
from backstay.trainer.readers.opening import open_reader

__all__ = [
    "BadRecord",
    "BadRecords",
    "Metadata",
    "Reader",
    "Shard",
    "open_reader",
    "read_batch",
]
