"""Keys whose rows trainers make and delete, each by one trainer, which waits for every answer.

So it is known at any time what such a key counts: the pushes since its last delete. A delete that
counts twice, or a late copy that brings a row back, is found. It draws from random numbers of its
own.

With lifetimes a trainer also takes such a key back to 0, has the rows of weight 0 expire from the
slots of its keys, and has shows and clicks decay there. What a key counts is the same whether its
row of 0 is there or not, and the digests of replicas differ if one removed a row that another kept.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import numpy as np

from backstay import _native

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster
    from tests.sim.pserver import Pserver

__all__ = ["Deletions"]

FIRST_KEY = 1_000_000
# Changes of the slots of the keys, not of their rows.
LIVES = ("expire", "decay")
WITHOUT_VALUES = ("delete", *LIVES)
# Rows of weight 0 expire, no others; every statistic is kept.
LIFETIME = {
    "expiry": {"norm_below": 0.5, "score_below": 1e-30, "unseen_seconds": 1_000_000},
    "capacity": {"rows": 1 << 24, "evict": "least_frequent"},
    "score": {"decay": 0.9},
}
# Of each trainer.
KEYS = 6


class Deletions:
    """What the keys of all trainers count."""

    def __init__(
        self, cluster: Cluster, seed: int, *, trainers: int, lifetimes: bool = False
    ) -> None:
        self._cluster = cluster
        self._lifetimes = lifetimes
        self._random = Random(f"deletions {seed}")
        self._counts: dict[int, int] = {}
        self._idle: dict[int, list[int]] = {}
        for trainer in range(trainers):
            first = FIRST_KEY + trainer * KEYS
            self._idle[trainer] = list(range(first, first + KEYS))
            self._counts |= dict.fromkeys(self._idle[trainer], 0)
        keys = np.array(sorted(self._counts), dtype=np.uint64)
        slots = _native.slots_of(keys, cluster.options.slots)
        self.slot_of = dict(zip(keys.tolist(), slots.tolist(), strict=True))

    def draw(self, trainer: int) -> tuple[list[int], str, float]:
        """Return keys that a trainer is to change now, mostly none; how, and the gradient."""
        idle = self._idle.get(trainer, [])
        if not idle or self._random.random() < 0.5:
            return [], "", -1.0
        keys = self._random.sample(idle, self._random.randrange(1, len(idle) + 1))
        change, value = self._draw_change(keys)
        for key in keys:
            idle.remove(key)
        self._cluster.queue.counts[f"{change}s" if change else "pushes_to_delete"] += 1
        return keys, change, value

    def _draw_change(self, keys: list[int]) -> tuple[str, float]:
        if not self._lifetimes:
            return "delete" if self._random.random() < 0.5 else "", -1.0
        change = self._random.choice(
            ("", "", "zero", "zero", "expire", "expire", "decay", "delete")
        )
        if change == "zero":
            # One key, whose count is known: nothing of it is under way.
            del keys[1:]
            return change, float(self._counts[keys[0]])
        return change, -1.0

    def acknowledged(self, keys: list[int], change: str) -> None:
        """A push is done in all its slots."""
        for key in keys:
            if key in self._counts:
                if change in ("delete", "zero"):
                    self._counts[key] = 0
                elif not change:
                    self._counts[key] += 1
                self._idle[(key - FIRST_KEY) // KEYS].append(key)

    def check_final(self, process: Pserver, slot: int, lost: set[int]) -> None:
        """Nothing is under way any more: the rows are what was acknowledged last."""
        keys = [key for key, of in self.slot_of.items() if of == slot and slot not in lost]
        for key, count in zip(keys, process.native.peek(self._cluster.table, keys), strict=True):
            if round(count) != self._counts[key]:
                self._cluster.fail(
                    f"I2: {process.node_id} counts {round(count)} for key {key} of slot {slot}, "
                    f"which was pushed {self._counts[key]} times since its last delete"
                )
