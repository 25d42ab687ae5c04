"""Faults of the network, at one host each; see ``network`` for what can be done there."""

from __future__ import annotations

from tests.chaos import network
from tests.chaos.faults import Arena, Fault, OnNode, Role, restart
from tests.chaos.network import Host

__all__ = [
    "CutFromStore",
    "CutPair",
    "CutTrainer",
    "Deaf",
    "Delay",
    "Drop",
    "Duplicate",
    "HalfOpen",
    "Mute",
    "Partition",
    "Reset",
    "SlowLink",
]


class NetworkFault(OnNode):
    """A fault of the network at one node."""

    needs_network = True
    # Whether nothing can be asked of it meanwhile.
    silences = False

    def host(self, arena: Arena) -> Host:
        """Choose the node and return its host."""
        host = self.aim(arena).host
        if self.silences:
            arena.cluster.cut_off.add(self.number)
        return host

    def undo(self, arena: Arena) -> None:
        arena.cluster.network.heal(arena.cluster.hosts[self.number])
        arena.cluster.cut_off.discard(self.number)


class Partition(NetworkFault):
    """Nothing in, nothing out: shorter than a lease, or longer, so that all is copied anew."""

    kind = "partition"
    silences = True

    def __init__(self, arena: Arena, role: Role | None = None) -> None:
        super().__init__(arena, role)
        self.hold_s = arena.draw.uniform(1.0, 8.0)

    def strike(self, arena: Arena) -> None:
        arena.cluster.network.apply(self.host(arena), ["drop"], ["drop"])


class Deaf(Partition):
    """One way: the node sends, and hears nothing."""

    kind = "partition_in"

    def strike(self, arena: Arena) -> None:
        arena.cluster.network.apply(self.host(arena), ["drop"])


class Mute(Partition):
    """One way: the node hears, and nothing that it sends arrives."""

    kind = "partition_out"

    def strike(self, arena: Arena) -> None:
        arena.cluster.network.apply(self.host(arena), [], ["drop"])


class HalfOpen(Partition):
    """The node is killed while nothing gets through: its peers hold sockets without a peer."""

    kind = "half_open"
    kills = True

    def strike(self, arena: Arena) -> None:
        arena.cluster.network.apply(self.host(arena), ["drop"], ["drop"])
        arena.cluster.nodes[self.number].kill()

    def undo(self, arena: Arena) -> None:
        super().undo(arena)
        restart(arena, self.number)


class CutPair(NetworkFault):
    """Two nodes do not hear each other; both hear everybody else."""

    kind = "partition_pair"

    def strike(self, arena: Arena) -> None:
        host = self.host(arena)
        other = arena.node_with("any")
        peer = [arena.cluster.hosts[other]]
        arena.cluster.network.apply(host, network.drop_from(peer), network.drop_to(peer))
        self.hold_s = arena.draw.uniform(1.0, 8.0)
        self.what += f" and ps-{other}"


class CutFromStore(NetworkFault):
    """A node does not reach etcd: its lease ends while it serves."""

    kind = "cut_from_store"
    needs_etcd = True

    def strike(self, arena: Arena) -> None:
        host = self.host(arena)
        assert arena.cluster.etcd is not None
        store = arena.cluster.etcd.hosts
        arena.cluster.network.apply(host, network.drop_from(store), network.drop_to(store))
        self.hold_s = arena.draw.uniform(2.0, 8.0)


class Drop(NetworkFault):
    """1 to 30 % of packets are lost."""

    kind = "drop"

    def strike(self, arena: Arena) -> None:
        rules = network.drop_some(percent := arena.draw.randint(1, 30))
        arena.cluster.network.apply(self.host(arena), rules, rules)
        self.hold_s = arena.draw.uniform(2.0, 6.0)
        self.what += f", {percent} %"


class Duplicate(NetworkFault):
    """Packets arrive twice."""

    kind = "duplicate"

    def strike(self, arena: Arena) -> None:
        host = self.host(arena)
        peers = [one for one in arena.cluster.hosts if one is not host]
        arena.cluster.network.duplicate(host, [*peers, *arena.workload.hosts], 40)


class Delay(NetworkFault):
    """What the node sends comes 10 to 500 ms late, and out of order."""

    kind = "delay"

    def strike(self, arena: Arena) -> None:
        delay_ms = int(10 ** arena.draw.uniform(1.0, 2.7))
        jitter_ms = int(delay_ms * arena.draw.choice([0.0, 0.5]))
        arena.cluster.network.delay(self.host(arena), delay_ms, jitter_ms)
        self.hold_s = arena.draw.uniform(2.0, 6.0)
        self.what += f", {delay_ms} ms, give or take {jitter_ms}"


class SlowLink(NetworkFault):
    """What the node sends is limited to 0.5 to 4 Mbit/s."""

    kind = "slow_link"

    def strike(self, arena: Arena) -> None:
        kbit = arena.draw.choice([500, 1000, 4000])
        arena.cluster.network.slow(self.host(arena), kbit)
        self.hold_s = arena.draw.uniform(2.0, 6.0)
        self.what += f", {kbit} kbit/s"


class Reset(NetworkFault):
    """Connections of the node are reset in the middle of frames."""

    kind = "reset"

    def strike(self, arena: Arena) -> None:
        rules = network.reset_some(arena.draw.choice([5, 20, 80]))
        sides = arena.draw.choice([(rules, rules), (rules, []), ([], rules)])
        arena.cluster.network.apply(self.host(arena), *sides)


class CutTrainer(Fault):
    """A trainer reaches no server for a while."""

    kind = "trainer_partition"
    needs_network = True

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self.place = arena.draw.randrange(len(arena.workload.trainers))
        self.what = f"trainer {self.place}"

    def strike(self, arena: Arena) -> None:
        arena.cluster.network.apply(arena.workload.hosts[self.place], ["drop"], ["drop"])

    def undo(self, arena: Arena) -> None:
        arena.cluster.network.heal(arena.workload.hosts[self.place])
