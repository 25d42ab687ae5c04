"""Faults of processes: what each does to a run, and how it is undone.

A fault draws its victim and its measures from the run's random numbers when it is made, so the
same seed makes the same faults; the process that has a role at that moment (the controller, the
master of most slots) is found when it strikes.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from tests.chaos.cluster import ChaosCluster
from tests.chaos.processes import NodeProcess
from tests.chaos.workload import Workload

if TYPE_CHECKING:
    from tests.chaos.checkpoints import Checkpoints

__all__ = [
    "Arena",
    "CrashLoop",
    "Fault",
    "KillDuringRepair",
    "KillNode",
    "KillTrainer",
    "OnNode",
    "PauseNode",
    "PauseTrainer",
    "Role",
    "SlowStart",
    "StopNode",
    "restart",
]

Role = Literal["master", "backup", "controller", "store_member", "any"]
ROLES: tuple[Role, ...] = ("master", "backup", "controller", "store_member", "any")
REPAIR_LIMIT_S = 10.0


@dataclass
class Arena:
    """What faults act on.

    Attributes:
        cluster: The nodes and the store.
        workload: The trainers.
        checkpoints: What was saved.
        draw: Random numbers, from the run's seed.
        outage_s: How long the whole store stays away.
        struck: Nodes that a fault under way has hit.
    """

    cluster: ChaosCluster
    workload: Workload
    checkpoints: Checkpoints
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
        needs_network: It needs namespaces, as the run then makes them.
        needs_etcd: It needs the store in processes of its own.
        needs_members: How many members of the store it needs.
        hold_s: How long it lasts.
        what: Whom it hit, for the report; known once it has struck.
        struck_ns: When it struck, if that was before ``strike`` returned; else 0.
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
        also = ", the controller" if arena.cluster.controller() == self.number else ""
        self.what = f"ps-{self.number} ({self.role}{also})"
        return arena.cluster.nodes[self.number]


class KillNode(OnNode):
    """SIGKILL; the node is started again, empty."""

    kind = "node_sigkill"
    kills = True

    def strike(self, arena: Arena) -> None:
        self.aim(arena).kill()

    def undo(self, arena: Arena) -> None:
        restart(arena, self.number)


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
        restart(arena, self.number)


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
        restart(arena, self.number)


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
        else:
            self.kind = "controller_sigkill_after_repair"  # Too late: not counted as the other.
        self.second = arena.node_with("controller")
        arena.struck.add(self.second)
        arena.cluster.nodes[self.second].kill()
        self.what = f"ps-{self.number}, then the controller ps-{self.second}"

    def undo(self, arena: Arena) -> None:
        for number in (self.number, self.second):
            restart(arena, number)


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
    """SIGSTOP of a trainer: answers pile up, and the servers do not wait."""

    kind = "trainer_sigstop"

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self.place = arena.draw.randrange(len(arena.workload.trainers))
        self.what = f"trainer {self.place}"

    def strike(self, arena: Arena) -> None:
        arena.workload.trainers[self.place].pause()

    def undo(self, arena: Arena) -> None:
        arena.workload.trainers[self.place].resume()


def restart(arena: Arena, number: int) -> None:
    """Start a node again and wait until it serves."""
    node = arena.cluster.nodes[number]
    node.start()
    node.wait_ready()
