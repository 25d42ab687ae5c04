"""``make demo``: three pservers and two Paddle trainers on this machine train Wide & Deep.

Meanwhile the cluster grows by one pserver, one is killed and started anew, and it shrinks again;
each pass ends with a checkpoint, and the last one is restored into fresh servers. Shows progress
and what happens, ends with the test AUC; the last line, ``DEMO {json}``, is for programs.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import warnings
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
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
from backstay.trainer import Client
from examples.census.failure import Failure
from examples.census.growth import Growth
from examples.census.reader import load
from examples.census.train import PASSES, score_on_cluster
from examples.common.counters import audit
from examples.common.launch import ProcessFailed, check_servers, run_trainers

# Parts of the training after which the cluster grows, and after which the pserver is killed.
GROW_AT = 0.05
KILL_AT = 1 / 3
RESTORED_SERVERS = 2


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
        now = time.monotonic()
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

    def tell(self, line: str) -> None:
        """Print a line for people above the bar, with the seconds since training began."""
        when = f"{time.monotonic() - self.begin:6.2f} s" if self.begin else " " * 8
        self.bar.console.print(f"{when}  {line}", highlight=False, markup=False, soft_wrap=True)

    @property
    def part(self) -> float:
        """How much of the training is done, 0 to 1."""
        return self.sum_of("examples") / self.total

    def sum_of(self, name: str) -> int:
        """Add up a count over the trainers."""
        return sum(int(report[name]) for report in self.reports.values())

    def mean_of(self, name: str) -> float:
        """Average a figure over the trainers."""
        values = [float(report[name]) for report in self.reports.values()]
        return sum(values) / len(values)


@dataclass(frozen=True)
class Shape:
    """What is run.

    Attributes:
        servers: How many pservers.
        replicas: Copies of each slot.
        trainers: How many trainers.
        passes: Over the training split.
        seed: Of the trainers.
        victim: Index of the pserver to kill; None: none.
    """

    servers: int
    replicas: int
    trainers: int
    passes: int
    seed: int
    victim: int | None


class Course:
    """What happens to the cluster while it trains: it grows, a pserver dies, it shrinks."""

    def __init__(
        self, shape: Shape, cluster: LocalCluster, stack: ExitStack, progressed: Progressed
    ) -> None:
        tell = progressed.tell
        self._shape = shape
        self._cluster = cluster
        self.progressed = progressed
        self.growth = stack.enter_context(Growth(cluster, tell))
        self.failure: Failure | None = None
        if shape.victim is not None:
            self.failure = stack.enter_context(Failure(cluster, shape.victim, shape.trainers, tell))
        self._steps = [self._grow, self._kill, self._shrink]

    def on_report(self, report: dict[str, Any]) -> None:
        """Take a trainer's report, and do what is due."""
        self.progressed.on_report(report)
        if self.failure is not None:
            self.failure.on_report(report)
        all_train = len(self.progressed.reports) == self._shape.trainers
        if all_train and self._steps and not self.growth.is_busy and self._steps[0]():
            del self._steps[0]

    def check(self) -> None:
        """Fail if something that must be there is not."""
        down = set(self.growth.may_be_down)
        if self.failure is not None and self.failure.may_be_down is not None:
            down.add(self.failure.may_be_down)
        check_servers(self._cluster, but=down)
        self.growth.check()
        if self.failure is not None:
            self.failure.check()

    def finish(self) -> None:
        """Wait for what is under way. Call it when the trainers have ended."""
        if self.failure is not None:
            self.failure.finish()
        if self._steps:
            raise ProcessFailed(
                "training ended before the cluster had grown and shrunk; train for more passes"
            )
        self.growth.finish()

    def _grow(self) -> bool:
        if self.progressed.part < GROW_AT:
            return False
        self.growth.begin(self._shape.servers + 1)
        return True

    def _kill(self) -> bool:
        if self.failure is None:
            return True
        if self.progressed.part < KILL_AT:
            return False
        self.failure.begin()
        return True

    def _shrink(self) -> bool:
        if self.failure is not None and not self.failure.is_repaired:
            return False
        self.growth.begin(self._shape.servers)
        return True


def run(shape: Shape, console: Console) -> dict[str, Any]:
    """Train while the cluster changes, restore it elsewhere; return the last line's figures."""
    with TemporaryDirectory(prefix="backstay-demo-") as folder:
        figures, scores = train(shape, folder, console)
        figures["restore_auc_equal"] = restored_scores(folder, console) == scores
    return figures


