"""The Python calls for jobs: what they refuse before anything starts, and what importing costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay.errors import ConfigError

JOB = {"name": "tiny", "model": "model.py", "training": "a.csv"}


def test_the_package_stays_light() -> None:
    code = "import sys, backstay; print(sorted(m for m in sys.modules if 'backstay' in m))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['backstay', 'backstay._version']\n"
    assert {"train", "submit", "Job"} <= set(backstay.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = getattr(backstay, "trian")  # noqa: B009 (as a misspelt call would)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "no job is given"),
        ({"job": JOB, "on": "slurm"}, "on: 'slurm' is neither None nor 'kubernetes'"),
        ({"job": JOB, "use": "serving"}, "use: 'serving' is not one of training, evaluation"),
        ({"job": JOB, "epochs": 0}, r"epochs: 0 is out of range.*\(from the call\)"),
        ({"job": JOB, "on": "kubernetes", "fresh": True}, "--fresh: not with --on kubernetes"),
        ({"job": JOB, "on": "kubernetes"}, "kubernetes: is missing"),
        ({"job": "nowhere.yaml"}, "cannot read the job file 'nowhere.yaml'"),
    ],
)
def test_what_cannot_run_is_an_error_of_ours_and_prints_nothing(
    given: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").touch()
    monkeypatch.setenv("BACKSTAY_ENDPOINT", "127.0.0.1:1")
    with pytest.raises(ConfigError, match=said):
        backstay.submit(**given)
    assert capfd.readouterr() == ("", "")
