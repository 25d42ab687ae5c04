"""Counters on the servers that show whether a push was lost, or counted twice.

Each trainer has a row of one number in every slot of the cluster, in four groups, and with each
step of its training pushes the gradient -1 to one group after the other: under SGD of rate 1 a row
is the number of pushes that its slot has taken. The trainer counts the pushes of each group that
were acknowledged. At the end the two must be equal, slot by slot; only a loss and a duplicate of
one trainer in one slot would hide each other. May import numpy and backstay's client; knows no
framework.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from backstay._native import slots_of
from backstay.tables import SGD, TableSpec, Zeros
from backstay.trainer import Client
from backstay.trainer.pending import Pending

__all__ = ["GROUPS", "Acknowledgement", "Audit", "Counters", "audit"]

TABLE = "push_counters"
# A push to all slots with each step would be more work for the servers than the model is.
GROUPS = 4
# Keys of one trainer begin here times its number.
KEYS_PER_TRAINER = 1 << 40
# float32 counts to here without a gap.
COUNT_MAX = 1 << 24


class Acknowledgement(NamedTuple):
    """Which group was pushed, when that was begun, and when its acknowledgement was seen.

    Times are of ``time.monotonic``, a clock that all processes of a machine share.
    """

    group: int
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
        counted: Pushes acknowledged so far, of each group.
    """

    def __init__(self, client: Client, trainer_id: int) -> None:
        self.counted = [0] * GROUPS
        self._client = client
        self._table = client.create_table(_spec())
        groups = _key_groups(trainer_id, client.cluster().routing.slot_count)
        self._batches = [client.prepare(keys) for keys in groups]
        self._steps = 0
        self._under_way: deque[tuple[int, float, Pending[None]]] = deque()
        self._seen: list[Acknowledgement] = []

    def step(self) -> None:
        """Push to the next group, and take note of what was acknowledged meanwhile.

        Raises:
            BackstayError: A push failed.
        """
        group = self._steps % GROUPS
        self._steps += 1
        batch = self._batches[group]
        begun_s = time.monotonic()
        gradients = np.full((batch.size, 1), -1.0, dtype=np.float32)
        pending = self._client.push_async(self._table, batch, gradients)
        self._under_way.append((group, begun_s, pending))
        while self._under_way and self._under_way[0][2].done():
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
        group, begun_s, pending = self._under_way.popleft()
        pending.result()
        self.counted[group] += 1
        self._seen.append(Acknowledgement(group, begun_s, time.monotonic()))


def audit(client: Client, counted: Mapping[int, Sequence[int]]) -> Audit:
    """Compare the counters with what the trainers counted.

    Args:
        client: Connected to the cluster; no trainer pushes any more.
        counted: For each trainer ``Counters.counted`` at its end.

    Raises:
        ValueError: A trainer counted more than a float32 can.
        UnknownTable: No trainer had counters.
    """
    table = client.table(TABLE)
    slot_count = client.cluster().routing.slot_count
    lost = duplicated = 0
    for trainer_id, counts in counted.items():
        groups = _key_groups(trainer_id, slot_count)
        for count, keys in zip(counts, groups, strict=True):
            if count > COUNT_MAX:
                raise ValueError(f"{count} pushes are more than a counter holds ({COUNT_MAX})")
            on_servers = client.pull(table, keys).astype(np.int64)
            # Each push goes to every slot of its group: the worst one tells.
            lost += max(0, count - int(on_servers.min()))
            duplicated += max(0, int(on_servers.max()) - count)
    return Audit(lost, duplicated)


def _spec() -> TableSpec:
    return TableSpec.sparse(TABLE, dim=1, optimizer=SGD(1.0), initializer=Zeros())


def _key_groups(trainer_id: int, slot_count: int) -> list[NDArray[np.uint64]]:
    """Return keys of this trainer, one in each slot, in groups over all servers."""
    first = trainer_id * KEYS_PER_TRAINER
    tried = slot_count
    while True:
        keys = np.arange(first, first + tried, dtype=np.uint64)
        slots, positions = np.unique(slots_of(keys, slot_count), return_index=True)
        if len(slots) == slot_count:
            # Slots may be dealt to servers in turn: no group shall miss one.
            shuffled = np.random.default_rng(0).permutation(keys[positions])
            return np.array_split(shuffled, GROUPS)
        tried *= 2
