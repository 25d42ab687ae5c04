"""``backstay train --local``: what a job file asks for and one process does not do is said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.tiny_jobs import write_clicks, write_model

JOB = """\
name: clicks
model: {model}
training: train.csv
exports: served
prometheus: 127.0.0.1:0
hooks: {{each_pass: ["true"]}}
"""


def test_what_local_training_does_nothing_with_is_named(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    write_clicks(tmp_path / "train.csv", 100)
    (tmp_path / "job.yaml").write_text(JOB.format(model=write_model(tmp_path, "torch").name))
    command = [sys.executable, "-m", "backstay.cli", "train", "job.yaml", "--local"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True
    )
    said = "clicks: --local does nothing with exports, hooks.each_pass, prometheus"
    assert said in done.stdout + done.stderr
    assert not (tmp_path / "served").exists()
