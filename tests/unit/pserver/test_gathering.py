"""Which masters are asked for slots of an element, and when those that are missing are left out."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from backstay._proto.v1 import checkpoint_pb2
from backstay.pserver.snapshots.gathering import SlotGatherer
from tests.unit.controller_cluster import SLOTS, cluster, table

PART = "part-6b1f0c2a-0000.safetensors"
ROUTING = table(cluster(nodes=2))


class View:
    """A cluster in which nothing changes."""

    def snapshot(self) -> Any:
        return SimpleNamespace(routing=ROUTING, revision=1)

    async def newer_than(self, revision: int) -> Any:
        await asyncio.Event().wait()


class Masters:
    """Masters that write some slots in each call."""

    def __init__(self, **at_once: int) -> None:
        self.at_once = at_once
        self.asked: dict[str, list[list[int]]] = {}

    async def write_slots(
        self, address: str, request: checkpoint_pb2.WriteSlotsRequest
    ) -> checkpoint_pb2.WriteSlotsResponse:
        node = address.partition(":")[0]
        slots = [one.slot for one in request.slots]
        self.asked.setdefault(node, []).append(slots)
        written = [checkpoint_pb2.WrittenSlot(slot=one) for one in slots[: self.at_once[node]]]
        return checkpoint_pb2.WriteSlotsResponse(
            parts=[checkpoint_pb2.WrittenPart(file=PART, bytes=1, sha256="0" * 64, slots=written)]
        )


def request(slots: list[int]) -> checkpoint_pb2.WriteSlotsRequest:
    return checkpoint_pb2.WriteSlotsRequest(
        slots=[checkpoint_pb2.SlotBase(slot=one) for one in slots]
    )


def of_node(number: int) -> list[int]:
    return [slot for slot in range(SLOTS) if ROUTING.master_of_slot[slot] == number]


def test_a_master_that_has_much_to_write_holds_up_no_other() -> None:
    async def gathered() -> None:
        masters = Masters(h0=1, h1=SLOTS)
        gatherer = SlotGatherer(View(), masters)  # type: ignore[arg-type]
        left = of_node(0)
        while left:
            found = await gatherer.gather(request, give_up_s=0.0, first=left)
            # One call for each time, and each time another one of its slots.
            assert found.todo == set(of_node(0)) - {left[0]}
            assert masters.asked["h0"][-1] == left
            left.pop(0)
        assert len(masters.asked["h0"]) == len(of_node(0)) == len(masters.asked["h1"])

    asyncio.run(gathered())


def test_without_a_limit_all_are_waited_for() -> None:
    async def gathered() -> None:
        masters = Masters(h0=1, h1=3)
        found = await SlotGatherer(View(), masters).gather(request)  # type: ignore[arg-type]
        assert (found.todo, len(found.written)) == (set(), SLOTS)

    asyncio.run(gathered())
