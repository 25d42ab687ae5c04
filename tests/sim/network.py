"""Who reaches whom: delays, partitions, and connections that keep their order until they break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tests.sim.events import EventQueue, Micros

__all__ = ["STORE", "Endpoint", "Network", "Stream"]

STORE = "store"


class Endpoint(Protocol):
    """Something with a place in the network."""

    @property
    def place(self) -> str:
        """Name of its machine."""

    def handle(self, what: Callable[[], None]) -> None:
        """Do it when this process runs: at once, later if it is paused, never if it is dead."""


class Network:
    """The links between machines, one way each."""

    def __init__(self, queue: EventQueue, slow: Micros) -> None:
        self.queue = queue
        self.slow = slow
        self.blocked: set[tuple[str, str]] = set()
        self.is_healed = False
        self._waiting: dict[tuple[str, str], list[Callable[[], None]]] = {}

    def delay(self) -> Micros:
        """Return how long the next packet takes."""
        return self.queue.between(30, self.slow)

    def is_open(self, source: str, target: str) -> bool:
        """Whether packets get through that way."""
        return (source, target) not in self.blocked

    def block(self, source: str, target: str) -> None:
        """Hold back everything that way."""
        if not self.is_healed:
            self.blocked.add((source, target))

    def unblock(self, source: str, target: str) -> None:
        """Let it through again, with what was held back."""
        self.blocked.discard((source, target))
        for arrive in self._waiting.pop((source, target), []):
            self.queue.after(self.delay(), arrive)

    def heal(self) -> None:
        """Let everything through, for good."""
        self.is_healed = True
        for source, target in sorted(self.blocked):
            self.unblock(source, target)

    def send(self, source: str, target: str, arrive: Callable[[], None]) -> None:
        """Carry one packet; it waits (TCP sends it again) as long as the way is blocked."""

        def try_to_arrive() -> None:
            if self.is_open(source, target):
                arrive()
            else:
                self._waiting.setdefault((source, target), []).append(try_to_arrive)

        self.queue.after(self.delay(), try_to_arrive)


class Stream:
    """One direction of a connection: what is sent arrives in order, or not at all."""

    def __init__(self, network: Network, source: str, target: str) -> None:
        self._network = network
        self._ends = (source, target)
        self._sent: list[Callable[[], None] | None] = []
        self._arrived: set[int] = set()
        self._next = 0
        self.is_cut = False

    def send(self, deliver: Callable[[], None]) -> None:
        """Send a message; ``deliver`` is called when it and all before it have arrived."""
        number = len(self._sent)
        self._sent.append(deliver)
        self._network.send(*self._ends, lambda: self._arrive(number))

    def cut(self) -> None:
        """Lose what has not arrived."""
        self.is_cut = True

    def _arrive(self, number: int) -> None:
        self._arrived.add(number)
        while not self.is_cut and self._next in self._arrived:
            deliver = self._sent[self._next]
            self._sent[self._next] = None
            self._next += 1
            if deliver is not None:
                deliver()
