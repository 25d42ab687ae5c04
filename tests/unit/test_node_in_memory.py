"""Registration and the controller's shell, against the store in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

import pytest

from backstay.consensus import ClusterMirror
from backstay.consensus.keys import Keys
from backstay.consensus.membership import DeathRecord
from backstay.consensus.memory_store import MemoryBackend, MemoryStore
from backstay.consensus.records import (
    ClusterConfig,
    ClusterHealthRecord,
    ControllerRecord,
    MemberRecord,
    NodeReport,
    RoutingTable,
)
from backstay.consensus.store import CoordinationStore, KeyValue
from backstay.errors import ConfigError, LeaseLost, StoreDataLost, StoreError, TakenForDead
from backstay.pserver.cluster_member import keep_on
from backstay.pserver.controller import ClusterRecords, Decision, decide
from backstay.pserver.controller_host import ControllerHost
from backstay.pserver.departures import Departures
from backstay.pserver.metrics.figures import ControlFigures
from backstay.pserver.record_watch import RecordWatch
from backstay.pserver.registration import Predecessor, Registration
from tests.unit.member_records import member

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
    on_alive: Callable[[int], None] = lambda _: None,
    catch_up: Callable[[], Awaitable[None]] | None = None,
) -> Registration:
    return Registration(
        store,
        KEYS,
        CONFIG,
        record,
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
        said: list[int] = []
        one = registration(store, member(0), on_alive=said.append)
        holding = asyncio.ensure_future(one.hold(nothing))

        async def has_incarnation(number: int) -> bool:
            record = await stored(store, "ps-0")
            return record is not None and record.incarnation == number

        await until(lambda: has_incarnation(1))
        found = await store.get(KEYS.member("ps-0"))
        assert found is not None
        assert all(0 < told <= TTL_MS for told in said)
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


class Office:
    """A candidate for controller, on its own connection to the store."""

    def __init__(
        self,
        backend: MemoryBackend,
        node_id: str,
        *,
        decide: Callable[[ClusterRecords], Decision] = decide,
        return_grace_ms: int = 0,
    ) -> None:
        self._decide, self._return_grace_ms = decide, return_grace_ms
        self.store = MemoryStore(backend)
        self.mirror = ClusterMirror(KEYS)
        self.watch = RecordWatch(self.store, KEYS, self.mirror)
        self._own = ControllerRecord(node_id, 1)
        self._task: asyncio.Task[None] | None = None
        self.lease = 0

    async def __aenter__(self) -> Office:
        host = ControllerHost(
            self.store,
            KEYS,
            self.mirror,
            self.watch,
            CONFIG,
            self._own,
            return_grace_ms=self._return_grace_ms,
            decide=self._decide,
            figures=ControlFigures(),
        )
        await self.watch.__aenter__()
        self.lease = (await self.store.lease_grant(60_000)).id
        self._task = asyncio.create_task(host.run(self.lease))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await self.watch.__aexit__(None, None, None)


async def routing_version(store: CoordinationStore) -> int:
    found = await store.get(KEYS.routing)
    return 0 if found is None else RoutingTable.from_json(found.value).version


def test_the_controller_writes_routing_status_view_and_events() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store = await new_cluster(backend)
        async with Office(backend, "ps-0"):
            await store.put(KEYS.member("ps-0"), member(0).to_json())

            async def waits() -> bool:
                found = await store.get(KEYS.status)
                return found is not None and "1 of 2 serve" in found.value

            await until(waits)
            await store.put(KEYS.member("ps-1"), member(1).to_json())

            async def is_made() -> bool:
                return await routing_version(store) == 1

            await until(is_made)
            status = await store.get(KEYS.status)
            assert status is not None
            assert ClusterHealthRecord.from_json(status.value).cluster_status == "OK"

            async def is_shown() -> bool:
                return len((await store.range(KEYS.shards)).items) == 16

            await until(is_shown)
            assert len((await store.range(KEYS.events)).items) == 1
            await store.delete(KEYS.member("ps-1"))

            async def shows_one_copy() -> bool:
                return len((await store.range(KEYS.shards)).items) == 8

            await until(shows_one_copy)

    run(scenario)


def test_nothing_is_decided_while_a_record_cannot_be_read() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store = await new_cluster(backend)
        for index in (0, 1):
            await store.put(KEYS.member(f"ps-{index}"), member(index).to_json())
        async with Office(backend, "ps-0") as office:

            async def is_made() -> bool:
                return await routing_version(store) == 1

            await until(is_made)
            # A node of a later version: to this one it would look as if it were gone.
            await store.put(KEYS.member("ps-1"), '{"format":9}')
            await until(lambda: has_unreadable(office.mirror))
            await asyncio.sleep(0.2)
            assert await routing_version(store) == 1
            await store.put(KEYS.member("ps-1"), member(1, instance=77).to_json())

            async def is_taken_in() -> bool:
                return await routing_version(store) > 1

            await until(is_taken_in)

    run(scenario)


async def has_unreadable(mirror: ClusterMirror) -> bool:
    return bool(mirror.snapshot().unreadable)


def test_an_ousted_controller_writes_nothing() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store = await new_cluster(backend)
        for index in (0, 1):
            await store.put(KEYS.member(f"ps-{index}"), member(index).to_json())
        async with Office(backend, "ps-0"):

            async def is_made() -> bool:
                return await routing_version(store) == 1

            await until(is_made)
            # Another one holds the office, before the first one hears of it.
            await store.delete(KEYS.controller)
            await store.put(KEYS.controller, ControllerRecord("ps-9", 9).to_json())
            await store.delete(KEYS.member("ps-1"))
            await asyncio.sleep(0.3)
            assert await routing_version(store) == 1
            # It is a candidate again.
            await store.delete(KEYS.controller)

            async def is_decided() -> bool:
                return await routing_version(store) > 1

            await until(is_decided)

    run(scenario)


def test_a_decision_survives_an_outage_of_the_store() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store = await new_cluster(backend)
        for index in (0, 1):
            await store.put(KEYS.member(f"ps-{index}"), member(index).to_json())
        async with Office(backend, "ps-0"):

            async def is_made() -> bool:
                return await routing_version(store) == 1

            await until(is_made)
            await store.delete(KEYS.member("ps-1"))
            backend.set_outage(True)
            await asyncio.sleep(0.3)
            backend.set_outage(False)

            async def is_decided() -> bool:
                return await routing_version(store) > 1

            await until(is_decided)

    run(scenario)


def test_a_wall_clock_that_jumps_ends_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = iter((600.0, -600.0) * 1_000_000)
    wall, wall_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: wall() + next(jumps))
    monkeypatch.setattr(time, "time_ns", lambda: wall_ns() + int(next(jumps) * 1e9))

    async def scenario(backend: MemoryBackend) -> None:
        store = await new_cluster(backend)
        said: list[int] = []
        one = registration(store, member(0), on_alive=said.append)
        holding = asyncio.ensure_future(one.hold(nothing))

        async def was_renewed() -> bool:
            return len(said) > 10

        await until(was_renewed)
        assert all(0 < told <= TTL_MS for told in said)
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
            # By now this one is registered: nobody takes its slots from here on.
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
            return "0" in said and said[-1] not in ("0", "caught up")

        await until(was_told_again)
        assert said[0] == "caught up"
        assert said[said.index("0") + 1] == "caught up"
        holding.cancel()
        one.close()

    run(scenario)


def test_a_lease_without_a_registration_allows_nothing() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store = await new_cluster(backend)
        first = registration(store, member(0))
        await first.register()
        said: list[int] = []
        second = registration(store, member(0, instance=99), judge=alive, on_alive=said.append)
        with pytest.raises(ConfigError, match="is taken"):
            await second.register()
        assert said == []
        for one in (first, second):
            one.close()

    run(scenario)


def test_a_report_that_changes_while_it_is_decided_on_is_not_relied_on() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store = await new_cluster(backend)
        for index in (0, 1):
            await store.put(KEYS.member(f"ps-{index}"), member(index).to_json())
        loop = asyncio.get_running_loop()
        tried: list[int] = []

        async def withdraw() -> None:
            revision = await store.put(KEYS.report(11), NodeReport(11, 1, (12,)).to_json())
            while office.mirror.revision_of(KEYS.report(11)) < revision:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

        def slow(records: ClusterRecords) -> Decision:
            decision = decide(records)
            if records.routing is None or records.routing.version > 1 or 11 not in records.reports:
                return decision
            tried.append(records.reports[11].routing_version)
            routing = replace(records.routing, version=2)
            if len(tried) == 1:
                asyncio.run_coroutine_threadsafe(withdraw(), loop).result(LIMIT_S)
                return replace(decision, routing=routing, relies_on=(11,))
            return Decision(None, decision.health)

        office = Office(backend, "ps-0", decide=slow)
        async with office:

            async def is_made() -> bool:
                return await routing_version(store) == 1

            await until(is_made)
            await store.put(KEYS.report(11), NodeReport(11, 1).to_json())

            async def is_decided_again() -> bool:
                return len(tried) > 1

            await until(is_decided_again)
            assert await routing_version(store) == 1

    run(scenario)


def test_a_wait_that_ends_during_a_decision_ends() -> None:
    grace_s = 0.3

    async def scenario(backend: MemoryBackend) -> None:
        store = await new_cluster(backend)
        for index in (0, 1):
            await store.put(KEYS.member(f"ps-{index}"), member(index).to_json())

        def slow(records: ClusterRecords) -> Decision:
            if records.waiting and records.routing and min(records.routing.master_of_slot) < 0:
                # The time of the one that is waited for runs out meanwhile; there is nothing to
                # write, so nothing comes back by which the controller would look again.
                time.sleep(1.5 * grace_s)
            return decide(records)

        async with Office(backend, "ps-0", decide=slow, return_grace_ms=int(grace_s * 1000)):

            async def is_made() -> bool:
                return await routing_version(store) == 1

            await until(is_made)
            await store.delete(KEYS.member("ps-1"))
            await until(lambda: at_least(store, 2))
            # ps-0 alone holds all; now it goes, too, and another one comes.
            await store.put(KEYS.member("ps-2"), member(2).to_json())
            await store.delete(KEYS.member("ps-0"))

            async def is_given_up() -> bool:
                return RoutingTable.from_json((await _routing(store)).value).generation > 0

            await until(is_given_up)

    run(scenario)


async def at_least(store: CoordinationStore, version: int) -> bool:
    return await routing_version(store) >= version


async def _routing(store: CoordinationStore) -> KeyValue:
    found = await store.get(KEYS.routing)
    assert found is not None
    return found


def test_a_store_that_refuses_a_write_ends_no_node() -> None:
    async def scenario(_backend: MemoryBackend) -> None:
        outcomes: list[Exception] = [StoreError("etcd is full"), LeaseLost("over")]

        async def work() -> None:
            raise outcomes.pop(0)

        with pytest.raises(LeaseLost):
            await keep_on(work, "a test")
        assert outcomes == []

    run(scenario)
