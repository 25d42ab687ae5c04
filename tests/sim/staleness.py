"""Tables that make up for stale gradients, and trainers whose gradients are stale.

A trainer pulls, waits, and pushes: with the origins of its slots and, where its table wants them,
the weights or sums that it pulled. On every try it pushes the same. What a row holds then depends
on the order in its slot, so no count judges it: the digests of the replicas do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from backstay import _native
from tests.sim.events import MS
from tests.sim.trainer import Push, Trainer

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster
    from tests.sim.pserver import Pserver

__all__ = ["StaleTrainer", "stale_keys", "stale_tables"]

FIRST_KEY = 2_000_000
DIM = 2
# Of data_plane.md, and the most pulls whose pushes are still to come.
WINDOW, PULLS_AHEAD = 128, 64
# Of a slot that was not pulled.
UNTOLD = 2**64 - 1
# The table's name, its optimizer, what it does, and what pushes bring for that.
TABLES: dict[str, tuple[object, object, str]] = {
    "scaled": ({"sgd": {"learning_rate": 0.5}}, "scale", ""),
    "delayed": (
        {"momentum": {"learning_rate": 0.1, "momentum": 0.5}},
        {"delay_compensated": {"strength": 0.5, "adaptive": True}},
        "weights",
    ),
    "revised": ({"adagrad": {"learning_rate": 0.1}}, "adaptive_revision", "sums"),
}


def stale_tables() -> list[str]:
    """Return the descriptions of the tables."""
    return [
        json.dumps(
            {
                "name": name,
                "kind": {"sparse": {"dim": DIM}},
                "initializer": {"uniform": {"low": -1.0, "high": 1.0}},
                "optimizer": optimizer,
                "compensation": compensation,
            }
        )
        for name, (optimizer, compensation, _) in TABLES.items()
    ]


def stale_keys(slots: int) -> dict[int, int]:
    """Return the keys that all these trainers push to, with their slots."""
    keys = np.arange(FIRST_KEY, FIRST_KEY + slots, dtype=np.uint64)
    return dict(zip(keys.tolist(), _native.slots_of(keys, slots).tolist(), strict=True))


class StaleTrainer(Trainer):
    """Pushes to one table what it computed with rows that it pulled a while ago."""

    def __init__(self, cluster: Cluster, number: int, table_json: str) -> None:
        super().__init__(cluster, number)
        self._name: str = json.loads(table_json)["name"]
        self._table = _native.table_id(self._name)
        self._reference = TABLES[self._name][2]
        # What goes back for a key, and for a slot, as it came last.
        self._pulled: dict[int, list[float]] = {}
        self._origins: dict[int, int] = {}
        # The same for each push, as it was when it was made.
        self._told: dict[int, tuple[dict[int, list[float]], dict[int, int]]] = {}

    def _go_on(self) -> None:
        if self.stopping:
            return
        random = self.queue.random
        # A slot remembers only so many sequences above the floor.
        ahead = self._next + PULLS_AHEAD - self.floor
        if self._version and len(self.pushes) < self._window and ahead < WINDOW:
            keys = random.sample(list(stale_keys(self.cluster.options.slots)), 3)
            self._pull(self.cluster.sort_keys(keys))
            self.queue.after(self.queue.between(1 * MS, self._pause), partial(self._push, keys))
        self.queue.after(self.queue.between(100, self._pause), self._go_on)

    def _read_on(self) -> None:
        """Nothing: the rows are no counts."""

    def _pull(self, keys: list[int]) -> None:
        by_slot: dict[int, list[int]] = {}
        for key in keys:
            by_slot.setdefault(self.cluster.slot_of[key], []).append(key)
        for process, slots in self._masters(by_slot).items():
            wanted = [key for slot in slots for key in by_slot[slot]]
            self._carry(process, partial(self._serve, process, wanted, slots))

    def _serve(self, process: Pserver, keys: list[int], slots: list[int]) -> None:
        now = process.clock.now()
        code, values, sums, origins = process.native.pull(now, self._table, keys)
        if code:
            return
        told = sums if self._reference == "sums" else values
        width = len(told) // len(keys)

        def arrive() -> None:
            for at, key in enumerate(keys):
                self._pulled[key] = told[at * width : (at + 1) * width]
            self._origins |= zip(slots, origins, strict=True)

        self.cluster.network.send(process.place, self.place, arrive)

    def _push(self, keys: list[int]) -> None:
        # A client that has not pulled a key pushes none to it.
        keys = [key for key in keys if key in self._pulled]
        if self.stopping or not keys:
            return
        random = self.queue.random
        change = "delete" if random.random() < 0.1 else ""
        self.queue.counts["deletes_stale" if change else f"pushes_{self._name}"] += 1
        self._told[self._next] = (dict(self._pulled), dict(self._origins))
        slots = {self.cluster.slot_of[key] for key in keys}
        value = random.choice((-1.0, -0.5, 0.5, 1.0))
        sequence, self._next = self._next, self._next + 1
        ordered = self.cluster.sort_keys(keys)
        self.begin(Push(self.stream, sequence, ordered, slots, change, value))

    def _request(
        self, push: Push, process: Pserver, keys: list[int]
    ) -> Callable[[Callable[[int], None]], None]:
        pulled, origins = self._told[push.sequence]
        values: list[float] = []
        for key in () if push.change else keys:
            values += [push.value] * DIM + (pulled[key] if self._reference else [])
        slots = sorted({self.cluster.slot_of[key] for key in keys})
        told = None if push.change else [origins.get(slot, UNTOLD) for slot in slots]
        return partial(
            process.on_push, push.stream, push.sequence, self.floor, keys, values, self._version,
            table=self._table, origins=told, reference="" if push.change else self._reference,
        )  # fmt: skip
