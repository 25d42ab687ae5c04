"""Processes as a test sees them."""

from __future__ import annotations

import psutil

__all__ = ["is_gone"]


def is_gone(pid: int) -> bool:
    """Whether there is no such process, or only the record of its end for its parent."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
