"""One push, followed by its (stream, sequence) through the logs of its master and its backup."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from backstay.pserver.local_cluster import LocalCluster, LocalServer
from backstay.tables import SGD, TableSpec, Zeros
from backstay.trainer import Client

SPEC = TableSpec.sparse("t", 2, optimizer=SGD(1.0), initializer=Zeros())
ID = ("job", "pass", "task", "sequence")
Eventually = Callable[[Callable[[], bool]], None]


def steps(server: LocalServer, log_format: str) -> list[dict[str, Any]]:
    """The lines about pushes, each as what it says and its fields."""
    found = []
    for line in server.log_path.read_text().splitlines():
        if log_format == "json":
            entry = json.loads(line)
            if entry["logger"] == "backstay_net::push":
                found.append(entry)
        elif "backstay_net::push: " in line:
            text = line.partition("backstay_net::push: ")[2]
            fields = {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)\b", text)}
            found.append({"message": text.partition(" job=")[0], **fields})
    return found


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_a_push_can_be_followed_through_both_nodes(log_format: str, eventually: Eventually) -> None:
    # One key is in one slot, so one node alone is its master. The log is at its usual level.
    settings = {"slot_count": 2, "log_format": log_format, "trace_pushes": True}
    with LocalCluster(servers=2, settings=settings) as cluster:
        with Client(cluster.endpoints) as client:
            client.create_table(SPEC)
            for _ in range(2):
                client.push("t", np.array([7], np.uint64), np.ones((1, 2), np.float32))
        received = [
            (server, entry)
            for server in cluster.servers
            for entry in steps(server, log_format)
            if entry["message"] == "push received"
        ]
        assert len(received) == 2
        master, first = received[0]
        backup = next(server for server in cluster.servers if server is not master)
        wanted = {name: first[name] for name in ID}

        def way(server: LocalServer) -> list[dict[str, Any]]:
            entries = steps(server, log_format)
            return [one for one in entries if {name: one.get(name) for name in ID} == wanted]

        def said(server: LocalServer) -> list[str]:
            return [entry["message"] for entry in way(server)]

        # A backup applies when it hears of the decision, after the answer.
        eventually(lambda: said(backup) == ["push staged for its master", "push applied"])
        assert said(master) == [
            *("push received", "push staged", "push applied", "push committed", "push answered")
        ]
        (lsn,) = {entry["lsn"] for entry in way(master) + way(backup) if "lsn" in entry}
        assert lsn > 0
        (instance,) = {entry["master"] for entry in way(master) + way(backup) if "master" in entry}
        assert instance > 0
        if log_format == "json":
            assert {entry["node"] for entry in way(master)} == {master.node_id}
            assert {entry["node"] for entry in way(backup)} == {backup.node_id}
            # Python's lines and the data plane's have the same members.
            every = [json.loads(line) for line in master.log_path.read_text().splitlines()]
            common = {"time", "level", "logger", "node", "message"}
            assert all(common <= entry.keys() for entry in every)
            assert {entry["logger"].partition(".")[0] for entry in every} >= {"backstay"}
            assert all(len(entry["time"]) == len(every[0]["time"]) for entry in every)


def test_pushes_are_not_logged_unless_asked_for() -> None:
    with LocalCluster(servers=1, settings={"slot_count": 2}) as cluster:
        with Client(cluster.endpoints) as client:
            client.create_table(SPEC)
            client.push("t", np.array([7], np.uint64), np.ones((1, 2), np.float32))
        assert steps(cluster.servers[0], "text") == []
