"""One trainer: a small model of the client, which retries, keeps its order, and reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from tests.sim.deletions import LIVES, WITHOUT_VALUES
from tests.sim.events import MS, Micros

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster
    from tests.sim.pserver import Pserver

__all__ = ["Push", "Trainer"]

TIMEOUT = 400 * MS
BACKOFF = 15 * MS
# Of data_plane.md.
NOT_MASTER = 9


@dataclass
class Push:
    """One push, until every slot of it is acknowledged."""

    stream: tuple[int, int, int]
    sequence: int
    keys: list[int]
    open_slots: set[int]
    change: str = ""
    """What happens to the rows (``tests.sim.deletions``); otherwise each counts one more."""
    value: float = -1.0
    """The gradient of each key."""
    waits: int = 0
    sent: set[int] = field(default_factory=set)
    """Slots that were sent and wait for an answer."""


class Trainer:
    """Pushes and reads until it is told to stop; then it goes on until all is acknowledged."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster = cluster
        self.queue = cluster.queue
        self.number = number
        self.place = f"trainer-{number}"
        self.stream = (number + 1, 0, 0)
        self.pushes: dict[int, Push] = {}
        self.stopping = False
        self.acknowledged = 0
        self._next = 0
        self._window = self.queue.random.randrange(1, 5)
        self._pause = self.queue.random.choice((10 * MS, 30 * MS, 60 * MS))
        self._version = 0
        self._reading = False
        cluster.store.watch(self._notice)
        self.queue.after(self.queue.random.randrange(50 * MS), self._go_on)
        self.queue.after(self.queue.random.randrange(50 * MS), self._read_on)

    @property
    def floor(self) -> int:
        """Everything below it is acknowledged."""
        return min(self.pushes, default=self._next)

    # Routing: it comes from any node, late

    def _notice(self) -> None:
        newest = len(self.cluster.routings)
        if newest > self._version:
            delay = self.cluster.watch_delay()
            self.queue.after(delay, partial(self._learn, newest))

    def _learn(self, version: int) -> None:
        if version > self._version:
            self._version = version
            for push in list(self.pushes.values()):
                self._send(push)

    def _masters(self, slots: Iterable[int]) -> dict[Pserver, list[int]]:
        routing = self.cluster.routings[self._version - 1]
        found: dict[Pserver, list[int]] = {}
        for slot in sorted(slots):
            master = routing.replicas_of_slot[slot].master
            if master >= 0:
                process = self.cluster.processes[routing.nodes[master].instance]
                found.setdefault(process, []).append(slot)
        return found

    # Pushes

    def _go_on(self) -> None:
        if self.stopping:
            return
        if self._version and len(self.pushes) < self._window:
            keys, change, value = self._draw()
            slots = {self.cluster.slot_of[key] for key in keys}
            push = Push(self.stream, self._next, keys, slots, change, value)
            self._next += 1
            self.begin(push)
        self.queue.after(self.queue.between(100, self._pause), self._go_on)

    def _draw(self) -> tuple[list[int], str, float]:
        """Draw the keys of the next push, what happens to their rows, and the gradient."""
        keys, change, value = self.cluster.deletions.draw(self.number)
        if not keys:
            random = self.queue.random
            keys = random.sample(self.cluster.keys, random.choice((1, 1, 2, 3, 6)))
        return self.cluster.sort_keys(keys), change, value

    def begin(self, push: Push) -> None:
        """Send a push, and again until every slot of it is acknowledged."""
        self.pushes[push.sequence] = push
        self.cluster.history.sent(push.stream, push.sequence, push.keys)
        self._send(push)

    def _send(self, push: Push) -> None:
        """Send what is missing and not under way, one part to each master."""
        if self.pushes.get(push.sequence) is not push or not self._version:
            return
        for process, slots in self._masters(push.open_slots - push.sent).items():
            self._send_part(push, process, slots)
        if push.open_slots - push.sent:
            self._try_later(push, BACKOFF * 4)

    def _try_later(self, push: Push, delay: Micros) -> None:
        self.queue.after(self.queue.between(1 * MS, delay), partial(self._send, push))

    def _send_part(self, push: Push, process: Pserver, slots: list[int]) -> None:
        keys = [key for key in push.keys if self.cluster.slot_of[key] in slots]
        push.sent.update(slots)
        network = self.cluster.network
        is_open = True
        known: dict[int, int] = {}

        def answered(code: int) -> None:
            nonlocal is_open
            if not is_open:
                return  # The connection it came on was given up.
            is_open = False
            push.sent.difference_update(slots)
            if code == 0:
                push.open_slots.difference_update(slots)
                # A slot may have begun anew since: what it was is gone, and the push with it.
                epochs = self.cluster.routings[-1].epoch_of_slot
                ended = {slot for slot in slots if known[slot] != epochs[slot]}
                self.cluster.history.acknowledged(push.stream, push.sequence, keys, ended)
                if not push.open_slots and self.pushes.get(push.sequence) is push:
                    del self.pushes[push.sequence]
                    self.acknowledged += 1
                    self.cluster.deletions.acknowledged(push.keys, push.change)
            else:
                self.queue.counts[f"refused_{code}"] += 1
                self._try_later(push, BACKOFF)

        def answer(code: int) -> None:
            network.send(process.place, self.place, lambda: answered(code))

        carried = self._request(push, process, keys)

        def request() -> None:
            known.update((slot, process.native.slot_state(slot)[1]) for slot in slots)
            carried(answer)

        self._carry(process, request)
        # A request may come a second time: a late copy of a connection that was given up.
        if self.queue.random.random() < self.cluster.options.duplicates:
            self.queue.counts["late_copies"] += 1
            late = self.queue.between(1 * MS, 800 * MS)
            self.queue.after(late, partial(self._carry, process, partial(carried, _nobody)))

        def give_up() -> None:
            nonlocal is_open
            if is_open:
                is_open = False
                push.sent.difference_update(slots)
                self.queue.counts["timeouts"] += 1
                self._send(push)

        def refused() -> None:
            nonlocal is_open
            if is_open and not process.is_alive:
                is_open = False
                push.sent.difference_update(slots)
                self._try_later(push, BACKOFF)

        if not process.is_alive:
            network.send(process.place, self.place, refused)
        self.queue.after(TIMEOUT, give_up)

    def _request(
        self, push: Push, process: Pserver, keys: list[int]
    ) -> Callable[[Callable[[int], None]], None]:
        """Return what brings a part of a push to a process, given what takes the answer."""
        values = [] if push.change in WITHOUT_VALUES else [push.value] * len(keys)
        carried = partial(
            process.on_push, push.stream, push.sequence, self.floor, keys, values, self._version
        )
        return partial(carried, change=push.change) if push.change in LIVES else carried

    def _carry(self, process: Pserver, request: Callable[[], None]) -> None:
        self.cluster.network.send(self.place, process.place, partial(process.handle, request))

    # Reads

    def _read_on(self) -> None:
        if self.stopping:
            return
        if self._version and not self._reading:
            keys = self.queue.random.sample(self.cluster.keys, 3)
            by_slot: dict[int, list[int]] = {}
            for key in keys:
                by_slot.setdefault(self.cluster.slot_of[key], []).append(key)
            for process, slots in self._masters(by_slot).items():
                wanted = [key for slot in slots for key in by_slot[slot]]
                self._read(process, self.cluster.sort_keys(wanted))
        self.queue.after(self.queue.between(1 * MS, self._pause * 2), self._read_on)

    def _read(self, process: Pserver, keys: list[int]) -> None:
        history = self.cluster.history
        expected = history.expect(keys)

        def serve() -> None:
            code, values = process.native.read(process.clock.now(), self.cluster.table, keys)
            if code == 0:
                counts = [round(value) for value in values]

                def arrive() -> None:
                    history.was_read(process.node_id, keys, counts, expected)

                self.cluster.network.send(process.place, self.place, arrive)

        self._carry(process, serve)


def _nobody(_code: int) -> None:
    """Take an answer that no call waits for."""
