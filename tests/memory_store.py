"""The coordination store in this process's memory.

A ``MemoryBackend`` is the store; each ``MemoryStore`` is one client. Time is the event loop's,
so that a loop with virtual time works.
"""

from __future__ import annotations

import asyncio

from backstay.consensus.store import (
    CoordinationStore,
    KeyValue,
    Lease,
    RangeResult,
    Txn,
    TxnResult,
    Watch,
    WatchBatch,
    check_key,
)
from backstay.consensus.store.embedded import ChangeSignal, LocalWatch
from backstay.consensus.store.state import StoreState
from backstay.errors import ClosedError, StoreUnavailable

__all__ = ["MemoryBackend", "MemoryStore"]


class MemoryBackend:
    """The store that any number of ``MemoryStore`` clients share.

    Make it while the event loop runs. Leases end by themselves as the loop's time passes.
    """

    def __init__(self) -> None:
        """Begin empty."""
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.time
        self._started_s = self._clock()
        self._state = StoreState()
        self._timer: asyncio.TimerHandle | None = None
        self._outage = False
        self.changed = ChangeSignal()

    def set_outage(self, outage: bool) -> None:
        """Let the store not answer for a while; time stands still for its leases meanwhile.

        When it is back all leases are full, as after a change of leader.
        """
        self.catch_up()
        self._outage = outage
        if not outage:
            self._started_s = self._clock() - self._state.now_ms / 1000
            for lease in self._state.lease_ids():
                self._state.keepalive(lease)
        self.catch_up()

    def catch_up(self) -> None:
        """Take in the time that has passed, and what it ends."""
        if self._outage:
            return
        elapsed_ms = int((self._clock() - self._started_s) * 1000) - self._state.now_ms
        self._state.advance(max(0, elapsed_ms))
        self._arm()
        self.changed.notify()

    def state(self) -> StoreState:
        """Return the state as of now.

        Raises:
            StoreUnavailable: An outage is being played.
        """
        if self._outage:
            raise StoreUnavailable("memory store: an outage is being played")
        self.catch_up()
        return self._state

    def read_events(self, prefix: str, start_revision: int) -> tuple[tuple[WatchBatch, ...], int]:
        """Return events for a watch, and where to read on; none during an outage."""
        if self._outage:
            return (), start_revision
        return self._state.read_on(prefix, start_revision)

    def _arm(self) -> None:
        """Wake up when the next lease ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        end_ms = self._state.next_lease_end_ms()
        if end_ms is not None:
            delay_s = self._started_s + end_ms / 1000 - self._clock()
            # A little late rather than early: the clock's milliseconds are rounded down.
            self._timer = self._loop.call_later(max(delay_s, 0) + 0.001, self.catch_up)


class MemoryStore(CoordinationStore):
    """One client of a ``MemoryBackend``."""

    def __init__(self, backend: MemoryBackend | None = None) -> None:
        """Use a backend, or one of its own."""
        self._backend = backend or MemoryBackend()
        self._closed = False

    async def get(self, key: str) -> KeyValue | None:
        """Return a key, None if it is not there."""
        check_key(key)
        return self._state().get(key)

    async def range(self, prefix: str) -> RangeResult:
        """Return all keys that begin with a prefix."""
        return self._state().range(prefix)

    async def transaction(self, txn: Txn) -> TxnResult:
        """Compare, then do one of two lists of operations."""
        try:
            return self._state().transact(txn)
        finally:
            self._backend.catch_up()

    async def lease_grant(self, ttl_ms: int) -> Lease:
        """Return a new lease."""
        try:
            return self._state().grant(ttl_ms)
        finally:
            self._backend.catch_up()

    async def lease_keepalive(self, lease: int) -> int:
        """Give the lease its full time again and return it."""
        return self._state().keepalive(lease)

    async def lease_revoke(self, lease: int) -> None:
        """End a lease and remove its keys."""
        try:
            self._state().revoke(lease)
        finally:
            self._backend.catch_up()

    def watch(self, prefix: str, start_revision: int) -> Watch:
        """Return the changes of a prefix from a revision on."""

        def read(revision: int) -> tuple[tuple[WatchBatch, ...], int]:
            self._check_open()
            return self._backend.read_events(prefix, revision)

        return LocalWatch(read, start_revision, self._backend.changed)

    async def close(self) -> None:
        """End this client's watches; the backend stays."""
        self._closed = True
        self._backend.changed.notify()

    def _state(self) -> StoreState:
        self._check_open()
        return self._backend.state()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the store was closed")
