"""The benchmark runs from its command line and ends with its figures."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gates

ROOT = Path(__file__).resolve().parents[2]


def run_quickly(
    file: Path, *groups: str, timeout_s: float = 100.0
) -> subprocess.CompletedProcess[str]:
    """Run some groups; their figures go to the file as well."""
    words = ["--quick", "--no-peers", "--json", str(file), "--only", *groups]
    return subprocess.run(
        [sys.executable, "-m", "bench", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("rustc") is None, reason="the bare ceiling is built with rustc")
def test_a_quick_run_measures_what_it_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = run_quickly(file, "sparse_3328", "memory")
    assert done.returncode == 0, done.stderr
    word, text = done.stdout.splitlines()[-1].split(" ", 1)
    assert word == "BENCH"
    figures = json.loads(text)
    assert {"sparse_3328_over_ceiling", "memory_over_payload"} <= figures.keys()
    assert all(value > 0 for value in figures.values())
    document = json.loads(file.read_text())
    assert document["quick"] is True
    assert document["problems"] == []
    copies = {"two_copies", "two_copies_overlapped"}
    contestants = {"ceiling", "backstay", "overlapped"} | copies
    assert document["rounds"]["sparse_3328"].keys() == contestants
    # Paddle was not asked for, so its ratio is neither measured nor a failure.
    assert "sparse_3328_over_paddle" not in figures
    assert "not measured" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_quick_run_writes_and_restores_checkpoints_and_resizes(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = run_quickly(file, "checkpoint", "restore", "resize")
    assert done.returncode == 0, done.stderr
    rounds = json.loads(file.read_text())["rounds"]
    (checkpoint,) = rounds["checkpoint"]["backstay"]
    # These do not depend on the machine: 5% of the rows, and as many bytes as the rows have.
    assert 0.05 <= checkpoint["changed_over_full"] < 0.08
    assert 1.0 <= checkpoint["full_over_state"] < 1.01
    assert checkpoint["p99_over_normal"] > 0
    (restore,) = rounds["restore"]["backstay"]
    assert 0 < restore["ready_s"] < restore["first_pull_s"]
    assert restore["cache_dropped"] == 0
    (resize,) = rounds["resize"]["backstay"]
    assert 0.95 < resize["moved_over_fewest"] < 1.5
    assert resize["longest_push_s"] > 0


@pytest.mark.slow
def test_a_quick_run_trains_beside_a_plain_process(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "figures.json"
    done = run_quickly(file, "train", timeout_s=280.0)
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())["figures"]
    for name in ("train_1_over_plain", "train_2_over_1", "train_tasks_1000_over_20000"):
        assert figures[name]["median"] > 0
