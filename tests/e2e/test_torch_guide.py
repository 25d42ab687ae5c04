"""The PyTorch guide's ten-line change is the difference of two programs that run."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from backstay.pserver.local_cluster import LocalCluster

pytestmark = pytest.mark.torch
ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
# What the guide says both print. Without learning it is 0.69.
LOSS = 0.39
TOLERANCE = 0.01


def guide() -> str:
    return (ROOT / "docs" / "guide" / "pytorch.md").read_text(encoding="utf-8")


def run(script: str, **environment: str) -> float:
    done = subprocess.run(
        [sys.executable, str(QUICKSTART / script)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout.rsplit(":", 1)[1])


def test_the_diff_in_the_guide() -> None:
    names = ("single_torch.py", "cluster_torch.py")
    before, after = ((QUICKSTART / name).read_text(encoding="utf-8").splitlines() for name in names)
    shown = re.search(r"```diff\n(.*?)\n```", guide(), re.DOTALL)
    assert shown
    expected = difflib.unified_diff(before, after, *names, lineterm="")
    assert shown[1].splitlines() == list(expected)
    added = [line for line in shown[1].splitlines()[2:] if line.startswith("+") and line != "+"]
    assert len(added) <= 10


@pytest.mark.slow
def test_both_programs_learn_the_same() -> None:
    alone = run("single_torch.py")
    with LocalCluster(servers=3) as cluster:
        on_cluster = run("cluster_torch.py", BACKSTAY_ENDPOINT=",".join(cluster.endpoints))
    documented = re.findall(r"^mean loss of the last 20 steps: ([0-9.]+)$", guide(), re.MULTILINE)
    assert len(documented) == 2
    for figure in (alone, on_cluster, *map(float, documented)):
        assert figure == pytest.approx(LOSS, abs=TOLERANCE)
