"""Background tasks that must not end: their failure is heard of, and they end with their owner.

It imports nothing of the package.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

__all__ = ["end_tasks", "spawn"]

log = logging.getLogger(__name__)


def spawn(work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
    """Start a background task; without this nobody would hear of its failure."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_report_bug)
    return task


async def end_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _report_bug(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("%s has ended; this is a bug", task.get_name(), exc_info=error)
