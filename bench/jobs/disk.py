"""What the disk of a folder can do: files written and read by a program that does nothing else.

Files are read and written in blocks of 4 MiB, as `dd bs=4M conv=fsync` does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["drop_page_cache", "read_bytes_per_s", "write_bytes_per_s"]

BLOCK_BYTES = 4 << 20
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
PAGE_CACHE = "1\n"


def write_bytes_per_s(folder: Path, size: int) -> float:
    """Write a file and have it on the disk; it is removed again.

    Args:
        folder: Where.
        size: Bytes.

    Returns:
        Bytes over seconds, fsync included.
    """
    # What others have left to be written would be written meanwhile.
    os.sync()
    block = os.urandom(BLOCK_BYTES)
    path = folder / "sequential"
    try:
        begun = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            for left in range(size, 0, -BLOCK_BYTES):
                file.write(block[:left])
            os.fsync(file.fileno())
        return size / (time.perf_counter() - begun)
    finally:
        path.unlink(missing_ok=True)


def read_bytes_per_s(paths: Sequence[Path]) -> float:
    """Read files from end to end, one after the other; returns bytes over seconds."""
    block = bytearray(BLOCK_BYTES)
    size = 0
    begun = time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while read := file.readinto(block):
                size += read
    return size / (time.perf_counter() - begun)


def drop_page_cache() -> bool:
    """Make the system forget what it has read and written, for all programs.

    Returns:
        Whether that was allowed; else files may be read from memory.
    """
    os.sync()
    try:
        DROP_CACHES.write_text(PAGE_CACHE)
    except OSError:
        return False
    return True
