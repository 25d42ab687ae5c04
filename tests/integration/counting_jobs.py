"""Masters of a job as processes, and workers as threads, for the tests of the job master."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from backstay.config import ClientConfig
from backstay.errors import UnknownJob
from backstay.job.messages import Ended, Task, Wait
from backstay.job_spec import CheckpointSpec, DataSpec, JobSpec
from backstay.master.job_client import JobClient
from backstay.trainer.worker.master_link import MasterLink

JOB = "counting"
TASKS = 40
LIMIT_S = 120.0
CLIENT = ClientConfig(deadline_ms=20_000)

Eventually = Callable[[Callable[[], bool]], None]


@dataclass
class Masters:
    """Starts and kills masters of one job."""

    endpoints: list[str]
    folder: Path
    environment: dict[str, str]
    instance: int = 0
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, spec: JobSpec, *arguments: str) -> subprocess.Popen[bytes]:
        self.instance += 1
        spec_file = self.folder / f"spec-{self.instance}.json"
        spec_file.write_text(spec.to_json(), encoding="utf-8")
        with (self.folder / f"master-{self.instance}.log").open("wb") as log:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "backstay.master.serve_cli", str(spec_file)),
                    *("--endpoint", ",".join(self.endpoints), "--instance", str(self.instance)),
                    *arguments,
                ],
                env=self.environment,
                stdout=log,
                stderr=log,
            )
        self.processes.append(process)
        return process

    def replace(self, spec: JobSpec) -> subprocess.Popen[bytes]:
        """Kill the newest one, and start another in its place."""
        self.processes[-1].kill()
        self.processes[-1].wait()
        return self.start(spec, "--replaces", str(self.instance))

    def log(self) -> str:
        return (self.folder / f"master-{self.instance}.log").read_text()

    def end(self) -> None:
        """End the running ones, in good order if they can."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def counting_spec(folder: Path, **fields: object) -> JobSpec:
    data = folder / "data.csv"
    lines = "\n".join(str(number) for number in range(4 * TASKS))
    data.write_text(f"x\n{lines}\n", encoding="utf-8")
    values: dict[str, object] = {
        "name": JOB,
        "model": "model.py",
        "training": DataSpec(paths=(str(data),)),
        "records_per_task": 4,
        "checkpoint": CheckpointSpec(every="none"),
        **fields,
    }
    return JobSpec(**values)  # type: ignore[arg-type]


def wait_for_master(endpoints: list[str], instance: int, eventually: Eventually) -> None:
    """Wait until the job is open at a certain master."""
    client = JobClient(endpoints, JOB, config=CLIENT)

    def is_open() -> bool:
        try:
            return client.status().master_instance == instance
        except UnknownJob:
            return False

    try:
        eventually(is_open)
    finally:
        client.close()


class Worker(threading.Thread):
    """Counts the tasks that it is told to be first at."""

    def __init__(self, endpoints: list[str], worker: str) -> None:
        super().__init__(name=worker, daemon=True)
        self.link = MasterLink(endpoints, JOB, worker, config=CLIENT)
        self.first: Counter[tuple[str, int, int]] = Counter()
        # The job was over before the answer about this task arrived.
        self.unanswered: Counter[tuple[str, int, int]] = Counter()
        self.work: Callable[[Task], None] = lambda _task: None
        self.ended: Ended | None = None
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 (the test looks at it)
            self.failure = error
        finally:
            self.link.close()

    def _run(self) -> None:
        self.link.join()
        while True:
            answer = self.link.get_task()
            for stream in self.link.streams_to_close():
                self.link.stream_closed(*stream)
            if isinstance(answer, Ended):
                self.ended = answer
                return
            if isinstance(answer, Wait):
                continue
            self.link.lease(answer)
            self.work(answer)
            key = (answer.kind, answer.round, answer.number)
            if self.link.complete(answer, batches=2, examples=answer.count):
                self.first[key] += 1
                if answer.kind == "training":
                    self.link.stream_closed(answer.round, answer.number)
            elif self.link.stop_reason is not None:
                self.unanswered[key] += 1

    def finish(self) -> None:
        self.join(LIMIT_S)
        assert not self.is_alive(), f"{self.name} is still at work"
        if self.failure is not None:
            raise self.failure
