"""The faults: what each does to a run, and how it is undone.

A fault draws its victim and its measures from the run's random numbers when it is made, so the
same seed makes the same faults; whoever has a role at that moment (the controller, the master of
most slots) is found when it strikes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from tests.chaos import network
from tests.chaos.cluster import ChaosCluster, NotYet
from tests.chaos.network import Host
from tests.chaos.processes import NodeProcess, Process
from tests.chaos.workload import Workload

__all__ = ["BY_KIND", "Arena", "Fault", "KillNode", "Partition", "PauseNode", "possible"]

Role = Literal["master", "backup", "controller", "store_member", "any"]
ROLES: tuple[Role, ...] = ("master", "backup", "controller", "store_member", "any")
REPAIR_LIMIT_S = 10.0


@dataclass
class Arena:
    """What faults act on.

    Attributes:
        cluster: The nodes and the store.
        workload: The trainers.
        draw: Random numbers, from the run's seed.
        outage_s: How long the whole store stays away.
        struck: Nodes that a fault under way has hit.
    """

    cluster: ChaosCluster
    workload: Workload
    draw: random.Random
    outage_s: float = 15.0
    struck: set[int] = field(default_factory=set)

    def node_with(self, role: Role) -> int:
        """Return a running node that has a role now; one that nothing has struck yet."""
        running = [
            number
            for number, node in enumerate(self.cluster.nodes)
            if node.is_running and not node.paused and number not in self.struck
        ]
        if role in ("master", "backup"):
            slots = self.cluster.masters()
            most = max if role == "master" else min
            return most(running, key=lambda number: (slots.get(number, 0), number))
        if role == "controller":
            found = self.cluster.controller()
            return found if found in running else self.draw.choice(running)
        if role == "store_member":
            keepers = [number for number in self.cluster.keepers if number in running]
            return self.draw.choice(keepers or running)
        return self.draw.choice(running)


class Fault:
    """One fault. ``strike`` brings it about, ``undo`` ends it; between them ``hold_s`` passes.

    Attributes:
        kind: The name it is counted under.
        kills: Whether a node loses its memory.
        hold_s: How long it lasts.
    """

    kind = ""
    kills = False
    needs_network = False
    needs_etcd = False
    needs_members = 1

    def __init__(self, arena: Arena) -> None:
        """Draw the measures."""
        self.hold_s = arena.draw.uniform(1.0, 3.0)
        self.what = ""
        # When it struck, if that was before ``strike`` returned.
        self.struck_ns = 0

    def strike(self, arena: Arena) -> None:
        """Bring it about."""
        raise NotImplementedError

    def undo(self, arena: Arena) -> None:
        """End it."""
        raise NotImplementedError


class OnNode(Fault):
    """A fault that hits one node, chosen by its role."""

    def __init__(self, arena: Arena, role: Role | None = None) -> None:
        super().__init__(arena)
        self.role: Role = arena.draw.choice(ROLES) if role is None else role
        self.number = -1

    def aim(self, arena: Arena) -> NodeProcess:
        """Choose the node."""
        self.number = arena.node_with(self.role)
        arena.struck.add(self.number)
        self.what = f"ps-{self.number} ({self.role})"
        return arena.cluster.nodes[self.number]


class KillNode(OnNode):
    """SIGKILL; the node is started again, empty."""

    kind = "node_sigkill"
    kills = True

    def strike(self, arena: Arena) -> None:
        self.aim(arena).kill()

    def undo(self, arena: Arena) -> None:
        _restart(arena, self.number)


class StopNode(OnNode):
    """SIGTERM, as for a restart by an operator: it hands over and ends."""

    kind = "node_sigterm"
    kills = True

    def strike(self, arena: Arena) -> None:
        node = self.aim(arena)
        self.struck_ns = time.monotonic_ns()
        node.terminate()
        node.wait()

    def undo(self, arena: Arena) -> None:
        _restart(arena, self.number)


class CrashLoop(OnNode):
    """SIGKILL, and again as soon as it serves, and once more while it starts."""

    kind = "node_crash_loop"
    kills = True

    def strike(self, arena: Arena) -> None:
        node = self.aim(arena)
        node.kill()
        node.start()
        node.wait_ready()
        node.kill()
        node.start()
        time.sleep(arena.draw.uniform(0.2, 1.2))
        node.kill()

    def undo(self, arena: Arena) -> None:
        _restart(arena, self.number)


class SlowStart(OnNode):
    """SIGKILL; the node that is started again stands still for a while before it serves."""

    kind = "node_slow_start"
    kills = True

    def strike(self, arena: Arena) -> None:
        self.aim(arena).kill()

    def undo(self, arena: Arena) -> None:
        node = arena.cluster.nodes[self.number]
        node.start()
        time.sleep(arena.draw.uniform(0.3, 1.0))
        node.pause()
        time.sleep(arena.draw.uniform(0.5, 4.0))
        node.resume()
        node.wait_ready()


class PauseNode(OnNode):
    """SIGSTOP for 1 to 10 s, then SIGCONT: a paused master wakes up."""

    kind = "node_sigstop"

    def __init__(self, arena: Arena, role: Role | None = None) -> None:
        super().__init__(arena, role)
        self.hold_s = arena.draw.uniform(1.0, 10.0)

    def strike(self, arena: Arena) -> None:
        self.aim(arena).pause()

    def undo(self, arena: Arena) -> None:
        arena.cluster.nodes[self.number].resume()


class KillDuringRepair(OnNode):
    """SIGKILL of a node, and of the controller as soon as copies are being made. Needs 3 copies."""

    kind = "controller_sigkill_during_repair"
    kills = True

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena, "backup")
        self.second = -1

    def strike(self, arena: Arena) -> None:
        self.aim(arena).kill()
        deadline_s = time.monotonic() + REPAIR_LIMIT_S
        while time.monotonic() < deadline_s:
            held = arena.cluster.routing().replicas_of_slot
            if any(one.catching_up for one in held):
                break
        self.second = arena.node_with("controller")
        arena.struck.add(self.second)
        arena.cluster.nodes[self.second].kill()
        self.what = f"ps-{self.number}, then the controller ps-{self.second}"

    def undo(self, arena: Arena) -> None:
        for number in (self.number, self.second):
            _restart(arena, number)


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
    """The node is killed while nothing gets through: its peers hold sockets to nobody."""

    kind = "half_open"
    kills = True

    def strike(self, arena: Arena) -> None:
        arena.cluster.network.apply(self.host(arena), ["drop"], ["drop"])
        arena.cluster.nodes[self.number].kill()

    def undo(self, arena: Arena) -> None:
        super().undo(arena)
        _restart(arena, self.number)


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


class KillTrainer(Fault):
    """SIGKILL of a trainer in the middle of pushes; another one takes its place."""

    kind = "trainer_sigkill"

    def strike(self, arena: Arena) -> None:
        place = arena.draw.randrange(len(arena.workload.trainers))
        self.what = f"trainer {place}"
        arena.workload.replace(place)

    def undo(self, arena: Arena) -> None:
        """The other one runs already."""


class PauseTrainer(Fault):
    """SIGSTOP of a trainer: answers pile up, the servers wait for nobody."""

    kind = "trainer_sigstop"

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self.place = arena.draw.randrange(len(arena.workload.trainers))
        self.what = f"trainer {self.place}"

    def strike(self, arena: Arena) -> None:
        arena.workload.trainers[self.place].pause()

    def undo(self, arena: Arena) -> None:
        arena.workload.trainers[self.place].resume()


class CutTrainer(Fault):
    """A trainer reaches nobody for a while."""

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


class StoreDown(Fault):
    """All of etcd is killed and stays away: training goes on."""

    kind = "store_down"
    needs_etcd = True

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self.hold_s = arena.outage_s
        self.what = f"etcd, for {self.hold_s:g} s"

    def victims(self, arena: Arena) -> list[Process]:
        """Return the members that go."""
        assert arena.cluster.etcd is not None
        return arena.cluster.etcd.members

    def strike(self, arena: Arena) -> None:
        self._gone = self.victims(arena)
        for member in self._gone:
            member.kill()

    def undo(self, arena: Arena) -> None:
        for member in self._gone:
            member.start()
        assert arena.cluster.etcd is not None
        arena.cluster.etcd.leader()


class StoreMajorityDown(StoreDown):
    """Two of three members of etcd are killed."""

    kind = "store_majority_sigkill"
    needs_members = 3

    def victims(self, arena: Arena) -> list[Process]:
        return arena.draw.sample(super().victims(arena), 2)


class StoreLeaderKilled(StoreDown):
    """The leader of three members of etcd is killed."""

    kind = "store_leader_sigkill"
    needs_members = 3

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self.hold_s = arena.draw.uniform(1.0, 4.0)
        self.what = "etcd's leader"

    def victims(self, arena: Arena) -> list[Process]:
        assert arena.cluster.etcd is not None
        return [arena.cluster.etcd.members[arena.cluster.etcd.leader()]]


class StoreLeaderPaused(StoreLeaderKilled):
    """The leader of three members of etcd stands still."""

    kind = "store_leader_sigstop"

    def strike(self, arena: Arena) -> None:
        self._gone = self.victims(arena)
        for member in self._gone:
            member.pause()

    def undo(self, arena: Arena) -> None:
        for member in self._gone:
            member.resume()


class Pair(Fault):
    """Two faults in a row: the second strikes while the first one's repair goes on."""

    kind = "pair"

    def __init__(self, arena: Arena, first: Fault, second: Fault) -> None:
        super().__init__(arena)
        self.first, self.second = first, second
        self.kind = f"{first.kind}+{second.kind}"
        self.kills = first.kills or second.kills
        self.gap_s = arena.draw.uniform(0.0, 1.5)

    def strike(self, arena: Arena) -> None:
        self.first.strike(arena)
        time.sleep(self.gap_s)
        self.second.strike(arena)
        self.hold_s = max(self.first.hold_s, self.second.hold_s)
        self.what = f"{self.first.what}; after {self.gap_s:.2f} s {self.second.what}"

    def undo(self, arena: Arena) -> None:
        self.first.undo(arena)
        self.second.undo(arena)


