"""``make demo``: three pservers and two Paddle trainers on this machine train Wide & Deep.

Shows progress, ends with the test AUC; the last line, ``DEMO {json}``, is for programs.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

# "python examples/census/demo.py" puts only this file's folder on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# Paddle looks for a compiler cache when it is imported; nothing is compiled here.
warnings.filterwarnings("ignore", message="No ccache found")

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from backstay.errors import BackstayError
from backstay.pserver.local_cluster import LocalCluster
from examples.census.reader import load
from examples.census.train import PASSES, score_on_cluster
from examples.common.launch import ProcessFailed, run_trainers


@dataclass
class Progressed:
    """The last report of each trainer, and the progress bar that shows their sum."""

    bar: Progress
    total: int
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)
    begin: float = 0.0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.task = self.bar.add_task("", total=self.total, note="trainers are starting")

    def on_report(self, report: dict[str, Any]) -> None:
        """Take a trainer's report and redraw."""
        now = time.perf_counter()
        # Starting Python and Paddle and reading the data is not training.
        self.begin = self.begin or now - float(report["seconds"])
        self.seconds = now - self.begin
        self.reports[report["trainer"]] = report
        rate = self.sum_of("examples") / self.seconds
        note = (
            f"loss {self.mean_of('loss'):.4f}   AUC so far {self.mean_of('auc'):.4f}   "
            f"{rate:,.0f} examples/s"
        )
        self.bar.update(self.task, completed=self.sum_of("examples"), note=note)

    def sum_of(self, name: str) -> int:
        """Add up a count over the trainers."""
        return sum(int(report[name]) for report in self.reports.values())

    def mean_of(self, name: str) -> float:
        """Average a figure over the trainers."""
        values = [float(report[name]) for report in self.reports.values()]
        return sum(values) / len(values)


def run(servers: int, trainers: int, passes: int, seed: int, console: Console) -> dict[str, Any]:
    """Train and evaluate; return the figures of the last line."""
    total = len(load()[0]) * passes
    columns = (BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn())
    with LocalCluster(servers=servers) as cluster:
        console.print(
            f"{servers} pservers on {', '.join(cluster.endpoints)}; {trainers} trainers, "
            f"{passes} passes over {total // passes:,} examples"
        )
        with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as bar:
            progressed = Progressed(bar, total)
            run_trainers(
                ["-m", "examples.census.train", "--passes", str(passes), "--seed", str(seed)],
                trainers=trainers,
                cluster=cluster,
                on_report=progressed.on_report,
            )
        scores = score_on_cluster(cluster.endpoints)
    examples = progressed.sum_of("examples")
    return {
        "auc": round(scores["auc"], 5),
        "logloss": round(scores["logloss"], 5),
        "examples": examples,
        "seconds": round(progressed.seconds, 2),
        "examples_per_s": round(examples / progressed.seconds),
        "servers": servers,
        "trainers": trainers,
        "pushes_acknowledged": progressed.sum_of("pushes_acknowledged"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--passes", type=int, default=PASSES)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    # As an exception it unwinds the stack, which stops servers and trainers.
    signal.signal(signal.SIGTERM, _on_terminate)
    console = Console()
    try:
        figures = run(
            arguments.servers, arguments.trainers, arguments.passes, arguments.seed, console
        )
    except (ProcessFailed, BackstayError) as error:
        print(f"The demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130
    table = Table(show_header=False)
    for name, value in figures.items():
        table.add_row(name.replace("_", " "), f"{value:,}")
    console.print(table)
    print("DEMO " + json.dumps(figures), flush=True)
    return 0


def _on_terminate(_: int, __: FrameType | None) -> None:
    raise SystemExit(143)


if __name__ == "__main__":
    sys.exit(main())