def train(shape: Shape, folder: str, console: Console) -> tuple[dict[str, Any], dict[str, float]]:
    """Train, and save checkpoints to a folder; return figures, and AUC and logloss."""
    total = len(load()[0]) * shape.passes
    columns = (BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn())
    progress = Progress(*columns, TextColumn("{task.fields[note]}"), console=console)
    with ExitStack() as stack:
        settings = {"replicas": shape.replicas, "checkpoint_url": folder}
        cluster = stack.enter_context(LocalCluster(servers=shape.servers, settings=settings))
        progressed = Progressed(progress, total)
        course = Course(shape, cluster, stack, progressed)
        progressed.tell(
            f"{shape.servers} pservers, copies of each slot: {shape.replicas}; {shape.trainers} "
            f"trainers, {shape.passes} passes over {total // shape.passes:,} examples"
        )
        command = f"-m examples.census.train --passes {shape.passes} --seed {shape.seed}"
        with progress:
            run_trainers(
                [*command.split(), "--checkpoints"],
                trainers=shape.trainers,
                cluster=cluster,
                on_report=course.on_report,
                check=course.check,
            )
            progressed.tell("training has ended")
            course.finish()
            with Client(cluster.endpoints) as client:
                last = client.checkpoints.save(tags={"by": "demo"})
            progressed.tell(f"checkpoint {last.id} holds the trained model ({last.kind})")
        scores = score_on_cluster(cluster.endpoints)
        return figures_of(shape, cluster, course, scores), scores


def restored_scores(folder: str, console: Console) -> dict[str, float]:
    """Restore the newest checkpoint into fresh servers; return AUC and logloss there."""
    with TemporaryDirectory(prefix="backstay-demo-") as directory:
        settings = {"checkpoint_url": folder, "restore": "latest"}
        begun_s = time.monotonic()
        with LocalCluster(RESTORED_SERVERS, settings=settings, directory=directory) as fresh:
            scores = score_on_cluster(fresh.endpoints)
            console.print(
                f"restored into {RESTORED_SERVERS} fresh pservers and evaluated in "
                f"{time.monotonic() - begun_s:.1f} s: AUC {scores['auc']!r}",
                highlight=False,
            )
            return scores


def figures_of(
    shape: Shape, cluster: LocalCluster, course: Course, scores: dict[str, float]
) -> dict[str, Any]:
    """Read the counters and put all figures together."""
    progressed, failure = course.progressed, course.failure
    counted = {trainer: last["counted"] for trainer, last in progressed.reports.items()}
    with Client(cluster.endpoints) as client:
        audited = audit(client, counted)
    examples = progressed.sum_of("examples")
    return {
        "auc": round(scores["auc"], 5),
        "logloss": round(scores["logloss"], 5),
        "examples": examples,
        "seconds": round(progressed.seconds, 2),
        "examples_per_s": round(examples / progressed.seconds),
        "servers": shape.servers,
        "trainers": shape.trainers,
        "replicas": shape.replicas,
        "killed": failure.node_id if failure is not None else None,
        "failover_ms": round(failure.failover_ms) if failure is not None else None,
        "pushes_acknowledged": progressed.sum_of("pushes_acknowledged"),
        "pushes_counted": sum(sum(counts) for counts in counted.values()),
        "pushes_lost": audited.lost,
        "pushes_duplicated": audited.duplicated,
        "resized": course.growth.reached,
        "moved_slots": course.growth.moved_slots,
        # And the one after the training.
        "checkpoints": progressed.sum_of("checkpoints") + 1,
    }


def main() -> int:
    shape = parse_arguments()
    # As an exception it unwinds the stack, which stops servers and trainers.
    signal.signal(signal.SIGTERM, _on_terminate)
    console = Console()
    try:
        figures = run(shape, console)
    except (ProcessFailed, BackstayError) as error:
        print(f"The demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130
    table = Table(show_header=False)
    for name, value in figures.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        shown = f"{value:,}" if number else str("none" if value is None else value)
        table.add_row(name.replace("_", " "), shown)
    console.print(table)
    print("DEMO " + json.dumps(figures), flush=True)
    lost = figures["pushes_lost"] + figures["pushes_duplicated"]
    if lost:
        print("The demo failed: pushes were lost or counted twice", file=sys.stderr)
    if not figures["restore_auc_equal"]:
        print("The demo failed: the restored model is another one", file=sys.stderr)
    return 1 if lost or not figures["restore_auc_equal"] else 0


def parse_arguments() -> Shape:
    """Return what the command line asks for; a wrong argument ends the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=2, help="copies of each slot")
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--passes", type=int, default=PASSES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--kill",
        default="ps-1",
        metavar="NODE",
        help="the pserver to kill at a third of the training, ps-0, ps-1, ...; or none",
    )
    arguments = parser.parse_args()
    nodes = [f"ps-{index}" for index in range(arguments.servers)]
    if arguments.kill not in (*nodes, "none"):
        parser.error(f"--kill {arguments.kill}: choose one of {', '.join(nodes)}, or none")
    return Shape(
        servers=arguments.servers,
        replicas=arguments.replicas,
        trainers=arguments.trainers,
        passes=arguments.passes,
        seed=arguments.seed,
        victim=nodes.index(arguments.kill) if arguments.kill != "none" else None,
    )


def _on_terminate(_: int, __: FrameType | None) -> None:
    raise SystemExit(143)


if __name__ == "__main__":
    sys.exit(main())
