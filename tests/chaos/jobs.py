"""A real ``backstay train`` on a cluster of a run: started, looked at, hurt, and judged at its end.

The judge goes by what servers and workers have written down: the counter of each record, the state
in which the job ended, and what each worker was told of each task that it completed.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from backstay._proto.v1 import job_pb2
from backstay.config import ClientConfig
from backstay.errors import BackstayError
from backstay.master.job_client import JobClient
from tests.chaos.cluster import ChaosCluster, NotYet
from tests.chaos.processes import environment

__all__ = ["ChaosJob", "JobShape", "JobVerdict", "judge_job", "judge_told", "stop_politely"]

MODEL = Path(__file__).with_name("job_model.py")
MASTER, WORKER = "backstay.master.serve_cli", "backstay.trainer.worker.cli"
ASK_LIMIT_MS = 1500
POLL_PAUSE_S = 0.05
# Until a job goes on after a fault is over; a worker that is started anew imports its framework.
GOES_ON_LIMIT_S = 150.0
END_LIMIT_S = 180.0
LEASE_TTL_MS = 1000


@dataclass(frozen=True)
class JobShape:
    """What a job of the suite is."""

    name: str
    seed: int
    records: int = 240
    records_per_task: int = 8
    batch_size: int = 3
    passes: int = 6
    workers: int = 2

    def settings(self) -> dict[str, Any]:
        """Return the job file's content."""
        return {
            "name": self.name,
            "model": "model.py",
            "training": "train.csv",
            "validation": "valid.csv",
            "batch_size": self.batch_size,
            "records_per_task": self.records_per_task,
            "epochs": self.passes,
            "seed": self.seed,
            "audit": True,
            "task_lease_ttl_ms": LEASE_TTL_MS,
            # Speculative attempts all the time, once a worker stands still or the pass comes to its
            # end.
            "straggler_factor": 2.0,
            "straggler_min_s": 0.4,
            "workers": {"initial": self.workers, "min": 1, "max": 4, "max_relaunches": 100},
        }

    def write(self, folder: Path) -> None:
        """Write what the job file names."""
        shutil.copy(MODEL, folder / "model.py")
        numbers = "".join(f"{number}\n" for number in range(self.records))
        (folder / "train.csv").write_text("n\n" + numbers)
        (folder / "valid.csv").write_text("n\n" + "".join(f"{n}\n" for n in range(16)))


