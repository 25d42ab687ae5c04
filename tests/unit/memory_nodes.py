"""What tests of nodes against the store in memory share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from backstay.consensus.records import (
    ClusterConfig,
    MemberRecord,
)
from backstay.consensus.records.keys import Keys
from backstay.consensus.store import CoordinationStore
from backstay.pserver.membership.own_node import OwnNode
from backstay.pserver.membership.registration import Predecessor, Registration
from tests.memory_store import MemoryBackend, MemoryStore

KEYS = Keys("demo")
CONFIG = ClusterConfig("demo", 8, 2, 2, "ab")
TTL_MS = 400
LIMIT_S = 10.0


def run(scenario: Callable[[MemoryBackend], Awaitable[None]]) -> None:
    async def inside() -> None:
        await asyncio.wait_for(scenario(MemoryBackend()), LIMIT_S)

    asyncio.run(inside())


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    while not await holds():  # noqa: ASYNC110 (what is waited for is in the store)
        await asyncio.sleep(0.005)


async def unknown(_other: MemberRecord) -> Predecessor:
    return Predecessor(is_gone=False, answers=False)


async def alive(_other: MemberRecord) -> Predecessor:
    return Predecessor(is_gone=False, answers=True)


def registration(
    store: CoordinationStore,
    record: MemberRecord,
    *,
    judge: Callable[[MemberRecord], Awaitable[Predecessor]] = unknown,
    on_alive: Callable[[float], None] = lambda _: None,
    catch_up: Callable[[], Awaitable[None]] | None = None,
) -> Registration:
    return Registration(
        store,
        KEYS,
        CONFIG,
        OwnNode(record),
        ttl_ms=TTL_MS,
        judge=judge,
        on_alive=on_alive,
        on_trouble=lambda _: None,
        catch_up=catch_up or at_once,
    )


async def at_once() -> None:
    pass


async def nothing(_lease: int) -> None:
    await asyncio.Event().wait()


async def stored(store: CoordinationStore, node_id: str) -> MemberRecord | None:
    found = await store.get(KEYS.member(node_id))
    return None if found is None else MemberRecord.from_json(found.value)


async def new_cluster(backend: MemoryBackend) -> MemoryStore:
    store = MemoryStore(backend)
    await store.put(KEYS.config, CONFIG.to_json())
    return store
