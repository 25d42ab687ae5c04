"""What goes wrong, when, for how long: drawn from the seed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from backstay.consensus.store import Delete, Txn
from tests.sim.events import MS, Micros
from tests.sim.network import STORE

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster
    from tests.sim.pserver import Pserver

__all__ = ["Faults", "depose"]

BEGIN = 150 * MS
LEADERSHIP = "controller"


class Faults:
    """A plan of faults over some time, and the end of them all."""

    def __init__(self, cluster: Cluster, end: Micros) -> None:
        self._cluster = cluster
        self._queue = cluster.queue
        self._end = end
        random = self._queue.random
        kinds: list[Callable[[], None]] = [
            self.kill,
            self.kill,
            self.kill_and_restart,
            self.kill_and_restart,
            self.pause,
            self.pause,
            self.slow_apply_queues,
            self.partition,
            self.one_way,
            self.cut_from_store,
            self.store_outage,
            self.break_connections,
            self.break_connections,
            self.swizzle,
            self.depose,
        ]
        # Each seed has its own taste: two kinds of faults at a time find more than all at once.
        chosen = random.sample(kinds, random.randrange(1, 4))
        for _ in range(random.randrange(1, 11)):
            self._queue.at(random.randrange(BEGIN, end), partial(self._do, random.choice(chosen)))

    def _do(self, fault: Callable[[], None]) -> None:
        self._queue.counts[f"fault_{fault.__name__}"] += 1
        self._queue.log("fault", lambda: fault.__name__)
        fault()

    def _someone(self) -> Pserver | None:
        alive = [one for one in self._cluster.processes.values() if one.is_alive]
        controller = self._cluster.store.state.get(LEADERSHIP)
        if controller is not None and self._queue.random.random() < 0.3:
            ruling = [one for one in alive if one.node_id == controller.value]
            alive = ruling or alive
        return self._queue.random.choice(alive) if alive else None

    def _for_a_while(self, undo: Callable[[], None]) -> None:
        self._queue.at(
            min(self._end, self._queue.now + self._queue.between(5 * MS, 1200 * MS)), undo
        )

    def kill(self) -> None:
        """SIGKILL; it comes back when the faults are over, if at all."""
        one = self._someone()
        if one is not None:
            self._queue.log("fault", lambda: f"kills {one.node_id}")
            one.die()

    def kill_and_restart(self) -> None:
        """SIGKILL, and a new process soon after."""
        one = self._someone()
        if one is not None:
            self._queue.log("fault", lambda: f"kills and restarts {one.node_id}")
            one.die()
            self._for_a_while(partial(self._cluster.start_process, one.node_id))

    def pause(self) -> None:
        """SIGSTOP and SIGCONT."""
        one = self._someone()
        if one is not None:
            self._queue.log("fault", lambda: f"pauses {one.node_id}")
            one.pause()
            self._for_a_while(one.resume)

    def slow_apply_queues(self) -> None:
        """Its apply queues are late, each on its own."""
        one = self._someone()
        if one is not None:
            one.work_delay = self._queue.random.choice((10 * MS, 100 * MS))
            self._for_a_while(partial(setattr, one, "work_delay", 150))

    def _block(self, pairs: list[tuple[str, str]]) -> None:
        network = self._cluster.network
        for source, target in pairs:
            network.block(source, target)

            def undo(source: str = source, target: str = target) -> None:
                network.unblock(source, target)

            self._for_a_while(undo)

    def _places(self) -> list[str]:
        return sorted({one.place for one in self._cluster.processes.values()})

    def partition(self) -> None:
        """Two sides that do not hear each other; the store is on one of them."""
        places = self._places()
        self._queue.random.shuffle(places)
        cut = self._queue.random.randrange(1, len(places)) if len(places) > 1 else 1
        left, right = places[:cut], [*places[cut:], STORE]
        self._block([(a, b) for a in left for b in right] + [(b, a) for a in left for b in right])
        if self._queue.random.random() < 0.5:
            self._break(left, right)

    def one_way(self) -> None:
        """Somebody is not heard by others, or does not hear them."""
        places = self._places()
        one = self._queue.random.choice(places)
        others = [place for place in [*places, STORE] if place != one]
        some = self._queue.random.sample(others, self._queue.random.randrange(1, len(others) + 1))
        outwards = self._queue.random.random() < 0.5
        self._block([(one, other) if outwards else (other, one) for other in some])

    def cut_from_store(self) -> None:
        """Some nodes lose the store and nothing else."""
        places = self._places()
        for place in self._queue.random.sample(places, self._queue.random.randrange(1, 3)):
            self._block([(place, STORE), (STORE, place)])

    def store_outage(self) -> None:
        """The store answers no call."""
        self._cluster.store.stop()
        self._for_a_while(self._cluster.store.start)

    def break_connections(self) -> None:
        """Connections between nodes are reset."""
        places = self._places()
        some = self._queue.random.sample(places, self._queue.random.randrange(1, len(places) + 1))
        self._break(some, places)

    def _break(self, some: list[str], others: list[str]) -> None:
        for one in list(self._cluster.processes.values()):
            for peer in list(one.links):
                other = self._cluster.processes[peer]
                hit = one.place in some and other.place in others
                if hit and self._queue.random.random() < 0.7:
                    one.break_link(peer, late=self._queue.random.random() < 0.5)

    def swizzle(self) -> None:
        """Clog ways one after the other, then unclog them in another order."""
        places = [*self._places(), STORE]
        pairs = [(a, b) for a in places for b in places if a != b]
        some = self._queue.random.sample(pairs, self._queue.random.randrange(1, len(pairs) + 1))
        network = self._cluster.network
        for at, (source, target) in enumerate(some):
            self._queue.after(at * 20 * MS, partial(network.block, source, target))
        self._queue.random.shuffle(some)
        begin = self._queue.now + len(some) * 20 * MS
        for at, (source, target) in enumerate(some):
            self._queue.at(begin + at * 20 * MS, partial(network.unblock, source, target))

    def depose(self) -> None:
        """Another node rules, and the controller does not know yet."""
        depose(self._cluster)


def depose(cluster: Cluster) -> None:
    """Take the leadership from the controller, wherever it is and whatever it hears.

    Its lease is revoked, too, where slots have more copies than one: what their backups grant
    keeps I3. With one copy the lease alone does, and nothing revokes that of a process that lives.
    """
    store = cluster.store
    leadership = store.state.get(LEADERSHIP)
    if leadership is None or not store.is_up:
        return
    if cluster.options.replicas == 1:
        store.state.transact(Txn((), (Delete(LEADERSHIP),)))
    else:
        store.state.revoke(leadership.lease)
    store.changed()
