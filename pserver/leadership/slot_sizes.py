"""How large the slots are, as their masters say: asked once for each plan and each repair.

It is a help for choosing which slots move, and for telling people how much there is to copy. A
node that does not answer in time only makes the choice worse: its slots count as empty.
"""

from __future__ import annotations

import asyncio
import logging

import numpy as np
from numpy.typing import NDArray

from backstay.consensus import ClusterSnapshot
from backstay.consensus.records import NO_MASTER, RoutingTable
from backstay.errors import BackstayError
from backstay.pserver.controller import missing_copies
from backstay.pserver.peers import PeerCalls
from backstay.tasks import spawn

__all__ = ["SlotSizes"]

log = logging.getLogger(__name__)


class SlotSizes:
    """Remembers what was asked for the plan that is under way, and for the newest repair."""

    def __init__(self, calls: PeerCalls) -> None:
        """Prepare; nothing is asked yet."""
        self._calls = calls
        # The key says what they were asked for: "plan" or "repair", and its id.
        self._asked_for: dict[str, str] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._bytes: dict[str, tuple[str, NDArray[np.uint64]]] = {}
        self._missing: NDArray[np.int64] | None = None

    def known(self, snapshot: ClusterSnapshot) -> NDArray[np.uint64] | None:
        """Return the bytes of each slot, [slot_count]; None without a plan that was asked for."""
        plan = snapshot.plan
        return self._of("plan", plan.plan_id) if plan is not None else None

    def of_repair(self, repair_id: int) -> NDArray[np.uint64] | None:
        """Return the bytes of each slot, [slot_count], when a repair began; None: not known."""
        return self._of("repair", str(repair_id))

    def missing_bytes(self, repair_id: int) -> int:
        """Return the size of the copies that a repair had to make at first; 0: not known."""
        found = self.of_repair(repair_id)
        if found is None or self._missing is None:
            return 0
        return int((found * self._missing.astype(np.uint64)).sum())

    def look(self, snapshot: ClusterSnapshot) -> None:
        """Ask the masters if there is a plan under way for which they were not asked yet.

        The controller does not wait for the answers; its next decision has them.
        """
        plan, routing = snapshot.plan, snapshot.routing
        if plan is not None and routing is not None and plan.is_under_way:
            self._ask_once("plan", plan.plan_id, routing)

    def look_for_repair(self, repair_id: int, routing: RoutingTable) -> None:
        """Ask the masters if they were not asked for this repair yet."""
        if self._asked_for.get("repair") != str(repair_id):
            self._missing = missing_copies(routing)
        self._ask_once("repair", str(repair_id), routing)

    def _of(self, kind: str, name: str) -> NDArray[np.uint64] | None:
        asked_for, found = self._bytes.get(kind, ("", None))
        return found if asked_for == name else None

    def _ask_once(self, kind: str, name: str, routing: RoutingTable) -> None:
        if self._asked_for.get(kind) != name:
            self._asked_for[kind] = name
            self._asking[kind] = spawn(self._ask(kind, name, routing), "the sizes of slots")

    async def _ask(self, kind: str, name: str, routing: RoutingTable) -> None:
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
        if self._asked_for.get(kind) == name:
            self._bytes[kind] = (name, found)
