"""Having every slot of a snapshot written by its master.

The node that was asked, or the controller, asks the masters, slot by slot again if one fails or
loses its slots meanwhile. Nothing here stops a push.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backstay._proto.v1 import checkpoint_pb2
from backstay.checkpoint.manifest import NO_PART, Manifest, Part, SlotEntries
from backstay.consensus import ClusterSnapshot, ClusterView, NodeRecord, RoutingTable
from backstay.consensus.records import NO_MASTER
from backstay.errors import BackstayError, CheckpointError, CheckpointUnavailable, text_of
from backstay.pserver.peers import PeerCalls

__all__ = ["Gathered", "SlotGatherer", "SlotWritten", "refuse_anew"]

# What is written is given up when no more slot is written in this time.
STALL_S = 60.0
RETRY_PAUSE_S = 0.2
NAMES_MAX = 8


@dataclass(frozen=True)
class SlotWritten:
    """A slot as its master wrote it.

    Attributes:
        part: Index into the parts; ``NO_PART``: there was nothing to be written.
        position: Where it was.
        epoch: The routing version at which its content began.
        whole: Whether all its rows were written.
        rows: How many were.
    """

    part: int
    position: int
    epoch: int
    whole: bool
    rows: int


@dataclass
class Gathered:
    """What the masters have written so far; ``todo`` are the slots that are missing."""

    todo: set[int]
    parts: list[Part] = field(default_factory=list)
    written: dict[int, SlotWritten] = field(default_factory=dict)
    bytes: int = 0

    def add(self, response: checkpoint_pb2.WriteSlotsResponse) -> bool:
        """Take over what a master has written; whether there was anything."""
        for part in response.parts:
            # A slot may come twice if an answer was late: the first one counts.
            new = [one for one in part.slots if one.slot in self.todo]
            if not new:
                continue
            at = NO_PART
            if part.file:
                at = len(self.parts)
                self.parts.append(Part(part.file, part.bytes, part.sha256))
                self.bytes += part.bytes
            for one in new:
                self.written[one.slot] = SlotWritten(
                    at, one.position, one.epoch, one.whole, one.rows
                )
                self.todo.discard(one.slot)
        return bool(response.parts)

    def of_checkpoint(self) -> SlotEntries:
        """Return the slots of a checkpoint, of which none is missing."""
        return replace(self.of_export(None), since=None)

    def of_export(self, before: Manifest | None) -> SlotEntries:
        """Return the slots of an export's snapshot; those that are missing are as they were before.

        Args:
            before: What a delta builds on; None: a full snapshot.
        """
        count = len(self.written) + len(self.todo)
        none = np.zeros(count, np.uint64)
        position = none.copy() if before is None else before.slots.position.copy()
        epoch = none.copy() if before is None else before.slots.epoch.copy()
        part, whole, rows = np.full(count, NO_PART), np.zeros(count, np.bool_), none
        since = position.copy()
        for slot, one in self.written.items():
            part[slot], position[slot], epoch[slot] = one.part, one.position, one.epoch
            whole[slot], rows[slot] = one.whole, one.rows
        since[whole] = 0
        return SlotEntries(part, position, epoch, whole, rows, since)


class _Stall:
    """How long no more slot was written."""

    def __init__(self, left: int) -> None:
        self._left = left
        self._begun_s: float | None = None

    def is_too_long(self, left: int, now_s: float) -> bool:
        """Whether nothing more was written for ``STALL_S``; asked after each round of asking."""
        if left < self._left:
            self._left, self._begun_s = left, None
        elif self._begun_s is None:
            # The time counts from here: a master that is lost may have written for long.
            self._begun_s = now_s
        return self._begun_s is not None and now_s - self._begun_s > STALL_S


class SlotGatherer:
    """Asks the masters, as they are from moment to moment."""

    def __init__(self, view: ClusterView, calls: PeerCalls) -> None:
        """Prepare; ``view`` is the cluster as this node sees it."""
        self._view = view
        self._calls = calls

    async def gather(
        self,
        request: Callable[[list[int]], checkpoint_pb2.WriteSlotsRequest],
        tell: Callable[[int, int, int], None] = lambda _done, _total, _bytes: None,
        *,
        give_up_s: float | None = None,
        first: Collection[int] = (),
    ) -> Gathered:
        """Have every slot written by its master.

        Args:
            request: Returns what to ask a master about some slots.
            tell: Called with slots written, slots in all, and bytes, as it goes.
            give_up_s: No master is asked anew after so long: slots may be missing then. None: all
                are waited for.
            first: Slots that each master is asked for before its others.

        Raises:
            CheckpointUnavailable: The folder, or slots that are waited for, cannot be reached.
        """
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        total = self._routing().slot_count
        gathered = Gathered(set(range(total)))
        stall = _Stall(total)
        reasons: dict[str, str] = {}

        def is_late() -> bool:
            return give_up_s is not None and loop.time() - begun_s > give_up_s

        async def ask(node: NodeRecord, slots: list[int]) -> None:
            while slots := [slot for slot in slots if slot in gathered.todo]:
                asked = [slot for slot in slots if slot in first] or slots
                call = self._calls.write_slots(node.control_address, request(asked))
                try:
                    response = await self._unless_replaced(node, asked, call)
                except CheckpointError:
                    # The folder: no other node would fare better.
                    raise
                except BackstayError as error:
                    reasons[node.node_id] = text_of(error)
                    return
                if response is None:
                    reasons[node.node_id] = f"{node.node_id} has lost them"
                    return
                wrote = gathered.add(response)
                tell(total - len(gathered.todo), total, gathered.bytes)
                if not wrote:
                    reasons[node.node_id] = f"{node.node_id} is not surely their master"
                    return
                if is_late():
                    # One that has much to write must not hold up what the others have written.
                    return

        while gathered.todo:
            routing = self._routing()
            _refuse_lost(routing)
            await _all(ask(node, slots) for node, slots in _masters(routing, gathered.todo))
            if is_late():
                return gathered
            if stall.is_too_long(len(gathered.todo), loop.time()):
                raise _stalled(gathered.todo, reasons)
            if gathered.todo:
                await asyncio.sleep(RETRY_PAUSE_S)
        return gathered

    def _routing(self) -> RoutingTable:
        routing = self._view.snapshot().routing
        assert routing is not None
        return routing

    async def _unless_replaced(
        self,
        node: NodeRecord,
        slots: list[int],
        call: Coroutine[Any, Any, checkpoint_pb2.WriteSlotsResponse],
    ) -> checkpoint_pb2.WriteSlotsResponse | None:
        """Wait for a master's answer; None once others are masters of all these slots.

        One that stands still keeps its connection for long, and its slots only as long as its
        lease.
        """
        answer = asyncio.ensure_future(call)
        news: asyncio.Future[ClusterSnapshot] | None = None
        try:
            while True:
                snapshot = self._view.snapshot()
                if not answer.done() and not _masters_any(snapshot.routing, node, slots):
                    return None
                news = asyncio.ensure_future(self._view.newer_than(snapshot.revision))
                await asyncio.wait({answer, news}, return_when=asyncio.FIRST_COMPLETED)
                if answer.done():
                    return answer.result()
                news.result()
        finally:
            answer.cancel()
            if news is not None:
                news.cancel()
            await asyncio.gather(answer, *([news] if news else []), return_exceptions=True)


def refuse_anew(epoch: NDArray[np.uint64], routing: RoutingTable) -> None:
    """Refuse what has slots that began anew since it was begun.

    They lack what was acknowledged before: it would not be what its caller asked for, and a
    restore would take it for the newest of all.

    Args:
        epoch: Of each slot as it was written.
        routing: As it was when this was begun.

    Raises:
        CheckpointUnavailable: There are such slots.
    """
    anew = np.flatnonzero(epoch > routing.version).tolist()
    if anew:
        some = ", ".join(map(str, anew[:NAMES_MAX]))
        raise CheckpointUnavailable(
            f"{len(anew)} slots were lost or restored while it was written ({some}, ...); "
            "repeat the call if that is what is to be kept"
        )


def _refuse_lost(routing: RoutingTable) -> None:
    if lost := routing.lost:
        raise CheckpointUnavailable(
            f"{len(lost)} slots were lost or restored while it was written: no node serves them"
        )


async def _all(calls: Any) -> None:
    """Wait for all calls; if one fails, the others are ended first."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _masters(routing: RoutingTable, slots: set[int]) -> list[tuple[NodeRecord, list[int]]]:
    """Return the masters of some slots, each with its slots."""
    of: dict[int, list[int]] = defaultdict(list)
    for slot in sorted(slots - set(routing.restoring.slots)):
        master = int(routing.master_of_slot[slot])
        if master != NO_MASTER:
            of[master].append(slot)
    return [(routing.nodes[number], some) for number, some in of.items()]


def _masters_any(routing: RoutingTable | None, node: NodeRecord, slots: list[int]) -> bool:
    """Whether a process is still the master of any of the slots."""
    if routing is None:
        return False
    own = [number for number, one in enumerate(routing.nodes) if one.instance == node.instance]
    return bool(own) and bool((routing.master_of_slot[slots] == own[0]).any())


def _stalled(slots: set[int], reasons: Mapping[str, str]) -> CheckpointUnavailable:
    some = ", ".join(map(str, sorted(slots)[:NAMES_MAX]))
    return CheckpointUnavailable(
        f"{len(slots)} slots could not be written ({some}, ...): "
        + ("; ".join(reasons.values()) or "they have no master")
    )
