"""``pserverctl`` slots, top and completion against real nodes."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import click
import numpy as np
import pytest
from click.shell_completion import ShellComplete

from backstay.config import ClientConfig
from backstay.pserver.client.inspection import ClusterInspection
from backstay.pserver.ctl.cli import main
from backstay.pserver.ctl.completion import complete_node_id
from backstay.pserver.ctl.rates import rates_between
from backstay.pserver.ctl.top import take_sample
from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import TableSpec
from backstay.trainer.client import Client

Command = Callable[..., "subprocess.CompletedProcess[str]"]
Eventually = Callable[[Callable[[], bool]], None]

LIMIT_S = 120.0
PSERVERCTL = (sys.executable, "-m", "backstay.pserver.ctl.cli")


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(servers=3, settings={"slot_count": 64}) as running:
        yield running


@pytest.fixture
def _heeds_ctrl_c() -> Iterator[None]:
    """What is started here must not ignore SIGINT, as a suite in the background does."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def report_of(command: Command, cluster: LocalCluster, *arguments: str) -> Any:
    done = command("pserverctl", "--endpoint", cluster.endpoints[0], *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_slots_tells_who_holds_what(cluster: LocalCluster, command: Command) -> None:
    report = report_of(command, cluster, "slots")
    ids = ["ps-0", "ps-1", "ps-2"]
    assert [node["node_id"] for node in report["nodes"]] == ids
    assert [slot["slot"] for slot in report["slots"]] == list(range(64))
    for node in report["nodes"]:
        held = [slot["master"] for slot in report["slots"]].count(node["node_id"])
        assert node["master_slots"] == held > 0
    for slot in report["slots"]:
        assert len({slot["master"], *slot["in_sync"]}) == 2
    one = report_of(command, cluster, "slots", "--slot", "17")
    assert one == report["slots"][17] | {
        "routing_version": report["routing_version"], "epoch": 1, "copies_missing": 0,
    }  # fmt: skip


def test_the_map_for_people_agrees_with_the_report(cluster: LocalCluster, command: Command) -> None:
    report = report_of(command, cluster, "slots")
    here = {"BACKSTAY_ENDPOINT": cluster.endpoints[1], "COLUMNS": "80"}
    done = command("pserverctl", "slots", **here)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    rows = [line.split() for line in lines if line.startswith((" 0  ", "32  "))]
    letters = [letter for row in rows for letter in row[1:]]
    assert ["ps-" + str("ABC".index(letter)) for letter in letters] == [
        slot["master"] for slot in report["slots"]
    ]
    one = command("pserverctl", "slots", "--slot", "0", **here).stdout.splitlines()
    assert one[0] == "slot 0: term 1, epoch 1 at routing version 1"
    assert one[1] == f"master: {report['slots'][0]['master']}"


def test_a_slot_that_is_not_there_is_a_wrong_argument(
    cluster: LocalCluster, command: Command
) -> None:
    done = command("pserverctl", "--endpoint", cluster.endpoints[0], "slots", "--slot", "64")
    assert done.returncode == 2
    assert "slot: 64 is out of range; the cluster has 0 to 63" in done.stderr


def test_rates_count_what_a_trainer_did_between_two_looks(cluster: LocalCluster) -> None:
    config = ClientConfig()
    with (
        Client(cluster.endpoints) as client,
        ClusterInspection(cluster.endpoints[0], config) as inspection,
    ):
        table = client.create_table(TableSpec.sparse("rates/emb", 4))
        before = take_sample(inspection, 5.0)
        for _ in range(5):
            client.push(table, np.arange(300), np.ones((300, 4), dtype=np.float32))
        client.pull(table, np.arange(200))
        after = take_sample(inspection, 5.0)
    report = rates_between(before, after)
    assert [node["state"] for node in report["nodes"]] == ["ok"] * 3

    def counted(name: str) -> int:
        counts: list[float] = [node[name] * node["interval_s"] for node in report["nodes"]]
        return round(sum(counts))

    assert counted("keys_pushed_per_s") == 1500
    assert counted("keys_pulled_per_s") == 200
    assert counted("pushes_per_s") == 15
    assert all(node["push_p99_ms"] > 0 for node in report["nodes"])
    (grown,) = [one for one in report["tables"] if one["name"] == "rates/emb"]
    # Two copies of each.
    assert grown["rows"] == 600
    assert grown["rows_per_s"] > 0


def test_top_once(cluster: LocalCluster, command: Command) -> None:
    report = report_of(command, cluster, "top", "--once", "--interval", "0.2")
    assert [node["node_id"] for node in report["nodes"]] == ["ps-0", "ps-1", "ps-2"]
    assert {node["state"] for node in report["nodes"]} == {"ok"}
    assert report["total"]["pushes_per_s"] == 0
    here = {"BACKSTAY_ENDPOINT": cluster.endpoints[0], "COLUMNS": "40"}
    done = command("pserverctl", "top", "--once", "--interval", "0.2", **here)
    assert done.returncode == 0, done.stderr
    row = next(line.split() for line in done.stdout.splitlines() if line.startswith(" ps-1 "))
    assert row[:5] == ["ps-1", "0", "0", "0", "0"]


@pytest.mark.usefixtures("_heeds_ctrl_c")
def test_top_goes_on_in_place_until_ctrl_c(
    cluster: LocalCluster, plain_environment: dict[str, str]
) -> None:
    terminal, other_end = pty.openpty()
    process = subprocess.Popen(
        [*PSERVERCTL, "top", "--interval", "0.2"],
        env=plain_environment
        | {"BACKSTAY_ENDPOINT": cluster.endpoints[0], "COLUMNS": "160", "TERM": "xterm"},
        stdin=other_end,
        stdout=other_end,
        stderr=other_end,
    )
    os.close(other_end)
    seen = b""
    deadline = time.monotonic() + LIMIT_S
    # Each look names the total once, and is drawn over the one before.
    while seen.count(b"total") < 3:
        assert time.monotonic() < deadline, seen
        if select.select([terminal], [], [], 1.0)[0]:
            seen += os.read(terminal, 65_536)
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) == 0
    os.close(terminal)
    assert b"\x1b[1A" in seen
    assert b"Traceback" not in seen


