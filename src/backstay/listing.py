"""Long lists in messages for people. Imports nothing of the package."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["listed"]


def listed(items: Sequence[str], most: int = 5) -> str:
    """Return the first ``most`` items with commas between them, and how many more there are."""
    left = len(items) - most
    return ", ".join(items[:most]) + (f" and {left} more" if left > 0 else "")
