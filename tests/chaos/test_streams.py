"""Jobs over topics of Kafka that export, under faults: each record counts once, and is served.

Each test is one run of ``python -m tests.chaos streams`` on a cluster and a broker of its own. The
verdict comes from the job's audit, and from the rows of followers, row by row. Not part of ``make
test``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kafka.broker import require_kafka

pytest.importorskip("torch")
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(420)]

ROOT = Path(__file__).resolve().parents[2]
SEED = "11"
VICTIMS = ("worker", "master", "server", "controller")


@pytest.fixture(autouse=True)
def kafka() -> None:
    require_kafka()


def run(*kinds: str, options: tuple[str, ...] = ()) -> dict[str, Any]:
    words = ["streams", "--seed", SEED, "--faults", ",".join(kinds), *options]
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    *_, line = done.stdout.splitlines() or [""]
    assert line.startswith("STREAMS {"), done.stderr
    result: dict[str, Any] = json.loads(line.removeprefix("STREAMS "))
    assert (done.returncode, result["verdict"]) == (0, "true"), done.stderr
    if sorted(result["faults"]) != sorted(set(kinds)):
        assert "no namespaces" in done.stderr, done.stderr
        pytest.skip(f"only in namespaces: {set(kinds) - set(result['faults'])}")
    assert result["records_counted"] > 0
    return result


def test_a_broker_that_is_killed_and_started_again_or_stands_still() -> None:
    run("broker_sigkill", "broker_at_commit", "broker_sigstop")


def test_a_job_master_that_dies_while_the_broker_stands_still() -> None:
    assert run("master_at_hung_commit")["master_starts"] >= 2


def test_connections_that_are_cut() -> None:
    run("broker_reset", "broker_cut")


def test_another_broker_leads_the_partitions() -> None:
    run("leader_sigkill", options=("--brokers", "3"))


# A job takes longer to begin than to bear a fault.
@pytest.mark.parametrize(
    "steps", ["take lease", "batch journal", "period commit", "increment base"]
)
def test_whoever_dies_in_a_step(steps: str) -> None:
    result = run(*(f"{victim}_at_{step}" for step in steps.split() for victim in VICTIMS))
    assert result["master_starts"] >= 3


def test_a_sink_that_is_full() -> None:
    run("sink_full")


def test_a_sink_that_is_away() -> None:
    run("sink_away")


def test_an_s3_server_that_is_away() -> None:
    run("sink_away", options=("--s3",))


def test_a_follower_that_is_killed_and_increments_that_are_damaged_on_their_way() -> None:
    follower = ("follower_sigkill", "follower_sigstop")
    run(*follower, "part_damaged", "manifest_damaged", "part_damaged", "manifest_damaged")


def test_a_job_that_is_stopped_and_goes_on() -> None:
    run("jobs_stop_and_resume", "command_sigkill")
