"""Registration, against the store in memory."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import replace

import pytest

from backstay.consensus import ClusterMirror
from backstay.consensus.clock import clock_s
from backstay.consensus.cluster_mirror import DeathRecord
from backstay.consensus.records import (
    MemberRecord,
)
from backstay.errors import ConfigError, StoreDataLost, TakenForDead
from backstay.pserver.membership.departures import Departures
from backstay.pserver.membership.registration import Predecessor
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.member_records import member
from tests.unit.memory_nodes import (
    CONFIG,
    KEYS,
    TTL_MS,
    alive,
    new_cluster,
    nothing,
    registration,
    run,
    stored,
    until,
)


def test_an_id_is_taken_over_from_the_dead_and_not_from_the_living() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store = await new_cluster(backend)
        first = registration(store, member(0))
        await first.register()
        with pytest.raises(ConfigError, match="'ps-0' is taken"):
            await registration(store, member(0, instance=99), judge=alive).register()

        departures = Departures(store, KEYS, ClusterMirror(KEYS), "ps-0", "here")

        async def dead(other: MemberRecord) -> Predecessor:
            return Predecessor(await departures.declare(other, "a test says so"), answers=False)

        second = registration(store, member(0, instance=99), judge=dead)
        await second.register()
        now = await stored(store, "ps-0")
        assert now is not None
        assert (now.instance, now.incarnation) == (99, 2)
        death = await store.get(KEYS.death(11))
        assert death is not None
        assert DeathRecord.from_json(death.value).reason == "a test says so"
        with pytest.raises(TakenForDead):
            await first.register()
        for one in (first, second):
            one.close()

    run(scenario)


def test_a_predecessor_that_cannot_be_judged_is_waited_for() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store = await new_cluster(backend)
        first = registration(store, member(0))
        await first.register()
        second = registration(store, member(0, instance=99))
        began = asyncio.get_running_loop().time()
        await second.register()
        assert asyncio.get_running_loop().time() - began > TTL_MS / 2000
        for one in (first, second):
            one.close()

    run(scenario)


def test_a_lease_that_is_lost_is_told_and_taken_again() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store = await new_cluster(backend)
        said: list[float] = []
        one = registration(store, member(0), on_alive=said.append)
        holding = asyncio.ensure_future(one.hold(nothing))

        async def has_incarnation(number: int) -> bool:
            record = await stored(store, "ps-0")
            return record is not None and record.incarnation == number

        await until(lambda: has_incarnation(1))
        found = await store.get(KEYS.member("ps-0"))
        assert found is not None
        assert all(0 < told <= clock_s() + TTL_MS / 1000 for told in said)
        await store.lease_revoke(found.lease)
        await until(lambda: has_incarnation(2))
        assert 0 in said
        again = await stored(store, "ps-0")
        assert again is not None
        assert again.instance == 11
        await one.set_status("stopping")
        told = await stored(store, "ps-0")
        assert told is not None
        assert told.status == "stopping"
        holding.cancel()
        one.close()

    run(scenario)


def test_nothing_is_registered_in_a_store_that_is_another_one() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store = MemoryStore(backend)
        with pytest.raises(StoreDataLost, match="lost its data or was replaced"):
            await registration(store, member(0)).register()
        await store.put(KEYS.config, replace(CONFIG, cluster_uid="cd").to_json())
        with pytest.raises(StoreDataLost):
            await registration(store, member(0)).register()
        assert await stored(store, "ps-0") is None

    run(scenario)


def test_a_wall_clock_that_jumps_ends_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = itertools.cycle((600.0, -600.0))
    wall, wall_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: wall() + next(jumps))
    monkeypatch.setattr(time, "time_ns", lambda: wall_ns() + int(next(jumps) * 1e9))

    async def scenario(backend: MemoryBackend) -> None:
        store = await new_cluster(backend)
        said: list[float] = []
        one = registration(store, member(0), on_alive=said.append)
        holding = asyncio.ensure_future(one.hold(nothing))

        async def was_renewed() -> bool:
            return len(said) > 10

        await until(was_renewed)
        assert all(0 < told <= clock_s() + TTL_MS / 1000 for told in said)
        record = await stored(store, "ps-0")
        assert record is not None
        assert record.incarnation == 1
        holding.cancel()
        one.close()

    run(scenario)


def test_a_new_lease_allows_nothing_before_the_records_are_followed() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store = await new_cluster(backend)
        said: list[str] = []

        async def catch_up() -> None:
            # By now this one is registered: no node takes its slots from here on.
            assert await stored(store, "ps-0") is not None
            said.append("caught up")

        one = registration(
            store, member(0), on_alive=lambda told: said.append(str(told)), catch_up=catch_up
        )
        holding = asyncio.ensure_future(one.hold(nothing))

        async def has_incarnation(number: int) -> bool:
            record = await stored(store, "ps-0")
            return record is not None and record.incarnation == number

        await until(lambda: has_incarnation(1))
        found = await store.get(KEYS.member("ps-0"))
        assert found is not None
        await store.lease_revoke(found.lease)

        async def was_told_again() -> bool:
            return "0.0" in said and said[-1] not in ("0.0", "caught up")

        await until(was_told_again)
        assert said[0] == "caught up"
        assert said[said.index("0.0") + 1] == "caught up"
        holding.cancel()
        one.close()

    run(scenario)


def test_a_lease_without_a_registration_allows_nothing() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store = await new_cluster(backend)
        first = registration(store, member(0))
        await first.register()
        said: list[float] = []
        second = registration(store, member(0, instance=99), judge=alive, on_alive=said.append)
        with pytest.raises(ConfigError, match="is taken"):
            await second.register()
        assert said == []
        for one in (first, second):
            one.close()

    run(scenario)
