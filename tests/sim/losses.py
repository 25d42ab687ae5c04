"""An operator who accepts, some time later, that slots lost all their copies.

It draws from random numbers of its own: other runs of a seed stay as they are.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from backstay.consensus.records import RoutingTable
from backstay.consensus.records.checkpoints import LossAcceptance
from backstay.consensus.store import Put, Txn
from tests.sim.events import MS

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster

__all__ = ["LOSS", "LossOperator"]

LOSS = "plans/loss"
THINKS_AT_MOST = 200 * MS


class LossOperator:
    """Looks at each routing table, and accepts what the table says is lost."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        """Prepare."""
        self._cluster = cluster
        self._random = Random(f"losses {seed}")
        self._is_thinking = False

    def look(self, routing: RoutingTable) -> None:
        """See a table that the store has from now on."""
        if routing.lost and not self._is_thinking:
            self._is_thinking = True
            self._cluster.queue.after(self._random.randrange(MS, THINKS_AT_MOST), self._accept)

    def _accept(self) -> None:
        self._is_thinking = False
        cluster = self._cluster
        routing = cluster.routings[-1]
        if not routing.lost:
            # Somebody has restored a checkpoint meanwhile.
            return
        if not cluster.store.is_up:
            self.look(routing)
            return
        cluster.queue.counts["losses_accepted"] += 1
        record = LossAcceptance(routing.version, len(routing.lost), "")
        cluster.store.state.transact(Txn((), (Put(LOSS, record.to_json()),)))
        cluster.store.changed()