SINGLE: tuple[type[Fault], ...] = (
    *(KillNode, StopNode, CrashLoop, SlowStart, PauseNode),
    *(Partition, Deaf, Mute, HalfOpen, CutPair, CutFromStore),
    *(Drop, Duplicate, Delay, SlowLink, Reset),
    *(KillTrainer, PauseTrainer, CutTrainer),
    *(StoreDown, StoreMajorityDown, StoreLeaderKilled, StoreLeaderPaused),
)
# What may come second while the first is being repaired, whoever it hits.
SECOND: tuple[type[Fault], ...] = (
    *(KillNode, PauseNode, Partition, CutPair, Drop, Delay, Reset, KillTrainer),
)


# By the name that they are counted under.
BY_KIND: dict[str, Callable[[Arena], Fault]] = {
    KillDuringRepair.kind: KillDuringRepair,
    **{kind.kind: kind for kind in SINGLE},
    "pair": lambda arena: pair_of(arena),
}


def fits(arena: Arena, kind: type[Fault]) -> bool:
    """Whether a fault can be done in this arena."""
    cluster = arena.cluster
    members = cluster.plan.etcd_members if cluster.etcd is not None else 0
    return (cluster.network.has_faults or not kind.needs_network) and (
        members >= kind.needs_members or not kind.needs_etcd
    )


