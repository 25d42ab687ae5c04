"""How large the slots are, as their masters say: asked once for each plan of a resize.

It is a help for choosing which slots move, so a node that does not answer in time only makes the
choice worse: its slots count as empty.
"""

from __future__ import annotations

import asyncio
import logging

import numpy as np
from numpy.typing import NDArray

from backstay.consensus import ClusterSnapshot
from backstay.consensus.records import NO_MASTER, RoutingTable
from backstay.errors import BackstayError
from backstay.pserver.peers import PeerCalls
from backstay.tasks import spawn

__all__ = ["SlotSizes"]

log = logging.getLogger(__name__)


class SlotSizes:
    """Remembers what was asked for the plan that is under way."""

    def __init__(self, calls: PeerCalls) -> None:
        """Prepare; nothing is asked yet."""
        self._calls = calls
        self._plan_id = self._asked_for = ""
        self._asking: asyncio.Task[None] | None = None
        self._bytes: NDArray[np.uint64] | None = None

    def known(self, snapshot: ClusterSnapshot) -> NDArray[np.uint64] | None:
        """Return the bytes of each slot, [slot_count]; None without a plan that was asked for."""
        plan = snapshot.plan
        return self._bytes if plan is not None and plan.plan_id == self._plan_id else None

    def look(self, snapshot: ClusterSnapshot) -> None:
        """Ask the masters if there is a plan under way for which they were not asked yet.

        Nobody waits for the answers: a decision must not, and the next one has them.
        """
        plan, routing = snapshot.plan, snapshot.routing
        if plan is None or routing is None or not plan.is_under_way:
            return
        if plan.plan_id not in (self._plan_id, self._asked_for):
            self._asked_for = plan.plan_id
            self._asking = spawn(self._ask(plan.plan_id, routing), "the sizes of slots")

    async def _ask(self, plan_id: str, routing: RoutingTable) -> None:
        found = np.zeros(routing.slot_count, dtype=np.uint64)

        async def ask(number: int, address: str) -> None:
            try:
                sizes = await self._calls.slot_bytes(address)
            except BackstayError as error:
                log.warning("the sizes of a node's slots are not known: %s", error)
                return
            masters = routing.master_of_slot[: len(sizes)] == number
            found[: len(sizes)][masters] = sizes[masters]

        masters = set(routing.master_of_slot.tolist()) - {NO_MASTER}
        await asyncio.gather(
            *(ask(number, routing.nodes[number].control_address) for number in masters)
        )
        self._plan_id, self._bytes = plan_id, found
