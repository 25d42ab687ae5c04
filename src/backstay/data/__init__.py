"""Training data: batches of records, and readers of files, of SQL, or of the user's own.

``open_reader`` returns the reader of a DataSpec; ``read_batch`` reads a task's records with it.
"""

from backstay.data.base import (
    BadRecord,
    BadRecords,
    Metadata,
    Reader,
    Shard,
    read_batch,
)
from backstay.data.opening import open_reader

__all__ = [
    "BadRecord",
    "BadRecords",
    "Metadata",
    "Reader",
    "Shard",
    "open_reader",
    "read_batch",
]
