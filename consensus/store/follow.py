"""Helpers over any coordination store: following a prefix, election, keeping a lease alive.

They need nothing but the interface. Waiting is the event loop's; the time of a lease
is that of ``consensus.clock``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from backstay.backoff import Backoff
from backstay.consensus.clock import clock_s
from backstay.consensus.store import (
    Compare,
    CoordinationStore,
    Delete,
    Event,
    Get,
    KeyValue,
    Lease,
    Put,
    RangeResult,
    Txn,
    absent,
    create_revision_is,
)
from backstay.errors import LeaseLost, StoreUnavailable, WatchLost

__all__ = ["Election", "FencingToken", "KeepAlive", "follow"]

_LOG = logging.getLogger(__name__)

RETRY = Backoff(first_s=0.05, longest_s=1.0)
DEFAULT_MARGIN_MS = 50


async def follow(store: CoordinationStore, prefix: str) -> AsyncGenerator[RangeResult, None]:
    """Yield all keys of a prefix, now and after each change of them.

    Level-triggered: a reader that is slow, or a store that was away, costs intermediate states
    and nothing else. Outages are waited out; errors that waiting does not cure are raised. Close
    it (``aclose``, ``contextlib.aclosing``) when leaving the loop early.
    """
    retries = RETRY.begin()
    while True:
        try:
            now = await store.range(prefix)
        except StoreUnavailable as error:
            level = logging.WARNING if retries.pause_s == 0 else logging.DEBUG
            _LOG.log(level, "following %r: %s; trying until it answers", prefix, error)
            await asyncio.sleep(retries.next_s())
            continue
        retries.reset()
        yield now
        items = now.values()
        try:
            async with store.watch(prefix, now.revision + 1) as watch:
                async for batch in watch:
                    for event in batch.events:
                        _apply(items, event)
                    yield RangeResult(
                        tuple(items[key] for key in sorted(items)), revision=batch.revision
                    )
        except WatchLost as error:
            _LOG.info("following %r: %s; reading again", prefix, error)


def _apply(items: dict[str, KeyValue], event: Event) -> None:
    if event.kind == "delete":
        items.pop(event.key, None)
    else:
        items[event.key] = KeyValue(
            event.key,
            event.value,
            event.create_revision,
            event.revision,
            event.version,
            event.lease,
        )


@dataclass(frozen=True)
class FencingToken:
    """Proof of having been elected: the key as this election created it.

    Attributes:
        key: The election key.
        create_revision: Larger than that of every earlier holder.
    """

    key: str
    create_revision: int

    def still_mine(self) -> Compare:
        """Return the condition to put into each transaction made in this role."""
        return create_revision_is(self.key, self.create_revision)


class Election:
    """An election over one key: the process that creates it leads until the key goes."""

    def __init__(self, store: CoordinationStore, key: str) -> None:
        """Prepare; nothing is read or written yet."""
        self._store = store
        self._key = key

    async def campaign(self, value: str, lease: int) -> FencingToken:
        """Wait until elected.

        Outages are waited out. Cancel the call to give up; a key that this call may have created
        unseen is found again by the next campaign with the same lease, and ends with the lease.

        Args:
            value: What others see while this one is elected.
            lease: The leadership ends with it.

        Raises:
            LeaseLost: The lease is over.
        """
        states = follow(self._store, self._key)
        try:
            async for state in states:
                if self._held(state) is None or self._is_mine(state, lease):
                    token = await self._try(value, lease)
                    if token is not None:
                        return token
        finally:
            # Otherwise the watch would end when the garbage collector comes by.
            await states.aclose()
        raise AssertionError("follow never ends")

    async def observe(self) -> AsyncGenerator[KeyValue | None, None]:
        """Yield who leads, now and after each change; None while there is no leader."""
        states = follow(self._store, self._key)
        try:
            async for state in states:
                yield self._held(state)
        finally:
            await states.aclose()

    async def resign(self, token: FencingToken) -> bool:
        """Give the leadership back; false if this one no longer led."""
        result = await self._store.transaction(
            Txn((token.still_mine(),), success=(Delete(self._key),))
        )
        return result.succeeded

    async def _try(self, value: str, lease: int) -> FencingToken | None:
        """Create the key once; an unknown outcome is cleared up by looking."""
        txn = Txn(
            (absent(self._key),),
            success=(Put(self._key, value, lease),),
            failure=(Get(self._key),),
        )
        while True:
            try:
                result = await self._store.transaction(txn)
            except StoreUnavailable as error:
                _LOG.warning("election %r: %s; trying again", self._key, error)
                await asyncio.sleep(RETRY.first_s)
                continue
            if result.succeeded:
                return FencingToken(self._key, result.revision)
            held = result.results[0]
            if held is not None and held.lease == lease:
                return FencingToken(self._key, held.create_revision)
            return None

    def _held(self, state: RangeResult) -> KeyValue | None:
        return next((item for item in state.items if item.key == self._key), None)

    def _is_mine(self, state: RangeResult, lease: int) -> bool:
        held = self._held(state)
        return held is not None and held.lease == lease


class KeepAlive:
    """Renews one lease, and tells until when it is surely alive.

    That time is counted on :func:`~backstay.consensus.clock.clock_s` from *before* the last
    successful keepalive was sent: the store cannot have begun to count earlier. It does not tell
    when the lease is gone; the store may keep it for longer.
    """

    def __init__(
        self,
        store: CoordinationStore,
        ttl_ms: int,
        on_alive: Callable[[float], None],
        *,
        margin_ms: int = DEFAULT_MARGIN_MS,
    ) -> None:
        """Prepare.

        Args:
            store: Where the lease is.
            ttl_ms: Its time to live.
            on_alive: Called after the grant and each renewal with the time, in that clock's
                seconds, until which the lease is surely alive; never with an earlier one.
            margin_ms: Taken off, for clocks that run at slightly different speeds.
        """
        self._store = store
        self._ttl_ms = ttl_ms
        self._on_alive = on_alive
        self._margin_ms = margin_ms
        self._lease: Lease | None = None
        self.alive_until = float("-inf")

    @property
    def lease(self) -> int:
        """Id of the lease."""
        if self._lease is None:
            raise LeaseLost("no lease was granted yet")
        return self._lease.id

    async def grant(self) -> Lease:
        """Get a lease; call it once, then ``run``."""
        sent = clock_s()
        self._lease = await self._store.lease_grant(self._ttl_ms)
        self._report(sent, self._lease.ttl_ms)
        return self._lease

    async def run(self) -> None:
        """Renew at a third of the TTL until cancelled; an outage does not end it.

        Raises:
            LeaseLost: The store says that it is over.
            StoreAuthError: The store refuses this client.
            StoreDataLost: The store has lost its data, and the lease with it.
        """
        if self._lease is None:
            raise LeaseLost("grant the lease first")
        period_s = self._lease.ttl_ms / 3000
        pause_s = period_s
        failing = False
        while True:
            await asyncio.sleep(pause_s)
            sent = clock_s()
            try:
                ttl_ms = await self._store.lease_keepalive(self._lease.id)
            except StoreUnavailable as error:
                level = logging.DEBUG if failing else logging.WARNING
                _LOG.log(level, "lease %d is not renewed: %s", self._lease.id, error)
                failing = True
                pause_s = min(period_s / 4, RETRY.longest_s)
                continue
            if failing:
                _LOG.info("lease %d is renewed again", self._lease.id)
                failing = False
            self._report(sent, ttl_ms)
            pause_s = max(0.0, period_s - (clock_s() - sent))

    async def revoke(self) -> None:
        """End the lease now; its keys go."""
        if self._lease is not None:
            await self._store.lease_revoke(self._lease.id)

    def _report(self, sent: float, ttl_ms: int) -> None:
        until = sent + (ttl_ms - self._margin_ms) / 1000
        if until > self.alive_until:
            self.alive_until = until
            self._on_alive(until)
