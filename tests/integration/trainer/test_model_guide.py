"""The guide's page "your own model in ten minutes" is followed to the letter, in one process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from backstay.job.model_definition import load
from backstay.job_spec import JobSpec
from backstay.trainer.worker.local_run import LocalRun

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")

PAGE = Path(__file__).resolve().parents[3] / "docs" / "guide" / "model.md"


def files_of_the_page(folder: Path) -> None:
    """Write each block that has a title."""
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r'^```\w+ title="([\w.]+)"\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in blocks] == [
        "make_data.py", "model_paddle.py", "model_torch.py", "job.yaml",
    ]  # fmt: skip
    for name, content in blocks:
        (folder / name).write_text(content, encoding="utf-8")


@pytest.mark.parametrize("framework", ["paddle", "torch"])
def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, framework: str) -> None:
    pytest.importorskip(framework)
    monkeypatch.chdir(tmp_path)
    files_of_the_page(tmp_path)
    subprocess.run([sys.executable, "make_data.py"], check=True, timeout=60)
    document = yaml.safe_load((tmp_path / "job.yaml").read_text(encoding="utf-8"))
    spec = JobSpec.from_mapping({**document, "model": f"model_{framework}.py"})
    result = LocalRun(spec, load(spec.model)).run()
    assert result.evaluations[-1]["auc"] > 0.75
