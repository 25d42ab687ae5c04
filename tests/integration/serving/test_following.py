"""Followers of the exports of real clusters: rows that come, change and go, faults, stops."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backstay.checkpoint import remote
from backstay.checkpoint.manifest import Manifest, kind_of, number_of
from backstay.checkpoint.storage import ExportFolder
from backstay.errors import CheckpointNotFound, ConfigError, ExportRefused, InvalidRequest
from backstay.pserver.local_cluster import LocalCluster
from backstay.serving import Follower
from backstay.serving import follower as follower_module
from backstay.tables import SGD, Adagrad, Expiry, Lifetime, Score, TableSpec
from backstay.trainer import Client
from tests.integration.exporting import (
    controller_of,
    counting,
    elements_in,
    exported,
    exporting,
    finished,
    is_whole,
    same_rows,
    settled,
    start_export,
    stop_export,
)
from tests.waiting import wait_until

KEYS = np.arange(2000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
SLOTS = 32


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {"slot_count": SLOTS, "checkpoint_url": str(folder / "ckpt"), **more}


def fill(client: Client) -> None:
    wide = client.create_table(TableSpec.sparse("wide", dim=4, optimizer=Adagrad(0.1)))
    client.create_table(TableSpec.dense("w", shape=(10, 7), optimizer=SGD(0.5)))
    for step in range(3):
        client.push(wide, KEYS, np.sin(np.outer(np.arange(len(KEYS)), [1, 2, 3, 4]) + step))
    client.push_dense("w", np.ones((10, 7), np.float32))


def test_a_follower_has_the_rows_of_the_servers(tmp_path: Path) -> None:
    with (
        LocalCluster(2, settings=settings(tmp_path)) as cluster,
        Client(cluster.endpoints) as client,
    ):
        fill(client)
        with exporting(cluster, tmp_path / "served") as follower:
            settled(follower)
            assert same_rows(client, follower, tmp_path) == SLOTS
            table = follower.table("wide")
            assert len(table) == len(KEYS)
            # Rows that change, go and come.
            client.push("wide", KEYS[:50], np.ones((50, 4)))
            assert client.delete("wide", KEYS[40:90]) == 50
            client.push("wide", np.arange(1, 8), np.ones((7, 4)))
            client.push_dense("w", np.ones((10, 7), np.float32))
            settled(follower)
            assert len(table) == len(KEYS) - 50 + 7
            assert same_rows(client, follower, tmp_path) == SLOTS
            assert np.array_equal(table.lookup(KEYS[:40]), client.pull("wide", KEYS[:40]))
            # A key without a row: zeros, or what a server would answer.
            assert not table.lookup(KEYS[40:50]).any()
            initial = table.lookup(KEYS[40:50], unknown="initial")
            assert np.array_equal(initial, client.pull("wide", KEYS[40:50]))
            with pytest.raises(InvalidRequest, match="no row of 10 of 10"):
                table.lookup(KEYS[40:50], unknown="refuse")
            # What an increment has is little.
            newest = [one for one in elements_in(tmp_path / "served") if one.kind == "delta"]
            assert 0 < sum(one.rows for one in newest) < len(KEYS) / 2
            stop_export(cluster)
            assert follower.status.trouble == ""


def test_the_last_increment_has_every_push_that_was_acknowledged(tmp_path: Path) -> None:
    with (
        LocalCluster(1, settings=settings(tmp_path)) as cluster,
        Client(cluster.endpoints) as client,
    ):
        fill(client)
        # So long that nothing but the stop can have it written.
        with exporting(cluster, tmp_path / "served", every_s=3000.0) as follower:
            client.push("wide", KEYS[:5], np.ones((5, 4)))
            stop_export(cluster)
            follower.wait_for_version(2, timeout_s=60)
            assert same_rows(client, follower, tmp_path) == SLOTS


def test_an_increment_comes_after_so_many_pushes(tmp_path: Path) -> None:
    with (
        LocalCluster(2, settings=settings(tmp_path)) as cluster,
        Client(cluster.endpoints) as client,
    ):
        fill(client)
        # So long that nothing but pushes can have an increment written.
        with exporting(cluster, tmp_path / "served", every_s=3000.0, every_pushes=5) as follower:
            for number in range(1, 3):
                for _ in range(5):
                    client.push("wide", KEYS[:50], np.ones((50, 4)))
                follower.wait_for_version(number + 1, timeout_s=60)
                found = follower.table("wide").lookup(KEYS[:50])
                assert np.array_equal(found, client.pull("wide", KEYS[:50]))
            # Two of them in an increment, at least.
            assert len(elements_in(tmp_path / "served")) == 3


def test_the_last_increment_has_the_slots_of_a_master_that_hangs(tmp_path: Path) -> None:
    folder = tmp_path / "served"
    # Longer than an increment waits for a slot without a master.
    lease = {"lease_ttl_ms": 4000}
    with (
        LocalCluster(3, settings=settings(tmp_path, **lease)) as cluster,
        counting(cluster) as acknowledged,
    ):
        wait_until(lambda: acknowledged[0] > 5, "pushes")
        with exporting(cluster, folder, every_s=0.4) as follower:
            settled(follower)
            cluster.pause(1 if controller_of(cluster) == 2 else 2)
            total = acknowledged[0]
            stop_export(cluster)
    with Follower(folder) as late:
        assert late.table("n").lookup(KEYS[:300]).min() >= total


def test_a_follower_that_stopped_catches_up_and_a_late_one_begins_with_the_base(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "served"
    with (
        LocalCluster(1, settings=settings(tmp_path)) as cluster,
        Client(cluster.endpoints) as client,
    ):
        fill(client)
        with exporting(cluster, folder):
            pass
        client.push("wide", KEYS[:500], np.ones((500, 4)))
        client.delete("wide", KEYS[500:600])
        with Follower(folder, poll_s=0.05) as follower:
            settled(follower)
            assert same_rows(client, follower, tmp_path) == SLOTS
        stop_export(cluster)
    # Without any server.
    with Follower(folder) as follower:
        assert len(follower.table("wide")) == len(KEYS) - 100
        assert follower.status.age_s > 0


def test_a_folder_that_is_emptied_gets_a_base_again(tmp_path: Path) -> None:
    folder = tmp_path / "served"
    with (
        LocalCluster(1, settings=settings(tmp_path)) as cluster,
        Client(cluster.endpoints) as client,
    ):
        fill(client)
        with exporting(cluster, folder) as follower:
            settled(follower)
            for element in folder.iterdir():
                shutil.rmtree(element)
            # Increments go on, and who begins now has a base to begin with.
            with Follower(folder, poll_s=0.05) as late:
                client.push("wide", KEYS[:5], np.ones((5, 4)))
                for one in (follower, late):
                    settled(one)
                    assert same_rows(client, one, tmp_path) == SLOTS
            # Emptied between two exports: numbers begin anew.
            stop_export(cluster)
            shutil.rmtree(folder)
            wait_until(lambda: "are gone" in follower.status.trouble)
            start_export(cluster, folder)
            client.push("wide", KEYS[:5], np.ones((5, 4)))
            settled(follower)
            assert number_of(follower.status.chain) == 1
            assert same_rows(client, follower, tmp_path) == SLOTS
            wait_until(lambda: not follower.status.trouble)


def test_a_damaged_base_beside_the_increments_holds_up_none_of_them(tmp_path: Path) -> None:
    folder = tmp_path / "served"
    with (
        LocalCluster(1, settings=settings(tmp_path)) as cluster,
        Client(cluster.endpoints) as client,
    ):
        fill(client)
        with exporting(cluster, folder) as follower:
            # Another base is written, because the first one is away.
            first, aside = folder / follower.status.chain, tmp_path / "aside"
            first.rename(aside)

            def another() -> str | None:
                return next((name for name in finished(folder) if kind_of(name) == "full"), None)

            damaged = wait_until(another)
            aside.rename(first)
            (folder / damaged / "manifest.json").write_text("{}")
            with Follower(folder, poll_s=0.05) as late:
                wait_until(lambda: damaged in late.status.trouble)
                client.push("wide", KEYS[:5], np.ones((5, 4)))
                settled(late)
                assert same_rows(client, late, tmp_path) == SLOTS


@pytest.mark.chaos
def test_an_increment_after_a_death_is_small(tmp_path: Path) -> None:
    folder = tmp_path / "served"
    with (
        LocalCluster(3, settings=settings(tmp_path, replicas=2)) as cluster,
        Client(cluster.endpoints) as client,
    ):
        fill(client)
        wait_until(lambda: is_whole(cluster, 3))
        with exporting(cluster, folder) as follower:
            client.push("wide", KEYS, np.ones((len(KEYS), 4)))
            # Some increments, so that everybody hears that these rows are in one.
            for step in range(5):
                client.push("wide", KEYS[step : step + 3], np.ones((3, 4)))
                settled(follower)
            killed = (controller_of(cluster) + 1) % 3
            before = max(one.number for one in elements_in(folder))
            cluster.kill(killed)
            client.push("wide", KEYS[:50], np.ones((50, 4)))
            settled(follower)
            assert same_rows(client, follower, tmp_path) == SLOTS
            later = [one for one in elements_in(folder) if one.number > before]
            assert {one.chain for one in later} == {follower.status.chain}
            # The new masters heard what was complete: they tell what changed since.
            assert sum(one.rows for one in later) < len(KEYS) / 8


def two_bases_and_theirs(folder: Path) -> bool:
    """Whether what is left is two bases, and the increments that come after the older one."""
    names = finished(folder)
    bases = [name for name in names if kind_of(name) == "full"]
    return len(bases) == 2 and min(map(number_of, names)) == number_of(bases[0])


def test_a_new_base_comes_while_a_follower_serves_and_old_elements_go(tmp_path: Path) -> None:
    folder = tmp_path / "served"
    with (
        LocalCluster(1, settings=settings(tmp_path)) as cluster,
        Client(cluster.endpoints) as client,
    ):
        fill(client)
        with exporting(cluster, folder, every_s=0.1) as follower:
            first = follower.status.chain

            def three_bases() -> bool:
                # All rows change, so the increments soon are as large as the base.
                client.push("wide", KEYS, np.ones((len(KEYS), 4)))
                bases = [name for name in finished(folder) if kind_of(name) == "full"]
                return first not in bases

            wait_until(three_bases, lambda: f"a third base; {finished(folder)}")
            wait_until(lambda: two_bases_and_theirs(folder), lambda: str(finished(folder)))
            settled(follower)
            assert same_rows(client, follower, tmp_path) == SLOTS
            # It went on with the same chain, and so read no base a second time.
            assert follower.status.chain == first
            with Follower(folder) as late:
                settled(late)
                assert same_rows(client, late, tmp_path) == SLOTS
            # One that was away for too long takes a base.
        with Follower(folder) as later:
            settled(later)
            assert same_rows(client, later, tmp_path) == SLOTS


def test_a_restore_begins_a_chain_that_says_why(tmp_path: Path) -> None:
    with (
        LocalCluster(2, settings=settings(tmp_path)) as cluster,
        Client(cluster.endpoints) as client,
    ):
        fill(client)
        saved = client.checkpoints.save()
        with exporting(cluster, tmp_path / "served") as follower:
            first = follower.status
            assert first.reason == "the export was started"
            client.push("wide", np.arange(1, 101), np.ones((100, 4)))
            settled(follower)
            assert len(follower.table("wide")) == len(KEYS) + 100
            client._directory.call_to_its_end(lambda channel: remote.restore(channel, saved.id))
            wait_until(lambda: follower.status.chain != first.chain, "a new chain")
            assert "restored or lost" in follower.status.reason
            settled(follower)
            assert len(follower.table("wide")) == len(KEYS)


def test_a_new_table_begins_a_chain(tmp_path: Path) -> None:
    with (
        LocalCluster(1, settings=settings(tmp_path)) as cluster,
        Client(cluster.endpoints) as client,
    ):
        start_export(cluster, tmp_path / "served", tables=["job/*"])
        wait_until(lambda: exported(cluster)[0].trouble, "a word about the tables")
        client.create_table(TableSpec.sparse("other/x", dim=2, optimizer=SGD(0.1)))
        client.create_table(TableSpec.sparse("job/__audit", dim=2, optimizer=SGD(0.1)))
        client.create_table(TableSpec.sparse("job/a", dim=2, optimizer=SGD(0.1)))
        with Follower(tmp_path / "served", poll_s=0.05) as follower:
            assert [spec.name for spec in follower.sparse] == ["job/a"]
            client.create_table(TableSpec.sparse("job/b", dim=3, optimizer=SGD(0.1)))
            client.push("job/b", KEYS, np.ones((len(KEYS), 3)))
            wait_until(lambda: len(follower.sparse) == 2, "the new table")
            settled(follower)
            assert len(follower.table("job/b")) == len(KEYS)
            wait_until(lambda: not exported(cluster)[0].trouble, "no trouble")


def test_exports_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with LocalCluster(1, settings=settings(tmp_path)) as cluster:
        start_export(cluster, tmp_path / "served")
        start_export(cluster, tmp_path / "served")  # the same again
        with pytest.raises(ExportRefused, match="with other settings"):
            start_export(cluster, tmp_path / "other")
        with pytest.raises(InvalidRequest, match="every_s"):
            start_export(cluster, tmp_path / "served", every_s=0.0)
        stop_export(cluster)
        with pytest.raises(ExportRefused, match="no export"):
            stop_export(cluster)
        with pytest.raises(InvalidRequest, match="neither an absolute path nor a URL"):
            start_export(cluster, "served")
        start_export(cluster, tmp_path / "served", tables=["n*"])
        wait_until(lambda: "no table matches" in exported(cluster)[0].trouble, "the trouble")
    with pytest.raises(CheckpointNotFound, match=r"no base.* loaded without follow=True"):
        Follower(tmp_path / "nowhere", wait_s=0.1)
    with pytest.raises(ConfigError, match="poll_s is 0, wait_s is 1: poll_s must be above 0"):
        Follower(tmp_path / "nowhere", poll_s=0.0, wait_s=1.0)


@contextmanager
def watched(follower: Follower) -> Iterator[list[int]]:
    """Look rows up all the time: none may go back. What is given counts the lookups."""
    table, looked, wrong = follower.table("n"), [0], []
    stop = threading.Event()

    def work() -> None:
        seen = np.zeros(300, np.float32)
        while not stop.is_set():
            rows = table.lookup(KEYS[:300])[:, 0]
            if (rows < seen).any():
                wrong.append((seen, rows))
                return
            seen = rows
            looked[0] += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield looked
    finally:
        stop.set()
        thread.join()
    assert not wrong, "a row went back"


@pytest.mark.timeout(400)
def test_nothing_is_lost_or_goes_back_while_masters_and_the_controller_are_killed(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "served"
    with (
        LocalCluster(3, settings=settings(tmp_path)) as cluster,
        Client(cluster.endpoints) as client,
        counting(cluster) as acknowledged,
    ):
        wait_until(lambda: acknowledged[0] > 5, "pushes")
        with exporting(cluster, folder, every_s=0.1) as follower:
            with watched(follower) as looked:
                for round_number in range(3):
                    before = acknowledged[0]
                    controller = controller_of(cluster)
                    # In turn the controller, which is a master too, and another master.
                    victim = controller if round_number % 2 == 0 else (controller + 1) % 3
                    cluster.kill(victim)
                    wait_until(lambda: acknowledged[0] > before + 20, "pushes after the kill")  # noqa: B023
                    settled(follower)
                    assert same_rows(client, follower, tmp_path) <= SLOTS
                    cluster.restart(victim)
                    wait_until(lambda: is_whole(cluster, 3), "two copies of each slot")
                assert looked[0] > 100
            assert follower.status.trouble == ""
            total = acknowledged[0]
            stop_export(cluster)
        chains = {one.chain for one in elements_in(folder)}
        assert len(chains) == 1, "no death begins a chain"
    with Follower(folder) as late:
        assert late.table("n").lookup(KEYS[:300]).min() >= total


def test_a_storage_that_hangs_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "served"
    with (
        LocalCluster(1, settings=settings(tmp_path)) as cluster,
        Client(cluster.endpoints) as client,
    ):
        fill(client)
        with exporting(cluster, folder):
            client.push("wide", KEYS[:5], np.ones((5, 4)))
            stop_export(cluster)
    goes_on = threading.Event()
    whole = ExportFolder.read

    def read(there: ExportFolder, name: str) -> Manifest | None:
        if kind_of(name) == "delta":
            goes_on.wait()
        return whole(there, name)

    monkeypatch.setattr(ExportFolder, "read", read)
    monkeypatch.setattr(follower_module, "CLOSE_S", 0.1)
    try:
        with Follower(folder, wait_s=2.0) as late:
            assert len(late.table("wide")) == len(KEYS)
        monkeypatch.setattr(ExportFolder, "names", lambda _: goes_on.wait())
        with pytest.raises(CheckpointNotFound, match="no base"):
            Follower(folder, wait_s=0.1)
    finally:
        goes_on.set()


def test_a_folder_that_is_away_is_waited_for(tmp_path: Path) -> None:
    # A file in the place of the folder: nothing can be written there.
    folder = tmp_path / "served"
    with (
        LocalCluster(2, settings=settings(tmp_path)) as cluster,
        counting(cluster) as acknowledged,
    ):
        wait_until(lambda: acknowledged[0] > 5, "pushes")
        with exporting(cluster, folder) as follower:
            settled(follower)
            folder.rename(tmp_path / "away")
            folder.write_text("")
            wait_until(lambda: exported(cluster)[0].trouble, "a word about it")
            pushed = acknowledged[0]
            wait_until(lambda: acknowledged[0] > pushed + 50, "training goes on")
            folder.unlink()
            (tmp_path / "away").rename(folder)
            settled(follower)
            chain = follower.status.chain
            wait_until(lambda: not exported(cluster)[0].trouble, "all is well again")
            settled(follower)
            assert follower.status.chain == chain
            assert follower.table("n").lookup(KEYS[:300]).min() >= pushed


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_damaged_or_missing_increment_is_named_and_not_used(tmp_path: Path) -> None:
    folder, copy = tmp_path / "served", tmp_path / "copy"
    with (
        LocalCluster(1, settings=settings(tmp_path)) as cluster,
        Client(cluster.endpoints) as client,
    ):
        fill(client)
        with exporting(cluster, folder) as follower:
            for step in range(3):
                client.push("wide", KEYS[step : step + 5], np.ones((5, 4)))
                settled(follower)
        stop_export(cluster)
        before = client.pull("wide", KEYS)
    with_rows = [one for one in elements_in(folder) if one.kind == "delta" and one.rows]
    second = with_rows[1]
    part = second.parts[0].file
    shutil.copytree(folder, copy)
    damage(copy / second.id / part)
    with Follower(copy, poll_s=0.05) as follower:
        wait_until(lambda: "SHA-256" in follower.status.trouble, lambda: str(follower.status))
        assert second.id in follower.status.trouble
        table = follower.table("wide")
        # What comes before it is served, nothing behind it is.
        assert number_of(follower.status.element) < second.number
        # It is fetched again.
        shutil.copy(folder / second.id / part, copy / second.id / part)
        wait_until(lambda: not follower.status.trouble, lambda: str(follower.status))
        assert np.array_equal(table.lookup(KEYS), before)
    shutil.rmtree(copy / second.id)
    with Follower(copy, poll_s=0.05) as follower:
        wait_until(lambda: "are missing" in follower.status.trouble, lambda: str(follower.status))
        shutil.copytree(folder / second.id, copy / second.id)
        wait_until(lambda: not follower.status.trouble, lambda: str(follower.status))
        assert np.array_equal(follower.table("wide").lookup(KEYS), before)
    damage(copy / with_rows[0].chain / "manifest.json")
    with pytest.raises(CheckpointNotFound, match=r"base-000001-\w+/manifest.json"):
        Follower(copy, wait_s=1.0)


def test_weights_alone_or_statistics_and_only_rows_of_a_high_score(tmp_path: Path) -> None:
    with (
        LocalCluster(1, settings=settings(tmp_path)) as cluster,
        Client(cluster.endpoints) as client,
    ):
        lifetime = Lifetime(expiry=Expiry(score_below=0.001), score=Score())
        spec = TableSpec.sparse("s", dim=2, optimizer=Adagrad(0.1), lifetime=lifetime)
        table = client.create_table(spec)
        ones = np.ones((len(KEYS), 2), np.float32)
        clicks = np.zeros(len(KEYS), np.float32)
        clicks[:100] = 1.0
        client.push(table, KEYS, ones, shows=np.ones(len(KEYS), np.float32), clicks=clicks)
        with exporting(
            cluster, tmp_path / "served", statistics=True, score_at_least=0.5
        ) as follower:
            settled(follower)
            served = follower.table("s")
            assert len(served) == 100
            client.decay(table, period=1, rate=0.25)
            settled(follower)
            assert len(served) == 0
            client.push(table, KEYS[:7], ones[:7], shows=clicks[:7], clicks=clicks[:7])
            settled(follower)
            assert len(served) == 7
            assert np.array_equal(served.lookup(KEYS[:7]), client.pull(table, KEYS[:7]))
    there = ExportFolder(tmp_path / "served")
    assert all(there.is_finished(name) for name in there.names())
