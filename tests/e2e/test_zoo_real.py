"""The zoo on real data that may not be shipped: bring it, and say where it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("paddle")
pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.paddle, pytest.mark.slow, pytest.mark.timeout(900)]
# The sampling error of one AUC on the test part of Frappe is 0.0014.
AUC_TOLERANCE = 0.003


def last_metrics(tmp_path: Path, variable: str, file: str, job: str, *options: str) -> Any:
    """Run ``backstay train`` on a job of the zoo, from the root; return the last evaluation."""
    folder = os.environ.get(variable, "")
    if not folder or not (Path(folder) / file).exists():
        pytest.skip(f"{file} is not here: set {variable} to the folder that holds it")
    job_file = str(ROOT / "examples" / job)
    command = [sys.executable, "-m", "backstay.cli", "train", job_file, "--json", *options]
    # The hooks of the job call "python".
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [*command, "--log-dir", str(tmp_path / "log")],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", **os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["evaluations"][-1]["metrics"]


@pytest.mark.parametrize("model", ["deepfm_torch", "deepfm_paddle", "dcn", "xdeepfm"])
def test_frappe(model: str, tmp_path: Path) -> None:
    where = ("BACKSTAY_FRAPPE_DIR", "frappe_ctr.tsv.gz", "ctr/frappe.yaml")
    model_file = f"--model={ROOT}/examples/ctr/{model}.py"
    alone = last_metrics(tmp_path / "alone", *where, model_file, "--local")
    assert alone["auc"] > 0.972
    workers = last_metrics(tmp_path / "workers", *where, model_file)
    assert abs(workers["auc"] - alone["auc"]) < AUC_TOLERANCE


def test_movielens(tmp_path: Path) -> None:
    where = ("BACKSTAY_MOVIELENS_DIR", "ml-100k.inter.gz", "movielens/job.yaml")
    assert last_metrics(tmp_path, *where, "--local")["rmse"] < 0.94


def test_mnist(tmp_path: Path) -> None:
    where = ("BACKSTAY_MNIST_DIR", "t10k-images-idx3-ubyte.gz", "mnist/job.yaml")
    assert last_metrics(tmp_path, *where, "--local")["accuracy"] > 0.96