class ChaosJob:
    """One job: its folder, the command that runs it now, and questions to its job master."""

    def __init__(self, cluster: ChaosCluster, folder: Path, shape: JobShape) -> None:
        """Write the job's files; ``start`` starts the command."""
        self.shape = shape
        self.folder = folder
        self.restores = 0
        self._cluster = cluster
        self._command: subprocess.Popen[bytes] | None = None
        folder.mkdir()
        shape.write(folder)
        # JSON is YAML.
        (folder / "job.yaml").write_text(json.dumps(shape.settings()))
        self.slow(True)
        config = ClientConfig.load(explicit={"deadline_ms": ASK_LIMIT_MS})
        self.client = JobClient(cluster.endpoints, shape.name, config=config)

    def slow(self, wanted: bool) -> None:
        """Let each batch take its time, or none."""
        if wanted:
            (self.folder / "slow").touch()
        else:
            (self.folder / "slow").unlink(missing_ok=True)

    def start(self) -> None:
        """Start the command: the same one goes on with a job that was begun."""
        command = [sys.executable, "-m", "backstay.cli", "train", "job.yaml"]
        command += ["--endpoint", ",".join(self._cluster.endpoints), "--json"]
        with (self.folder / "out").open("wb") as out, (self.folder / "err").open("ab") as err:
            self._command = subprocess.Popen(
                command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment() | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    @property
    def is_over(self) -> bool:
        """Whether the command has ended."""
        return self._running().poll() is not None

    def status(self) -> job_pb2.JobStatus:
        """Return what the job master says.

        Raises:
            NotYet: It does not answer.
        """
        try:
            return self.client.status()
        except BackstayError as error:
            raise NotYet(str(error)) from error

    def master(self) -> psutil.Process | None:
        """Return the job master's process, if one runs."""
        found = self._children(MASTER)
        return found[0] if found else None

    def workers(self) -> list[psutil.Process]:
        """Return the processes of the workers that run, the oldest first."""
        return self._children(WORKER)

    def signal(self, number: int) -> None:
        """Send a signal to the command."""
        self._running().send_signal(number)

    def wait(self, limit_s: float) -> int:
        """Wait for the command's end; return its exit code.

        Raises:
            NotYet: It did not end in time.
        """
        try:
            return self._running().wait(limit_s)
        except subprocess.TimeoutExpired:
            raise NotYet(f"the command has not ended after {limit_s:g} s") from None

    def kill(self) -> None:
        """End the command and all of its processes by SIGKILL."""
        if self._command is None:
            return
        # It may be that the command was killed before: its processes end by themselves.
        children = self._children("")
        if self._command.poll() is None:
            self._command.kill()
        self._command.wait()
        _, alive = psutil.wait_procs(children, timeout=10.0)
        for child in alive:
            child.kill()

    def close(self) -> None:
        """End everything."""
        self.kill()
        self.client.close()

    def result(self) -> dict[str, Any]:
        """Return what the command printed at its end; empty: nothing."""
        text = (self.folder / "out").read_text(encoding="utf-8")
        result: dict[str, Any] = json.loads(text) if text.strip() else {}
        return result

    def wait_until(self, problem: Callable[[], str], limit_s: float = GOES_ON_LIMIT_S) -> None:
        """Wait until a function returns an empty text, or the job is over.

        Raises:
            NotYet: It did not come to that.
        """
        deadline_s = time.monotonic() + limit_s
        while not self.is_over:
            try:
                seen = problem()
            except NotYet as error:
                seen = str(error)
            if not seen:
                return
            if time.monotonic() > deadline_s:
                raise NotYet(f"job {self.shape.name}, after {limit_s:g} s: {seen}")
            time.sleep(POLL_PAUSE_S)

    def wait_going_on(self, limit_s: float = GOES_ON_LIMIT_S) -> None:
        """Wait until somebody is told that a task is done, from now on, or the job is over.

        Raises:
            NotYet: No worker was.
        """
        before = self.completions()
        self.wait_until(
            lambda: "" if self.completions() > before else "no task becomes done", limit_s
        )

    def completions(self) -> int:
        """Return how many completions workers were told of so far."""
        return sum(len(told) for told in self.told().values())

    def told(self) -> dict[str, list[tuple[int, int, int, bool]]]:
        """Return what each worker was told: (pass, task, attempt, whether it was first)."""
        found: dict[str, list[tuple[int, int, int, bool]]] = {}
        for path in sorted(self.folder.glob("told-*")):
            # A worker that was killed leaves half a line.
            whole, _, _ = path.read_text(encoding="ascii").rpartition("\n")
            lines = [line.split() for line in whole.splitlines()]
            found[path.name] = [
                (int(number), int(task), int(attempt), first == "1")
                for number, task, attempt, first in lines
            ]
        return found

    def log_tail(self, size: int = 3000) -> str:
        """Return the end of what the command said."""
        return (self.folder / "err").read_text(errors="replace")[-size:]

    def _children(self, words: str) -> list[psutil.Process]:
        try:
            children = psutil.Process(self._running().pid).children()
        except psutil.NoSuchProcess:
            return []
        found = []
        for child in sorted(children, key=lambda one: one.pid):
            try:
                if words in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
            except psutil.NoSuchProcess:
                continue
        return found

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._command is not None, "it was not started"
        return self._command


@dataclass
class JobVerdict:
    """What became of a job; ``faults`` says in words what is wrong.

    Attributes:
        job: Its name.
        faults: Empty: each record counts once in each pass, and all the rest is right.
        passes: Of the audit.
        records: Likewise.
        first_told: How many completions were told to be first.
        not_first: How many were told that another one was.
        attempts: How many attempts completed or came too late.
        master_starts: How often a job master took the job over.
        restores: How often the cluster was restored meanwhile.
    """

    job: str
    faults: list[str] = field(default_factory=list)
    passes: int = 0
    records: int = 0
    first_told: int = 0
    not_first: int = 0
    master_starts: int = 0
    restores: int = 0


def judge_job(job: ChaosJob) -> JobVerdict:
    """Judge a job whose command has ended."""
    shape, result = job.shape, job.result()
    verdict = JobVerdict(shape.name, restores=job.restores)
    audit = result.get("audit") or {}
    verdict.passes, verdict.records = audit.get("passes", 0), audit.get("records", 0)
    verdict.master_starts = result.get("master_starts", 0)
    wanted: Sequence[tuple[str, object, object]] = (
        ("state", result.get("state"), "done"),
        ("exit code", result.get("exit_code"), 0),
        ("dead_letters", result.get("dead_letters"), 0),
        ("records_counted_once", result.get("records_counted_once"), True),
        ("passes counted", verdict.passes, shape.passes),
        ("records", verdict.records, shape.records),
    )
    verdict.faults = [f"{name} is {seen!r}, not {right!r}" for name, seen, right in wanted
                      if seen != right]  # fmt: skip
    if verdict.faults:
        verdict.faults.append(f"{result or job.log_tail()}")
    verdict.faults += judge_told(job, verdict)
    return verdict


def judge_told(job: ChaosJob, verdict: JobVerdict) -> list[str]:
    """No worker is told to be first at a task that another one was first at."""
    first: Counter[tuple[int, int]] = Counter()
    attempts: Counter[tuple[int, int, int]] = Counter()
    for lines in job.told().values():
        for number, task, attempt, is_first in lines:
            if is_first:
                first[number, task] += 1
                attempts[number, task, attempt] += 1
            else:
                verdict.not_first += 1
    verdict.first_told = sum(first.values())
    # After a restore, tasks that were done since are done again.
    most = 1 + job.restores
    faults = [f"task {task} of pass {number} was completed first {count} times"
              for (number, task), count in sorted(first.items()) if count > most]  # fmt: skip
    faults += [f"attempt {one} was told twice that it was first"
               for one, count in sorted(attempts.items()) if count > 1]  # fmt: skip
    return faults


def stop_politely(job: ChaosJob, limit_s: float = END_LIMIT_S) -> None:
    """Stop the command as Ctrl-C does, and wait for its end.

    Raises:
        NotYet: It did not end.
    """
    job.signal(signal.SIGINT)
    job.wait(limit_s)
