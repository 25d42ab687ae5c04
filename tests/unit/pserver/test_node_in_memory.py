"""The controller's shell, against the store in memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

import pytest

from backstay.config import ServerConfig
from backstay.consensus import ClusterMirror
from backstay.consensus.records import (
    ClusterHealthRecord,
    ControllerRecord,
    NodeReport,
    RoutingTable,
    TableRecord,
)
from backstay.consensus.records.checkpoints import CheckpointRecord
from backstay.consensus.records.packing import unpack
from backstay.consensus.records.settings import ClusterSettings
from backstay.consensus.store import CoordinationStore, KeyValue, Put, Txn
from backstay.errors import LeaseLost, StoreError
from backstay.pserver.checkpoints.restoring import FirstRestore
from backstay.pserver.cluster_member import keep_on
from backstay.pserver.controller import ClusterRecords, Decision, decide
from backstay.pserver.leadership.controller_host import ControllerHost
from backstay.pserver.leadership.slot_sizes import SlotSizes
from backstay.pserver.membership.record_watch import RecordWatch
from backstay.pserver.metrics.figures import ControlFigures
from backstay.pserver.peers import PeerCalls
from backstay.tables import TableSpec
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.member_records import member
from tests.unit.memory_nodes import (
    CONFIG,
    KEYS,
    LIMIT_S,
    new_cluster,
    run,
    until,
)


class Leadership:
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

    async def __aenter__(self) -> Leadership:
        host = ControllerHost(
            self.store,
            KEYS,
            self.mirror,
            self.watch,
            CONFIG,
            self._own,
            return_grace_ms=self._return_grace_ms,
            first_restore=FirstRestore(ServerConfig(), self.store, KEYS),
            sizes=SlotSizes(PeerCalls(ServerConfig(), 1000)),
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


async def mirrored(mirror: ClusterMirror, key: str, revision: int) -> None:
    """Wait until a mirror has a record as it was written at this revision."""
    while mirror.revision_of(key) < revision:
        await mirror.newer_than(mirror.snapshot().revision)


def test_the_controller_writes_routing_status_view_and_events() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store = await new_cluster(backend)
        async with Leadership(backend, "ps-0"):
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


def test_nothing_is_decided_while_a_record_cannot_be_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store = await new_cluster(backend)
        for index in (0, 1):
            await store.put(KEYS.member(f"ps-{index}"), member(index).to_json())
        async with Leadership(backend, "ps-0"):

            async def is_made() -> bool:
                return await routing_version(store) == 1

            await until(is_made)
            # A node of a later version: to this one it would look as if it were gone.
            await store.put(KEYS.member("ps-1"), '{"format":9}')
            await until(said(caplog, "nothing is decided while"))
            assert await routing_version(store) == 1
            await store.put(KEYS.member("ps-1"), member(1, instance=77).to_json())

            async def is_taken_in() -> bool:
                return await routing_version(store) > 1

            await until(is_taken_in)

    run(scenario)


def said(caplog: pytest.LogCaptureFixture, words: str) -> Callable[[], Awaitable[bool]]:
    """Return whether the controller has logged this: then it has looked at the records."""

    async def is_said() -> bool:
        return words in caplog.text

    return is_said


def test_an_ousted_controller_writes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def scenario(backend: MemoryBackend) -> None:
        store = await new_cluster(backend)
        for index in (0, 1):
            await store.put(KEYS.member(f"ps-{index}"), member(index).to_json())
        async with Leadership(backend, "ps-0"):

            async def is_made() -> bool:
                return await routing_version(store) == 1

            await until(is_made)
            # Another one holds the leadership, before the first one hears of it.
            await store.delete(KEYS.controller)
            await store.put(KEYS.controller, ControllerRecord("ps-9", 9).to_json())
            await store.delete(KEYS.member("ps-1"))
            await until(said(caplog, "no longer the controller"))
            assert await routing_version(store) == 1
            # It is a candidate again.
            await store.delete(KEYS.controller)

            async def is_decided() -> bool:
                return await routing_version(store) > 1

            await until(is_decided)

    run(scenario)


def test_a_decision_survives_an_outage_of_the_store(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store = await new_cluster(backend)
        for index in (0, 1):
            await store.put(KEYS.member(f"ps-{index}"), member(index).to_json())
        loop = asyncio.get_running_loop()
        outages = 0

        async def begin_outage() -> None:
            backend.set_outage(True)

        def interrupted(records: ClusterRecords) -> Decision:
            nonlocal outages
            if "ps-1" not in records.members and records.routing and not outages:
                outages += 1
                asyncio.run_coroutine_threadsafe(begin_outage(), loop).result(LIMIT_S)
            return decide(records)

        async with Leadership(backend, "ps-0", decide=interrupted):

            async def is_made() -> bool:
                return await routing_version(store) == 1

            await until(is_made)
            await store.delete(KEYS.member("ps-1"))
            await until(said(caplog, "a decision could not be written"))
            backend.set_outage(False)
            assert await routing_version(store) == 1

            async def is_decided() -> bool:
                return await routing_version(store) > 1

            await until(is_decided)

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
            await mirrored(leadership.mirror, KEYS.report(11), revision)

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

        leadership = Leadership(backend, "ps-0", decide=slow)
        async with leadership:

            async def is_made() -> bool:
                return await routing_version(store) == 1

            await until(is_made)
            await store.put(KEYS.report(11), NodeReport(11, 1).to_json())

            async def is_decided_again() -> bool:
                return len(tried) > 1

            await until(is_decided_again)
            assert await routing_version(store) == 1

    run(scenario)


def test_slots_come_back_from_no_checkpoint_that_may_be_removed() -> None:
    """While it is decided that slots come back from the newest checkpoint, a newer one is noted."""

    async def scenario(backend: MemoryBackend) -> None:
        store = await new_cluster(backend)
        settings = ClusterSettings(checkpoint_url="/root")
        spec = TableSpec.sparse("t", dim=1)
        await store.put(KEYS.table("t"), TableRecord(spec.to_json(), 1).to_json())
        await store.put(KEYS.settings, settings.to_json())
        await store.put(KEYS.checkpoint, CheckpointRecord("/root", "old", "then").to_json())
        for index in (0, 1):
            await store.put(KEYS.member(f"ps-{index}"), member(index).to_json())
        loop = asyncio.get_running_loop()
        told: list[str] = []

        async def note_newer() -> None:
            newer = CheckpointRecord("/root", "new", "now").to_json()
            revision = await store.put(KEYS.checkpoint, newer)
            await mirrored(leadership.mirror, KEYS.checkpoint, revision)

        def slow(records: ClusterRecords) -> Decision:
            decision = decide(records)
            routing = decision.routing
            if routing is not None and routing.restoring.slots and records.on_loss is not None:
                told.append(records.on_loss.id)
                if len(told) == 1:
                    asyncio.run_coroutine_threadsafe(note_newer(), loop).result(LIMIT_S)
            return decision

        leadership = Leadership(backend, "ps-0", decide=slow)
        async with leadership:

            async def is_made() -> bool:
                return await routing_version(store) == 1

            await until(is_made)
            # Both begin anew, without their rows.
            anew = [
                Put(KEYS.member(f"ps-{n}"), member(n, instance=90 + n).to_json()) for n in (0, 1)
            ]
            await store.transaction(Txn((), tuple(anew), ()))

            async def is_lost() -> bool:
                return await routing_version(store) > 1

            await until(is_lost)
            found = await store.get(KEYS.routing)
            assert found is not None
            assert RoutingTable.from_json(unpack(found.value)).restoring.checkpoint == "new"
            assert told[:2] == ["old", "new"]

    run(scenario)


def test_a_wait_that_ends_during_a_decision_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    grace_s = 0.3
    clock = {"ahead_s": 0.0}

    async def scenario(backend: MemoryBackend) -> None:
        loop = asyncio.get_running_loop()
        loop_time = loop.time
        monkeypatch.setattr(loop, "time", lambda: loop_time() + clock["ahead_s"])
        store = await new_cluster(backend)
        for index in (0, 1):
            await store.put(KEYS.member(f"ps-{index}"), member(index).to_json())

        def slow(records: ClusterRecords) -> Decision:
            if records.waiting and records.routing and min(records.routing.master_of_slot) < 0:
                # The time of the one that is waited for runs out meanwhile; there is nothing to
                # write, so nothing comes back by which the controller would look again.
                clock["ahead_s"] += 1.5 * grace_s
            return decide(records)

        async with Leadership(backend, "ps-0", decide=slow, return_grace_ms=int(grace_s * 1000)):

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
