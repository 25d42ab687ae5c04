"""``make demo``: one ``backstay train`` on this machine, and everything that may happen to it.

Three pservers and two workers train Wide & Deep on census income. Meanwhile the cluster grows by
one pserver and shrinks again; a worker is killed, one joins; a pserver is killed and started anew;
the job master is killed. Each pass ends with a checkpoint, and the last one is restored into
fresh servers. Shows what happens, ends with the test AUC and with whether each record of each
pass was counted once; the last line, ``DEMO {json}``, is for programs. In it, ``trainers`` are
those that it begins with, and ``examples_per_s`` counts the examples of all passes over the whole
time.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

# "python examples/census/demo.py" puts only this file's folder on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from backstay.errors import BackstayError
from backstay.job_spec import JobSpec
from backstay.master.job_file import load_job
from backstay.pserver.local_cluster import LocalCluster
from backstay.trainer import Client
from examples.census.growth import Growth
from examples.common.failure import Failure
from examples.common.job_run import JobRun
from examples.common.launch import ProcessFailed, check_servers

JOB = Path(__file__).with_name("job.yaml")
PASSES = 10
RESTORED_SERVERS = 2
LOOK_SECONDS = 0.1
# Parts of the training at which something happens, unless what was before is still under way.
GROW_AT, WORKER_AT, SERVER_AT, MASTER_AT, SHRINK_AT = 0.05, 0.15, 0.3, 0.4, 0.45


@dataclass(frozen=True)
class Shape:
    """What is run.

    Attributes:
        servers: How many pservers.
        replicas: Copies of each slot.
        workers: How many workers to begin with; one more joins.
        passes: Over the training split.
        seed: Of all orders.
        victim: Index of the pserver to kill; None: none.
    """

    servers: int
    replicas: int
    workers: int
    passes: int
    seed: int
    victim: int | None


class Told:
    """The progress bar, and lines for people above it with the seconds since the job began."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=1.0, note="the workers are starting")
        self._begin_s = time.monotonic()

    def line(self, text: str) -> None:
        """Print a line."""
        when = f"{time.monotonic() - self._begin_s:6.2f} s"
        self._bar.console.print(f"{when}  {text}", highlight=False, markup=False, soft_wrap=True)

    def show(self, part: float, job: JobRun) -> None:
        """Redraw the bar."""
        status = job.status
        auc = status.evaluations[-1].metrics.get("auc") if status.evaluations else None
        alive = sum(worker.alive for worker in status.workers)
        note = f"loss {status.loss:.4f}   {status.examples_per_s:,.0f} examples/s   "
        note += f"{alive} workers" + (f"   test AUC {auc:.4f}" if auc is not None else "")
        self._bar.update(self._task, completed=part, note=note)


