"""Who reaches a shared store through a node reaches the records of jobs, and no others."""

from __future__ import annotations

from typing import Any, cast

import pytest

from backstay._proto.v1 import store_pb2
from backstay.consensus.records.keys import JOBS
from backstay.consensus.store import Delete, Get, Put, Txn, absent, exists
from backstay.consensus.store.messages import txn_to_message
from backstay.errors import InvalidRequest
from backstay.pserver.services.store import StoreService
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.memory_nodes import run

NO_CONTEXT = cast(Any, None)


@pytest.mark.parametrize("prefix", ["", "j", "jobs", "routing", "controller", "jobsx/"])
def test_what_lies_elsewhere_is_not_read(prefix: str) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store = MemoryStore(backend)
        await store.put("routing", "the cluster's")
        service = StoreService(store, lambda: True, only_below=JOBS)
        for single in (False, True):
            request = store_pb2.StoreRangeRequest(prefix=prefix, single=single)
            with pytest.raises(InvalidRequest, match="only those below 'jobs/'"):
                await service.Range(request, NO_CONTEXT)

    run(scenario)


@pytest.mark.parametrize(
    "txn",
    [
        Txn(success=(Put("routing", "mine"),)),
        Txn(success=(Put("jobs/a/state", "x"), Delete("controller"))),
        Txn((absent("jobs/a/state"),), failure=(Put("routing", "mine"),)),
        Txn(success=(Get("config"),)),
        Txn((exists("config"),), success=(Put("jobs/a/state", "x"),)),
    ],
)
def test_a_transaction_with_any_part_elsewhere_does_nothing(txn: Txn) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store = MemoryStore(backend)
        await store.put("config", "the cluster's")
        before = await store.range("")
        service = StoreService(store, lambda: True, only_below=JOBS)
        with pytest.raises(InvalidRequest):
            await service.Transact(txn_to_message(txn), NO_CONTEXT)
        assert await store.range("") == before

    run(scenario)


def test_the_records_of_jobs_are_served() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        service = StoreService(MemoryStore(backend), lambda: True, only_below=JOBS)
        txn = Txn((absent("jobs/a/master"),), (Put("jobs/a/master", "me"),))
        assert (await service.Transact(txn_to_message(txn), NO_CONTEXT)).succeeded
        request = store_pb2.StoreRangeRequest(prefix="jobs/a/master", single=True)
        (item,) = (await service.Range(request, NO_CONTEXT)).items
        assert item.value == "me"

    run(scenario)
