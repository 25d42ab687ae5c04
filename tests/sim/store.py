"""The coordination store: the real state machine, with outages and watches in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from backstay.consensus.store import Txn, TxnResult
from backstay.consensus.store.state import StoreState
from backstay.errors import LeaseLost
from tests.sim.events import MS, EventQueue
from tests.sim.network import STORE, Endpoint, Network

__all__ = ["SimStore"]

T = TypeVar("T")
STEP_MS = 20
REQUEST_TIMEOUT = 250 * MS


class SimStore:
    """One store for all; requests take time, may fail, and may have been done all the same."""

    def __init__(self, queue: EventQueue, network: Network) -> None:
        self.state = StoreState()
        self.is_up = True
        self._queue = queue
        self._network = network
        self._watchers: list[Callable[[], None]] = []
        self._seen = 0
        self._terms = 0
        self._stopped_at = 0
        queue.after(STEP_MS * MS, self._advance)

    def _advance(self) -> None:
        if self.is_up:
            self.state.advance(STEP_MS)
            self.changed()
        self._queue.after(STEP_MS * MS, self._advance)

    def stop(self) -> None:
        """Begin an outage: no answers, and no time passes for leases."""
        self.is_up = False
        self._stopped_at = self._queue.now

    def start(self) -> None:
        """End it: a new leader counts the time without one."""
        silent_ms = 0 if self.is_up else (self._queue.now - self._stopped_at) // MS
        self.is_up = True
        self._terms += 1
        self.state.take_lead(self._terms, silent_ms)
        self.changed()

    def watch(self, notify: Callable[[], None]) -> None:
        """Call it after each change; the callee finds out what has changed, later."""
        self._watchers.append(notify)

    def changed(self) -> None:
        """Tell the watchers if there is news."""
        if self.is_up and self.state.revision != self._seen:
            self._seen = self.state.revision
            for notify in self._watchers:
                notify()

    def request(
        self,
        who: Endpoint,
        ask: Callable[[StoreState], T],
        done: Callable[[T | None, bool], None],
    ) -> None:
        """Ask the store something.

        Args:
            who: Who asks.
            ask: What is done at the store.
            done: Called with (answer, whether there is one); an answer of None with True is a
                lease that is over. Without one it is unknown whether it was done.
        """
        answered = False

        def finish(answer: T | None, known: bool) -> None:
            nonlocal answered
            if not answered:
                answered = True
                who.handle(lambda: done(answer, known))

        def serve() -> None:
            if not self.is_up:
                return
            answer: T | None
            try:
                answer = ask(self.state)
            except LeaseLost:
                answer = None
            self.changed()
            self._network.send(STORE, who.place, lambda: finish(answer, True))

        self._network.send(who.place, STORE, serve)
        self._queue.after(REQUEST_TIMEOUT, lambda: finish(None, False))

    def transact(
        self, who: Endpoint, txn: Txn, done: Callable[[TxnResult | None, bool], None]
    ) -> None:
        """Do a transaction."""
        self.request(who, lambda state: state.transact(txn), done)
