"""The benchmark runs from its command line and ends with its figures."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(shutil.which("rustc") is None, reason="the bare ceiling is built with rustc")
def test_a_quick_run_measures_what_it_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "bench", "--quick", "--no-peers", "--json", str(file)),
            *("--only", "sparse_3328", "memory"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
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