@pytest.mark.usefixtures("_heeds_ctrl_c")
def test_top_outlives_the_nodes(plain_environment: dict[str, str]) -> None:
    with LocalCluster(servers=1, settings={"slot_count": 16}) as cluster:
        process = subprocess.Popen(
            [*PSERVERCTL, "--endpoint", cluster.endpoints[0], "top", "--json", "--interval", "0.2"],
            env=plain_environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        try:
            assert json.loads(process.stdout.readline())["nodes"][0]["state"] == "ok"
            cluster.kill(0)
            for line in process.stdout:
                node = json.loads(line)["nodes"][0]
                if node["state"] == "silent":
                    break
            assert "no pserver answers at " in node["error"]
            process.send_signal(signal.SIGINT)
            assert process.wait(LIMIT_S) == 0
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.mark.slow
def test_every_question_shows_the_token(command: Command) -> None:
    secret = "only-for-friends"
    with LocalCluster(servers=2, settings={"slot_count": 16, "token": secret}) as cluster:
        here = ("pserverctl", "--endpoint", cluster.endpoints[0])
        for arguments in (("top", "--once", "--interval", "0.1"), ("slots",), ("config", "get")):
            assert command(*here, *arguments, BACKSTAY_TOKEN=secret).returncode == 0
            refused = command(*here, *arguments, BACKSTAY_TOKEN="a-guessed-one")
            assert refused.returncode == 3
            assert "wrong token" in refused.stderr


def test_ids_of_nodes_are_completed(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    root = click.Group("pserverctl", params=main.params)
    argument = click.Argument(["node"], shell_complete=complete_node_id)
    root.add_command(click.Command("drain", params=[argument]))
    complete = ShellComplete(root, {}, "pserverctl", "_PSERVERCTL_COMPLETE")

    def ids(words: list[str], begun: str) -> list[str]:
        return [item.value for item in complete.get_completions(words, begun)]

    assert ids(["--endpoint", cluster.endpoints[0], "drain"], "ps-") == ["ps-0", "ps-1", "ps-2"]
    monkeypatch.setenv("BACKSTAY_ENDPOINT", cluster.endpoints[1])
    assert ids(["drain"], "ps-2") == ["ps-2"]
    assert ids(["drain"], "x") == []


def test_a_node_that_hangs_and_then_is_lost(command: Command, eventually: Eventually) -> None:
    with LocalCluster(servers=2, settings={"slot_count": 16, "lease_ttl_ms": 60_000}) as cluster:
        here = ("pserverctl", "--endpoint", cluster.endpoints[0])
        cluster.pause(1)
        done = command(*here, "top", "--once", "--interval", "0.2", "--json")
        assert done.returncode == 1, done.stderr
        states = [node["state"] for node in json.loads(done.stdout)["nodes"]]
        assert states == ["ok", "silent"]
        cluster.kill(1)

        def is_short() -> bool:
            done = command(*here, "slots", "--json")
            report = json.loads(done.stdout)
            assert done.returncode == (1 if report["slots_short_of_copies"] else 0)
            return bool(report["slots_short_of_copies"] == 16)

        eventually(is_short)
        done = command(*here, "slots")
        assert done.returncode == 1
        assert "0  " + "A-" * 16 in done.stdout
