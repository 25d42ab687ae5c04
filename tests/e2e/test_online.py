"""``make demo-online``, short: each click once, a model that keeps up, and how it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("confluent_kafka")
pytest.importorskip("paddle")

from tests.kafka.broker import require_kafka

pytestmark = pytest.mark.paddle
ROOT = Path(__file__).resolve().parents[2]
DEMO = "examples/online/demo.py"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, DEMO, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_each_click_counts_once_and_the_followed_model_keeps_up() -> None:
    require_kafka()
    # Few clicks a second: machines of tests are shared.
    demo = run("--seconds=40", "--warm-up=20000", "--rate=1000")
    assert demo.returncode == 0, demo.stderr + demo.stdout
    last = demo.stdout.splitlines()[-1]
    assert last.startswith("ONLINE ")
    figures: dict[str, Any] = json.loads(last[len("ONLINE ") :])
    assert figures["records_once"] is True
    assert figures["records"] == figures["written"] > 40_000
    assert figures["periods"] >= 1
    assert figures["auc_frozen"] < figures["auc_follower"] < figures["auc_best"]
    assert figures["auc_frozen"] < figures["auc_trainer"] < figures["auc_best"]
    assert 0 < figures["delay_p50_s"] <= figures["delay_p99_s"]
    assert figures["pushes"] > 100
    # Most users come once and get no row; ads that are gone lose theirs.
    assert 0 < figures["rows_expired"] <= figures["rows_admitted"] < figures["ids_met"] / 2
    assert figures["rows_end"] == figures["rows_admitted"] - figures["rows_expired"]
    assert 0 < figures["memory_end_mib"] < 2 * figures["memory_start_mib"]
    assert figures["killed"] == ["worker", "ps-1", "job master", "broker"]
    assert figures["master_starts"] == 2
    for name in ("worker_recovery_ms", "failover_ms", "master_recovery_ms", "broker_recovery_ms"):
        assert figures[name] > 0, name


def test_without_java_it_says_what_to_install(tmp_path: Path) -> None:
    demo = run(PATH=str(tmp_path))
    assert demo.returncode == 2
    assert demo.stderr.splitlines() == [
        "The demo needs a Kafka broker, and it cannot run here: java and mvn not installed "
        "(Debian: apt-get install maven default-jre-headless)"
    ]


def test_a_wrong_argument_is_named() -> None:
    demo = run("--seconds=0")
    assert demo.returncode == 2
    assert "--seconds and --rate must be above 0" in demo.stderr
