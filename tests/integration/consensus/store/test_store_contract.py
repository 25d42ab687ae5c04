"""One contract for every store: memory, etcd, the embedded store, its remote client."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path

import pytest

from backstay.consensus.store import (
    VALUE_BYTES_MAX,
    CoordinationStore,
    Delete,
    Get,
    Put,
    Txn,
    absent,
    create_revision_is,
    exists,
    mod_revision_is,
    value_is,
    version_is,
)
from backstay.consensus.store.embedded import EmbeddedStore
from backstay.consensus.store.etcd import EtcdStore
from backstay.consensus.store.follow import Election, KeepAlive, follow
from backstay.consensus.store.remote import RemoteStore
from backstay.errors import ClosedError, InvalidRequest, LeaseLost
from backstay.pserver.free_ports import free_ports
from tests.etcd import EtcdCluster
from tests.memory_store import MemoryBackend, MemoryStore
from tests.store_member import serve

WAIT_S = 15.0
# The shortest that etcd gives with the fixture's election timeout.
TTL_MS = 1000

OpenClient = Callable[[], CoordinationStore]
Scenario = Callable[[OpenClient], Awaitable[None]]
RunScenario = Callable[[Scenario], None]


@pytest.fixture(scope="module")
def etcd_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], EtcdCluster]]:
    """Clusters of etcd by size, each started at first use."""
    clusters: dict[int, EtcdCluster] = {}

    def get(size: int) -> EtcdCluster:
        if size not in clusters:
            clusters[size] = EtcdCluster(tmp_path_factory.mktemp(f"etcd{size}"), size)
            clusters[size].start()
        return clusters[size]

    yield get
    for cluster in clusters.values():
        cluster.stop()


_numbers = itertools.count()


@asynccontextmanager
async def clients(
    kind: str, etcd_of: Callable[[int], EtcdCluster], folder: Path
) -> AsyncIterator[OpenClient]:
    """Start what a kind needs and yield how to open one more client of the same, empty store."""
    async with AsyncExitStack() as stack:

        def kept(store: CoordinationStore) -> CoordinationStore:
            stack.push_async_callback(store.close)
            return store

        if kind == "memory":
            backend = MemoryBackend()
            yield lambda: kept(MemoryStore(backend))
            return
        if kind.startswith("etcd"):
            etcd, cluster = etcd_of(int(kind[-1])), f"c{next(_numbers)}"
            yield lambda: kept(EtcdStore(etcd.endpoints, cluster))
            return
        addresses = [f"127.0.0.1:{port}" for port in free_ports(int(kind[-1]))]
        members = []
        for address in addresses:
            member = EmbeddedStore(address, addresses, data_dir=folder / address)
            stack.push_async_callback(member.close)
            await member.start()
            members.append(member)
        if kind.startswith("embedded"):
            turn = itertools.cycle(members)
            yield lambda: next(turn)
            return
        servers = [await serve(member, "127.0.0.1:0") for member in members]
        for server in servers:
            stack.push_async_callback(server.stop, 0)
        yield lambda: kept(RemoteStore([server.address for server in servers]))


@pytest.fixture(params=["memory", "etcd1", "etcd3", "embedded1", "embedded3", "remote3"])
def run(
    request: pytest.FixtureRequest,
    etcd_of: Callable[[int], EtcdCluster],
    tmp_path: Path,
) -> RunScenario:
    """Run a scenario against a fresh store."""

    async def whole(scenario: Scenario) -> None:
        async with clients(request.param, etcd_of, tmp_path) as open_client:
            await asyncio.wait_for(scenario(open_client), WAIT_S)

    return lambda scenario: asyncio.run(whole(scenario))


def test_what_is_written_is_read_by_everybody(run: RunScenario) -> None:
    async def scenario(open_client: OpenClient) -> None:
        one, two = open_client(), open_client()
        first = await one.put("a/x", "1")
        second = await two.put("a/x", "zwölf")
        await one.put("b", "3")
        assert second > first
        item = await one.get("a/x")
        assert item is not None
        assert (item.value, item.version, item.lease) == ("zwölf", 2, 0)
        assert (item.create_revision, item.mod_revision) == (first, second)
        found = await two.range("a/")
        assert found.items == (item,)
        assert found.revision == second + 1
        assert [each.key for each in (await two.range("")).items] == ["a/x", "b"]
        both = await two.ranges(["b", "a/", "c"])
        assert [[each.key for each in one.items] for one in both] == [["b"], ["a/x"], []]
        assert {one.revision for one in both} == {second + 1}
        assert await one.get("a") is None
        assert await two.delete("a/x")
        assert not await one.delete("a/x")
        assert await one.get("a/x") is None
        large = "x" * VALUE_BYTES_MAX
        await one.put("large", large)
        read = await two.get("large")
        assert read is not None
        assert read.value == large
        with pytest.raises(InvalidRequest, match=f"at most {VALUE_BYTES_MAX}"):
            await one.put("large", large + "x")
        with pytest.raises(InvalidRequest, match="store key ''"):
            await one.get("")

    run(scenario)


def test_a_transaction_does_one_of_two_things_as_a_whole(run: RunScenario) -> None:
    async def scenario(open_client: OpenClient) -> None:
        store = open_client()
        made = await store.transaction(
            Txn((absent("k"), version_is("k", 0)), (Put("k", "1"), Put("l", "2")), (Get("k"),))
        )
        assert made.succeeded
        assert made.results == (None, None)
        refused = await store.transaction(
            Txn((absent("k"),), (Put("k", "9"),), (Get("k"), Get("n")))
        )
        assert not refused.succeeded
        found, missing = refused.results
        assert missing is None
        assert found is not None
        assert (found.value, found.create_revision) == ("1", made.revision)
        assert refused.revision == made.revision
        holds = (
            exists("k"),
            mod_revision_is("k", made.revision),
            create_revision_is("k", made.revision),
            version_is("k", 1),
            value_is("k", "1"),
            mod_revision_is("n", 0),
        )
        for number, condition in enumerate(holds):
            assert (await store.transaction(Txn((condition,), (Put("t", f"{number}"),)))).succeeded
        fails = (
            absent("k"),
            exists("n"),
            mod_revision_is("k", made.revision + 1),
            version_is("k", 2),
            value_is("k", "2"),
            value_is("n", ""),
        )
        for condition in fails:
            both = Txn((exists("k"), condition), (Delete("k"),))
            assert not (await store.transaction(both)).succeeded
        swap = await store.transaction(Txn((), (Get("k"), Delete("k"), Put("l", "3"))))
        assert swap.results[0] == found
        items = (await store.range("")).values()
        assert items["l"].mod_revision == swap.revision
        assert "k" not in items

    run(scenario)


def test_one_of_many_at_once_wins_a_comparison(run: RunScenario) -> None:
    async def scenario(open_client: OpenClient) -> None:
        stores = [open_client() for _ in range(3)]
        await stores[0].put("n", "0")

        async def add(store: CoordinationStore) -> None:
            while True:
                item = await store.get("n")
                assert item is not None
                bigger = Put("n", str(int(item.value) + 1))
                txn = Txn((mod_revision_is("n", item.mod_revision),), (bigger,))
                if (await store.transaction(txn)).succeeded:
                    return

        await asyncio.gather(*(add(store) for store in stores for _ in range(8)))
        item = await stores[0].get("n")
        assert item is not None
        assert item.value == "24"

    run(scenario)


def test_leases_end_are_kept_and_are_revoked(run: RunScenario) -> None:
    async def scenario(open_client: OpenClient) -> None:
        one, two = open_client(), open_client()
        now = asyncio.get_running_loop().time
        short, kept, revoked = [await one.lease_grant(TTL_MS) for _ in range(3)]
        assert min(short.ttl_ms, kept.ttl_ms) >= TTL_MS
        started = now()
        await one.put("short", "", short.id)
        await one.put("freed", "", short.id)
        await one.put("freed", "again")
        await one.put("kept", "", kept.id)
        last = await one.put("revoked", "", revoked.id)
        await two.lease_revoke(revoked.id)
        await two.lease_revoke(revoked.id)
        with pytest.raises(LeaseLost):
            await two.lease_keepalive(revoked.id)
        with pytest.raises(LeaseLost):
            await one.put("late", "", revoked.id)
        # On a slow machine all this may have taken most of its time.
        assert await one.lease_keepalive(kept.id) >= TTL_MS
        async with two.watch("", last + 1) as watch:
            assert [event.key for event in (await anext(watch)).events] == ["revoked"]
            waiting = asyncio.ensure_future(anext(watch))
            while not waiting.done():
                # Any member that is asked may keep it alive.
                assert await two.lease_keepalive(kept.id) >= TTL_MS
                await asyncio.wait([waiting], timeout=TTL_MS / 4000)
            gone = waiting.result()
        assert [(event.kind, event.key) for event in gone.events] == [("delete", "short")]
        assert now() - started >= TTL_MS / 1000
        assert set((await one.range("")).values()) == {"freed", "kept"}
        with pytest.raises(LeaseLost):
            await one.lease_keepalive(short.id)
        with pytest.raises(InvalidRequest, match="lease of 0 ms"):
            await one.lease_grant(0)

    run(scenario)


def test_a_watch_has_no_gap(run: RunScenario) -> None:
    async def scenario(open_client: OpenClient) -> None:
        writer, reader = open_client(), open_client()
        await writer.put("w/old", "0")
        start = (await reader.range("w/")).revision + 1
        early = reader.watch("w/", start)
        await writer.put("other", "x")
        for number in range(20):
            await writer.transaction(
                Txn((), (Put("w/a", f"{number}"), Put("other", "x"), Put("w/b", f"{number}")))
            )
        await writer.delete("w/a")
        late = reader.watch("w/", start)
        for watch in (early, late):
            batches = [await anext(watch) for _ in range(21)]
            assert [batch.revision for batch in batches] == sorted(b.revision for b in batches)
            for number, batch in enumerate(batches[:20]):
                changes = [(each.key, each.value, each.version) for each in batch.events]
                assert changes == [
                    ("w/a", f"{number}", number + 1),
                    ("w/b", f"{number}", number + 1),
                ]
                assert {each.revision for each in batch.events} == {batch.revision}
            (gone,) = batches[20].events
            assert (gone.kind, gone.key, gone.value) == ("delete", "w/a", "")
        waiting = asyncio.ensure_future(anext(late))
        await asyncio.sleep(0)
        await early.aclose()
        await late.aclose()
        with pytest.raises(ClosedError):
            await waiting
        with pytest.raises(ClosedError):
            await anext(early)

    run(scenario)


def test_following_a_prefix_gives_its_newest_state(run: RunScenario) -> None:
    async def scenario(open_client: OpenClient) -> None:
        writer, reader = open_client(), open_client()
        async with aclosing(follow(reader, "f/")) as states:
            assert (await anext(states)).items == ()
            await writer.put("f/a", "1")
            await writer.put("f/b", "2")
            await writer.delete("f/a")
            async for state in states:
                if [item.key for item in state.items] == ["f/b"]:
                    assert state.items == (await writer.range("f/")).items
                    break

    run(scenario)


def test_one_is_elected_and_an_ousted_one_can_do_nothing(run: RunScenario) -> None:
    async def scenario(open_client: OpenClient) -> None:
        one, two = open_client(), open_client()
        first, second = await one.lease_grant(60_000), await two.lease_grant(60_000)
        token = await Election(one, "controller").campaign("one", first.id)
        # As after an answer that got lost: the same lease asks again and gets the same leadership.
        assert await Election(one, "controller").campaign("one", first.id) == token
        waiting = asyncio.ensure_future(Election(two, "controller").campaign("two", second.id))
        write = Txn((token.still_mine(),), (Put("routing", "by one"),))
        assert (await one.transaction(write)).succeeded
        assert not waiting.done()
        await two.lease_revoke(first.id)
        newer = await waiting
        assert newer.create_revision > token.create_revision
        assert not (await one.transaction(write)).succeeded
        async with aclosing(Election(one, "controller").observe()) as holders:
            held = await anext(holders)
            assert held is not None
            assert (held.value, held.create_revision) == ("two", newer.create_revision)
            assert not await Election(one, "controller").resign(token)
            assert await Election(two, "controller").resign(newer)
            assert await anext(holders) is None

    run(scenario)


def test_keepalive_tells_until_when_the_lease_is_surely_alive(run: RunScenario) -> None:
    async def scenario(open_client: OpenClient) -> None:
        store = open_client()
        now = asyncio.get_running_loop().time
        reported: list[tuple[float, float]] = []
        renewed = asyncio.Event()

        def on_alive(until: float) -> None:
            reported.append((now(), until))
            if len(reported) == 5:
                renewed.set()

        keeper = KeepAlive(store, TTL_MS, on_alive)
        before = now()
        lease = await keeper.grant()
        running = asyncio.ensure_future(keeper.run())
        five = asyncio.ensure_future(renewed.wait())
        await asyncio.wait((five, running), timeout=WAIT_S, return_when="FIRST_COMPLETED")
        assert five.done(), running
        assert now() - before > lease.ttl_ms / 1000
        assert await store.lease_keepalive(lease.id) > 0
        untils = [until for _, until in reported]
        assert untils == sorted(untils)
        # Counted from before the renewal was sent, less the margin.
        assert all(until < at + lease.ttl_ms / 1000 for at, until in reported)
        await keeper.revoke()
        with pytest.raises(LeaseLost):
            await running

    run(scenario)


def test_a_closed_store_says_so(run: RunScenario) -> None:
    async def scenario(open_client: OpenClient) -> None:
        store = open_client()
        watch = store.watch("", (await store.range("")).revision + 1)
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        await store.close()
        await store.close()
        with pytest.raises(ClosedError):
            await waiting
        with pytest.raises(ClosedError):
            await store.get("x")
        await watch.aclose()

    run(scenario)
