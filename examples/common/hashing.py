"""Stable 64-bit keys for categorical values.

May import the standard library only. A key depends on nothing but its field and value:
not on the process, the machine, or the order in which values are met, so that every trainer
finds the same row.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

__all__ = ["hash_key"]


@lru_cache(maxsize=1 << 20)
def hash_key(field: str, value: str) -> int:
    """Return the key of ``value`` in ``field``: 64 bits, as a signed integer (for int64 arrays)."""
    # The separator keeps ("ab", "c") apart from ("a", "bc").
    digest = blake2b(f"{field}\x1f{value}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
