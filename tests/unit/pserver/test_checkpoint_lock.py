"""Who writes checkpoints, and which one is noted as the newest, against the store in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from backstay.checkpoint.manifest import Manifest, number_of
from backstay.checkpoint.storage import CheckpointStorage
from backstay.config import SecurityConfig
from backstay.consensus import ClusterMirror
from backstay.consensus.cluster_mirror import ClusterSnapshot
from backstay.consensus.records import Restoring
from backstay.consensus.records.checkpoints import CheckpointRecord
from backstay.consensus.records.packing import pack
from backstay.consensus.records.settings import ClusterSettings
from backstay.consensus.store import Put, Txn, TxnResult
from backstay.errors import CheckpointNotFound, CheckpointRefused, StoreUnavailable
from backstay.pserver.checkpoints.lock import CheckpointLock
from backstay.pserver.checkpoints.records import CheckpointRecords
from backstay.pserver.checkpoints.saving import Saver
from backstay.pserver.membership.record_watch import RecordWatch
from backstay.pserver.metrics.figures import ControlFigures
from backstay.pserver.peers import PeerCalls
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.checkpoint_files import (
    FULL,
    SECOND,
    THIRD,
    Content,
    full_content,
    make_checkpoint,
)
from tests.unit.controller_cluster import cluster, table
from tests.unit.member_records import member
from tests.unit.memory_nodes import KEYS, run


class Writer:
    """A registered node, as far as it writes checkpoints."""

    def __init__(self, backend: MemoryBackend, index: int) -> None:
        self.store = MemoryStore(backend)
        self.mirror = ClusterMirror(KEYS)
        self.watch = RecordWatch(self.store, KEYS, self.mirror)
        self.record = member(index)
        self.lock = CheckpointLock(self.store, KEYS, self.mirror, self.record.node)
        self.records = CheckpointRecords(self.store, KEYS, self.mirror)
        self.saver = Saver(
            lock=self.lock,
            records=self.records,
            view=self.mirror,
            cluster_uid="ab",
            calls=PeerCalls(SecurityConfig(), 1000),
            specs=list,
            figures=ControlFigures(),
        )

    async def register(self, lease: int) -> None:
        self.record = replace(self.record, lease=lease)
        put = Put(KEYS.member(self.record.node_id), self.record.to_json(), lease)
        await self.store.transaction(Txn((), (put,), ()))
        await self.watch.read_all()


async def two_writers(backend: MemoryBackend) -> tuple[Writer, Writer, int]:
    first, second = Writer(backend, 0), Writer(backend, 1)
    leases = [(await writer.store.lease_grant(60_000)).id for writer in (first, second)]
    await first.register(leases[0])
    await second.register(leases[1])
    return first, second, leases[0]


class Overtaken(CheckpointLock):
    """Another writer finishes a checkpoint after this one chose its number."""

    def __init__(self, lock: CheckpointLock, finish: Callable[[], object]) -> None:
        self.__dict__.update(lock.__dict__)
        self.finish = finish
        self.taken: list[int] = []

    async def acquire(self, checkpoint_id: str, *, wait_s: float = 0.0) -> int:
        if not self.taken:
            self.finish()
        self.taken.append(number_of(checkpoint_id))
        return await super().acquire(checkpoint_id)


def test_a_number_is_above_those_of_all_that_were_finished_before_the_lock(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path / "root")

    async def scenario(backend: MemoryBackend) -> None:
        writer, _, _ = await two_writers(backend)
        settings = ClusterSettings(checkpoint_url=storage.url)
        routing = table(cluster())
        puts = (
            Put(KEYS.settings, settings.to_json()),
            Put(KEYS.routing, pack(routing.to_json())),
        )
        await writer.store.transaction(Txn((), puts, ()))
        await writer.watch.read_all()
        lock = Overtaken(
            writer.lock, lambda: make_checkpoint(storage, tmp_path, FULL, full_content())
        )
        saver = Saver(
            lock=lock,
            records=writer.records,
            view=writer.mirror,
            cluster_uid="ab",
            calls=PeerCalls(SecurityConfig(), 1000),
            specs=list,
            figures=ControlFigures(),
        )
        # Nothing of this cluster is there to add to; by then it has its number.
        with pytest.raises(CheckpointRefused, match="save a full one"):
            await saver.save("incremental", tags={}, progress={}, tell=lambda *_: None)
        assert lock.taken == [1, 2]
        assert await writer.store.get(KEYS.save) is None

    run(scenario)


async def newest(writer: Writer) -> str | None:
    found = await writer.store.get(KEYS.checkpoint)
    return CheckpointRecord.from_json(found.value).id if found is not None else None


def test_one_writes_at_a_time_and_none_for_ever() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        first, second, lease = await two_writers(backend)
        await first.lock.acquire(FULL)
        with pytest.raises(CheckpointRefused, match=f"{FULL}, by ps-0"):
            await second.lock.acquire(SECOND)
        await first.store.lease_revoke(lease)
        held = await second.lock.acquire(SECOND)
        # The first one's end says nothing about the second's lock.
        await first.lock.release(held - 1)
        with pytest.raises(CheckpointRefused, match=f"{SECOND}, by ps-1"):
            await second.lock.acquire(THIRD)
        await second.lock.release(held)
        await second.lock.acquire(THIRD)

    run(scenario)


def test_a_turn_whose_end_the_store_did_not_hear_keeps_nobody_out_for_ever() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        first, second, _ = await two_writers(backend)
        held = await first.lock.acquire(FULL)
        backend.set_outage(True)
        await first.lock.release(held)
        backend.set_outage(False)
        # The other node cannot know; the one whose it was does.
        with pytest.raises(CheckpointRefused, match=f"{FULL}, by ps-0"):
            await second.lock.acquire(SECOND)
        again = await first.lock.acquire(SECOND)
        # And a lock that somebody holds is not taken over.
        with pytest.raises(CheckpointRefused, match=f"{SECOND}, by ps-0"):
            await first.lock.acquire(THIRD)
        await first.lock.release(again)
        await second.lock.acquire(THIRD)

    run(scenario)


class Silent(MemoryStore):
    """Does what it is asked to, and does not answer the first transactions."""

    def __init__(self, backend: MemoryBackend) -> None:
        super().__init__(backend)
        self.silences = 1

    async def transaction(self, txn: Txn) -> TxnResult:
        result = await super().transaction(txn)
        if self.silences:
            self.silences -= 1
            raise StoreUnavailable("no answer in time")
        return result


def test_a_lock_that_was_acquired_without_an_answer_is_acquired() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        first, second, _ = await two_writers(backend)
        silent = Silent(backend)
        lock = CheckpointLock(silent, KEYS, first.mirror, first.record.node)
        held = await lock.acquire(FULL)
        with pytest.raises(CheckpointRefused, match=f"{FULL}, by ps-0"):
            await second.lock.acquire(SECOND)
        await lock.release(held)
        await second.lock.release(await second.lock.acquire(SECOND))
        # The store may stay away: that is said, and the next try acquires the lock.
        silent.silences = 3
        with pytest.raises(StoreUnavailable):
            await lock.acquire(THIRD)
        await lock.release(await lock.acquire(THIRD))
        assert await silent.get(KEYS.save) is None

    run(scenario)


def test_a_lock_of_another_node_is_not_acquired_without_an_answer() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        first, second, _ = await two_writers(backend)
        await second.lock.acquire(FULL)
        lock = CheckpointLock(Silent(backend), KEYS, first.mirror, first.record.node)
        with pytest.raises(CheckpointRefused, match=f"{FULL}, by ps-1"):
            await lock.acquire(SECOND)

    run(scenario)


def test_a_turn_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(backend: MemoryBackend) -> None:
        first, second, _ = await two_writers(backend)
        held = await first.lock.acquire(FULL)
        waits, newer_than = asyncio.Event(), second.mirror.newer_than

        async def noted(revision: int) -> ClusterSnapshot:
            waits.set()
            return await newer_than(revision)

        monkeypatch.setattr(second.mirror, "newer_than", noted)
        waiting = asyncio.ensure_future(second.lock.acquire(SECOND, wait_s=30.0))
        await waits.wait()
        assert not waiting.done()
        await first.lock.release(held)
        assert await waiting > held

    run(scenario)


def test_whoever_gives_up_while_a_turn_is_taken_leaves_it_to_others() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        first, second, _ = await two_writers(backend)
        taking = asyncio.ensure_future(first.lock.acquire(FULL))
        await asyncio.sleep(0)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        await second.lock.acquire(SECOND)

    run(scenario)


def test_a_late_writer_does_not_note_an_older_checkpoint(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path / "root")
    old = make_checkpoint(storage, tmp_path, FULL, full_content())
    new = make_checkpoint(storage, tmp_path, SECOND, full_content())

    async def scenario(backend: MemoryBackend) -> None:
        late, second, _ = await two_writers(backend)
        await second.records.announce(storage.url, new)
        await late.records.announce(storage.url, old)
        assert await newest(second) == SECOND
        # In another folder numbers begin anew.
        await late.records.announce("/elsewhere", old)
        assert await newest(second) == FULL

    run(scenario)


def test_what_is_deleted_is_nothing_to_come_back_from(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path / "root")
    make_checkpoint(storage, tmp_path, FULL, full_content())
    last = make_checkpoint(storage, tmp_path, SECOND, Content(), base=FULL)

    async def scenario(backend: MemoryBackend) -> None:
        writer, _, _ = await two_writers(backend)
        await writer.records.announce(storage.url, last)
        with pytest.raises(CheckpointRefused, match=f"needed by {SECOND}"):
            await writer.saver.delete(storage, FULL)
        await writer.saver.delete(storage, SECOND)
        assert await newest(writer) == FULL
        await writer.saver.delete(storage, FULL)
        assert await newest(writer) is None
        with pytest.raises(CheckpointNotFound):
            await writer.saver.delete(storage, FULL)

    run(scenario)


def test_nothing_is_deleted_while_somebody_writes_who_may_add_to_it(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path / "root")
    make_checkpoint(storage, tmp_path, FULL, full_content())

    async def scenario(backend: MemoryBackend) -> None:
        first, second, _ = await two_writers(backend)
        held = await first.lock.acquire(SECOND)
        with pytest.raises(CheckpointRefused, match="another checkpoint is being written"):
            await second.saver.delete(storage, FULL)
        await first.lock.release(held)
        await second.saver.delete(storage, FULL)
        assert storage.ids() == []

    run(scenario)


async def restore_slots(writer: Writer, checkpoint: str) -> None:
    """The controller has slots come back from a checkpoint; this node has not heard of it."""
    routing = replace(table(cluster()), restoring=Restoring("/root", checkpoint, (1, 3)))
    await writer.store.put(KEYS.routing, pack(routing.to_json()))


class LostMeanwhile(CheckpointRecords):
    """Slots are lost just before this node notes what they no longer come back from."""

    def __init__(self, writer: Writer, checkpoint: str) -> None:
        self.__dict__.update(writer.records.__dict__)
        self.writer, self.checkpoint = writer, checkpoint

    async def forget(self, url: str, checkpoint_id: str, newest: Manifest | None) -> None:
        await restore_slots(self.writer, self.checkpoint)
        await super().forget(url, checkpoint_id, newest)


def test_what_lost_slots_are_to_come_back_from_is_not_deleted(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path / "root")
    for each in (FULL, SECOND):
        make_checkpoint(storage, tmp_path, each, full_content())

    async def scenario(backend: MemoryBackend) -> None:
        writer, _, _ = await two_writers(backend)
        await restore_slots(writer, FULL)
        assert writer.mirror.snapshot().routing is None
        with pytest.raises(CheckpointRefused, match=f"{FULL} is being restored"):
            await writer.saver.delete(storage, FULL)
        writer.saver.records = LostMeanwhile(writer, SECOND)
        with pytest.raises(CheckpointRefused, match=f"{SECOND} is being restored"):
            await writer.saver.delete(storage, SECOND)
        assert storage.ids() == [FULL, SECOND]
        assert await writer.records.needed() == {SECOND}

    run(scenario)


def test_a_damaged_manifest_can_be_deleted_and_keeps_no_other_from_it(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path / "root")
    for each in (FULL, SECOND):
        make_checkpoint(storage, tmp_path, each, full_content())
    (tmp_path / "root" / FULL / "manifest.json").write_text("{}")

    async def scenario(backend: MemoryBackend) -> None:
        writer, _, _ = await two_writers(backend)
        await writer.saver.delete(storage, SECOND)
        await writer.saver.delete(storage, FULL)
        assert storage.ids() == []

    run(scenario)


def test_two_calls_of_one_process_do_not_both_hold_the_lock() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        writer, _, _ = await two_writers(backend)
        both = await asyncio.gather(
            writer.lock.acquire(FULL), writer.lock.acquire(SECOND), return_exceptions=True
        )
        refused = [outcome for outcome in both if isinstance(outcome, CheckpointRefused)]
        assert len(refused) == 1

    run(scenario)