def possible(arena: Arena) -> list[Callable[[Arena], Fault]]:
    """Return what can be done in this arena; each makes a fault."""
    makers: list[Callable[[Arena], Fault]] = [kind for kind in SINGLE if fits(arena, kind)]
    if _spares_two(arena):
        makers.append(KillDuringRepair)
    # As likely as four of the others.
    return makers + [pair_of] * 4


def pair_of(arena: Arena) -> Fault:
    """Return two faults in a row that leave a copy of every slot."""
    seconds = [kind for kind in SECOND if fits(arena, kind)]
    second = arena.draw.choice(seconds)
    # With two copies, a node that was struck before the kill may hold the only one left.
    safe = _spares_two(arena) or not second.kills
    first = arena.draw.choice(seconds if safe else [KillTrainer])
    return Pair(arena, first(arena), second(arena))


def _spares_two(arena: Arena) -> bool:
    """Whether two nodes may lose their memory at once."""
    return arena.cluster.plan.replicas >= 3 and arena.cluster.plan.nodes > 3


def _restart(arena: Arena, number: int) -> None:
    node = arena.cluster.nodes[number]
    node.start()
    try:
        node.wait_ready()
    except TimeoutError as error:
        raise NotYet(f"ps-{number} does not become ready: {node.log_tail()}") from error
