"""Threads for what waits for the storage of checkpoints, and for nothing else.

A disk or a network file system may stand still for minutes. The event loop's own threads, which
are few, also decide for the controller: they must never all wait for files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

__all__ = ["in_disk_thread"]

THREADS = 8

P = ParamSpec("P")
T = TypeVar("T")

_threads = ThreadPoolExecutor(THREADS, thread_name_prefix="checkpoint-storage")


async def in_disk_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function that may wait for the storage; others wait until a thread is free."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_threads, lambda: call(*args, **kwargs))
