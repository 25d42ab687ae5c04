"""Counters on the servers that show whether a push was lost, or counted twice.

Each trainer has a row of one number in every slot of the cluster, and pushes the gradient -1 to
all of them with each step of its training: under SGD of rate 1 a row is the number of pushes that
its slot has taken. The trainer counts the pushes that were acknowledged. At the end the two must
be equal, slot by slot. May import numpy and backstay's client; knows no framework.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from backstay._native import slots_of
from backstay.tables import SGD, TableSpec, Zeros
from backstay.trainer import Client
from backstay.trainer.pending import Pending

__all__ = ["Acknowledgement", "Audit", "Counters", "audit"]

TABLE = "push_counters"
# Keys of one trainer begin here times its number.
KEYS_PER_TRAINER = 1 << 40
# float32 counts to here without a gap.
COUNT_MAX = 1 << 24


class Acknowledgement(NamedTuple):
    """When a push was begun, and when its acknowledgement was seen, on ``time.monotonic``.

    All processes of a machine share that clock.
    """

    begun_s: float
    seen_s: float


class Audit(NamedTuple):
    """What the counters on the servers say.

    Attributes:
        lost: Acknowledged pushes that some slot does not have.
        duplicated: Pushes that some slot has counted more than once.
    """

    lost: int
    duplicated: int


class Counters:
    """One trainer's counters; it has the methods of an optimizer that ``fit`` calls.

    The pushes go through the trainer's own client: the same connections, the same stream of
    numbered pushes, the same retries as those of the model.

    Attributes:
        counted: Pushes acknowledged so far.
    """

    def __init__(self, client: Client, trainer_id: int) -> None:
        self.counted = 0
        self._client = client
        self._table = client.create_table(_spec())
        self._batch = client.prepare(_keys(trainer_id, client.cluster().routing.slot_count))
        self._gradient = np.full((self._batch.size, 1), -1.0, dtype=np.float32)
        self._under_way: deque[tuple[float, Pending[None]]] = deque()
        self._seen: list[Acknowledgement] = []

    def step(self) -> None:
        """Push, and take note of the pushes that were acknowledged meanwhile.

        Raises:
            BackstayError: A push failed.
        """
        begun_s = time.monotonic()
        pending = self._client.push_async(self._table, self._batch, self._gradient)
        self._under_way.append((begun_s, pending))
        while self._under_way and self._under_way[0][1].done():
            self._settle_first()

    def clear_grad(self) -> None:
        """Do nothing: the gradient is always the same."""

    def synchronize(self) -> None:
        """Wait for every push. Raises as ``step``."""
        while self._under_way:
            self._settle_first()

    def take_acknowledgements(self) -> list[Acknowledgement]:
        """Return those seen since the last call."""
        taken, self._seen = self._seen, []
        return taken

    def _settle_first(self) -> None:
        begun_s, pending = self._under_way.popleft()
        pending.result()
        self.counted += 1
        self._seen.append(Acknowledgement(begun_s, time.monotonic()))


def audit(client: Client, counted: Mapping[int, int]) -> Audit:
    """Compare the counters with what the trainers counted.

    Args:
        client: Connected to the cluster; no trainer pushes any more.
        counted: For each trainer the number of its pushes that were acknowledged.

    Raises:
        ValueError: A trainer counted more than a float32 can.
        UnknownTable: No trainer had counters.
    """
    table = client.table(TABLE)
    slot_count = client.cluster().routing.slot_count
    lost = duplicated = 0
    for trainer_id, count in counted.items():
        if count > COUNT_MAX:
            raise ValueError(f"{count} pushes are more than a counter can hold ({COUNT_MAX})")
        on_servers = client.pull(table, _keys(trainer_id, slot_count)).astype(np.int64)
        # Each push goes to every slot: the worst slot tells how many were not whole.
        lost += max(0, count - int(on_servers.min()))
        duplicated += max(0, int(on_servers.max()) - count)
    return Audit(lost, duplicated)


def _spec() -> TableSpec:
    return TableSpec.sparse(TABLE, dim=1, optimizer=SGD(1.0), initializer=Zeros())


def _keys(trainer_id: int, slot_count: int) -> NDArray[np.uint64]:
    """Return one key of this trainer in each slot."""
    first = trainer_id * KEYS_PER_TRAINER
    tried = slot_count
    while True:
        keys = np.arange(first, first + tried, dtype=np.uint64)
        slots, positions = np.unique(slots_of(keys, slot_count), return_index=True)
        if len(slots) == slot_count:
            return keys[positions]
        tried *= 2
