"""Jobs under faults, kind by kind: each record counts once in each pass, whichever process dies.

Each test is one run of ``python -m tests.chaos jobs`` on a cluster of its own. Not part of
``make test``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(420)]

ROOT = Path(__file__).resolve().parents[2]
SEED = "11"


def run(*kinds: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "jobs", "--seed", SEED, "--faults", ",".join(kinds)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    *_, line = done.stdout.splitlines() or [""]
    assert line.startswith("JOBS {"), done.stderr
    result: dict[str, Any] = json.loads(line.removeprefix("JOBS "))
    assert (done.returncode, result["verdict"]) == (0, "true"), done.stderr
    assert sorted(result["faults"]) == sorted(set(kinds))
    assert result["records_counted"] > 0
    return result


def test_workers_that_die_and_workers_that_come_late() -> None:
    result = run("worker_sigkill", "workers_sigkill", "worker_sigstop", "worker_blinks")
    assert result["completions_first"] > 0


def test_masters_that_die_one_after_the_other_and_masters_that_wake_up() -> None:
    kinds = ("master_sigkill", "masters_sigkill", "master_sigstop", "master_and_worker_sigkill")
    # A job master that is stopped may wake before another one takes its place.
    assert run(*kinds)["master_starts"] >= 4


def test_servers_that_die_alone_and_with_a_worker() -> None:
    run("server_sigkill", "server_and_worker_sigkill", "server_sigstop", "server_sigkill")


def test_a_job_that_grows_and_shrinks_and_is_stopped_and_killed_as_a_whole() -> None:
    run("scale", "stop_and_resume", "scale", "command_sigkill", "scale")


def test_a_store_that_is_away_and_a_master_that_dies_meanwhile() -> None:
    run("store_down", "store_down_and_master_sigkill")


def test_clusters_that_are_restored_in_the_middle_of_a_job() -> None:
    kinds = ("restore", "restore_and_worker_blinks", "restore_and_master_sigkill", "restore")
    assert run(*kinds)["restores"] == len(kinds)
