"""Processes as a test sees them."""

from __future__ import annotations

import socket

import psutil

__all__ = ["is_gone", "takes_connections"]


def is_gone(pid: int) -> bool:
    """Whether there is no such process, or only the record of its end for its parent."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def takes_connections(port: int) -> bool:
    """Whether a process takes connections at a port of this machine."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
