"""Watches over a ``StoreState`` in this process: memory store and embedded store use them.

A watch keeps the next revision it wants and asks the state whenever something changed, so that
nothing is queued per watch and a slow reader costs no memory. Imports the store's values and its
state; belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from backstay.consensus.store import Watch, WatchBatch
from backstay.errors import ClosedError

__all__ = ["ChangeSignal", "LocalWatch"]


class ChangeSignal:
    """Wakes everybody who waits for a change."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Wake those who wait now."""
        self._changed.set()
        self._changed = asyncio.Event()

    def waiter(self) -> asyncio.Event:
        """Return what to wait for; take it before looking at what may change."""
        return self._changed


class LocalWatch(Watch):
    """The changes of a prefix, read from a state in this process."""

    def __init__(
        self,
        read: Callable[[int], tuple[tuple[WatchBatch, ...], int]],
        start_revision: int,
        signal: ChangeSignal,
    ) -> None:
        """Begin.

        Args:
            read: Returns the batches from a revision on, none if there are none yet, and from
                where to read next; raises ``WatchLost``, and ``ClosedError`` when the store was
                closed.
            start_revision: The first revision wanted.
            signal: Tells when it is worth reading again.
        """
        self._read = read
        self._next = start_revision
        self._signal = signal
        self._ready: deque[WatchBatch] = deque()
        self._closed = False

    async def __anext__(self) -> WatchBatch:
        """Wait for the next batch."""
        while True:
            changed = self._signal.waiter()
            if self._closed:
                raise ClosedError("the watch was closed")
            if not self._ready:
                batches, self._next = self._read(self._next)
                self._ready.extend(batches)
            if self._ready:
                return self._ready.popleft()
            await changed.wait()

    async def aclose(self) -> None:
        """End the watch."""
        self._closed = True
        self._signal.notify()
