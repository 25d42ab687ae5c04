"""The fault list, line by line: real processes, a seed, and a verdict from histories.

Each test is one run of ``python -m tests.chaos`` on a cluster of its own.
docs/internals/fault-matrix.md lists what they try. Not part of ``make test``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import sandbox

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(420)]

ROOT = Path(__file__).resolve().parents[2]
SEED = "11"
# Longer than the aim, which docs/benchmarks.md is about: a machine that runs other tests
# beside this one is given more.
KILL_LIMIT_MS = 3000.0
LEASE_LIMIT_MS = 3000.0 + 3000.0
END_LIMIT_S = 10.0


@pytest.fixture(scope="module")
def namespaces() -> None:
    reason = sandbox.why_not()
    if reason:
        pytest.skip(f"no faults of the network without namespaces; {reason}")


def run(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--seed", SEED, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    *_, line = done.stdout.splitlines() or [""]
    assert line.startswith("CHAOS {"), done.stderr
    result: dict[str, Any] = json.loads(line.removeprefix("CHAOS "))
    assert (done.returncode, result["verdict"], result["stuck"]) == (0, "true", []), done.stderr
    assert result["pushes_acknowledged"] > 0
    return result


def failover_max_ms(result: dict[str, Any], kind: str) -> float:
    return float(result["failover_ms"][kind]["max"])


@pytest.mark.parametrize("store", ["etcd", "embedded"])
def test_process_sigkill_sigstop_slow_start_crash_loop(store: str) -> None:
    kinds = ("node_sigkill", "node_sigterm", "node_crash_loop", "node_slow_start", "node_sigstop")
    result = run("--store", store, "--replicas", "2", "--faults", ",".join(kinds))
    assert result["faults"] == dict.fromkeys(sorted(kinds), 1)
    assert failover_max_ms(result, "node_sigkill") < KILL_LIMIT_MS
    assert failover_max_ms(result, "node_sigstop") < LEASE_LIMIT_MS


def test_target_client_in_the_middle_of_pushes() -> None:
    kinds = "trainer_sigkill,trainer_sigkill,trainer_sigstop"
    result = run("--store", "embedded", "--replicas", "2", "--faults", kinds)
    assert result["faults"] == {"trainer_sigkill": 2, "trainer_sigstop": 1}


def test_target_controller_during_repair_and_two_faults_in_a_row() -> None:
    kinds = "controller_sigkill_during_repair,pair,pair,pair"
    result = run("--store", "embedded", "--replicas", "3", "--faults", kinds)
    assert sum(result["faults"].values()) == 4
    assert result["faults"].get("controller_sigkill_during_repair") == 1


@pytest.mark.parametrize(
    ("store", "how"), [("etcd", []), ("embedded", ["--unclean"])], ids=["stopped", "killed"]
)
def test_target_whole_cluster_at_once(store: str, how: list[str]) -> None:
    run("restart", "--store", store, "--replicas", "2", *how)


@pytest.mark.usefixtures("namespaces")
def test_network_partitions_full_one_way_and_partial() -> None:
    kinds = ("partition", "partition_in", "partition_out", "partition_pair", "half_open")
    result = run("--store", "etcd", "--replicas", "2", "--faults", ",".join(kinds))
    for kind in ("partition", "partition_in", "partition_out", "half_open"):
        assert failover_max_ms(result, kind) < LEASE_LIMIT_MS


@pytest.mark.usefixtures("namespaces")
def test_network_drop_delay_duplicate_reorder_slow_reset() -> None:
    kinds = ("drop", "delay", "duplicate", "slow_link", "reset", "drop", "delay", "reset")
    run("--store", "embedded", "--replicas", "2", "--faults", ",".join(kinds))


@pytest.mark.usefixtures("namespaces")
def test_coordinator_lease_lost_while_the_primary_runs() -> None:
    result = run("--store", "etcd", "--replicas", "2", "--faults", "cut_from_store")
    assert failover_max_ms(result, "cut_from_store") < LEASE_LIMIT_MS


def test_coordinator_leader_and_majority_killed_and_paused() -> None:
    kinds = "store_leader_sigkill,store_leader_sigstop,store_majority_sigkill"
    result = run("--store", "etcd", "--replicas", "2", "--outage-s", "8", "--faults", kinds)
    for figures in result["failover_ms"].values():
        assert figures["max"] < KILL_LIMIT_MS


def test_coordinator_down_for_a_minute_and_the_data_path_goes_on() -> None:
    arguments = ("--store", "etcd", "--replicas", "2", "--outage-s", "60")
    result = run(*arguments, "--faults", "store_down")
    assert failover_max_ms(result, "store_down") < KILL_LIMIT_MS
    during = result["throughput"]["etcd"]["during"]
    assert during["grains"] >= 590
    assert during["empty_grains"] < during["grains"] / 10


def test_without_namespaces_everything_runs_on_loopback() -> None:
    result = run("--loopback", "--store", "etcd", "--replicas", "2", "--faults", "node_sigkill")
    assert result["network_faults"] is False


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_nothing_behind(number: int) -> None:
    mark = f"CHAOS_TEST={os.getpid()}-{number}"
    name, value = mark.split("=")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.chaos", "--store", "etcd", "--minutes", "2"],
        cwd=ROOT,
        env=os.environ | {name: value},
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    # The first fault has been told: all its processes run.
    process.stderr.readline()
    process.stderr.readline()
    assert len(processes_with(mark)) > 8
    process.send_signal(number)
    process.wait(END_LIMIT_S)
    process.stderr.close()
    deadline_s = time.monotonic() + END_LIMIT_S
    while left := processes_with(mark):
        assert time.monotonic() < deadline_s, left
        time.sleep(0.05)


def processes_with(mark: str) -> list[str]:
    """Processes that have inherited this variable."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("store", ["etcd", "embedded"])
def test_exact_places_checkpoints_while_nodes_die_and_stand_still(store: str) -> None:
    kinds = ("checkpoint+node_sigkill", "checkpoint+node_sigstop")
    result = run("--store", store, "--faults", ",".join(kinds))
    assert result["faults"] == dict.fromkeys(kinds, 1)
    assert result["checkpoints"] >= len(kinds)
    assert result["checkpoint_faults"] == 0
