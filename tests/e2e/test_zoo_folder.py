"""A folder of ``backstay zoo init`` trains as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from backstay.config import ENDPOINT_VARIABLES

pytestmark = pytest.mark.slow


def backstay(folder: Path, *words: str) -> str:
    """Run ``backstay`` in a folder; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "backstay.cli", *words],
        cwd=folder,
        env={**os.environ, **dict.fromkeys(ENDPOINT_VARIABLES, "")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_a_new_folder_passes_the_dry_run_and_trains(framework: str, tmp_path: Path) -> None:
    pytest.importorskip(framework)
    backstay(tmp_path, "zoo", "init", "clicks", "--framework", framework)
    folder = tmp_path / "clicks"
    tried: dict[str, Any] = json.loads(backstay(folder, "train", "job.yaml", "--dry-run", "--json"))
    assert (tried["framework"], tried["warnings"]) == (framework, [])
    done: dict[str, Any] = json.loads(backstay(folder, "train", "job.yaml", "--local", "--json"))
    assert (done["state"], done["examples"]) == ("done", 4_000)
    # It learns: the users and ads of the test data are those of the training data.
    assert done["evaluations"][-1]["metrics"]["auc"] > 0.75
