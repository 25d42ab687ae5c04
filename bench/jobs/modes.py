"""AUC and examples/s of each mode on census income: the table of docs/guide/modes.md.

Each row is one ``backstay train`` with two workers and two servers on this machine, Wide & Deep in
Paddle. Mode geo needs SGD, so it and async are also run with that.

Usage: ``python -m bench.jobs.modes``
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.jobs.local import print_result

CENSUS = Path(__file__).resolve().parents[2] / "examples" / "census"
JOB_LIMIT_S = 280.0
TAIL_CHARACTERS = 2000
SGD = """

def optimizer(parameters):
    return paddle.optimizer.SGD(0.2, parameters=parameters)
"""
ROWS = (
    ("async", "Adagrad", {"kind": "async", "steps_in_flight": 2}),
    ("bounded", "Adagrad", {"kind": "bounded", "staleness": 4}),
    ("sync", "Adagrad", {"kind": "sync"}),
    ("async", "SGD", {"kind": "async", "steps_in_flight": 2}),
    ("geo", "SGD", {"kind": "geo", "local_steps": 8}),
)


def run(mode: dict[str, Any], optimizer: str, epochs: int, folder: Path) -> dict[str, float]:
    """Run one job; return its test AUC and its examples/s while it trained."""
    for name in ("census_features.py", "wide_deep_paddle.py"):
        (folder / name).write_text((CENSUS / name).read_text(encoding="utf-8"), encoding="utf-8")
    if optimizer == "SGD":
        with (folder / "wide_deep_paddle.py").open("a", encoding="utf-8") as model:
            model.write(SGD)
    job = (CENSUS / "job.yaml").read_text(encoding="utf-8").replace("data/", f"{CENSUS}/data/")
    (folder / "job.yaml").write_text(job, encoding="utf-8")
    command = [sys.executable, "-m", "backstay.cli", "train", str(folder / "job.yaml"), "--json"]
    command += ["--epochs", str(epochs), "--set", f"mode={json.dumps(mode)}", "--servers", "2"]
    command += ["--log-dir", str(folder / "log"), "--set", "checkpoint=none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=JOB_LIMIT_S, check=False)
    if done.returncode != 0:
        raise SystemExit(f"backstay train failed:\n{done.stderr[-TAIL_CHARACTERS:]}")
    result = json.loads(done.stdout)
    lines = [
        json.loads(line)
        for line in (folder / "log" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    # The first pass has the start of Python, and the framework's warming up, in it.
    later = [
        (line["time_s"], line["examples"])
        for line in lines
        if line.get("kind") == "training" and line.get("round", 1) > 1
    ]
    (begun_s, before), (ended_s, after) = later[0], later[-1]
    return {
        "auc": result["evaluations"][-1]["metrics"]["auc"],
        "examples_per_s": (after - before) / (ended_s - begun_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=5)
    epochs = parser.parse_args().epochs
    results = []
    for kind, optimizer, mode in ROWS:
        with tempfile.TemporaryDirectory() as folder:
            figures = run(mode, optimizer, epochs, Path(folder))
        results.append({"mode": kind, "optimizer": optimizer, **figures})
        print(f"| {kind} | {optimizer} | {figures['auc']:.4f} | {figures['examples_per_s']:,.0f} |")
    print_result({"rows": results})


if __name__ == "__main__":
    main()
