"""Keeps a mirror of the records equal to what the coordination store holds.

One task a prefix follows it for as long as the node runs; outages are waited out. It decides
nothing and writes nothing to the store.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from types import TracebackType

from backstay.backoff import Backoff
from backstay.consensus import ClusterMirror
from backstay.consensus.records.keys import Keys
from backstay.consensus.store import CoordinationStore
from backstay.consensus.store.follow import follow
from backstay.errors import StoreError, StoreUnavailable
from backstay.tasks import end_tasks, spawn, until_answered

__all__ = ["RecordWatch"]

# The pause after an error that waiting seldom cures: refused credentials, lost data.
RETRY_PAUSE_S = 2.0
RETRY_READ = Backoff(first_s=0.1, longest_s=0.1)

log = logging.getLogger(__name__)


class RecordWatch:
    """Follows the records that a node goes by. An async context manager."""

    def __init__(self, store: CoordinationStore, keys: Keys, mirror: ClusterMirror) -> None:
        """Prepare; nothing is read before ``read_all`` or ``async with``."""
        self._store = store
        self._mirror = mirror
        # The readable view and the events are left out: they are large, and for people.
        self._prefixes = (
            keys.routing,
            keys.settings,
            keys.controller,
            keys.status,
            keys.members,
            keys.reports,
            keys.deaths,
            keys.tables,
            keys.checkpoint,
            keys.plans,
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def read_all(self) -> None:
        """Read every prefix once, now.

        Raises:
            StoreError: The store does not answer, or refuses.
        """
        found = await self._store.ranges(self._prefixes)
        for prefix, result in zip(self._prefixes, found, strict=True):
            self._mirror.load(prefix, result)

    async def read_until_answered(self) -> None:
        """Read every prefix once, as soon as the store answers.

        Raises:
            StoreError: The store refuses.
        """
        await until_answered(
            self.read_all,
            RETRY_READ,
            StoreUnavailable,
            lambda error: log.warning("reading the cluster's records again: %s", error),
        )

    async def __aenter__(self) -> RecordWatch:
        self._tasks = [
            spawn(self._follow(prefix), f"the watch over {prefix}") for prefix in self._prefixes
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await end_tasks(*self._tasks)

    async def _follow(self, prefix: str) -> None:
        while True:
            try:
                async with aclosing(follow(self._store, prefix)) as states:
                    async for state in states:
                        self._mirror.load(prefix, state)
            except StoreError as error:
                log.error("records %s are no longer followed: %s", prefix, error)
                self._mirror.set_trouble(f"the coordination store cannot be followed: {error}")
                await asyncio.sleep(RETRY_PAUSE_S)
