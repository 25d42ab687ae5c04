"""The coordination stores when something breaks: members killed, paused, wiped, not there."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from backstay.config import ServerConfig
from backstay.consensus.store import CoordinationStore, Put, Txn, Watch
from backstay.consensus.store.embedded import EmbeddedStore
from backstay.consensus.store.etcd import SILENCE_S, EtcdStore, EtcdTls
from backstay.consensus.store.opening import open_store
from backstay.consensus.store.remote import RemoteStore
from backstay.errors import (
    ConfigError,
    ListenError,
    StoreAuthError,
    StoreDataLost,
    StoreUnavailable,
    WatchLost,
)
from backstay.pserver.free_ports import free_ports
from backstay.store_config import StoreMember
from tests.etcd import EtcdCluster
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[4]
WAIT_S = 120.0


async def put_until_done(store: CoordinationStore, key: str, value: str) -> float:
    """Put until it is confirmed, and return how long that took."""
    started = time.monotonic()
    while True:
        try:
            await store.put(key, value)
        except StoreUnavailable:
            assert time.monotonic() - started < WAIT_S
        else:
            return time.monotonic() - started


async def read_to(watch: Watch, key: str, value: str) -> list[tuple[str, str]]:
    """Return what a watch brings, up to a certain put."""
    seen: list[tuple[str, str]] = []
    while (key, value) not in seen:
        batch = await asyncio.wait_for(anext(watch), WAIT_S)
        seen += [(event.key, event.value) for event in batch.events]
    return seen


@pytest.mark.parametrize("how", [pytest.param("paused", marks=pytest.mark.slow), "killed"])
def test_etcd_away_for_seconds_costs_no_event(tmp_path: Path, how: str) -> None:
    async def scenario(etcd: EtcdCluster) -> None:
        store = EtcdStore(etcd.endpoints, "c", deadline_ms=500)
        other = EtcdStore(etcd.endpoints, "c", deadline_ms=500)
        # A slow machine may need more than one deadline for the first connection.
        await put_until_done(store, "first", "1")
        watch = store.watch("", 2)
        assert set(await read_to(watch, "first", "1")) == {("first", "1")}
        etcd.pause() if how == "paused" else etcd.kill()
        # The outage lasts longer than a watch waits for a sign of life.
        over_s = time.monotonic() + (SILENCE_S + 1.0 if how == "paused" else 1.0)
        while time.monotonic() < over_s:
            # Each call is refused in time: etcd comes back only after this loop.
            with pytest.raises(StoreUnavailable, match=etcd.endpoints[0]):
                await asyncio.wait_for(store.get("first"), WAIT_S)
        etcd.resume() if how == "paused" else etcd.start_member(0)
        # Before the watch has found its way back.
        await put_until_done(other, "second", "2")
        await put_until_done(other, "third", "3")
        seen = await read_to(watch, "third", "3")
        # The first put may have been done twice, before the watch had seen it once.
        assert set(seen) - {("first", "1")} == {("second", "2"), ("third", "3")}
        await store.close()
        await other.close()

    with EtcdCluster(tmp_path) as etcd:
        asyncio.run(scenario(etcd))


def test_etcd_going_on_with_its_leader_lost(tmp_path: Path) -> None:
    async def scenario(etcd: EtcdCluster) -> None:
        leader = etcd.leader()
        first = etcd.endpoints[leader:] + etcd.endpoints[:leader]
        store = EtcdStore(first, "c", deadline_ms=1000)
        lease = await store.lease_grant(5000)
        watch = store.watch("", await store.put("before", "1", lease.id))
        await read_to(watch, "before", "1")
        etcd.kill(leader)
        assert await put_until_done(store, "after", "2") < 8
        assert await store.lease_keepalive(lease.id) > 0
        assert ("after", "2") in await read_to(watch, "after", "2")
        etcd.start_member(leader)
        etcd.wait_healthy()
        paused = (leader + 1) % 3
        etcd.pause(paused)
        assert await put_until_done(store, "later", "3") < 15
        assert ("later", "3") in await read_to(watch, "later", "3")
        etcd.resume(paused)
        await store.close()

    with EtcdCluster(tmp_path, 3) as etcd:
        asyncio.run(scenario(etcd))


def test_etcd_that_was_compacted_or_wiped_is_noticed(tmp_path: Path) -> None:
    async def scenario(etcd: EtcdCluster) -> None:
        store = EtcdStore(etcd.endpoints, "c", deadline_ms=1000)
        first = await store.put("k", "1")
        for number in range(5):
            newest = await store.put("k", f"{number}")
        etcd.etcdctl("compact", str(newest))
        with pytest.raises(WatchLost, match="compacted"):
            await anext(store.watch("", first))
        watch = store.watch("", newest + 1)
        waiting = asyncio.ensure_future(anext(watch))
        etcd.kill()
        etcd.wipe()
        etcd.start_member(0)
        while True:
            try:
                await store.put("k", "2")
            except StoreUnavailable:
                continue
            except StoreDataLost:
                break
        # From here on nothing is answered as if all were well.
        with pytest.raises(StoreDataLost, match=f"revision {newest} was seen"):
            await store.get("k")
        with pytest.raises(StoreDataLost):
            await asyncio.wait_for(waiting, WAIT_S)
        await store.close()

    with EtcdCluster(tmp_path) as etcd:
        asyncio.run(scenario(etcd))


def test_a_store_that_is_not_there_is_named() -> None:
    async def scenario() -> None:
        ports = free_ports(2)
        endpoints = tuple(f"127.0.0.1:{port}" for port in ports)
        for store in (
            EtcdStore(endpoints, "c", deadline_ms=300),
            RemoteStore(endpoints, deadline_ms=300),
        ):
            with pytest.raises(StoreUnavailable, match="refused") as raised:
                await asyncio.wait_for(store.put("k", "v"), WAIT_S)
            assert all(endpoint in str(raised.value) for endpoint in endpoints)
            await store.close()

    asyncio.run(scenario())


def test_etcd_with_users(tmp_path: Path) -> None:
    async def scenario(etcd: EtcdCluster) -> None:
        endpoints = etcd.endpoints
        early = EtcdStore(endpoints, "c", username="root", password="right")
        with pytest.raises(StoreAuthError, match="has no users"):
            await early.get("k")
        etcd.etcdctl("user", "add", "root:right")
        etcd.etcdctl("user", "add", "guest:right")
        etcd.etcdctl("user", "grant-role", "root", "root")
        etcd.etcdctl("auth", "enable")
        good = EtcdStore(endpoints, "c", username="root", password="right")
        lease = await good.lease_grant(5000)
        revision = await good.put("k", "v", lease.id)
        assert await read_to(good.watch("", revision), "k", "v") == [("k", "v")]
        assert await good.lease_keepalive(lease.id) > 0
        for user, password, message in (
            ("root", "wrong", "refuses user 'root'"),
            ("guest", "right", "permission denied"),
            (None, None, "wants user and password"),
        ):
            bad = EtcdStore(endpoints, "c", username=user, password=password)
            with pytest.raises(StoreAuthError, match=message):
                await bad.get("k")
            with pytest.raises(StoreAuthError):
                await asyncio.wait_for(anext(bad.watch("", 1)), WAIT_S)
            await bad.close()
        await good.close()
        await early.close()

    with EtcdCluster(tmp_path) as etcd:
        asyncio.run(scenario(etcd))


def test_etcd_over_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    server = authority.issue_cert("127.0.0.1")
    key, cert, ca = (tmp_path / name for name in ("key.pem", "cert.pem", "ca.pem"))
    server.private_key_pem.write_to_path(key)
    server.cert_chain_pems[0].write_to_path(cert)
    authority.cert_pem.write_to_path(ca)

    async def scenario(etcd: EtcdCluster) -> None:
        config = ServerConfig(
            cluster="c",
            store="etcd",
            store_endpoints=tuple(etcd.endpoints),
            store_tls_ca_file=str(ca),
        )
        store = (await open_store(config)).store
        await put_until_done(store, "k", "v")
        await store.close()
        stranger = EtcdTls(trustme.CA().cert_pem.bytes())
        for tls, kind in ((stranger, StoreAuthError), (None, StoreUnavailable)):
            bad = EtcdStore(etcd.endpoints, "c", tls=tls, deadline_ms=1000)
            with pytest.raises(kind):
                await bad.get("k")
            await bad.close()

    with EtcdCluster(tmp_path, tls=(cert, key)) as etcd:
        asyncio.run(scenario(etcd))


class MemberProcesses:
    """Three members of the embedded store, each a process."""

    def __init__(self, folder: Path) -> None:
        ports = free_ports(6)
        self._folder = folder
        self._raft = [f"127.0.0.1:{port}" for port in ports[:3]]
        self.control = [f"127.0.0.1:{port}" for port in ports[3:]]
        self.processes: list[subprocess.Popen[bytes] | None] = [None] * 3
        self._led: list[int] = [0] * 3
        for index in range(3):
            self.start(index)

    def start(self, index: int) -> None:
        with (self._folder / f"member-{index}.log").open("ab") as log:
            self.processes[index] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.store_member"),
                    *(self._raft[index], ",".join(self._raft), self.control[index]),
                    str(self._folder / f"data-{index}"),
                ],
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )

    def leader(self) -> int:
        """Return who leads, by what the members log."""

        def newest_term() -> int:
            for index in range(3):
                lines = (self._folder / f"member-{index}.log").read_text().splitlines()
                terms = [int(line.rpartition(" ")[2]) for line in lines if "leads the" in line]
                self._led[index] = max(terms, default=0)
            return max(self._led)

        return self._led.index(wait_until(newest_term, "a member leads", limit_s=WAIT_S))

    def signal(self, index: int, number: signal.Signals) -> None:
        process = self.processes[index]
        assert process is not None
        process.send_signal(number)
        if number is signal.SIGKILL:
            process.wait()

    def end(self) -> None:
        for process in self.processes:
            if process is not None:
                process.kill()
                process.wait()


@pytest.fixture
def members(tmp_path: Path) -> Iterator[MemberProcesses]:
    """Three member processes."""
    processes = MemberProcesses(tmp_path)
    yield processes
    processes.end()


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_the_embedded_store_goes_on_without_its_leader(
    members: MemberProcesses, number: signal.Signals
) -> None:
    async def scenario() -> None:
        store = RemoteStore(members.control, deadline_ms=2000)
        await put_until_done(store, "before", "0")
        leader = members.leader()
        others = [address for index, address in enumerate(members.control) if index != leader]
        survivors = RemoteStore(others, deadline_ms=200)
        # Its connections are there before it counts how long it takes.
        await put_until_done(survivors, "warm", "0")
        # Longer than the calls take until it is renewed, also on a busy machine.
        lease = await store.lease_grant(20_000)
        watch = store.watch("", await store.put("leased", "1", lease.id))
        members.signal(leader, number)
        took = await put_until_done(survivors, "after", "2")
        assert took < 15
        assert await put_until_done(store, "later", "3") < 15
        # The lease outlived the change of leader.
        assert await store.lease_keepalive(lease.id) == 20_000
        seen = await read_to(watch, "later", "3")
        # A put of unknown outcome was repeated, and may have happened twice.
        assert list(dict.fromkeys(seen)) == [("leased", "1"), ("after", "2"), ("later", "3")]
        if number is signal.SIGSTOP:
            members.signal(leader, signal.SIGCONT)
        else:
            members.start(leader)
        back = RemoteStore([members.control[leader]], deadline_ms=1000)
        await put_until_done(back, "back", "4")
        assert set((await back.range("")).values()) == {
            *("before", "warm", "leased", "after", "later", "back")
        }
        for each in (store, survivors, back):
            await each.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("count", [1, 3])
def test_the_embedded_store_comes_back_after_a_stop(tmp_path: Path, count: int) -> None:
    async def run(addresses: list[str], *, first: bool) -> None:
        stores = [
            EmbeddedStore(address, addresses, data_dir=tmp_path / address, secret="a-secret")
            for address in addresses
        ]
        for store in stores:
            await store.start()
        if first:
            lease = await stores[0].lease_grant(60_000)
            await stores[0].put("lease", str(lease.id), lease.id)
            for number in range(50):
                await stores[-1].put("k", f"{number}")
        item, leased = await stores[0].get("k"), await stores[-1].get("lease")
        assert item is not None
        assert leased is not None
        assert (item.value, item.version) == ("49", 50)
        assert await stores[0].lease_keepalive(int(leased.value)) == 60_000
        for store in stores:
            await store.close()

    addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
    asyncio.run(run(addresses, first=True))
    asyncio.run(run(addresses, first=False))


def test_a_member_with_another_secret_stays_outside() -> None:
    async def scenario() -> None:
        addresses = [f"127.0.0.1:{port}" for port in free_ports(3)]
        stores = [
            EmbeddedStore(address, addresses, secret=secret, deadline_ms=500)
            for address, secret in zip(
                addresses, ["the-right-one", "the-right-one", "the-wrong-one"], strict=True
            )
        ]
        for store in stores:
            await store.start()
        await put_until_done(stores[0], "k", "v")
        assert await stores[1].get("k") is not None
        with pytest.raises(StoreUnavailable, match="is a majority of its members alive"):
            await stores[2].get("k")
        for store in stores:
            await store.close()

    asyncio.run(scenario())


def test_an_embedded_store_that_cannot_work_is_refused() -> None:
    async def scenario() -> None:
        (port,) = free_ports(1)
        own = f"127.0.0.1:{port}"
        store = EmbeddedStore(own, [own])
        await store.start()
        with pytest.raises(ListenError, match=own):
            await open_store(ServerConfig(store_members=(StoreMember("ps-0", own),)))
        await store.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("own", "members", "secret", "message"),
    [
        ("127.0.0.1:1", ["127.0.0.1:2"], None, "not one of"),
        ("10.0.0.1:1", ["10.0.0.1:1"], None, "set store_secret, use 127.0.0.1, or use etcd"),
        ("h:1", ["h:1", "h:2"], None, "1, 3 or 5 different ones"),
        ("h:1", ["h:1"], "short", "8 to 1024 visible ASCII characters"),
    ],
)
def test_a_group_that_cannot_work_is_refused(
    own: str, members: list[str], secret: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        EmbeddedStore(own, members, secret=secret)


def test_a_secret_shows_in_no_message() -> None:
    config = ServerConfig(
        store="etcd", store_endpoints=("h:1",), store_username="u", store_password="hidden"
    )
    assert "hidden" not in repr(config)


def test_a_transaction_with_too_much_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 128"):
        Txn(success=tuple(Put(f"{number}", "") for number in range(129)))
    with pytest.raises(ValueError, match="after it was written"):
        Txn(success=(Put("k", "1"), Put("k", "2")))
