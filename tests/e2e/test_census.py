"""The demo, short: quality beside plain Paddle, its last line, and how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("paddle")

pytestmark = pytest.mark.paddle
ROOT = Path(__file__).resolve().parents[2]
PASSES = 3
# The sampling error of one AUC here is 0.003; this is the project's own promise.
AUC_TOLERANCE = 0.003


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_demo_is_as_good_as_plain_paddle() -> None:
    passes = f"--passes={PASSES}"
    alone = run("-m", "examples.census.train", "--local", passes)
    last = run("examples/census/demo.py", passes).splitlines()[-1]
    assert last.startswith("DEMO ")
    figures: dict[str, Any] = json.loads(last[len("DEMO ") :])
    assert figures["auc"] > float(alone.split()[2].rstrip(",")) - AUC_TOLERANCE
    assert figures["examples"] == PASSES * 29_304
    assert (figures["servers"], figures["trainers"]) == (3, 2)
    # Two sparse tables and a dense one, in batches of 256.
    assert figures["pushes_acknowledged"] >= 3 * figures["examples"] // 256
    for name in ("logloss", "seconds", "examples_per_s"):
        assert figures[name] > 0


def test_reader() -> None:
    from examples.census.reader import DEEP_FIELDS, NUMBERS, WIDE_FIELDS, load

    splits = load()
    assert [len(split) for split in splits] == [29_304, 3_257, 16_281]
    training, _, test = splits
    assert training.keys.shape[1] == len(WIDE_FIELDS) > len(DEEP_FIELDS)
    assert abs(training.numbers.mean(axis=0)).max() < 1e-4
    assert training.numbers.shape[1] == len(NUMBERS)
    assert training.labels.mean() == pytest.approx(0.241, abs=0.002)
    assert test.labels.mean() == pytest.approx(0.236, abs=0.001)
