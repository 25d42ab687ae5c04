"""``pserverctl config`` against real nodes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from backstay.pserver.local_cluster import LocalCluster

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(servers=2, settings={"slot_count": 16}) as running:
        yield running


def read(command: Command, endpoint: str, *arguments: str) -> Any:
    done = command("pserverctl", "--endpoint", endpoint, "config", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_is_set_at_one_node_is_read_at_the_other(
    cluster: LocalCluster, command: Command
) -> None:
    here, there = cluster.endpoints
    before = read(command, here, "get")
    assert (before["revision"], len(before["settings"])) == (0, 9)
    after = read(command, here, "set", "checkpoint_url=/srv/points", "checkpoint_every_s=600")
    assert after["revision"] > 0
    seen = read(command, there, "get")
    assert seen == after
    values = {one["name"]: one["value"] for one in seen["settings"]}
    assert values["checkpoint_url"] == "/srv/points"
    assert values["checkpoint_every_s"] == 600
    assert values["moves_at_once"] == 256
    # The bare value, for scripts.
    done = command("pserverctl", "--endpoint", there, "config", "get", "checkpoint_url")
    assert done.stdout == "/srv/points\n"
    # Who has looked at the settings before they changed is refused.
    late = command(
        *("pserverctl", "--endpoint", there, "config", "set", "--revision", "0"),
        "moves_at_once=8",
    )
    assert late.returncode == 3
    assert "the settings were changed since revision 0" in late.stderr
    assert read(command, there, "get") == after


def test_the_settings_for_people(cluster: LocalCluster, command: Command) -> None:
    here = ("pserverctl", "--endpoint", cluster.endpoints[0], "config")
    done = command(*here, "set", "checkpoint_keep_last=5")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("checkpoint_keep_last = 5\nsettings are at revision ")
    lines = command(*here, "get").stdout.splitlines()
    row = next(line for line in lines if "checkpoint_keep_last" in line)
    assert row.split() == ["checkpoint_keep_last", "5", "3", "1", "to", "10000"]
    explained = command(*here, "get", "--explain", "checkpoint_keep_last").stdout
    assert explained == (
        "checkpoint_keep_last = 5\n"
        "    How many of the newest checkpoints are kept. (default: 3; allowed: 1 to 10000)\n"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("set", "moves_at_once=0"), "moves_at_once: 0 is out of range; allowed is 1 to 65536"),
        (("set", "move_at_once=1"), "no such setting; did you mean 'moves_at_once'?"),
        (("get", "checkpoint_uri"), "no such setting; did you mean 'checkpoint_url'?"),
        (("set", "moves_at_once"), "'moves_at_once' is not of the form NAME=VALUE"),
        (("set",), "give at least one NAME=VALUE"),
    ],
)
def test_a_wrong_name_or_value_ends_with_2(
    cluster: LocalCluster, command: Command, arguments: tuple[str, ...], says: str
) -> None:
    done = command("pserverctl", "--endpoint", cluster.endpoints[0], "config", *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
