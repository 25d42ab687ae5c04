"""Trainer processes are heard, and stopped when one of them fails."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backstay.pserver.local_cluster import LocalCluster
from examples.common.launch import ProcessFailed, run_trainers, stops_held_back

REPORTS = """
import json, os
print("a line of its own")
names = [name for name in os.environ if name.startswith(("PADDLE_", "TRAINING_"))]
print("REPORT " + json.dumps({name: os.environ[name] for name in names}))
"""
# Trainer 1 fails; trainer 0 would run for ever.
FAILS = """
import os, sys, time
if os.environ["PADDLE_TRAINER_ID"] == "1":
    sys.exit("the disk is full")
open({path!r}, "w").write(str(os.getpid()))
time.sleep(1000)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(servers=1) as running:
        yield running


def run(cluster: LocalCluster, program: str, trainers: int = 2) -> list[dict[str, Any]]:
    reports: list[dict[str, Any]] = []
    run_trainers(["-c", program], trainers=trainers, cluster=cluster, on_report=reports.append)
    return reports


def test_reports_come_with_each_trainers_place(cluster: LocalCluster) -> None:
    reports = run(cluster, REPORTS)
    assert sorted(report["PADDLE_TRAINER_ID"] for report in reports) == ["0", "1"]
    for report in reports:
        assert report["PADDLE_TRAINERS_NUM"] == "2"
        assert report["PADDLE_PSERVERS_IP_PORT_LIST"] == cluster.endpoints[0]
        assert report["TRAINING_ROLE"] == "TRAINER"


def test_a_failure_is_named_and_stops_the_others(cluster: LocalCluster, tmp_path: Path) -> None:
    path = tmp_path / "pid"
    with pytest.raises(ProcessFailed, match=r"(?s)trainer 1 failed.*the disk is full"):
        run(cluster, FAILS.format(path=str(path)))
    if path.exists() and path.read_text():  # it may have been stopped before it came so far
        alive = subprocess.run(
            [sys.executable, "-c", f"import os; os.kill({path.read_text()}, 0)"],
            capture_output=True,
            check=False,
        )
        assert alive.returncode != 0


def test_a_signal_is_named(cluster: LocalCluster) -> None:
    with pytest.raises(ProcessFailed, match="killed by signal 9"):
        run(cluster, "import os; os.kill(os.getpid(), 9)", trainers=1)


def test_a_dead_server_ends_the_run() -> None:
    with LocalCluster(servers=2) as cluster:
        cluster.kill(1)
        with pytest.raises(ProcessFailed, match=r"server ps-1 .*has died"):
            run(cluster, "import time; time.sleep(1000)")


def test_a_stop_waits_until_a_started_process_is_known() -> None:
    class Stopped(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stopped

    known = []

    def start() -> None:
        with stops_held_back():
            signal.raise_signal(signal.SIGTERM)
            known.append("process")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        with pytest.raises(Stopped):
            start()
        assert known == ["process"]
        assert signal.getsignal(signal.SIGTERM) is stop
    finally:
        signal.signal(signal.SIGTERM, before)
