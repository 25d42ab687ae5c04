"""Which faults there are, which can be done in an arena, and two in a row."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.chaos.checkpoints import SaveDuring
from tests.chaos.faults import (
    Arena,
    CrashLoop,
    Fault,
    KillDuringRepair,
    KillNode,
    KillTrainer,
    PauseNode,
    PauseTrainer,
    SlowStart,
    StopNode,
)
from tests.chaos.network_faults import (
    CutFromStore,
    CutPair,
    CutTrainer,
    Deaf,
    Delay,
    Drop,
    Duplicate,
    HalfOpen,
    Mute,
    Partition,
    Reset,
    SlowLink,
)
from tests.chaos.store_faults import (
    StoreDown,
    StoreLeaderKilled,
    StoreLeaderPaused,
    StoreMajorityDown,
)

__all__ = ["BY_KIND", "pair_of", "possible"]


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
# What may come second while the first is being repaired, whichever process it hits.
SECOND: tuple[type[Fault], ...] = (
    *(KillNode, PauseNode, Partition, CutPair, Drop, Delay, Reset, KillTrainer),
)


# By the name that they are counted under.
BY_KIND: dict[str, Callable[[Arena], Fault]] = {
    KillDuringRepair.kind: KillDuringRepair,
    **{kind.kind: kind for kind in SINGLE},
    "pair": lambda arena: pair_of(arena),
    "checkpoint": lambda arena: save_during(arena),
    "checkpoint+node_sigkill": lambda arena: SaveDuring(arena, KillNode),
    "checkpoint+node_sigstop": lambda arena: SaveDuring(arena, PauseNode),
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
    # As likely as four of the others, and as three.
    return makers + [pair_of] * 4 + [save_during] * 3


def pair_of(arena: Arena) -> Fault:
    """Return two faults in a row that leave a copy of every slot."""
    seconds = [kind for kind in SECOND if fits(arena, kind)]
    second = arena.draw.choice(seconds)
    # With two copies, a node that was struck before the kill may hold the only one left.
    safe = _spares_two(arena) or not second.kills
    first = arena.draw.choice(seconds if safe else [KillTrainer])
    return Pair(arena, first(arena), second(arena))


def save_during(arena: Arena) -> Fault:
    """Return a fault that strikes while a checkpoint is written."""
    kinds = [kind for kind in (*SECOND, StopNode, CutFromStore, SlowLink) if fits(arena, kind)]
    return SaveDuring(arena, arena.draw.choice(kinds))


def _spares_two(arena: Arena) -> bool:
    """Whether two nodes may lose their memory at once."""
    return arena.cluster.plan.replicas >= 3 and arena.cluster.plan.nodes > 3
