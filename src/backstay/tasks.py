"""Background tasks that must not end: their failure is heard of, and they end with their owner.

Imports ``backoff`` only.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from backstay.backoff import Backoff

__all__ = ["end_tasks", "spawn", "turns", "until_answered"]

ResultT = TypeVar("ResultT")

log = logging.getLogger(__name__)

# Longer than what a task may take to clean up.
CANCEL_AGAIN_S = 10.0


def spawn(work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
    """Start a background task whose failure is logged."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_report_bug)
    return task


async def end_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended.

    Tasks that go on are cancelled again: until Python 3.12 ``asyncio.wait_for`` loses a
    cancellation that comes in the same turn as what it waits for.
    """
    going_on: set[asyncio.Future[Any]] = set(tasks)
    while going_on:
        for task in going_on:
            task.cancel()
        _, going_on = await asyncio.wait(going_on, timeout=CANCEL_AGAIN_S)
    # No other code looks at how they ended.
    await asyncio.gather(*tasks, return_exceptions=True)


async def until_answered(
    ask: Callable[[], Awaitable[ResultT]],
    backoff: Backoff,
    again: type[Exception] | tuple[type[Exception], ...],
    say: Callable[[Exception], None],
) -> ResultT:
    """Ask until there is an answer; it has no limit.

    Args:
        ask: Asks once.
        backoff: The pauses.
        again: After these errors it is asked again.
        say: Gets each error whose text differs from that of the one before.
    """
    retries = backoff.begin()
    said: str | None = None
    while True:
        try:
            return await ask()
        except again as error:
            if str(error) != said:
                said = str(error)
                say(error)
            await asyncio.sleep(retries.next_s())


def _report_bug(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("%s has ended; this is a bug", task.get_name(), exc_info=error)


def turns(loop: asyncio.AbstractEventLoop, limit_s: float) -> bool:
    """Whether an event loop does something new within a time; call it on another thread."""
    has_turned = threading.Event()
    loop.call_soon_threadsafe(has_turned.set)
    return has_turned.wait(limit_s)
