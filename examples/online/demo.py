"""``make demo-online``: a model that learns from clicks as they come, and is served meanwhile.

A website shows ads, predicts clicks with the newest model, and writes what came of it to a topic of
Kafka. What is liked turns, users and ads come and go. A job of three workers learns from the topic;
ids are admitted when they come the second time and expire when they come no more; a running export
brings what has changed to the website. A worker, a pserver, the job master and the broker are
killed. In the end: was each click counted once, and how good were the predictions of the clicks to
come, beside those of a model that learned no more after the warm-up? The last line, ``ONLINE
{json}``, is for programs; docs/guide/serving.md says what is in it.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType, TracebackType
from typing import Any

# "python examples/online/demo.py" puts only this file's folder on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from backstay.errors import BackstayError
from backstay.pserver.local_cluster import LocalCluster
from backstay.runner.audit import audit_job
from backstay.trainer.worker.audit import RecordsAudit
from examples.common.failure import Failure
from examples.common.job_run import JobRun
from examples.common.launch import ProcessFailed, check_servers
from examples.online.measures import Memory, Probe, RowsGone, delays
from examples.online.processes import Outage, Website
from tests.kafka.broker import KafkaBroker, missing_programs

JOB = Path(__file__).with_name("job.yaml")
NAME, TOPIC = "online", "clicks"
IDS, PROBE = f"{NAME}/ids", f"{NAME}/probe"
PARTITIONS = 2
SERVERS, WORKERS, REPLICAS = 3, 3, 2
VICTIM = 1
WINDOW = 10_000
LOOK_SECONDS = 0.2
# Characters of the broker's log in an error.
LOG_TAIL = 2000
# For each thing that must come: the served model, the end of the lag.
WAIT_SECONDS = 180.0
# Parts of the time at which something is killed, unless what was before is still under way.
WORKER_AT, SERVER_AT, MASTER_AT, BROKER_AT = 0.08, 0.2, 0.38, 0.5
# By so much the AUC of what is followed must be above that of what is frozen.
MARGIN = 0.03


@dataclass(frozen=True)
class Shape:
    """What is run.

    Attributes:
        seconds: From the moment at which a model is frozen until the website closes.
        warm_up: Clicks that are learned before that.
        rate: Visits a second.
        seed: Of the world.
    """

    seconds: float
    warm_up: int
    rate: float
    seed: int


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

    def show(self, part: float, job: JobRun, website: Website) -> None:
        """Redraw the bar."""
        status, stream = job.status, job.status.stream
        note = f"{status.examples_per_s:,.0f}/s  lag {stream.lag_records:,}"
        decayed = status.progressive.decayed
        aucs = {"trainer": decayed.auc} if decayed.HasField("auc") else {}
        aucs |= {name: auc for name, auc in website.auc.items() if name != "best"}
        note += "  AUC:" * bool(aucs) + "".join(f" {name} {auc:.3f}" for name, auc in aucs.items())
        self._bar.update(self._task, completed=part, note=note)


class Deaths:
    """What is killed, in order. A context manager, inside those of what dies."""

    def __init__(
        self,
        cluster: LocalCluster,
        broker: KafkaBroker,
        job: JobRun,
        before: Callable[[], None],
        tell: Callable[[str], None],
    ) -> None:
        """Prepare.

        Args:
            cluster: Running, as are the others.
            broker: Of the topic.
            job: That trains.
            before: Called before a server is killed.
            tell: Called with lines for people, from several threads.
        """
        self.worker_s = self.master_s = 0.0
        self.failure = Failure(cluster, VICTIM, tell)
        self.outage = Outage(broker, tell)
        self._cluster = cluster
        self._job = job
        self._before = before
        self._tell = tell
        self._steps: list[tuple[float, Callable[[], None]]] = [
            (WORKER_AT, self._kill_worker),
            (SERVER_AT, self._kill_server),
            (MASTER_AT, self._kill_master),
            (BROKER_AT, self.outage.begin),
        ]

    @property
    def is_over(self) -> bool:
        """Whether all have died and are back."""
        return not self._steps and not self._is_busy

    def follow(self, part: float) -> None:
        """Do what is due.

        Raises:
            ProcessFailed: A server died that was not killed, or something does not come back.
        """
        down = self.failure.may_be_down
        check_servers(self._cluster, but=() if down is None else (down,))
        self.failure.check()
        self.outage.check()
        if self._steps and part >= self._steps[0][0] and not self._is_busy:
            self._steps.pop(0)[1]()

    def __enter__(self) -> Deaths:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.failure.__exit__(kind, error, traceback)
        self.outage.wait()

    @property
    def _is_busy(self) -> bool:
        hurt = self.failure.has_begun and not self.failure.is_repaired
        return hurt or self.outage.is_busy

    def _kill_worker(self) -> None:
        worker, self.worker_s = self._job.kill_worker()
        self._tell(
            f"worker {worker} is killed (SIGKILL); its task is another one's "
            f"{self.worker_s * 1000:,.0f} ms later"
        )

    def _kill_server(self) -> None:
        self._before()
        self.failure.begin()

    def _kill_master(self) -> None:
        self.master_s = self._job.kill_master()
        self._tell(
            f"the job master is killed (SIGKILL); another one gives out tasks "
            f"{self.master_s * 1000:,.0f} ms later"
        )


class Run:
    """The job with all that is around it. A context manager."""

    def __init__(self, shape: Shape, folder: Path, console: Console) -> None:
        """Prepare; ``with`` starts everything."""
        self._shape = shape
        self._folder = folder
        columns = (BarColumn(bar_width=10), TextColumn("{task.percentage:>3.0f}%"))
        self._bar = Progress(*columns, TextColumn("{task.fields[note]}"), console=console)
        self._stack = ExitStack()
        self._lag_s = 0.0

    def __enter__(self) -> Run:
        with self._stack as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def _start(self, stack: ExitStack) -> None:
        folder, shape = self._folder, self._shape
        for name in ("broker", "checkpoints", "served"):
            (folder / name).mkdir()
        broker = KafkaBroker(folder / "broker")
        # Also if it is told to end while it starts.
        stack.callback(broker.kill)
        try:
            stack.enter_context(broker)
            broker.create_topic(TOPIC, PARTITIONS)
        except (AssertionError, subprocess.SubprocessError) as error:
            log = (folder / "broker" / "broker.log").read_text()[-LOG_TAIL:]
            raise ProcessFailed(f"the broker does not start: {error}\n{log}") from error
        settings = {"replicas": REPLICAS, "checkpoint_url": str(folder / "checkpoints")}
        cluster = LocalCluster(SERVERS, settings=settings, startup_timeout_s=WAIT_SECONDS)
        self._cluster = stack.enter_context(cluster)
        self._gone = RowsGone(self._cluster)
        self._probe = stack.enter_context(Probe(self._cluster.endpoints, PROBE))
        served = str(folder / "served")
        given = {
            "training.options.brokers": json.dumps([broker.address]),
            "exports": served,
            "audit": "true",
        }
        arguments = ["train", str(JOB)]
        arguments += [word for one in given.items() for word in ("--set", "=".join(one))]
        job = JobRun(self._cluster.endpoints, NAME, arguments, folder)
        self._job = stack.enter_context(job)
        arguments = ["--broker", broker.address, "--topic", TOPIC, "--export", served]
        arguments += ["--probe", PROBE, "--window", str(WINDOW)]
        arguments += ["--rate", str(shape.rate), "--seed", str(shape.seed)]
        self._website = stack.enter_context(Website(arguments, folder))
        self._told = Told(stack.enter_context(self._bar))
        deaths = Deaths(self._cluster, broker, self._job, self._gone.look, self._told.line)
        self._deaths = stack.enter_context(deaths)
        self._told.line(
            f"a broker; {SERVERS} pservers, copies of each slot: {REPLICAS}; {WORKERS} workers; "
            f"{shape.rate:,.0f} clicks a second"
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, traceback)

    def figures(self) -> dict[str, Any]:
        """Let everything happen; return the figures of the last line.

        Raises:
            ProcessFailed: Something ended that was not to end, or did not come in time.
        """
        self._until(f"{WORKERS} workers", self._has_workers)
        self._website.open()
        self._told.line(f"{WORKERS} workers wait for clicks; the website opens")
        self._until("a model that is served", lambda: bool(self._website.models))
        self._told.line("the website predicts with the newest model")
        learned = self._shape.warm_up
        self._until("a warm model", lambda: self._job.status.examples >= learned)
        self._website.freeze()
        self._until("a frozen model", lambda: len(self._website.models) == 2)
        begin = Memory.of(self._cluster, IDS)
        self._told.line(
            f"{self._job.status.examples:,} clicks are learned; a model is frozen as it is now"
        )
        self._pass_time()
        self._until("the return of all that was killed", lambda: self._deaths.is_over)
        self._gone.look()
        end = Memory.of(self._cluster, IDS)
        website = self._website.stop()
        self._told.line(f"the website closes; {website['acknowledged']:,} clicks are in the topic")
        self._until("the end of the lag", self._has_caught_up)
        self._probe.stop()
        self._job.stop_when_done()
        result = self._job.result(stopped=True)
        # A job that may go on says itself only how far it is.
        audit = audit_job(NAME, self._cluster.endpoints, self._cluster.client_config())
        return {
            **_counts(audit, website["acknowledged"]),
            **self._aucs(website),
            **_delays(self._probe, website["seen"]),
            **self._rows(begin, end, website["ids"]),
            "lag_max_s": round(self._lag_s, 1),
            **self._killed(result),
        }

    def _pass_time(self) -> None:
        """Look on, and kill what is to be killed."""
        begun_s = time.monotonic()
        while (part := (time.monotonic() - begun_s) / self._shape.seconds) < 1.0:
            self._look(part)
            self._deaths.follow(part)
            time.sleep(LOOK_SECONDS)

    def _look(self, part: float) -> None:
        self._job.look()
        self._lag_s = max(self._lag_s, self._job.status.stream.lag_s)
        self._told.show(part, self._job, self._website)
        self._website.check()
        if self._job.is_over:
            self._job.result()
            raise ProcessFailed("the job ended before it was stopped")

    def _until(self, what: str, holds: Callable[[], bool]) -> None:
        end_s = time.monotonic() + WAIT_SECONDS
        part = 1.0 if self._deaths.worker_s else 0.0
        while not holds():
            if time.monotonic() > end_s:
                why = self._website.trouble or self._job.status.trouble
                raise ProcessFailed(f"there was not {what} within {WAIT_SECONDS:.0f} s: {why}")
            self._look(part)
            self._deaths.follow(part)
            time.sleep(LOOK_SECONDS)

    def _has_workers(self) -> bool:
        return sum(worker.alive for worker in self._job.status.workers) == WORKERS

    def _has_caught_up(self) -> bool:
        stream = self._job.status.stream
        known = self._job.look() and stream.HasField("lag_records")
        return known and not stream.lag_records

    def _aucs(self, website: dict[str, Any]) -> dict[str, Any]:
        trainer = _trainer_auc(self._folder / NAME, website["frozen_at"])
        aucs = {"trainer": trainer, **website["auc"]}
        return {
            **{f"auc_{name}": one and round(one, 4) for name, one in aucs.items()},
            "windows": website["windows"],
            "window": WINDOW,
        }

    def _rows(self, begin: Memory, end: Memory, ids: int) -> dict[str, Any]:
        rows = end.rows // REPLICAS
        return {
            "ids_met": ids,
            "rows_admitted": rows + self._gone.expired,
            "rows_expired": self._gone.expired,
            "rows_start": begin.rows // REPLICAS,
            "rows_end": rows,
            "model_start_mib": round(begin.row_mib, 2),
            "model_end_mib": round(end.row_mib, 2),
            "audit_start_mib": round(begin.audit_mib, 1),
            "audit_end_mib": round(end.audit_mib, 1),
            "memory_start_mib": round(begin.resident_mib),
            "memory_end_mib": round(end.resident_mib),
        }

    def _killed(self, result: dict[str, Any]) -> dict[str, Any]:
        deaths = self._deaths
        return {
            "killed": ["worker", deaths.failure.node_id, "job master", "broker"],
            "worker_recovery_ms": round(deaths.worker_s * 1000),
            "failover_ms": round(deaths.failure.failover_ms or 0),
            "master_recovery_ms": round(deaths.master_s * 1000),
            "master_starts": result["master_starts"],
            "broker_recovery_ms": round((deaths.outage.seconds or 0) * 1000),
        }


def _counts(audit: RecordsAudit, written: int) -> dict[str, Any]:
    return {
        "records_once": audit.records_counted_once and audit.right == written,
        "records": audit.right,
        "written": written,
        "periods": audit.passes,
    }


def _trainer_auc(folder: Path, after: int) -> float | None:
    """Return the mean AUC of the windows of records after so many; None: there is none."""
    aucs, records = [], 0
    with (folder / "metrics.jsonl").open(encoding="utf-8") as lines:
        for line in map(json.loads, lines):
            if "window" not in line:
                continue
            if records >= after and line["auc"] is not None:
                aucs.append(line["auc"])
            records += line["examples"]
    return float(np.mean(aucs)) if aucs else None


def _delays(probe: Probe, seen: list[Any]) -> dict[str, Any]:
    if probe.trouble:
        raise ProcessFailed(f"the probe failed: {probe.trouble}")
    waited = delays(probe.told, [(value, at) for value, at in seen])
    if not len(waited):
        raise ProcessFailed("no push of the probe was seen where the model is served")
    p50, p99 = np.quantile(waited, [0.5, 0.99]).tolist()
    return {"delay_p50_s": round(p50, 3), "delay_p99_s": round(p99, 3), "pushes": len(waited)}


def complaints(figures: dict[str, Any]) -> list[str]:
    """Return what is wrong with the figures, in sentences; none: all is well."""
    found = []
    if not figures["records_once"]:
        found.append(
            f"not each of {figures['written']:,} clicks was counted once; "
            f"{figures['records']:,} were"
        )
    follower, frozen = figures.get("auc_follower"), figures.get("auc_frozen")
    if follower is None or frozen is None:
        found.append("the time was too short for an AUC; give it more --seconds")
    elif follower < frozen + MARGIN:
        found.append(
            f"the AUC of the followed model, {follower}, is not above that of the frozen one, "
            f"{frozen}, by {MARGIN}"
        )
    return found


def main() -> int:
    shape = parse_arguments()
    if missing := missing_programs():
        print(f"The demo needs a Kafka broker, and it cannot run here: {missing}", file=sys.stderr)
        return 2
    # As an exception it unwinds the stack, which stops servers and the job.
    signal.signal(signal.SIGTERM, _on_terminate)
    console = Console()
    try:
        with (
            TemporaryDirectory(prefix="backstay-demo-") as name,
            Run(shape, Path(name), console) as run,
        ):
            figures = run.figures()
    except (ProcessFailed, BackstayError) as error:
        print(f"The demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130
    show(figures, console)
    print("ONLINE " + json.dumps(figures), flush=True)
    wrong = complaints(figures)
    for sentence in wrong:
        print(f"The demo failed: {sentence}", file=sys.stderr)
    return 1 if wrong else 0


def show(figures: dict[str, Any], console: Console) -> None:
    """Print the figures for people."""
    table = Table(show_header=False)
    for name, value in figures.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        shown = ", ".join(value) if isinstance(value, list) else str(value)
        table.add_row(name.replace("_", " "), f"{value:,}" if number else shown)
    console.print(table)


def parse_arguments() -> Shape:
    """Return what the command line asks for; a wrong argument ends the process."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--seconds", type=float, default=100.0, help="from the frozen model to the end"
    )
    parser.add_argument("--warm-up", type=int, default=60_000, help="clicks to learn before that")
    parser.add_argument("--rate", type=float, default=2000.0, help="clicks a second")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.seconds <= 0 or given.rate <= 0 or given.warm_up < 0:
        parser.error("--seconds and --rate must be above 0, --warm-up not below")
    return Shape(given.seconds, given.warm_up, given.rate, given.seed)


def _on_terminate(_: int, __: FrameType | None) -> None:
    raise SystemExit(143)


if __name__ == "__main__":
    sys.exit(main())
