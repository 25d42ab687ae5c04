"""DeepFM on the Frappe log, which may not be shipped: bring it, and say where it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("paddle")

FOLDER = os.environ.get("BACKSTAY_FRAPPE_DIR", "")
FILE = Path(FOLDER) / "frappe_ctr.tsv.gz"
ROOT = Path(__file__).resolve().parents[2]
AUC_TOLERANCE = 0.003

pytestmark = [
    pytest.mark.paddle,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (FOLDER and FILE.exists()),
        reason="the Frappe log is not here: set BACKSTAY_FRAPPE_DIR to a folder that holds "
        "frappe_ctr.tsv.gz (see examples/deepfm/README.md)",
    ),
]


def auc_of(*arguments: str) -> float:
    command = ["-m", "examples.deepfm.train", "--form", "frappe", "--data", str(FILE)]
    done = subprocess.run(
        [sys.executable, *command, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return float(json.loads(done.stdout.splitlines()[-1][len("DEEPFM ") :])["auc"])


def test_cluster_beside_plain_paddle() -> None:
    alone = auc_of("--local")
    assert alone > 0.963
    assert auc_of() > alone - AUC_TOLERANCE
