"""One pserver process: the real replica under a small model of its sockets and threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from backstay._native import SimMessage, SimNode
from tests.sim.agent import Agent
from tests.sim.events import MS, Clock
from tests.sim.network import Stream

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster

__all__ = ["Link", "Pserver"]

TICK = 25 * MS
RECONNECT = 40 * MS
CONNECT_TIMEOUT = 120 * MS
# A key and a weight.
ROW_BYTES = 12
# A row of a push takes so much less time on the wire than one of a copy: trainers must not fill
# slow links alone.
PUSHED_FASTER = 10
# Of data_plane.md.
NOT_READY = 13


class Link:
    """The connections from a master to its backup: one for orders, one for heartbeats."""

    def __init__(self, cluster: Cluster, master: Pserver, backup: Pserver) -> None:
        self.there = Stream(cluster.network, master.place, backup.place)
        self.back = Stream(cluster.network, backup.place, master.place)
        self.heartbeats = Stream(cluster.network, master.place, backup.place)
        self.read_leases = Stream(cluster.network, backup.place, master.place)
        self.number = master.queue.now
        self.is_up = True

    def stream(self, kind: str, *, to_backup: bool) -> Stream:
        """Return what carries messages of a kind."""
        if kind in ("heartbeat", "read_lease"):
            return self.heartbeats if to_backup else self.read_leases
        return self.there if to_backup else self.back

    def cut_there(self) -> None:
        """Lose what has not arrived at the backup."""
        self.there.cut()
        self.heartbeats.cut()

    def cut_back(self) -> None:
        """Lose what has not arrived at the master."""
        self.back.cut()
        self.read_leases.cut()


class Pserver:
    """One process; it dies with its memory."""

    def __init__(self, cluster: Cluster, node_id: str, instance: int) -> None:
        self.cluster = cluster
        self.queue = cluster.queue
        self.node_id = node_id
        self.place = node_id
        self.instance = instance
        self.clock = Clock(self.queue, self.queue.random.randrange(-20_000, 20_001))
        options = cluster.options
        self.native = SimNode(
            instance,
            options.slots,
            read_lease_us=options.read_lease,
            heartbeat_us=options.heartbeat,
            prepare_timeout_us=options.prepare_timeout,
            copy_bytes_per_s=options.copy_bytes_per_s,
            copy_piece_bytes=ROW_BYTES,
            copy_window_bytes=options.copy_window * ROW_BYTES,
        )
        self.native.create_table(cluster.table_json)
        for table_json in cluster.stale_tables_json:
            self.native.create_table(table_json)
        if cluster.crowd is not None:
            self.native.create_table(cluster.crowd.table_json)
        self.is_alive = True
        self.is_paused = False
        self.work_delay = 150
        self.links: dict[int, Link] = {}
        self.heard: dict[int, Link] = {}
        self._dialling: set[int] = set()
        self._busy_queues: set[int] = set()
        self._inbox: list[Callable[[], None]] = []
        self.answers: dict[int, Callable[[int], None]] = {}
        self.report_number = 0
        self.agent = Agent(self)
        self.queue.after(self.queue.random.randrange(TICK), self._tick)

    # The process

    def handle(self, what: Callable[[], None]) -> None:
        """Do something now, after the pause, or never."""
        if not self.is_alive:
            return
        if self.is_paused:
            self._inbox.append(what)
            return
        what()
        self._after()

    def pause(self) -> None:
        """SIGSTOP."""
        self.is_paused = True

    def resume(self) -> None:
        """SIGCONT: what has queued up comes at once, in any order among connections."""
        if not self.is_alive or not self.is_paused:
            return
        self.is_paused = False
        self.cluster.network.hurt(self.place)
        for slot in range(self.cluster.options.slots):
            self.cluster.probe(self, slot)
        inbox, self._inbox = self._inbox, []
        for what in inbox:
            self.handle(what)

    def die(self) -> None:
        """SIGKILL: the kernel closes its connections, and its memory is gone."""
        self.is_alive = False
        for link in self.links.values():
            link.is_up = False
            link.cut_back()
        for master in self.cluster.processes.values():
            link_here = master.links.get(self.instance)
            if link_here is not None and link_here.is_up:
                self.close(link_here, master)

    def _tick(self) -> None:
        if not self.is_alive:
            return
        # A paused process gets its timer once, when it goes on.
        if not self.is_paused:
            self.handle(lambda: self.native.tick(self.clock.now()))
        self.queue.after(TICK, self._tick)

    def _after(self) -> None:
        """Carry out what the replica wants after it was called."""
        messages, queues, links, number = self.native.take_outcome()
        for peer, to_backup, message in messages:
            self._send(peer, to_backup, message)
        for queue in queues:
            if queue not in self._busy_queues:
                self._busy_queues.add(queue)
                self.queue.after(
                    self.queue.between(5, self.work_delay),
                    partial(self.handle, partial(self._work, queue)),
                )
        for peer in links:
            link = self.links.get(peer)
            if (link is None or not link.is_up) and peer not in self._dialling:
                self._dialling.add(peer)
                self.queue.after(self.queue.between(100, RECONNECT), partial(self._dial, peer))
        if number != self.report_number:
            self.report_number = number
            self.agent.report_changed()

    def _work(self, queue: int) -> None:
        self._busy_queues.discard(queue)
        done = self.native.work(self.clock.now(), queue)
        if done is not None and done[0] == "answer":
            _, token, code, reason = done
            self.queue.log(self.node_id, lambda: f"answers {token}: {code} {reason}")
            self.answers.pop(token)(code)

    # Connections

    def _send(self, peer: int, to_backup: bool, message: SimMessage) -> None:
        other = self.cluster.processes.get(peer)
        link = self.links.get(peer) if to_backup else self.heard.get(peer)
        if other is None or link is None or (to_backup and not link.is_up):
            return
        stream = link.stream(message.kind, to_backup=to_backup)
        takes = self.cluster.options.row_time * message.rows
        if message.kind == "prepare":
            takes //= PUSHED_FASTER

        def arrive() -> None:
            # A heartbeat brings no order, and may come before the other connection is heard of.
            ordered = to_backup and message.kind != "heartbeat"
            if ordered and other.heard.get(self.instance) is not link:
                other.close(link, self)  # Another one from here was heard after it.
                return
            if not to_backup and other.links.get(self.instance) is not link:
                return
            if not to_backup and not link.is_up:
                return
            if message.kind not in ("heartbeat", "read_lease"):
                self.queue.log(other.node_id, lambda: f"gets from {self.node_id}: {message!r}")
            other.native.receive(other.clock.now(), self.instance, message)

        stream.send(partial(other.handle, arrive), takes)

    def _dial(self, peer: int) -> None:
        """Try to connect; packets that do not get through mean trying again."""
        other = self.cluster.processes.get(peer)
        network = self.cluster.network

        def give_up() -> None:
            self._dialling.discard(peer)

        if not self.is_alive or other is None:
            return
        there = network.is_open(self.place, other.place)
        if self.is_paused:
            self.queue.after(RECONNECT, partial(self._dial, peer))
            return
        if not (there and network.is_open(other.place, self.place)):

            def unreachable() -> None:
                give_up()
                self.native.link_down(self.clock.now(), peer, False)

            self.queue.after(CONNECT_TIMEOUT, partial(self.handle, unreachable))
            return
        if not other.is_alive:
            self.handle(lambda: self.native.link_down(self.clock.now(), peer, True))
            self.queue.after(RECONNECT, give_up)
            return
        link = Link(self.cluster, self, other)
        self._dialling.discard(peer)

        def hear() -> None:
            known = other.heard.get(self.instance)
            if known is not None and known.number > link.number:
                other.close(link, self)  # Read after its successor.
                return
            other.heard[self.instance] = link
            other.native.master_connected(self.instance)

        def begin() -> None:
            self.queue.log(self.node_id, lambda: f"connects to {other.node_id}")
            self.links[peer] = link
            link.there.send(partial(other.handle, hear))
            self.native.link_up(self.clock.now(), peer)

        self.handle(begin)

    def close(self, link: Link, master: Pserver) -> None:
        """Close a connection from a master, as its backup."""
        link.cut_there()
        broken = partial(master.on_broken, self.instance, link, refused=False)
        self.cluster.network.send(self.place, master.place, partial(master.handle, broken))

    @property
    def is_hurt(self) -> bool:
        """Whether a fault hits this process, or did a short time ago."""
        dead_or_stopped = not self.is_alive or self.is_paused
        return dead_or_stopped or self.cluster.network.is_hurt(self.place)

    def break_link(self, peer: int, *, late: bool) -> None:
        """Reset the connection to a backup; ``late``: what is on its way still arrives."""
        link = self.links.get(peer)
        if link is not None and link.is_up:
            link.is_up = False
            self.cluster.network.hurt(self.place, self.cluster.processes[peer].place)
            if not late:
                link.cut_there()
            link.cut_back()
            self.handle(partial(self.on_broken, peer, link, refused=False))

    def on_broken(self, peer: int, link: Link, *, refused: bool) -> None:
        """Note that a connection to a backup is gone."""
        if self.links.get(peer) is link:
            self.queue.log(self.node_id, lambda: f"loses its connection to {peer}")
            del self.links[peer]
            link.is_up = False
            self.native.link_down(self.clock.now(), peer, refused)

    # Clients

    def on_push(
        self,
        stream: tuple[int, int, int],
        sequence: int,
        floor: int,
        keys: list[int],
        values: list[float],
        known_version: int,
        answer: Callable[[int], None],
        *,
        change: str = "",
        table: int | None = None,
        origins: list[int] | None = None,
        reference: str = "",
    ) -> None:
        """Take a push, or without values a delete or ``change``, on.

        ``answer`` gets 0 or a refusal's code. Of another ``table``: from where its gradients come.
        """
        token = self.cluster.next_token()
        self.answers[token] = answer
        what = "push" if values else change or "delete"
        code, reason = self.native.push(
            self.clock.now(),
            token,
            stream=stream,
            sequence=sequence,
            floor=floor,
            table=self.cluster.table if table is None else table,
            keys=keys,
            values=values,
            known_version=known_version,
            change=change,
            origins=origins,
            reference=reference,
        )
        self.queue.log(
            self.node_id,
            lambda: f"{what} {stream}/{sequence} floor {floor} {keys} as {token}: {code} {reason}",
        )
        if code != -1:
            del self.answers[token]
            answer(code)

    def on_close(
        self, stream: tuple[int, int, int], known_version: int, answer: Callable[[int], None]
    ) -> None:
        """Close a stream in the slots that are served here, as the server does."""
        slots = range(self.cluster.options.slots)
        if any(self.native.serving_state(slot) == "waiting" for slot in slots):
            answer(NOT_READY)
            return
        token = self.cluster.next_token()
        self.answers[token] = answer
        code, reason = self.native.close_stream(self.clock.now(), token, stream, known_version)
        self.queue.log(self.node_id, lambda: f"close {stream} as {token}: {code} {reason}")
        if code != -1:
            del self.answers[token]
            answer(code)
