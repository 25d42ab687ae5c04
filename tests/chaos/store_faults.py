"""Faults of the coordination store when it is etcd.

The embedded store lives in nodes: what hits its members hits it.
"""

from __future__ import annotations

from tests.chaos.faults import Arena, Fault
from tests.chaos.processes import Process

__all__ = ["StoreDown", "StoreLeaderKilled", "StoreLeaderPaused", "StoreMajorityDown"]


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
