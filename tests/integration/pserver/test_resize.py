"""Clusters that grow and shrink under pushes: every push counts once, whichever node dies."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from backstay.consensus.records.plans import ResizePlan
from backstay.errors import DeadlineExceeded, ResizeRefused
from backstay.pserver.client.inspection import ClusterInspection
from backstay.pserver.local_cluster import LocalCluster
from backstay.pserver.resizing import ClusterResizing, resize
from backstay.tables import SGD, TableSpec, Zeros
from backstay.trainer.client import Client

Eventually = Callable[[Callable[[], bool]], None]
Command = Callable[..., Any]
# The aim is half a second; a machine that runs other tests beside this one is given more.
WAIT_LIMIT_S = 10.0
LIMIT_S = 120.0
KEYS = np.arange(500)


class Pushes:
    """A trainer that pushes to every key all the time; each push adds one."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.said: list[str] = []
        self.client = Client(cluster.endpoints, progress=self.said.append)
        self.table = self.client.create_table(
            TableSpec.sparse("counts", 2, optimizer=SGD(1.0), initializer=Zeros())
        )
        self.count = 0
        self.longest_s = 0.0
        self.failure: Exception | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._push)

    def _push(self) -> None:
        gradients = np.full((KEYS.size, 2), -1, dtype=np.float32)
        while not self._stopping.is_set():
            began_s = time.monotonic()
            try:
                self.client.push(self.table, KEYS, gradients)
            except Exception as error:  # noqa: BLE001 (raised by stop)
                self.failure = error
                return
            self.count += 1
            self.longest_s = max(self.longest_s, time.monotonic() - began_s)

    def fill(self, rows: int) -> None:
        """Have something to copy: so many rows of a kibibyte."""
        table = self.client.create_table(TableSpec.sparse("wide", 256))
        self.client.push(table, np.arange(rows), np.zeros((rows, 256), dtype=np.float32))

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop, and find every push in the rows once."""
        self._stopping.set()
        self._thread.join(LIMIT_S)
        if self.failure is not None:
            raise self.failure
        assert self.count > 10
        rows = self.client.pull(self.table, KEYS)
        assert (rows == self.count).all(), (rows.min(), rows.max(), self.count)


@contextmanager
def pushing(cluster: LocalCluster) -> Iterator[Pushes]:
    pushes = Pushes(cluster)
    with pushes.client:
        pushes.start()
        try:
            yield pushes
        finally:
            pushes.stop()


def status(cluster: LocalCluster) -> dict[str, Any]:
    with ClusterInspection(",".join(cluster.endpoints), cluster.client_config()) as asked:
        return asked.status()


def verified(cluster: LocalCluster) -> bool:
    with ClusterInspection(",".join(cluster.endpoints), cluster.client_config()) as asked:
        return bool(asked.verify()["good"])


def masters(cluster: LocalCluster) -> dict[str, int]:
    return {node["node_id"]: node["master_slots"] for node in status(cluster)["nodes"]}


def test_a_cluster_grows_and_shrinks_under_pushes() -> None:
    with LocalCluster(servers=3, settings={"slot_count": 64}) as cluster:
        with pushing(cluster) as pushes:
            said: list[str] = []
            grown = cluster.resize(
                4, timeout_s=LIMIT_S, progress=lambda plan: said.append(plan.state)
            )
            assert grown.moves_total == 32
            assert set(masters(cluster).values()) == {16}
            shrunk = cluster.resize(3, timeout_s=LIMIT_S)
            assert [one.node_id for one in shrunk.leaving] == ["ps-3"]
            assert [server.node_id for server in cluster.servers] == ["ps-0", "ps-1", "ps-2"]
            assert pushes.longest_s < WAIT_LIMIT_S
        assert said[-1] == "done"
        assert verified(cluster)
        # A name is not used twice.
        assert cluster.resize(4, timeout_s=LIMIT_S).state == "done"
        assert cluster.servers[-1].node_id == "ps-4"


def moving(asked: ClusterResizing) -> bool:
    plan = asked.plan()
    return plan is not None and plan.state == "moving" and plan.moves_left > 0


# Slow copies, so that somebody dies in the middle of it.
SLOWLY: dict[str, object] = {"slot_count": 64, "replicas": 3, "copy_bytes_per_s": 1_048_576}


@pytest.mark.parametrize("victim", ["controller", "source", "target"])
def test_a_death_in_the_middle_of_a_resize_is_survived(victim: str, eventually: Eventually) -> None:
    with LocalCluster(servers=5, settings=SLOWLY) as cluster, pushing(cluster) as pushes:
        pushes.fill(4000)
        with ClusterResizing(",".join(cluster.endpoints), cluster.client_config()) as asked:
            plan = asked.resize(4)
            eventually(lambda: moving(asked))
            assert [one.node_id for one in (asked.plan() or plan).leaving] == ["ps-4"]
            controller = int(str(status(cluster)["controller"]).removeprefix("ps-"))
            index = {"controller": controller, "source": 4, "target": 3}[victim]
            cluster.kill(index)
            done = asked.wait(plan, timeout_s=LIMIT_S)
        # There are four now: the node that was to leave stays in the place of the dead one.
        assert done.leaving == ()
        eventually(lambda: status(cluster)["healthy"] is True)
        living = {f"ps-{number}" for number in range(5)} - {f"ps-{index}"}
        assert {name for name, slots in masters(cluster).items() if slots} == living


def test_a_newcomer_that_dies_is_waited_for_again(eventually: Eventually) -> None:
    with LocalCluster(servers=3, settings=SLOWLY) as cluster, pushing(cluster) as pushes:
        pushes.fill(4000)
        with ClusterResizing(",".join(cluster.endpoints), cluster.client_config()) as asked:
            plan = asked.resize(4)
            cluster.add_node()
            eventually(lambda: moving(asked))
            cluster.kill(3)
            eventually(lambda: (asked.plan() or plan).state == "waiting_for_nodes")
            cluster.add_node()
            assert asked.wait(plan, timeout_s=LIMIT_S).state == "done"
        assert masters(cluster) == {"ps-0": 16, "ps-1": 16, "ps-2": 16, "ps-4": 16}


def test_what_cannot_be_done_is_refused_and_says_why() -> None:
    settings = {"slot_count": 4, "memory_limit_bytes": 2**27}
    with LocalCluster(servers=2, settings=settings) as cluster:
        endpoints = ",".join(cluster.endpoints)
        with ClusterResizing(endpoints, cluster.client_config()) as asked:
            with pytest.raises(ResizeRefused, match="2 copies of each slot"):
                asked.resize(1)
            with pytest.raises(ResizeRefused, match="4 slots"):
                asked.resize(5)
            with pytest.raises(ResizeRefused, match="no node of that name"):
                asked.drain("ps-7")
            with pytest.raises(ResizeRefused, match="1 nodes would stay"):
                asked.drain("ps-1")
            # The third is not started: the plan waits, and the same request meets it.
            plan = asked.resize(3, wait_s=600)
            assert asked.resize(3).plan_id == plan.plan_id
            with pytest.raises(ResizeRefused, match="a resize is under way"):
                asked.rebalance()
            with pytest.raises(DeadlineExceeded, match="goes on: waits for nodes: 2 of 3"):
                asked.wait(plan, timeout_s=1)
            assert asked.cancel(plan.plan_id).state == "cancelled"
            with pytest.raises(ResizeRefused, match="cancelled"):
                asked.wait(plan)
            late = asked.resize(3, wait_s=1)
            with pytest.raises(ResizeRefused, match="2 of 3 nodes serve after 1 s"):
                asked.wait(late, timeout_s=LIMIT_S)
        with pytest.raises(ResizeRefused, match="2 copies"):
            resize(endpoints, 1)


def test_rows_that_would_not_fit_are_not_moved() -> None:
    settings = {"slot_count": 8, "replicas": 1, "memory_limit_bytes": 2**28}
    with LocalCluster(servers=2, settings=settings) as cluster, Client(cluster.endpoints) as client:
        # 200 MB: they fit into two processes of 256 MiB, and into none beside the process itself.
        table = client.create_table(TableSpec.sparse("wide", 2**14, optimizer=SGD(0.1)))
        for first in range(0, 3000, 100):
            client.push(table, np.arange(first, first + 100), np.zeros((100, 2**14), np.float32))
        with pytest.raises(ResizeRefused, match="memory_limit_bytes"):
            cluster.resize(1)
        assert cluster.resize(3, timeout_s=LIMIT_S).state == "done"


def test_a_drained_node_holds_nothing_until_a_rebalance(command: Command) -> None:
    with LocalCluster(servers=3, settings={"slot_count": 16}) as cluster, pushing(cluster):
        at = ("--endpoint", cluster.endpoints[0])
        done = command("pserverctl", *at, "drain", "ps-1", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["plan"]["leaving"] == ["ps-1"]
        assert masters(cluster)["ps-1"] == 0
        # Restarted, it is still to hold nothing.
        cluster.kill(1)
        cluster.restart(1)
        report = status(cluster)
        (node,) = [one for one in report["nodes"] if one["node_id"] == "ps-1"]
        assert (node["in_sync_slots"], node["catching_up_slots"]) == (0, 0)
        again = command("pserverctl", *at, "rebalance")
        assert again.returncode == 0, again.stderr
        assert "rebalance to 3 nodes: done" in again.stdout
        assert masters(cluster)["ps-1"] >= 5
        shown = command("pserverctl", *at, "plan", "--cancel")
        assert shown.returncode == 3
        assert "done already" in shown.stderr


def test_trainers_wait_while_a_strict_resize_moves_copies(eventually: Eventually) -> None:
    settings = {"slot_count": 16, "copy_bytes_per_s": 1_048_576}
    with LocalCluster(servers=3, settings=settings) as cluster, pushing(cluster) as pushes:
        # Some seconds' worth: copies that have arrived are taken in half a second at a time.
        pushes.fill(14_000)
        eventually(lambda: pushes.count > 20)
        said: list[str] = []
        with Client(cluster.endpoints, progress=said.append) as other:
            table = other.table("counts")
            counts: list[int] = []

            def look(plan: ResizePlan) -> None:
                # A word takes a moment to come to the one that pushes.
                if plan.state == "moving" and pushes.said:
                    counts.append(pushes.count)

            cluster.resize(4, pause=True, timeout_s=LIMIT_S, progress=look)
            assert len(counts) > 3
            # What was under way ends, and nothing new begins while copies move.
            assert counts[-1] <= counts[0] + 1
            other.pull(table, KEYS)
        assert said[0].startswith("waiting: a resize moves rows")
        assert said[-1].startswith("going on")
        eventually(lambda: pushes.count > counts[-1] + 20)


@pytest.mark.slow
def test_a_local_cluster_starts_the_servers_that_a_command_asks_for(command: Command) -> None:
    script = (
        "import subprocess, sys\n"
        "ctl = [sys.executable, '-m', 'backstay.pserver.ctl.cli']\n"
        "for nodes in '3', '2':\n"
        "    subprocess.run([*ctl, 'resize', nodes, '--timeout', '50'], check=True)\n"
        "subprocess.run([*ctl, 'status'], check=True)\n"
    )
    done = command("backstay", "local", "-n", "2", "--", sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr
    assert "resize to 3 nodes: done" in done.stdout
    assert "resize to 2 nodes: done; leaving: ps-2" in done.stdout
    assert "healthy, 2 nodes" in done.stdout
    assert "has ended" not in done.stderr


def test_the_commands_say_by_their_exit_code_what_came_of_it(command: Command) -> None:
    with LocalCluster(servers=2, settings={"slot_count": 4}) as cluster:
        at = ("--endpoint", cluster.endpoints[0])
        refused = command("pserverctl", *at, "resize", "1", "--json")
        assert refused.returncode == 3
        assert "2 copies of each slot" in json.loads(refused.stdout)["error"]
        late = command("pserverctl", *at, "resize", "3", "--timeout", "0.5", "--json")
        assert late.returncode == 1
        report = json.loads(late.stdout)
        assert "goes on" in report["error"]
        assert report["plan"]["state"] == "waiting_for_nodes"
        shown = command("pserverctl", *at, "plan")
        assert shown.returncode == 0
        assert "resize to 3 nodes: waiting for nodes; waits for nodes: 2 of 3" in shown.stdout
        again = command("pserverctl", *at, "resize", "3", "--no-wait", "--json")
        assert again.returncode == 0
        assert json.loads(again.stdout)["plan"]["plan_id"] == report["plan"]["plan_id"]
        ended = command("pserverctl", *at, "plan", "--cancel", "--json")
        assert ended.returncode == 0
        assert json.loads(ended.stdout)["plan"]["state"] == "cancelled"
        assert command("pserverctl", *at, "resize", "nonsense").returncode == 2
        assert command("pserverctl", "plan").returncode == 2
