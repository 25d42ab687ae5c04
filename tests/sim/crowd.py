"""A table with room for fewer rows than it has keys, and trainers that push to it.

A key has its row from its second push on, and rows of low scores go where a slot has too many. What
a row holds depends on the order in its slot, so the digests of the replicas judge it. A model says
only how many rows a slot may have, and how much a row may count.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from backstay import _native
from tests.sim.trainer import Push, Trainer

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster
    from tests.sim.pserver import Pserver

__all__ = ["Crowd", "CrowdTrainer"]

NAME = "crowd"
FIRST_KEY = 3_000_000
# Rows that a slot may have, and the keys that it has; only so many slots have any.
SHARE, KEYS, SLOTS = 16, 24, 4
# Pushes that it takes to make a row.
ADMITTED = 2


class Crowd:
    """The table, and what is known of its keys."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        slots = cluster.options.slots
        self.table = _native.table_id(NAME)
        lifetime = {
            "admission": {"after": {"occurrences": ADMITTED}},
            "capacity": {"rows": SHARE * slots, "evict": "lowest_score"},
        }
        self.table_json = json.dumps(
            {
                "name": NAME,
                "kind": {"sparse": {"dim": 1}},
                "initializer": {"constant": {"value": 0.0}},
                "optimizer": {"sgd": {"learning_rate": 1.0}},
                "lifetime": lifetime,
            }
        )
        self._keys_of: dict[int, list[int]] = {}
        keys = np.arange(FIRST_KEY, FIRST_KEY + 4 * KEYS * slots, dtype=np.uint64)
        for key, slot in zip(keys.tolist(), _native.slots_of(keys, slots).tolist(), strict=True):
            known = self._keys_of.setdefault(slot, [])
            if slot < SLOTS and len(known) < KEYS:
                known.append(key)
        self.slot_of = {key: slot for slot, known in self._keys_of.items() for key in known}
        self.pushed: Counter[int] = Counter()

    def check_final(self, process: Pserver, slot: int) -> None:
        """No slot has too many rows, and none counts more than what came after its admission."""
        keys = self._keys_of.get(slot, [])
        counts = [round(one) for one in process.native.peek(self.table, keys)]
        rows = sum(count > 0 for count in counts)
        self._cluster.queue.counts["rows_crowded"] += rows
        if rows > SHARE:
            self._cluster.fail(
                f"{process.node_id} has {rows} rows in slot {slot}, of {SHARE} at most"
            )
        for key, count in zip(keys, counts, strict=True):
            most = max(0, self.pushed[key] - (ADMITTED - 1))
            if count > most:
                self._cluster.fail(
                    f"I2: {process.node_id} counts {count} for key {key} of slot {slot}, which "
                    f"was pushed {self.pushed[key]} times"
                )
            # Not all of these had a row: of a key whose slot was lost, pushes are gone.
            self._cluster.queue.counts["keys_crowded_out"] += not count and most > ADMITTED


class CrowdTrainer(Trainer):
    """Pushes to that table, and sometimes deletes rows of it."""

    def __init__(self, cluster: Cluster, number: int, crowd: Crowd) -> None:
        super().__init__(cluster, number)
        self._crowd = crowd

    def begin(self, push: Push) -> None:
        """Send a push, and again until every slot of it is acknowledged."""
        if not push.change:
            self._crowd.pushed.update(push.keys)
        super().begin(push)

    def _draw(self) -> tuple[list[int], str, float]:
        random = self.queue.random
        change = "delete" if random.random() < 0.05 else ""
        self.queue.counts["deletes_crowded" if change else "pushes_crowded"] += 1
        keys = random.sample(
            list(self._crowd.slot_of), random.choice((1, 2) if change else (6, 24))
        )
        return self.cluster.sort_keys(keys), change, -1.0

    def _read_on(self) -> None:
        """Nothing: a row may go."""

    def _request(
        self, push: Push, process: Pserver, keys: list[int]
    ) -> Callable[[Callable[[int], None]], None]:
        values = [] if push.change else [push.value] * len(keys)
        return partial(
            process.on_push, push.stream, push.sequence, self.floor, keys, values, self._version,
            table=self._crowd.table,
        )  # fmt: skip
