"""Who reaches whom: delays, partitions, and connections that keep their order until they break."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from tests.sim.events import EventQueue, Micros, S

__all__ = ["STORE", "Endpoint", "Network", "Stream"]

STORE = "store"
# After a fault is over, the nodes that it hit need some time to be well again.
RECOVERY = 1 * S


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
        self._hurt_until: dict[str, Micros] = {}

    def delay(self) -> Micros:
        """Return how long the next packet takes."""
        return self.queue.between(30, self.slow)

    def is_open(self, source: str, target: str) -> bool:
        """Whether packets get through that way."""
        return (source, target) not in self.blocked

    def hurt(self, *places: str) -> None:
        """Note that a fault hits, or hit until now, the processes at these places."""
        for place in places:
            self._hurt_until[place] = self.queue.now + RECOVERY

    def is_hurt(self, place: str) -> bool:
        """Whether a fault hits the processes at a place, or did a short time ago."""
        cut = any(place in way for way in self.blocked)
        return cut or self._hurt_until.get(place, 0) > self.queue.now

    def block(self, source: str, target: str) -> None:
        """Hold back everything that way."""
        if not self.is_healed:
            self.blocked.add((source, target))

    def unblock(self, source: str, target: str) -> None:
        """Let it through again, with what was held back."""
        self.blocked.discard((source, target))
        self.hurt(source, target)
        for arrive in self._waiting.pop((source, target), []):
            self.queue.after(self.delay(), arrive)

    def heal(self) -> None:
        """Let everything through, for good."""
        self.is_healed = True
        for source, target in sorted(self.blocked):
            self.unblock(source, target)

    def send(self, source: str, target: str, arrive: Callable[[], None]) -> None:
        """Carry one packet; it waits (TCP sends it again) as long as the way is blocked."""
        self.queue.after(self.delay(), partial(self._try_to_arrive, (source, target), arrive))

    def _try_to_arrive(self, way: tuple[str, str], arrive: Callable[[], None]) -> None:
        if way not in self.blocked:
            arrive()
        else:
            waiting = self._waiting.setdefault(way, [])
            waiting.append(partial(self._try_to_arrive, way, arrive))


class Stream:
    """One direction of a connection: what is sent arrives in order, or not at all.

    What takes time on the wire holds up what is sent behind it.
    """

    def __init__(self, network: Network, source: str, target: str) -> None:
        self._network = network
        self._free_at: Micros = 0
        self._ends = (source, target)
        self._sent = 0
        self._arrived: dict[int, Callable[[], None]] = {}
        self._next = 0
        self.is_cut = False

    def send(self, deliver: Callable[[], None], takes: Micros = 0) -> None:
        """Send a message; ``deliver`` is called when it and all before it have arrived.

        Args:
            deliver: To be called.
            takes: For how long the message occupies the wire.
        """
        now = self._network.queue.now
        arrive = partial(self._arrive, self._sent, deliver)
        self._sent += 1
        self._free_at = max(now, self._free_at) + takes
        if self._free_at == now:
            self._network.send(*self._ends, arrive)
        else:
            leave = partial(self._network.send, *self._ends, arrive)
            self._network.queue.after(self._free_at - now, leave)

    def cut(self) -> None:
        """Lose what has not arrived."""
        self.is_cut = True

    def _arrive(self, number: int, deliver: Callable[[], None]) -> None:
        self._arrived[number] = deliver
        while not self.is_cut and self._next in self._arrived:
            due = self._arrived.pop(self._next)
            self._next += 1
            due()
