"""A report in the store is the newest one, also when an older write comes late."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from backstay.consensus.records.keys import Keys
from backstay.consensus.store import Txn, TxnResult
from backstay.errors import StoreUnavailable
from backstay.pserver.membership.reporting import Reporter
from backstay.pserver.metrics.figures import ControlFigures
from tests.memory_store import MemoryStore

INSTANCE = 7
KEYS = Keys("demo")


class LateStore(MemoryStore):
    """The first write gets lost on its way; it can be let through later."""

    lost: Txn | None = None

    async def transaction(self, txn: Txn) -> TxnResult:
        if self.lost is None:
            self.lost = txn
            raise StoreUnavailable("no answer")
        return await super().transaction(txn)


class Plane:
    """A data plane with one report after the other."""

    def __init__(self) -> None:
        self.said = (0, "")

    def say(self, version: int, silent: Sequence[int] = (8,)) -> None:
        report = {
            "routing_version": version,
            "silent": list(silent),
            "full": [],
            "caught_up": [],
            "refused": [],
            "loaded": [],
        }
        self.said = (version, json.dumps(report))

    def wait_report(self, _known: int, _timeout_ms: int) -> tuple[int, str]:
        return self.said


async def nobody(_instance: int, _because: str) -> bool:
    return False


def test_a_write_that_comes_late_does_not_replace_a_newer_report() -> None:
    async def scenario() -> None:
        store, plane = LateStore(), Plane()
        figures = ControlFigures()
        reporter = Reporter(store, KEYS, INSTANCE, plane, nobody, figures)  # type: ignore[arg-type]
        lease = await store.lease_grant(60_000)
        begin = (await store.range("")).revision + 1

        async def stored(version: int) -> None:
            watch = store.watch(KEYS.report(INSTANCE), begin)
            async for batch in watch:
                for event in batch.events:
                    if json.loads(event.value)["routing_version"] == version:
                        return

        plane.say(1)
        reporter.start()
        run = asyncio.ensure_future(reporter.run(lease.id))
        await asyncio.wait_for(stored(1), 10)
        plane.say(2)
        await asyncio.wait_for(stored(2), 10)
        assert store.lost is not None
        result = await store.transaction(store.lost)
        assert not result.succeeded
        held = await store.get(KEYS.report(INSTANCE))
        assert held is not None
        assert json.loads(held.value)["routing_version"] == 2
        run.cancel()
        await reporter.stop()
        await store.close()

    asyncio.run(scenario())


class UnseenStore(MemoryStore):
    """The first write is done, and its answer gets lost."""

    writes = 0

    async def transaction(self, txn: Txn) -> TxnResult:
        result = await super().transaction(txn)
        self.writes += 1
        if self.writes == 1:
            raise StoreUnavailable("no answer")
        return result


def test_what_was_written_unseen_is_taken_back_when_it_is_true_no_more() -> None:
    async def scenario() -> None:
        store, plane = UnseenStore(), Plane()
        figures = ControlFigures()
        reporter = Reporter(store, KEYS, INSTANCE, plane, nobody, figures)  # type: ignore[arg-type]
        lease = await store.lease_grant(60_000)
        begin = (await store.range("")).revision + 1
        plane.say(1)
        reporter.start()
        run = asyncio.ensure_future(reporter.run(lease.id))

        async def stored(silent: list[int]) -> None:
            async for batch in store.watch(KEYS.report(INSTANCE), begin):
                if any(json.loads(event.value)["silent"] == silent for event in batch.events):
                    return

        await asyncio.wait_for(stored([8]), 10)
        plane.say(2, silent=[])
        await asyncio.wait_for(stored([]), 10)
        held = await store.get(KEYS.report(INSTANCE))
        assert held is not None
        assert json.loads(held.value)["routing_version"] == 2
        run.cancel()
        await reporter.stop()
        await store.close()

    asyncio.run(scenario())