class Interruptions:
    """What happens to cluster and job while it trains, in order."""

    def __init__(self, shape: Shape, cluster: LocalCluster, job: JobRun, told: Told) -> None:
        self._shape = shape
        self._cluster = cluster
        self._job = job
        self._told = told
        self.growth = Growth(cluster, told.line)
        self.failure: Failure | None = None
        if shape.victim is not None:
            self.failure = Failure(cluster, shape.victim, told.line)
        self.worker_killed = ""
        self.worker_s = self.master_s = 0.0
        self._steps: list[tuple[float, Callable[[], None]]] = [
            (GROW_AT, lambda: self.growth.begin(shape.servers + 1)),
            (WORKER_AT, self._kill_worker),
            (SERVER_AT, self._kill_server),
            (MASTER_AT, self._kill_master),
            (SHRINK_AT, lambda: self.growth.begin(shape.servers)),
        ]

    def follow(self) -> None:
        """Look on until the job has ended, and do what is due.

        Raises:
            ProcessFailed: A server died that was not killed, or training ended too early.
        """
        while not self._job.is_over:
            self._job.look()
            part = self._part()
            self._told.show(part, self._job)
            self._check()
            if self._steps and part >= self._steps[0][0] and not self._is_busy:
                self._steps.pop(0)[1]()
            time.sleep(LOOK_SECONDS)
        if self._steps and self._job.status.state == "done":
            raise ProcessFailed("training ended before all had happened; train for more passes")
        if self.failure is not None and self._job.status.state == "done":
            self.failure.finish()
        self.growth.finish()

    def __enter__(self) -> Interruptions:
        return self

    def __exit__(self, *error: Any) -> None:
        self.growth.__exit__(*error)
        if self.failure is not None:
            self.failure.__exit__(*error)

    @property
    def _is_busy(self) -> bool:
        hurt = self.failure is not None and self.failure.has_begun
        return self.growth.is_busy or (
            hurt and self.failure is not None and not self.failure.is_repaired
        )

    def _part(self) -> float:
        status = self._job.status
        if status.state == "done":
            return 1.0
        if not status.passes or not status.records_total:
            return 0.0
        training = status.kind == 1
        passes_done = status.round - (1 if training else 0)
        done = status.records_done / status.records_total if training else 0.0
        return min(1.0, (passes_done + done) / status.passes)

    def _check(self) -> None:
        down = set(self.growth.may_be_down)
        if self.failure is not None and self.failure.may_be_down is not None:
            down.add(self.failure.may_be_down)
        check_servers(self._cluster, but=down)
        self.growth.check()
        if self.failure is not None:
            self.failure.check()

    def _kill_worker(self) -> None:
        self.worker_killed, self.worker_s = self._job.kill_worker()
        self._told.line(
            f"worker {self.worker_killed} is killed (SIGKILL); its task is another one's "
            f"{self.worker_s * 1000:,.0f} ms later"
        )
        self._job.scale(self._shape.workers + 1)
        self._job.wait_for_workers(self._shape.workers + 1)
        self._told.line(f"{self._shape.workers + 1} workers now: one in its place, and one more")

    def _kill_server(self) -> None:
        if self.failure is not None:
            self.failure.begin()

    def _kill_master(self) -> None:
        self.master_s = self._job.kill_master()
        self._told.line(
            f"the job master is killed (SIGKILL); another one gives out tasks "
            f"{self.master_s * 1000:,.0f} ms later"
        )


def run(shape: Shape, console: Console) -> dict[str, Any]:
    """Train while all that happens, restore it elsewhere; return the last line's figures."""
    with TemporaryDirectory(prefix="backstay-demo-") as name:
        folder = Path(name)
        (folder / "checkpoints").mkdir()
        figures, auc = train(shape, folder, console)
        figures["restore_auc_equal"] = restored_auc(folder, console) == auc
    return figures


def train(shape: Shape, folder: Path, console: Console) -> tuple[dict[str, Any], float]:
    """Train, and save checkpoints below a folder; return figures, and the test AUC."""
    columns = (BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn())
    bar = Progress(*columns, TextColumn("{task.fields[note]}"), console=console)
    settings = {"replicas": shape.replicas, "checkpoint_url": str(folder / "checkpoints")}
    arguments = ["train", str(JOB), "--epochs", str(shape.passes)]
    arguments += ["--workers", str(shape.workers), "--set", f"seed={shape.seed}"]
    arguments += ["--set", "audit=true"]
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(servers=shape.servers, settings=settings))
        job = stack.enter_context(JobRun(cluster.endpoints, "census", arguments, folder))
        told = Told(bar)
        interruptions = stack.enter_context(Interruptions(shape, cluster, job, told))
        told.line(
            f"{shape.servers} pservers, copies of each slot: {shape.replicas}; {shape.workers} "
            f"workers, {shape.passes} passes"
        )
        with bar:
            interruptions.follow()
        result = job.result()
        with Client(cluster.endpoints, trainer=None) as client:
            checkpoints = len(client.checkpoints.list())
            tables = sum(one.name.startswith("census/") for one in client.tables())
        return figures_of(shape, interruptions, result, checkpoints, tables), evaluated(result)


def restored_auc(folder: Path, console: Console) -> float:
    """Restore the newest checkpoint into fresh servers; return the AUC there."""
    settings = {"checkpoint_url": str(folder / "checkpoints"), "restore": "latest"}
    begun_s = time.monotonic()
    arguments = ["evaluate", str(JOB), "--set", "model_from=census"]
    with (
        LocalCluster(RESTORED_SERVERS, settings=settings) as fresh,
        JobRun(fresh.endpoints, "census-restored", arguments, folder) as job,
    ):
        auc = evaluated(job.result())
    console.print(
        f"restored into {RESTORED_SERVERS} fresh pservers and evaluated in "
        f"{time.monotonic() - begun_s:.1f} s: AUC {auc!r}",
        highlight=False,
    )
    return auc


