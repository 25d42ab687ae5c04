"""DeepFM on generated clicks: the reader, and the cluster beside plain Paddle."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("paddle")

from examples.ctr.generate import write_criteo
from examples.deepfm.reader import load

pytestmark = pytest.mark.paddle
ROOT = Path(__file__).resolve().parents[2]
ROWS, PASSES, BATCH_SIZE = 30_000, 1, 128
# 3,000 examples to test on: an AUC has a sampling error of 0.01.
AUC_TOLERANCE = 0.02


def train(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "examples.deepfm.train", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("DEEPFM ")
    figures: dict[str, Any] = json.loads(last[len("DEEPFM ") :])
    return figures


def test_cluster_beside_plain_paddle(tmp_path: Path) -> None:
    path = tmp_path / "clicks.txt.gz"
    best = write_criteo(path, ROWS, seed=1)
    arguments = (
        *("--data", str(path)),
        *("--passes", str(PASSES)),
        *("--batch-size", str(BATCH_SIZE)),
    )
    alone = train(*arguments, "--local")
    on_cluster = train(*arguments)
    assert 0.7 < alone["auc"] < best
    assert on_cluster["auc"] > alone["auc"] - AUC_TOLERANCE
    assert on_cluster["examples"] == alone["examples"] == ROWS * 8 // 10 * PASSES


def test_the_generator_repeats_itself(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path, seed in zip(paths, (3, 3, 4), strict=True):
        write_criteo(path, 100, seed)
    first, again, other = (path.read_bytes() for path in paths)
    assert first == again != other


def criteo_line(label: str = "1", number: str = "5", category: str = "0a1b2c3d") -> str:
    return "\t".join([label, *[number] * 13, *[category] * 26]) + "\n"


def test_reader_keys(tmp_path: Path) -> None:
    path = tmp_path / "clicks"
    lines = [criteo_line(), criteo_line(number="", category="")]
    lines += [criteo_line(label="0", number=number) for number in ("-1", "0", "5", "1000000")]
    path.write_text("".join(lines) + criteo_line() * 6, encoding="ascii")
    keys = np.concatenate([split.keys for split in load(path, "criteo")])
    assert keys.shape == (12, 39)
    # No field shares a key with another, and a missing value is a value of its own.
    assert len(np.unique(keys[0])) == len(np.unique(keys[1])) == 39
    assert not np.isin(keys[1], keys[[0, 2, 3, 4, 5]]).any()
    assert len(np.unique(keys[[0, 1, 2, 3, 5], 0])) == 5
    assert len(load(path, "criteo", rows=10)[0]) == 8


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1\t2\t3\n", "3 columns, 40 expected"),
        (criteo_line(label="7"), "label is '7'"),
        (criteo_line(number="many"), "many"),
        (criteo_line(category="xyz"), "xyz"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "clicks"
    path.write_text(criteo_line() + line, encoding="ascii")
    with pytest.raises(ValueError, match=f"clicks, line 2: .*{message}"):
        load(path, "criteo")


def test_too_few_rows(tmp_path: Path) -> None:
    path = tmp_path / "clicks"
    path.write_text(criteo_line(), encoding="ascii")
    with pytest.raises(ValueError, match="too few"):
        load(path, "criteo")


def test_a_file_that_is_not_there_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.deepfm.train", "--data", "nope.gz"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert "--data nope.gz cannot be read" in done.stderr
    assert "Traceback" not in done.stderr
