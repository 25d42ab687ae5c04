"""``backstay train`` on a model of the zoo: the same file here and with workers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.zoo_data import write_frappe

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
RECORDS = 20_000
# Until the AUC has levelled out: on the way there, where a model begins decides.
PASSES = 10
COMMAND = [sys.executable, "-m", "backstay.cli", "train"]

# The data comes from a command of the job itself, as in examples/ctr/frappe.yaml.
JOB = f"""\
name: clicks
model: {ROOT}/examples/ctr/deepfm_torch.py
model_params: {{fields: 10}}
hooks:
  before:
    - {sys.executable} {ROOT}/examples/common/split.py --by position "$CLICKS" "$FOLDER"
  after:
    - echo $BACKSTAY_JOB_RESULT > "$FOLDER/result"
training: $FOLDER/train.tsv
validation: $FOLDER/test.tsv
epochs: {PASSES}
batch_size: 128
records_per_task: 2000
workers: 2
servers: {{local: 1, replicas: 1}}
"""


def train(folder: Path, *options: str) -> dict[str, Any]:
    """Run the command in a folder of its own; return what ``--json`` prints."""
    folder.mkdir()
    write_frappe(folder / "log.tsv", RECORDS, seed=0)
    (folder / "job.yaml").write_text(JOB)
    done = subprocess.run(
        [*COMMAND, str(folder / "job.yaml"), "--json", *options],
        env={
            "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"),
            "CLICKS": str(folder / "log.tsv"), "FOLDER": str(folder),
        },
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (folder / "result").read_text() == "done\n"
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_the_same_file_here_and_with_workers(tmp_path: Path) -> None:
    here = train(tmp_path / "here", "--local")
    there = train(tmp_path / "there")
    for result in (here, there):
        assert result["examples"] == RECORDS * 8 // 10 * PASSES
        assert len(result["evaluations"]) == PASSES
    auc_here, auc_there = (r["evaluations"][-1]["metrics"]["auc"] for r in (here, there))
    assert auc_here > 0.7
    # 2,000 examples to test on: an AUC has a sampling error of 0.01.
    assert abs(auc_there - auc_here) < 0.03
