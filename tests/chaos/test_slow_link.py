"""A slot that takes longer on the wire than a push may take does not cost anybody's copies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos import sandbox

pytestmark = pytest.mark.chaos

ROOT = Path(__file__).resolve().parents[2]


def test_a_node_comes_back_over_a_slow_link_and_nobody_is_called_silent() -> None:
    reason = sandbox.why_not()
    if reason:
        pytest.skip(f"no slow link without namespaces: {reason}")
    done = subprocess.run(
        [*sandbox.command(), sys.executable, "-m", "tests.chaos.slow_link"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    *_, line = done.stdout.splitlines() or [""]
    assert line.startswith("SLOW_LINK {"), done.stderr
    result = json.loads(line.removeprefix("SLOW_LINK "))
    # Else it tried nothing: a push may take one second.
    assert result["slot_s"] > 1
    assert result["copies"] > 1
    assert result["pushes"] > 20
    assert done.returncode == 0, result