def evaluated(result: dict[str, Any]) -> float:
    """Return the AUC of a job's last evaluation."""
    return float(result["evaluations"][-1]["metrics"]["auc"])


def batches_of_pass(spec: JobSpec, records: int) -> int:
    """Return the batches of one pass over one file with so many records."""
    tasks, rest = divmod(records, spec.records_per_task)
    of_task, of_rest = (-(-count // spec.batch_size) for count in (spec.records_per_task, rest))
    return tasks * of_task + of_rest


def pushes_of(spec: JobSpec, audit: dict[str, Any], passes: int, tables: int) -> dict[str, int]:
    """Return what became of the pushes, as the counters of records on the servers say.

    Each batch pushes once to each table, in one stream with its counters. A task is done when
    every push of its batches is acknowledged, and the job when all tasks are. A push that is lost
    leaves the records of its batch short, one that counts twice leaves them over: of so many
    records, so many batches at least.
    """
    batches = passes * batches_of_pass(spec, audit["records"])
    return {
        "pushes_acknowledged": batches * tables,
        "pushes_lost": -(-audit["missing"] // spec.batch_size),
        "pushes_duplicated": -(-audit["doubled"] // spec.batch_size),
    }


def figures_of(
    shape: Shape,
    interruptions: Interruptions,
    result: dict[str, Any],
    checkpoints: int,
    tables: int,
) -> dict[str, Any]:
    """Put all figures together."""
    audit = result["audit"]
    trained = audit["records"] * shape.passes
    last = result["evaluations"][-1]["metrics"]
    failure = interruptions.failure
    failover_ms = failure.failover_ms if failure is not None else None
    return {
        **{name: round(value, 5) for name, value in last.items()},
        "records_counted_once": result["records_counted_once"],
        "records": audit["records"],
        "passes": shape.passes,
        "examples": result["examples"],
        "seconds": round(result["duration_s"], 2),
        "examples_per_s": round(trained / result["duration_s"]),
        "trainers": shape.workers,
        **pushes_of(job_spec(), audit, shape.passes, tables),
        "servers": shape.servers,
        "workers": shape.workers,
        "replicas": shape.replicas,
        "worker_killed": interruptions.worker_killed,
        "worker_recovery_ms": round(interruptions.worker_s * 1000),
        "workers_added": 1,
        "killed": failure.node_id if failure is not None else None,
        "failover_ms": round(failover_ms) if failover_ms is not None else None,
        "master_starts": result["master_starts"],
        "master_recovery_ms": round(interruptions.master_s * 1000),
        "resized": interruptions.growth.reached,
        "moved_slots": interruptions.growth.moved_slots,
        "checkpoints": checkpoints,
    }


def job_spec() -> JobSpec:
    """Return the job of the job file."""
    return load_job(JOB, {}, folder=JOB.parent)


def main() -> int:
    shape = parse_arguments()
    # As an exception it unwinds the stack, which stops servers and the job.
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
    wrong = [name for name in ("records_counted_once", "restore_auc_equal") if not figures[name]]
    for name in wrong:
        print(f"The demo failed: {name} is false", file=sys.stderr)
    return 1 if wrong else 0


def parse_arguments() -> Shape:
    """Return what the command line asks for; a wrong argument ends the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=2, help="copies of each slot")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--passes", type=int, default=PASSES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--kill",
        default="ps-1",
        metavar="NODE",
        help="the pserver to kill in the middle of the training, ps-0, ps-1, ...; or none",
    )
    arguments = parser.parse_args()
    nodes = [f"ps-{index}" for index in range(arguments.servers)]
    if arguments.kill not in (*nodes, "none"):
        parser.error(f"--kill {arguments.kill}: choose one of {', '.join(nodes)}, or none")
    return Shape(
        servers=arguments.servers,
        replicas=arguments.replicas,
        workers=arguments.workers,
        passes=arguments.passes,
        seed=arguments.seed,
        victim=nodes.index(arguments.kill) if arguments.kill != "none" else None,
    )


def _on_terminate(_: int, __: FrameType | None) -> None:
    raise SystemExit(143)


if __name__ == "__main__":
    sys.exit(main())
